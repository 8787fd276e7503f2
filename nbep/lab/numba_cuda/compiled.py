"""Plain kernels as machine code of the emulator's engine: their source, with other names in it, as Numba compiles it.

A kernel's loads, stores and meetings are calls of the engine; its arrays are those of `compiled_parts`. Each turn of a
`while` is a step, as it is when the kernel is interpreted.
"""

from __future__ import annotations

import ast
import copy
import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial
from keyword import iskeyword
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
from numba import types
from numba.extending import intrinsic, register_jitable
from numba.np.numpy_support import from_dtype

from nbep.device import engine
from nbep.device.compilers.cpu import how, site_of_call
from nbep.emulator.engine import access, meeting, schedule
from nbep.emulator.engine.build import compile_functions
from nbep.emulator.engine.words import I1, I64, get_s32
from nbep.emulator.machine.orders import SCOPES

from . import compiled_parts as parts
from . import stubs
from .arrays import ATOMICS
from .code import scope_of, source_of
from .compiled_parts import WORD, atomic, bits, find_first, like, of_bits, of_one, rounded
from .math_rules import BINARY, UNARY
from .types import Arr, Known, Num, Rec, Tup, dtype_of
from .unit import Unit, type_of

# The words of a kernel's arguments: the sizes x, y, z of its blocks and of its grid, the address of the grid's barrier;
# of each shared array, where it begins and how many elements fit there; then what it takes.
GRID_WORD, FIRST_WORD = 6, 7
ARRAYS_OWN = "shape", "strides", "size", "ndim"
OWN_SOURCE = [Path(file).read_bytes() for file in (parts.__file__, __file__)]


class NotCompiled(Exception):
    """A kernel that only Python can run. Its text ends a sentence that begins with the kernel's name."""


class Translation:
    """A kernel and the device functions that it calls, as functions that Numba compiles for the CPU."""

    def __init__(self, unit: Unit):
        self.unit = unit
        self.names = {f"nbep_{name}": value for name, value in NAMES.items()}  # that the functions have as globals
        self.functions: dict[Any, Any] = {}
        self.local_bytes = 0
        self.fields: set[str] = set()  # of records
        self.words = itertools.count(FIRST_WORD + 2 * len(unit.sites))  # of arguments

    def named(self, value: Any, what: str) -> str:
        name = f"nbep_{len(self.names)}_{what.replace('.', '_')}"
        self.names[name] = value
        return name

    def function(self, function: FunctionType, compiled: list[Any]) -> Any:
        """compiled: what it is for the types that it is called with, interpreted"""
        if function not in self.functions:
            self.functions[function] = None
            self.functions[function] = register_jitable(_Names(self, function, compiled).made())
        if self.functions[function] is None:
            raise NotCompiled(f"calls `{function.__name__}`, which calls itself: interpreted")
        return self.functions[function]

    # Of arrays and arguments, what makes them: code, whose names get the prefix later.

    def array(self, space: int, shape: tuple[int, ...], dtype: np.dtype, base: str, first: str = "") -> str:
        """first: its only size, if the launch says that"""
        sizes, strides = [first] if first else shape, np.empty([max(n, 1) for n in shape], dtype).strides
        tuples = (f"({''.join(f'{n}, ' for n in one)})" for one in (sizes, strides))
        return f"{self.elements(dtype, len(shape), space, space == parts.CONSTANT)}({base}, {', '.join(tuples)})"

    def shared(self, node: ast.Call, compiled: list[Any]) -> str:
        keys = [(id(one), (node.lineno, node.col_offset)) for one in compiled]
        sites = [self.unit.shared_sites[key] for key in keys if key in self.unit.shared_sites]
        if len(sites) != 1 or sites[0].shape is None:
            raise NotCompiled("has a shared array of several types, or of a size known at run time: interpreted")
        word = FIRST_WORD + 2 * self.unit.sites.index(sites[0])
        first = f"argument({word + 1})" if sites[0].shape == (0,) else ""
        return self.array(parts.SHARED, sites[0].shape, sites[0].dtype, f"argument({word})", first)

    def local(self, shape: Any, dtype: Any) -> str:
        shape, dtype = shape if isinstance(shape, tuple) else (shape,), dtype_of(dtype)
        nbytes = -(-math.prod(shape) * dtype.itemsize // 16) * 16
        self.local_bytes += nbytes
        if self.local_bytes > parts.LOCAL_BYTES or not nbytes:
            raise NotCompiled(f"has local arrays of no bytes or more than {parts.LOCAL_BYTES}: interpreted")
        return self.array(nbytes, shape, dtype, f"{self.named(parts.stack_of(nbytes), 'stack')}()")

    def constant(self, array: np.ndarray) -> str:
        base = self.named(parts.constant_of(self.unit.frozen(array).tobytes()), "constant")
        return self.array(parts.CONSTANT, array.shape, array.dtype, f"{base}()")

    def elements(self, dtype: np.dtype, ndim: int, space: int = parts.GLOBAL, is_const: bool = False) -> str:
        self.check(np.empty(2, dtype))
        return self.named(parts.array_of(parts.Elements(from_dtype(dtype), ndim, space, is_const)), "array")

    def check(self, array: np.ndarray) -> None:
        """Raises: NotCompiled for elements of types that are interpreted"""
        dtype = array.dtype
        if not dtype.names and (dtype.kind not in "biufc" or dtype == np.float16):
            raise NotCompiled(f"has elements of type {dtype}, which are interpreted")
        for name in dtype.names or ():
            if not array[name].flags.aligned or name in ARRAYS_OWN:
                raise NotCompiled(f"has records whose field {name} is unaligned or an array's attribute: interpreted")
            self.check(array[name])
        self.fields.update(dtype.names or ())

    def captured(self, array: Any) -> str:
        """An array of the device that is a global: the kernel has it as an argument, behind the others."""
        self.unit.captured.append((array, type_of(array)))
        return self.given(type_of(array))

    def given(self, t: Any) -> str:
        """An argument of the kernel."""

        def taken(count: int) -> str:
            return "".join(f"argument({next(self.words)}), " for _ in range(count))

        if isinstance(t, (Arr, Rec)):
            ndim, is_const = (t.ndim, t.is_const) if isinstance(t, Arr) else (0, False)
            made = self.elements(t.dtype, ndim, is_const=is_const)
            return f"{made}({taken(1)}({taken(ndim)}), ({taken(ndim)}))"
        if isinstance(t, Tup) and t.of is tuple and t.items:
            return f"({', '.join(map(self.given, t.items))},)"
        if isinstance(t, Num) and t.dtype.kind in "biuf" and t.dtype != np.float16:
            return f"like({self.named(from_dtype(t.dtype), str(t))}(0), {taken(1)})"
        if isinstance(t, Known) and t.value is None:
            return "None"
        raise NotCompiled(f"takes {t}, which is interpreted")


class _Names(ast.NodeTransformer):
    """Puts what Numba compiles in the place of what is `numba.cuda`'s."""

    def __init__(self, translation: Translation, function: FunctionType, compiled: list[Any]):
        self.translation, self.compiled, self.function = translation, compiled, function
        self.node: Any = copy.deepcopy(source_of(function))
        inner = [one for one in ast.walk(self.node) if isinstance(one, (ast.FunctionDef, ast.Lambda))]
        if len(inner) > 1 or isinstance(self.node, ast.Lambda):
            raise NotCompiled(f"has a function inside `{function.__name__}`, or a lambda: interpreted")
        self.scope = scope_of(function) | {name: value for one in compiled for name, value in one.scope.items()}
        given = self.node.args
        given.defaults = [ast.Constant(None) for _ in given.defaults]
        names = [one for one in (*given.posonlyargs, *given.args, given.vararg) if one is not None]
        for one in names:
            one.annotation = None
        stored = (one for one in ast.walk(self.node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store))
        self.own = {one.arg for one in names} | {one.id for one in stored}

    def made(self) -> Any:
        node, function = self.node, self.function
        node.decorator_list, node.returns = [], None
        node.body = [self.visit(one) for one in node.body]
        space = {**self.scope, **self.translation.names}
        exec(compile(ast.fix_missing_locations(ast.Module([node], [])), function.__code__.co_filename, "exec"), space)
        made = space[node.name]
        made.__defaults__ = function.__defaults__
        return made

    def known(self, node: ast.AST) -> Any:
        """What a name or a chain of attributes means before the kernel runs, in a tuple; () if that is not known."""
        if isinstance(node, ast.Name) and node.id not in self.own and node.id in self.scope:
            return (self.scope[node.id],)
        base: Any = self.known(node.value) if isinstance(node, ast.Attribute) else ()
        is_fixed = base and isinstance(base[0], (ModuleType, stubs.Stub, type))
        return (getattr(base[0], node.attr),) if is_fixed and hasattr(base[0], node.attr) else ()  # type: ignore[attr-defined]

    def constant(self, node: ast.AST) -> Any:
        """The value of an expression of constants."""
        if any(isinstance(one, ast.Name) and one.id in self.own for one in ast.walk(node)):
            raise NotCompiled(f"has in `{self.function.__name__}` an array of a variable's size or type: interpreted")
        return eval(compile(ast.Expression(copy.deepcopy(node)), "", "eval"), self.scope)  # type: ignore[arg-type]

    def code(self, text: str, at: ast.AST) -> Any:
        """An expression of names of the translation."""
        made = ast.parse(text, mode="eval").body
        for one in ast.walk(made):
            if isinstance(one, ast.Name):
                one.id = f"nbep_{one.id.removeprefix('nbep_')}"
            ast.copy_location(one, at)
        return made

    def instead(self, value: Any, at: ast.AST) -> Any:
        """A name of a value."""
        return self.code(self.translation.named(value, ast.unparse(at)), at)

    def visit_While(self, node: ast.While) -> ast.AST:
        self.generic_visit(node)
        node.body.insert(0, ast.copy_location(ast.Expr(self.code("turn()", node.body[0])), node.body[0]))
        return node

    def visit_Call(self, node: ast.Call) -> Any:
        value = next(iter(self.known(node.func)), None)
        given: dict[Any, ast.expr] = {one.arg: one.value for one in node.keywords}
        if value is stubs.shared.array:  # type: ignore[attr-defined]
            return self.code(self.translation.shared(node, self.compiled), node)
        if value is stubs.local.array:  # type: ignore[attr-defined]
            given = dict(zip(("shape", "dtype"), node.args, strict=False)) | given
            return self.code(self.translation.local(*(self.constant(given[name]) for name in ("shape", "dtype"))), node)
        if value is stubs.const.array_like:  # type: ignore[attr-defined]
            return self.visit(node.args[0])
        if value is stubs.cg.this_grid:  # type: ignore[attr-defined]
            return ast.copy_location(ast.Constant(0), node)
        if value is None and isinstance(node.func, ast.Attribute) and node.func.attr == "sync":
            return self.code("sync_grid(site())", node)
        if isinstance(value, np.ufunc) and len(node.args) == value.nin + 1 == 2:
            node.func = self.instead(parts.into_array(value), node.func)
        if isinstance(value, stubs.Stub) and value in GRIDS:
            axes = [GRIDS[value].format(i) for i in range(self.constant(next(iter((*node.args, *given.values())))))]
            return self.code(axes[0] if len(axes) == 1 else f"({', '.join(axes)})", node)
        if isinstance(value, stubs.Stub) and value in MEETINGS:
            node.args.insert(0, self.code("site()", node))
        if len(node.args) == 1 and (t := _integer(value)) is not None:
            node.args[0] = self.visit(node.args[0])
            node.func = self.instead(parts.number_of(t), node.func)
            return node
        return self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        base = self.known(node.value)
        if base and isinstance(base[0], stubs.Dim3) and node.attr in ("x", "y", "z"):
            return self.code(DIMENSIONS[base[0]].format("xyz".index(node.attr)), node)
        if not self.known(node) and node.attr in self.translation.fields:
            name = ast.copy_location(ast.Constant(node.attr), node)
            return ast.copy_location(ast.Subscript(self.visit(node.value), name, node.ctx), node)
        return self.visit_Name(node) if self.known(node) else self.generic_visit(node)

    def visit_Name(self, node: Any) -> ast.AST:
        if not self.known(node):
            return node
        (value,), text = self.known(node), ast.unparse(node)
        if value is stubs.laneid or value is stubs.warpsize:
            return self.code({"laneid": "i32(about(4))", "warpsize": "i32(32)"}[value._name], node)
        if callable(value) and value in FUNCTIONS:
            return self.instead(FUNCTIONS[value], node)
        if isinstance(value, np.ndarray):
            return self.code(self.translation.constant(value), node)
        if hasattr(value, "_nd"):
            return self.code(self.translation.captured(value), node)
        is_pythons = callable(value) and value in (print, math.gamma, math.lgamma)  # C's have other last bits
        if is_pythons or isinstance(value, stubs.Stub) or getattr(value, "declared", None):
            raise NotCompiled(f"has `{text}`, which is interpreted")
        if hasattr(value, "py_func"):
            found = [made for key, made in self.translation.unit.functions.items() if key[0] == id(value)]
            return self.instead(self.translation.function(value.py_func, found), node)
        is_type = isinstance(node, ast.Attribute) and isinstance(value, types.Type)
        return self.instead(value, node) if is_type else node


def _integer(value: Any) -> Any:
    """Numba's type, if a value is a type of integers."""
    if isinstance(value, type) and (value is int or issubclass(value, np.integer)):
        return from_dtype(np.dtype(value))
    return value if isinstance(value, types.Integer) else None


# --- who a thread is --------------------------------------------------------------------------------------------------
i32, i64, about, argument = np.int32, np.int64, access.about_thread, access.argument


@register_jitable
def place(which, axis):
    """threadIdx (0) or blockIdx (1)"""
    number, x, y = about(which), argument(3 * which), argument(3 * which + 1)
    return i32(number % x if axis == 0 else number // x % y if axis == 1 else number // (x * y))


@register_jitable
def grid(axis):
    return i64(place(1, axis)) * argument(axis) + place(0, axis)


# The code of each, which an axis completes.
DIMENSIONS = {stubs.threadIdx: "place(0, {})", stubs.blockIdx: "place(1, {})", stubs.blockDim: "i32(argument({}))",
              stubs.gridDim: "i32(argument(3 + {}))"}  # fmt: skip
GRIDS = {stubs.grid: "grid({})", stubs.gridsize: "(argument({0}) * argument(3 + {0}))"}


# --- meetings: functions whose first argument is the place of the call ------------------------------------------------
@intrinsic
def site(typingctx):
    """A number for the call in whose place this stands, not 0."""
    return WORD(), lambda context, builder, signature, values: I64(site_of_call("meeting") or 1)


@register_jitable
def met(site, test):
    """How many predicates of a block hold, and << 32 how many do not."""
    return meeting.meet(0, about(3), 2, i64(test != 0), site)


@register_jitable
def sync_grid(site):
    """As `device.grid_sync`."""
    cell, blocks = argument(GRID_WORD), about(2)
    if meeting.meet(0, about(3), 3, 1, site):
        access.fence(REACH)
        turn = access.atomic(access.ADD, cell, 4, 1, 0, BOTH_WAYS) // blocks + 1
        while get_s32(access.load(cell, 4, LOOK)) < turn * blocks:
            access.spin(1 << 62)
        access.fence(REACH)
    met(site, 1)


REACH, BOTH_WAYS, LOOK = SCOPES["gpu"], how("acq_rel", "gpu", False), how("acquire", "gpu")
MEETINGS: dict[Any, Callable] = {
    stubs.syncthreads: lambda site: met(site, 1),
    stubs.syncthreads_count: lambda site, test: i32(met(site, test) & 0xFFFFFFFF),
    stubs.syncthreads_or: lambda site, test: i32(met(site, test) & 0xFFFFFFFF != 0),
    stubs.syncthreads_and: lambda site, test: i32(met(site, test) >> 32 == 0),
}
NAMES = {name: globals()[name] for name in "about argument i32 i64 like place grid site sync_grid".split()}  # noqa: SIM905
NAMES["turn"] = schedule.turn


@register_jitable
def real(mask):
    """A mask without the lanes that the block does not have."""
    return np.int64(mask) & 0xFFFFFFFF & ((1 << min(32, about(3) - (about(0) & ~31))) - 1)


def _shuffle(name: int) -> Callable:
    return lambda mask, value, lane: like(value, meeting.collect(name, real(mask), bits(value), np.int64(lane), 0))


def _vote(name: int) -> Callable:
    return lambda mask, test: meeting.collect(name, real(mask), np.int64(test != 0), 0, 0) != 0


def _match_all(mask, value):
    same = meeting.collect(meeting.MATCH_ALL, real(mask), bits(value), 0, 0)
    return np.int32(same), same != 0


def _fence(scope: str) -> Callable:
    reach = SCOPES[scope]
    return lambda: access.fence(reach)


cas = atomic(ATOMICS["cas"])
_PLAIN: dict[Any, Callable] = {
    stubs.syncwarp: lambda mask=0xFFFFFFFF: meeting.collect(meeting.SYNC, real(mask), 0, 0, 0),
    stubs.match_all_sync: _match_all, stubs.nanosleep: lambda duration: schedule.pause(),
    stubs.threadfence: _fence("gpu"), stubs.threadfence_block: _fence("cta"), stubs.threadfence_system: _fence("sys"),
    stubs.ballot_sync: lambda mask, test: i32(meeting.collect(meeting.BALLOT, real(mask), i64(test != 0), 0, 0)),
    stubs.match_any_sync: lambda mask, value: i32(meeting.collect(meeting.MATCH, real(mask), bits(value), 0, 0)),
    stubs.selp: lambda test, a, b: a if test else b,
    **{getattr(stubs.atomic, name + "_" * iskeyword(name)): of_one(change) for name, change in ATOMICS.items()},
    stubs.atomic.cas: lambda array, index, old, value: cas(array, index, value, old),  # type: ignore[attr-defined]
    stubs.atomic.compare_and_swap: lambda array, old, value: cas(array, 0, value, old),  # type: ignore[attr-defined]
    **{
        getattr(stubs, f"shfl{name}_sync"): _shuffle(getattr(meeting, f"SHFL_{mode}"))
        for name, mode in (("", "IDX"), ("_up", "UP"), ("_down", "DOWN"), ("_xor", "XOR"))
    },
    **{
        getattr(stubs, f"{name}_sync"): _vote(getattr(meeting, mode))
        for name, mode in (("any", "ANY"), ("all", "ALL"), ("eq", "SAME"))
    },
    **{getattr(stubs, name): lambda array, index: array[index] for name in stubs.LOADS},
}  # fmt: skip
# What stands for what kernels call, by Numba's stub or Python's function.
FUNCTIONS: dict[Any, Any] = {
    stubs.popc: of_bits(lambda n: types.int64 if n > 32 else types.int32, 1, lambda b, x: b.ctpop(x)),
    stubs.clz: of_bits(lambda n: types.int32, 32, lambda b, x: b.ctlz(x, I1(0))),
    stubs.ffs: of_bits(lambda n: types.int32, 32, find_first),
    stubs.brev: of_bits(lambda n: types.uint32 if n == 32 else types.uint64, 32, lambda b, x: b.bitreverse(x)),
    **{stub: register_jitable(function) for stub, function in (_PLAIN | MEETINGS).items()},
    **{getattr(math, name): rounded(getattr(math, name), "x") for name in UNARY if "gamma" not in name},
    **{getattr(math, name): rounded(getattr(math, name), "x, y") for name in BINARY if name != "nextafter"},
}


# --- machine code -----------------------------------------------------------------------------------------------------
def entry_of(run: Any, compiles: bool) -> int | None:
    """Where the code of a launch begins; None if it is interpreted, or is not in the cache and may not be compiled.

    Raises: ValueError if it may not be interpreted
    """
    unit, name, options = run.unit, run.__name__, run.session.options
    try:
        if isinstance(unit.code, NotCompiled):
            raise unit.code
        unit.code = unit.code or _translated(run)
        return engine.load(f"{name}-{unit.code[0]}", name, unit.code[1], options["memory_model"], not compiles)
    except NotCompiled as error:
        if run.session.engine == "compiled":
            raise ValueError(f"engine: got 'compiled'; `{name}` {error}; 'auto' takes Python then") from None
        unit.code = error.with_traceback(None)
        return None


def _translated(run: Any) -> tuple[str, Callable[[str], bytes]]:
    """A digest of the code of a launch, and what makes it. Raises: NotCompiled if the engine cannot run it"""
    unit = run.unit
    if unit.successor or unit.debug:
        raise NotCompiled(f"uses {'numba_cuda_mlir' if unit.successor else 'debug=True'}, which is interpreted")
    translation = Translation(unit)
    text = f"def entry(): kernel({', '.join(map(translation.given, run.types))})"
    kernel = translation.function(run.made.keep, [run.made])
    names = {**NAMES, **translation.names, "kernel": kernel}
    exec(text, names)
    return engine.digest_of([names["entry"]], OWN_SOURCE), partial(_compiled, entry=names["entry"])


def _compiled(symbol: str, entry: Callable) -> bytes:
    try:
        return compile_functions({symbol: (entry, None, ())})
    except Exception as error:  # whatever Numba raises for what it does not compile
        innermost = f"\n{error}".rpartition("Failed in nopython mode pipeline")[2].splitlines()[1:]
        lines = (line.strip() for line in innermost)
        raise NotCompiled(f"is interpreted: {next(filter(None, lines), type(error).__name__)}") from error


def words_of(value: Any, t: Any, address_of: Callable[[Any], int]) -> Iterator[int]:
    """The words of an argument. address_of: of the first element of an array of the device, in the run's memory"""
    if isinstance(t, (Arr, Rec)):
        yield from (address_of(value), *value.shape, *value.strides)
    elif isinstance(t, Tup):
        for one, of in zip(value, t.items, strict=True):
            yield from words_of(one, of, address_of)
    elif isinstance(t, Num):
        raw = np.array([value]).astype(t.dtype).tobytes()
        yield int.from_bytes(raw.ljust(8, b"\0"), "little", signed=True)
