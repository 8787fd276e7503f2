"""Rules for what `numba.cuda` offers to kernels."""

from __future__ import annotations

import ast
from typing import Any

import numpy as np

from . import ops, stubs
from .calls import helper, need, plain, rule
from .code import build, constant
from .env import NOT_CONSTANT, V
from .types import (
    BOOL,
    F32,
    F64,
    I32,
    I64,
    U32,
    U64,
    Arr,
    Known,
    Num,
    Other,
    Tup,
    dtype_of,
    is_float,
    is_int,
    is_number,
    unify,
)

NUMBERS_32_64 = ("i4", "i8", "u4", "u8")
_ALL = (*NUMBERS_32_64, "f4", "f8")
ATOMIC_TYPES = {  # as numba-cuda declares them
    **dict.fromkeys(("add", "sub", "max", "min", "nanmax", "nanmin"), _ALL),
    **dict.fromkeys(("and_", "or_", "xor", "exch", "cas", "compare_and_swap"), NUMBERS_32_64),
    **dict.fromkeys(("inc", "dec"), ("u4", "u8")),
}


class SharedSite:
    """One call of cuda.shared.array in a function compiled once: every block has an array for it.

    shape: (0,) and None are in the dynamic part: all of it that is left, and what its size at run time takes
    """

    def __init__(self, shape: Any, dtype: np.dtype, alignment: int, name: str | None):
        self.shape, self.dtype, self.alignment, self.name = shape, dtype, alignment, name


def _shape(c: Any, value: V, dtype: V, where: str, node: ast.AST) -> tuple[int, ...] | None:
    known = value.known if value.is_known else None
    shape = known if isinstance(known, tuple) else (known,)
    if isinstance(value.t, Tup) and value.t.of is list:
        reason = "the shape is a list; must be an integer or a tuple of integers"
    elif _at_run_time(c, value, where):
        return None
    elif not value.is_known:
        reason = "the shape of a shared or local array must be known when the kernel is compiled"
    elif not all(isinstance(one, (int, np.integer)) and not isinstance(one, bool) and one >= 0 for one in shape):
        reason = f"shape: {known!r}; must be integers"
    else:
        return tuple(int(one) for one in shape)
    given = f"array(shape={name_in_numba(value)}, dtype={name_in_numba(dtype)})"
    function = "array" if c.unit.successor else f"{where}.array"
    raise c.fail(
        node,
        f"No implementation of function Function(<function {function}>) found for signature:\n \n >>> {given}\n"
        f"{reason}",
    )


def _at_run_time(c: Any, value: V, where: str) -> bool:
    """Whether the size of an array of dynamic shared memory is taken as it is when the kernel runs."""
    sizes = value.t.items if isinstance(value.t, Tup) else (value.t,)
    is_open = where == "shared" and not value.is_known and c.unit.successor
    return is_open and not c.may_be_compiled_again and all(is_int(one) for one in sizes)


def name_in_numba(value: V) -> str:
    """The type of a value, as messages of Numba have it."""
    if isinstance(value.t, Tup):
        parts = [_literal(t, const) for t, const in zip(value.t.items, _consts(value), strict=True)]
        if value.t.of is list:
            return (
                f"list({value.t.items[0]})<iv={list(value.known)}>" if value.is_known else f"list({value.t.items[0]})"
            )
        return f"Tuple({', '.join(parts)})"
    if isinstance(value.t, Known):
        return f"class({value.t.value})"
    return _literal(value.t, value.const)


def _consts(value: V) -> tuple[Any, ...]:
    if isinstance(value.const, tuple):
        return value.const
    codes = value.code.elts if isinstance(value.code, ast.Tuple) else [None] * len(value.t.items)
    return tuple(one.value if isinstance(one, ast.Constant) else NOT_CONSTANT for one in codes)


def _literal(t: Any, const: Any) -> str:
    return f"Literal[int]({const})" if is_int(t) and const is not NOT_CONSTANT else str(t)


def _array_arguments(
    c: Any, args: list[V], kwargs: dict[str, V], where: str, node: ast.AST
) -> tuple[Any, np.dtype, int]:
    given = dict(zip(("shape", "dtype", "alignment"), args, strict=False)) | kwargs
    if "shape" not in given or "dtype" not in given or set(given) > {"shape", "dtype", "alignment"}:
        raise c.fail(node, "takes a shape and a dtype, and maybe an alignment")
    alignment = given.get("alignment")
    align = 0
    if alignment is not None and alignment.known is not None:
        align = alignment.known
        if not isinstance(align, int) or align <= 0 or align & (align - 1) or align % 8:
            raise c.fail(
                node, f"Alignment must be a positive power of 2 and a multiple of the size of a pointer: {align!r}"
            )
    known = given["dtype"].known
    if isinstance(known, stubs.VectorStub):
        raise c.fail(node, "arrays of vector types are not supported on the emulator")
    try:
        dtype = dtype_of(known)
    except TypeError:
        raise c.fail(node, f"Invalid NumPy dtype specified: {known!r}") from None
    if dtype.hasobject or (dtype.kind not in "biufcmMV"):
        variable = f"Cannot infer the type of variable {c.target_name!r}: " if c.target_name else ""
        raise c.fail(node, f"{variable}dtype: {known!r} is no type of numbers or records")
    return _shape(c, given["shape"], given["dtype"], where, node), dtype, align


@rule(stubs.shared.array)  # type: ignore[attr-defined]
def _shared(c: Any, args: list[V], kwargs: dict[str, V], node: ast.AST) -> V:
    from . import device

    name = c.target_name
    shape, dtype, alignment = _array_arguments(c, args, kwargs, "shared", node)
    sizes: Any = None
    if shape is None:
        sizes = args[0] if args else kwargs["shape"]
        sizes = sizes if isinstance(sizes.t, Tup) else c.tuple_of([sizes], node)
    ndim = len(sizes.t.items if shape is None else shape)
    key = (node.lineno, node.col_offset)  # type: ignore[attr-defined]
    site = c.unit.shared_sites.setdefault((id(c.compiled), key), SharedSite(shape, dtype, alignment, name))
    c.compiled.uses.add("shared")
    if site not in c.unit.sites:
        c.unit.sites.append(site)
    keep, size = c.keep(device.shared_array), ", {0}" if sizes else ""
    code = build(f"{keep}(_t, _w, {c.keep(site)}{size})", node, *([sizes.code] if sizes else []))
    return V(Arr(dtype, ndim, "C"), code)


@rule(stubs.local.array)  # type: ignore[attr-defined]
def _local(c: Any, args: list[V], kwargs: dict[str, V], node: ast.AST) -> V:
    from . import device

    name = c.target_name or "local array"
    shape, dtype, _ = _array_arguments(c, args, kwargs, "local", node)
    code = build(f"{c.keep(device.local_array)}(_t, _w, {shape!r}, {c.keep(dtype)}, {name!r})", node)
    return V(Arr(dtype, len(shape), "C"), code)


@rule(stubs.const.array_like)  # type: ignore[attr-defined]
def _const(c: Any, args: list[V], kwargs: dict[str, V], node: ast.AST) -> V:
    need(c, args, 1, "cuda.const.array_like", node)
    if not isinstance(args[0].t, Arr):
        raise c.fail(node, f"cuda.const.array_like of {args[0].t}")
    return args[0]


def constant_array(c: Any, array: np.ndarray, node: ast.AST) -> V:
    """An array that is a global of the kernel: constant, as it is when the kernel is compiled."""
    from . import device

    frozen = c.unit.frozen(array)
    layout = "C" if frozen.flags.c_contiguous else "F" if frozen.flags.f_contiguous else "A"
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else "constant array"
    code = build(f"{c.keep(device.constant_array)}(_t, _w, {c.keep(frozen)}, {name!r})", node)
    return V(Arr(frozen.dtype, frozen.ndim, layout, True), code)


# --- who a thread is --------------------------------------------------------------------------------------------------
def _dimensions(letters: tuple[str, ...]) -> Any:
    def dimensions(c: Any, args: list[V], kwargs: dict[str, V], node: ast.AST) -> V:
        need(c, args, 1, "cuda.grid", node)
        count = args[0].const
        if count not in (1, 2, 3):
            message = "takes the number of dimensions, 1, 2 or 3, as a literal (RequireLiteralValue)"
            raise c.fail(node, message)
        values = [V(I64, build(one, node), NOT_CONSTANT, 42) for one in letters[:count]]
        return values[0] if count == 1 else c.tuple_of(values, node)

    return dimensions


rule(stubs.grid)(_dimensions(("_w.x", "_w.y", "_w.z")))
rule(stubs.gridsize)(_dimensions(("(_w.gx * _w.dx)", "(_w.gy * _w.dy)", "(_w.gz * _w.dz)")))


def special(c: Any, stub: Any, node: ast.AST) -> V | None:
    """laneid and warpsize, which are no calls."""
    if stub is stubs.laneid:
        return V(I32, build("_t.lane", node), NOT_CONSTANT, 5)
    if stub is stubs.warpsize:
        return V(I32, constant(32, node), 32)
    return None


# --- meetings ---------------------------------------------------------------------------------------------------------
@rule(stubs.syncthreads)
def _syncthreads(c: Any, args: list[V], kwargs: dict[str, V], node: ast.AST) -> V:
    need(c, args, 0, "cuda.syncthreads", node)
    return helper(c, Known(None), "syncthreads", [], node)


for _name in ("syncthreads_count", "syncthreads_and", "syncthreads_or"):

    @rule(getattr(stubs, _name))
    def _counted(c: Any, args: list[V], kwargs: dict[str, V], node: ast.AST, name: str = _name) -> V:
        need(c, args, 1, f"cuda.{name}", node)
        return helper(c, I32, name, [c.truth(args[0], node)], node, bits=11)


@rule(stubs.cg.this_grid)  # type: ignore[attr-defined]
def _this_grid(c: Any, args: list[V], kwargs: dict[str, V], node: ast.AST) -> V:
    c.compiled.uses.add("grid")
    return V(Other("grid group"), constant(None, node))


@rule(stubs.syncwarp)
def _syncwarp(c: Any, args: list[V], kwargs: dict[str, V], node: ast.AST) -> V:
    return helper(c, Known(None), "syncwarp", [c.converted(one, I64, node) for one in args], node)


for _name in ("threadfence", "threadfence_block", "threadfence_system"):

    @rule(getattr(stubs, _name))
    def _fence(c: Any, args: list[V], kwargs: dict[str, V], node: ast.AST, name: str = _name) -> V:
        need(c, args, 0, f"cuda.{name}", node)
        return helper(c, Known(None), name, [], node)


for _name, _mode in (
    ("shfl_sync", "idx"),
    ("shfl_up_sync", "up"),
    ("shfl_down_sync", "down"),
    ("shfl_xor_sync", "xor"),
):

    @rule(getattr(stubs, _name))
    def _shuffle(c: Any, args: list[V], kwargs: dict[str, V], node: ast.AST, name: str = _name, mode: str = _mode) -> V:
        need(c, args, 3, f"cuda.{name}", node)
        t = args[1].t
        if t not in (I32, I64, U32, U64, F32, F64, BOOL) and not is_int(t):
            raise c.fail(node, f"cuda.{name} of {t}; must be an integer or a float of 32 or 64 bits")
        return helper(c, t, "shuffle", args, node, mode, bits=args[1].bits)


for _name, _mode, _gives in (
    ("any_sync", "any", BOOL), ("all_sync", "all", BOOL), ("eq_sync", "eq", BOOL), ("ballot_sync", "ballot", I32),
):  # fmt: skip

    @rule(getattr(stubs, _name))
    def _vote(
        c: Any,
        args: list[V],
        kwargs: dict[str, V],
        node: ast.AST,
        name: str = _name,
        mode: str = _mode,
        t: Num = _gives,
    ) -> V:
        need(c, args, 2, f"cuda.{name}", node)
        if not is_int(args[0].t) or args[0].t == BOOL:
            raise c.fail(node, f"cuda.{name}: Mask type must be an integer, got {args[0].t}")
        if not is_int(args[1].t):
            raise c.fail(node, f"cuda.{name}: Predicate must be an integer or boolean, got {args[1].t}")
        made = helper(c, t, "vote", args, node, mode)
        return V(I32, build("wrap_i32({0})", node, made.code)) if mode == "ballot" else made


@rule(stubs.match_any_sync)
def _match_any(c: Any, args: list[V], kwargs: dict[str, V], node: ast.AST) -> V:
    return V(I32, build("wrap_i32({0})", node, helper(c, I32, "match_any", args, node).code))


@rule(stubs.match_all_sync)
def _match_all(c: Any, args: list[V], kwargs: dict[str, V], node: ast.AST) -> V:
    name = c.temporary()
    made = helper(c, I32, "match_all", args, node)
    code = build(f"(({name} := {{0}}), (wrap_i32({name}[0]), {name}[1]))[1]", node, made.code)
    return V(Tup((I32, BOOL)), code)


@rule(stubs.activemask)
def _activemask(c: Any, args: list[V], kwargs: dict[str, V], node: ast.AST) -> V:
    return helper(c, U32, "activemask", [], node)


@rule(stubs.lanemask_lt)
def _lanemask_lt(c: Any, args: list[V], kwargs: dict[str, V], node: ast.AST) -> V:
    return V(U32, build("((1 << _t.lane) - 1)", node))


@rule(stubs.nanosleep)
def _nanosleep(c: Any, args: list[V], kwargs: dict[str, V], node: ast.AST) -> V:
    return helper(c, Known(None), "nanosleep", args, node)


# --- bits and numbers -------------------------------------------------------------------------------------------------
for _name in ("popc", "clz", "ffs", "brev"):

    @rule(getattr(stubs, _name))
    def _bits(c: Any, args: list[V], kwargs: dict[str, V], node: ast.AST, name: str = _name) -> V:
        need(c, args, 1, f"cuda.{name}", node)
        t = args[0].t
        if not is_int(t):
            raise c.fail(node, f"cuda.{name} of {t}; must be an integer")
        size = 8 * t.dtype.itemsize if name != "brev" else max(32, 8 * t.dtype.itemsize)
        size = 32 if size < 32 and name != "popc" else size
        code = build(f"{name}({{0}}, {size})", node, args[0].code)
        if name != "brev":
            return V(I32 if size <= 32 else I64 if name == "popc" else I32, code, NOT_CONSTANT, 7)
        gives = U32 if size == 32 else U64
        return V(gives, code)


@rule(stubs.selp)
def _selp(c: Any, args: list[V], kwargs: dict[str, V], node: ast.AST) -> V:
    need(c, args, 3, "cuda.selp", node)
    t = unify(args[1].t, args[2].t)
    test = c.truth(args[0], node)
    a, b = (c.converted(one, t, node) for one in args[1:])
    return V(t, build("({1}, {2})[not {0}]", node, test.code, a.code, b.code), NOT_CONSTANT, max(a.bits, b.bits))


@rule(stubs.fma)
def _fma(c: Any, args: list[V], kwargs: dict[str, V], node: ast.AST) -> V:
    need(c, args, 3, "cuda.fma", node)
    t = Num(np.result_type(*(one.t.dtype for one in args)))
    t = t if is_float(t) else F64
    return plain(c, t, ops.fma, [c.converted(one, t, node) for one in args], node)


@rule(stubs.cbrt)
def _cbrt(c: Any, args: list[V], kwargs: dict[str, V], node: ast.AST) -> V:
    from . import device

    t = args[0].t if args[0].t in (F32, F64) else F64
    made = plain(c, F64, device.cbrt, [c.converted(args[0], F64, node)], node)
    return made if t == F64 else V(t, build("f32({0})", node, made.code))


# --- atomics ----------------------------------------------------------------------------------------------------------
def _atomic(name: str) -> Any:
    def atomic(c: Any, args: list[V], kwargs: dict[str, V], node: ast.AST) -> V:
        counts = {"cas": 4, "compare_and_swap": 3}
        need(c, args, counts.get(name, 3), f"cuda.atomic.{name}", node)
        array = args[0]
        if not isinstance(array.t, Arr) or array.t.dtype.names:
            raise c.fail(node, f"cuda.atomic.{name} on {array.t}; must be an array of numbers")
        if array.t.is_const:
            raise c.fail(node, f"cuda.atomic.{name} on an array that is constant in kernels")
        if array.t.dtype.str[1:] not in ATOMIC_TYPES[name]:
            raise c.fail(node, f"cuda.atomic.{name} on elements of type {array.t.dtype} is not supported")
        t = Num(array.t.dtype)
        if name == "compare_and_swap":
            if array.t.ndim != 1:
                raise c.fail(node, f"cuda.atomic.{name} on an array of {array.t.ndim} dimensions; must have 1")
            indices = [c.number(0, node)]
            old, value = args[1:]
        else:
            at = args[1]
            if array.t.ndim == 1 and is_number(at.t):
                at = c.converted(at, I64, node)  # Numba takes any number here
            indices = _atomic_index(c, at, array.t.ndim, f"atomic.{name}", node)
            value, old = (args[3], args[2]) if name == "cas" else (args[2], None)  # type: ignore[assignment]
        value = c.converted(value, t, node)
        compare = build("None", node) if old is None else c.converted(old, t, node).code
        op = {"and_": "and", "or_": "or", "compare_and_swap": "cas"}.get(name, name)
        if c.unit.successor and name in ("max", "min"):
            op = f"nan{name}"  # a number takes the place of what is none
        holes = "".join(f", {{{i + 3}}}" for i in range(len(indices)))
        code = build(
            f"{{0}}.atomic(_t, {op!r}, {{1}}, {{2}}{holes})", node, array.code, value.code, compare,
            *(one.code for one in indices),
        )  # fmt: skip
        return V(t, code)

    return atomic


def _atomic_index(c: Any, index: V, ndim: int, name: str, node: ast.AST) -> list[V]:
    if isinstance(index.t, Tup):
        parts = [c.tuple_item(index, c.number(i, node), node) for i in range(len(index.t.items))]
        if not isinstance(index.code, (ast.Tuple, ast.Name)):
            kept = c.temporary()
            parts = [V(t, build(f"{kept}[{i}]", node)) for i, t in enumerate(index.t.items)]
            parts[0] = V(index.t.items[0], build(f"({kept} := {{0}})[0]", node, index.code))
        elif isinstance(index.code, ast.Tuple):
            parts = [V(t, code) for t, code in zip(index.t.items, index.code.elts, strict=True)]
    else:
        parts = [index]
    if len(parts) != ndim:
        raise c.fail(node, f"cuda.{name}: {len(parts)} indices for an array of {ndim} dimensions")
    for one in parts:
        c.as_index(one, node)
    return parts


for _name in stubs.ATOMICS:
    rule(getattr(stubs.atomic, _name))(_atomic(_name))


# --- loads and stores with cache hints --------------------------------------------------------------------------------
for _name in (*stubs.LOADS, *stubs.STORES):

    @rule(getattr(stubs, _name))
    def _hinted(c: Any, args: list[V], kwargs: dict[str, V], node: ast.AST, name: str = _name) -> V:
        indices = _atomic_index(c, args[1], args[0].t.ndim, name, node)
        if name in stubs.LOADS:
            return c.element(args[0], indices, node)
        return V(Known(None), c.store_element(args[0], indices, args[2], node))
