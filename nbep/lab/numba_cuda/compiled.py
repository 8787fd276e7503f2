"""Plain kernels as machine code of the emulator's engine: their source, with other names in it, as Numba compiles it.

A kernel's loads, stores and meetings are calls of the engine, its `cuda.grid(1)` and the like are those of
`compiled_parts`. Each turn of a `while` is a step, as it is when the kernel is interpreted.
"""

from __future__ import annotations

import ast
import copy
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
from numba import config, types
from numba.extending import register_jitable
from numba.np.numpy_support import from_dtype

from nbep.device import engine
from nbep.emulator.engine.build import compile_functions

from . import compiled_parts as parts
from . import stubs
from .code import scope_of, source_of
from .types import Arr, Known, Num, Tup, dtype_of
from .unit import Unit

FIRST_WORD = 6  # behind the sizes of blocks and of the grid: of each shared array, where it begins and how many fit
OWN_SOURCE = [Path(file).read_bytes() for file in (parts.__file__, __file__)]


class NotCompiled(Exception):
    """A kernel that only Python can run. Its text ends a sentence that begins with the kernel's name."""


def number_type(dtype: np.dtype) -> Any:
    if dtype.kind not in "biufc" or dtype == np.float16:
        raise NotCompiled(f"has elements of type {dtype}, which are interpreted")
    return from_dtype(dtype)


class Translation:
    """A kernel and the device functions that it calls, as functions that Numba compiles for the CPU."""

    def __init__(self, unit: Unit):
        self.unit = unit
        self.said: list[Any] = [OWN_SOURCE]  # what the source of the functions does not say
        self.functions: dict[Any, Any] = {}
        self.local_bytes = 0

    def function(self, function: FunctionType, compiled: list[Any]) -> Any:
        """compiled: what it is for the types that it is called with, interpreted"""
        if function not in self.functions:
            self.functions[function] = None
            self.functions[function] = register_jitable(_Names(self, function, compiled).made())
        if self.functions[function] is None:
            raise NotCompiled(f"calls `{function.__name__}`, which calls itself: interpreted")
        return self.functions[function]

    def made(self, space: int, shape: tuple[int, ...], dtype: np.dtype, base: Any, first: str = "") -> dict[str, Any]:
        """The names of an array's code, and that. first: the code of its only size, if the launch says that"""
        sizes, strides = [first] if first else shape, np.empty(shape, dtype).strides
        array = parts.array_of(self.elements(dtype, len(shape), space))
        self.said.append((space, shape, dtype.str, first))
        tuples = (f"({', '.join(map(str, one))},)" for one in (sizes, strides))
        return {"array": array, "base": base, "": f"array(base(), {', '.join(tuples)})"}

    def shared(self, node: ast.Call, compiled: list[Any]) -> dict[str, Any]:
        keys = [(id(one), (node.lineno, node.col_offset)) for one in compiled]
        sites = [self.unit.shared_sites[key] for key in keys if key in self.unit.shared_sites]
        if len(sites) != 1 or sites[0].shape is None:
            raise NotCompiled("has a shared array of several types, or of a size known at run time: interpreted")
        word = FIRST_WORD + 2 * self.unit.sites.index(sites[0])
        base = register_jitable(eval(f"lambda: argument({word})", parts.NAMES))
        first = f"nbep_argument({word + 1})" if sites[0].shape == (0,) else ""
        self.said.append(word)
        return self.made(parts.SHARED, sites[0].shape, sites[0].dtype, base, first)

    def local(self, shape: Any, dtype: Any) -> dict[str, Any]:
        shape, dtype = shape if isinstance(shape, tuple) else (shape,), dtype_of(dtype)
        nbytes = -(-math.prod(shape) * dtype.itemsize // 16) * 16
        self.local_bytes += nbytes
        if self.local_bytes > parts.LOCAL_BYTES or not nbytes:
            raise NotCompiled(f"has local arrays of no bytes or more than {parts.LOCAL_BYTES}: interpreted")
        return self.made(nbytes, shape, dtype, parts.stack_of(nbytes))

    def elements(self, dtype: np.dtype, ndim: int, space: int = parts.GLOBAL, is_const: bool = False) -> Any:
        if ndim == 0:
            raise NotCompiled("has an array of no dimension, which is interpreted")
        return parts.Elements(number_type(dtype), ndim, space, is_const)

    def given(self, t: Any, words: Iterator[int], names: dict[str, Any]) -> str:
        """The code of an argument of the kernel."""
        name = f"name{len(names)}"

        def taken(count: int) -> str:
            return ", ".join(f"argument({next(words)})" for _ in range(count))

        if isinstance(t, Arr):
            names[name] = parts.array_of(self.elements(t.dtype, t.ndim, is_const=t.is_const))
            return f"{name}({taken(1)}, ({taken(t.ndim)},), ({taken(t.ndim)},))"
        if isinstance(t, Tup) and t.of is tuple and t.items:
            return f"({', '.join(self.given(one, words, names) for one in t.items)},)"
        if isinstance(t, Num) and t.dtype.kind in "biuf":
            names[name] = number_type(t.dtype)
            return f"like({name}(0), {taken(1)})"
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
        self.scope = scope_of(function)
        self.new: dict[str, Any] = {f"nbep_{name}": value for name, value in parts.NAMES.items()}
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
        space = {**self.scope, **self.new}
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

    def named(self, value: Any, what: str) -> str:
        name = f"nbep_{len(self.new)}_{what.replace('.', '_')}"
        self.new[name] = value
        return name

    def code(self, text: str, at: ast.AST, prefix: str = "nbep_") -> Any:
        """The code of an expression, whose names are new ones."""
        made = ast.parse(text, mode="eval").body
        for one in ast.walk(made):
            if isinstance(one, ast.Name):
                one.id = prefix + one.id.removeprefix(prefix)
            ast.copy_location(one, at)
        return made

    def array(self, made: dict[str, Any], at: ast.AST) -> ast.AST:
        text = made.pop("")
        for name, value in made.items():
            text = text.replace(f"{name}(", f"{self.named(value, name)}(", 1)
        return self.code(text, at)

    def visit_While(self, node: ast.While) -> ast.AST:
        self.generic_visit(node)
        node.body.insert(0, ast.copy_location(ast.Expr(self.code("turn()", node.body[0])), node.body[0]))
        return node

    def visit_Call(self, node: ast.Call) -> Any:
        value = next(iter(self.known(node.func)), None)
        given: dict[Any, ast.expr] = {one.arg: one.value for one in node.keywords}
        if value is stubs.shared.array:  # type: ignore[attr-defined]
            return self.array(self.translation.shared(node, self.compiled), node)
        if value is stubs.local.array:  # type: ignore[attr-defined]
            given = dict(zip(("shape", "dtype"), node.args, strict=False)) | given
            made = self.translation.local(*(self.constant(given[name]) for name in ("shape", "dtype")))
            return self.array(made, node)
        if isinstance(value, stubs.Stub) and value in parts.GRIDS:
            axes = parts.GRIDS[value][: self.constant(next(iter((*node.args, *given.values()))))]
            return self.code(axes[0] if len(axes) == 1 else f"({', '.join(axes)})", node)
        if len(node.args) == 1 and (t := _integer(value)) is not None:
            node.args[0] = self.visit(node.args[0])
            node.func = self.code(self.named(parts.number_of(t), str(t)), node)
            return node
        return self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        base = self.known(node.value)
        if base and isinstance(base[0], stubs.Dim3) and node.attr in ("x", "y", "z"):
            return self.code(parts.DIMENSIONS[base[0]]["xyz".index(node.attr)], node)
        return self.visit_Name(node) if self.known(node) else self.generic_visit(node)

    def visit_Name(self, node: Any) -> ast.AST:
        if not self.known(node):
            return node
        (value,), text = self.known(node), ast.unparse(node)
        if value is stubs.laneid or value is stubs.warpsize:
            return self.code({"laneid": "i32(about(4))", "warpsize": "i32(32)"}[value._name], node)
        if callable(value) and value in parts.FUNCTIONS:
            return self.code(self.named(parts.FUNCTIONS[value], text), node)
        if value is print or isinstance(value, (np.ndarray, stubs.Stub)) or hasattr(value, "_nd"):
            raise NotCompiled(f"has `{text}`, which is interpreted")
        if hasattr(value, "py_func"):
            if getattr(value, "sigs", None) or not getattr(value, "_can_compile", True):
                raise NotCompiled(f"calls `{text}`, which has a signature of its own: interpreted")
            found = [made for key, made in self.translation.unit.functions.items() if key[0] == id(value)]
            return self.code(self.named(self.translation.function(value.py_func, found), text), node)
        is_type = isinstance(node, ast.Attribute) and isinstance(value, types.Type)
        return self.code(self.named(value, text), node) if is_type else node


def _integer(value: Any) -> Any:
    """Numba's type, if a value is a type of integers."""
    if isinstance(value, type) and (value is int or issubclass(value, np.integer)):
        return from_dtype(np.dtype(value))
    return value if isinstance(value, types.Integer) else None


# --- machine code -----------------------------------------------------------------------------------------------------
_entries: dict[tuple[str, str], int] = {}


def entry_of(function: FunctionType, given: tuple[Any, ...], unit: Unit, compiled: Any, model: str) -> int:
    """Where a kernel for arguments of these types begins.

    Raises: NotCompiled if the engine cannot run it
    """
    if unit.successor or unit.debug or "grid" in unit.uses:
        what = "numba_cuda_mlir" if unit.successor else "debug=True" if unit.debug else "grid.sync()"
        raise NotCompiled(f"uses {what}, which is interpreted")
    translation = Translation(unit)
    kernel = translation.function(function, [compiled])
    names: dict[str, Any] = {"kernel": kernel, "argument": parts.argument, "like": parts.like}
    words = iter(range(FIRST_WORD + 2 * len(unit.sites), 1 << 20))
    exec(f"def entry(): kernel({', '.join(translation.given(t, words, names) for t in given)})", names)
    key = engine.digest_of([*translation.functions.values()], (given, translation.said))
    name = f"{function.__name__}-{key}"
    if (name, model) not in _entries:
        make = lambda symbol: _compiled(symbol, names["entry"])  # noqa: E731
        _entries[name, model] = engine.load(name, function.__name__, make, model)
    return _entries[name, model]


def _compiled(symbol: str, entry: Callable) -> bytes:
    looks, config.ALWAYS_WARN_UNINIT_VAR = config.ALWAYS_WARN_UNINIT_VAR, True
    try:
        return compile_functions({symbol: (entry, None, ())})
    except Exception as error:  # whatever Numba raises for what it does not compile
        lines = [line.strip() for line in str(error).splitlines() if not line.startswith("Failed in nopython")]
        raise NotCompiled(f"is interpreted: {next(filter(None, lines), type(error).__name__)}") from error
    finally:
        config.ALWAYS_WARN_UNINIT_VAR = looks


def words_of(value: Any, t: Any, address_of: Callable[[Any], int]) -> Iterator[int]:
    """The words of an argument. address_of: of the first element of an array of the device, in the run's memory"""
    if isinstance(t, Arr):
        yield from (address_of(value), *value.shape, *value.strides)
    elif isinstance(t, Tup):
        for one, of in zip(value, t.items, strict=True):
            yield from words_of(one, of, address_of)
    elif isinstance(t, Num):
        raw = np.array([value]).astype(t.dtype).tobytes()
        yield int.from_bytes(raw.ljust(8, b"\0"), "little", signed=True)
