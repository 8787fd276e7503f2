"""Rules for what `numba.cuda` offers to kernels."""

from __future__ import annotations

import ast
from typing import Any

import numpy as np

from . import device, ops, stubs
from .arrays import local_array
from .calls import Rule, helper, plain, rule
from .code import build
from .env import NOT_CONSTANT, V, called, invoked
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


def _shape(c: Any, value: V, dtype: V, where: str) -> tuple[int, ...] | None:
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
        f"No implementation of function Function(<function {function}>) found for signature:\n \n >>> {given}\n{reason}"
    )


def _at_run_time(c: Any, value: V, where: str) -> bool:
    """Whether the size of an array of dynamic shared memory is taken as it is when the kernel runs."""
    sizes = value.t.items if isinstance(value.t, Tup) else (value.t,)
    is_open = where == "shared" and not value.is_known and c.unit.successor
    return is_open and not c.may_be_compiled_again and all(is_int(one) for one in sizes)


def name_in_numba(value: V) -> str:
    """The type of a value, as messages of Numba have it."""
    if isinstance(value.t, Tup) and value.t.of is list:
        return f"list({value.t.items[0]})" + (f"<iv={list(value.known)}>" if value.is_known else "")
    if isinstance(value.t, Tup):
        consts = value.const
        if not isinstance(consts, tuple):
            codes = value.code.elts if isinstance(value.code, ast.Tuple) else [None] * len(value.t.items)
            consts = tuple(one.value if isinstance(one, ast.Constant) else NOT_CONSTANT for one in codes)
        return f"Tuple({', '.join(_literal(t, const) for t, const in zip(value.t.items, consts, strict=True))})"
    if isinstance(value.t, Known):
        return f"class({value.t.value})"
    return _literal(value.t, value.const)


def _literal(t: Any, const: Any) -> str:
    return f"Literal[int]({const})" if is_int(t) and const is not NOT_CONSTANT else str(t)


def _array_arguments(c: Any, where: str, shape: V, dtype: V, alignment: V | None) -> tuple[Any, np.dtype, int]:
    align = 0
    if alignment is not None and alignment.known is not None:
        align = alignment.known
        if not isinstance(align, int) or align <= 0 or align & (align - 1) or align % 8:
            raise c.fail(f"Alignment must be a positive power of 2 and a multiple of the size of a pointer: {align!r}")
    known = dtype.known
    if isinstance(known, stubs.VectorStub):
        raise c.fail("arrays of vector types are not supported on the emulator")
    try:
        found = dtype_of(known)
    except TypeError:
        raise c.fail(f"Invalid NumPy dtype specified: {known!r}") from None
    if found.hasobject or (found.kind not in "biufcmMV"):
        variable = f"Cannot infer the type of variable {c.target_name!r}: " if c.target_name else ""
        raise c.fail(f"{variable}dtype: {known!r} is no type of numbers or records")
    return _shape(c, shape, dtype, where), found, align


@rule(stubs.shared.array)  # type: ignore[attr-defined]
def _shared(c: Any, shape: V, dtype: V, alignment: V | None = None) -> V:
    found, of, align = _array_arguments(c, "shared", shape, dtype, alignment)
    sizes = [] if found is not None else [shape if isinstance(shape.t, Tup) else c.tuple_of([shape])]
    key = id(c.compiled), (c.at.lineno, c.at.col_offset)
    site = c.unit.shared_sites.setdefault(key, SharedSite(found, of, align, c.target_name))
    c.compiled.uses.add("shared")
    if site not in c.unit.sites:
        c.unit.sites.append(site)
    ndim = len(sizes[0].t.items if found is None else found)
    return V(Arr(of, ndim, "C"), called(c.keep(device.shared_array), "_t", "_w", c.keep(site), *sizes))


@rule(stubs.local.array)  # type: ignore[attr-defined]
def _local(c: Any, shape: V, dtype: V, alignment: V | None = None) -> V:
    found, of, _ = _array_arguments(c, "local", shape, dtype, alignment)
    name = c.target_name or "local array"
    code = called(c.keep(local_array), "_t.world", repr(found), c.keep(of), repr(name))
    return V(Arr(of, len(found), "C"), code)


@rule(stubs.const.array_like)  # type: ignore[attr-defined]
def _const(c: Any, array: V) -> V:
    if not isinstance(array.t, Arr):
        raise c.fail(f"cuda.const.array_like of {array.t}")
    return array


def constant_array(c: Any, array: np.ndarray) -> V:
    """An array that is a global of the kernel: constant, as it is when the kernel is compiled."""
    frozen, node = c.unit.frozen(array), c.at
    layout = "C" if frozen.flags.c_contiguous else "F" if frozen.flags.f_contiguous else "A"
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else "constant array"
    return V(Arr(frozen.dtype, frozen.ndim, layout, True), called("_w.run.constant", c.keep(frozen), repr(name)))


# --- who a thread is --------------------------------------------------------------------------------------------------
def _dimensions(*letters: str) -> Rule:
    def dimensions(c: Any, ndim: V) -> V:
        if ndim.const not in (1, 2, 3):
            raise c.fail("takes the number of dimensions, 1, 2 or 3, as a literal (RequireLiteralValue)")
        values = [V(I64, build(one), NOT_CONSTANT, 42) for one in letters[: ndim.const]]
        return values[0] if ndim.const == 1 else c.tuple_of(values)

    return dimensions


rule(stubs.grid)(_dimensions("_w.x", "_w.y", "_w.z"))
rule(stubs.gridsize)(_dimensions("(_w.gx * _w.dx)", "(_w.gy * _w.dy)", "(_w.gz * _w.dz)"))


def special(c: Any, stub: Any) -> V | None:
    """laneid and warpsize, which are no calls."""
    if stub is stubs.laneid:
        return V(I32, build("_t.lane"), NOT_CONSTANT, 5)
    return V(I32, ast.Constant(32), 32) if stub is stubs.warpsize else None


# --- meetings ---------------------------------------------------------------------------------------------------------
for _name in ("syncthreads", "threadfence", "threadfence_block", "threadfence_system"):
    rule(getattr(stubs, _name))(lambda c, *, name=_name: helper(c, Known(None), name))
for _name in ("syncthreads_count", "syncthreads_and", "syncthreads_or"):
    rule(getattr(stubs, _name))(lambda c, test, *, name=_name: helper(c, I32, name, c.truth(test), bits=11))


@rule(stubs.cg.this_grid)  # type: ignore[attr-defined]
def _this_grid(c: Any) -> V:
    c.compiled.uses.add("grid")
    return c.known(stubs.grid_group)


rule(stubs.grid_group.sync)(lambda c: helper(c, I32, "grid_sync"))  # type: ignore[attr-defined]
rule(stubs.syncwarp)(lambda c, *mask: helper(c, Known(None), "syncwarp", *(c.converted(one, I64) for one in mask)))


for _name, _mode in (
    ("shfl_sync", "idx"), ("shfl_up_sync", "up"), ("shfl_down_sync", "down"), ("shfl_xor_sync", "xor"),
):  # fmt: skip

    @rule(getattr(stubs, _name))
    def _shuffle(c: Any, mask: V, value: V, lane: V, *, name: str = _name, mode: str = _mode) -> V:
        if value.t not in (F32, F64) and not is_int(value.t):
            raise c.fail(f"cuda.{name} of {value.t}; must be an integer or a float of 32 or 64 bits")
        return helper(c, value.t, "shuffle", mask, value, lane, before=(mode,), bits=value.bits)


for _name in ("any", "all", "eq", "ballot"):

    @rule(getattr(stubs, f"{_name}_sync"))
    def _vote(c: Any, mask: V, predicate: V, *, mode: str = _name) -> V:
        if not is_int(mask.t) or mask.t == BOOL:
            raise c.fail(f"cuda.{mode}_sync: Mask type must be an integer, got {mask.t}")
        if not is_int(predicate.t):
            raise c.fail(f"cuda.{mode}_sync: Predicate must be an integer or boolean, got {predicate.t}")
        made = helper(c, BOOL, "vote", mask, predicate, before=(mode,))
        return V(I32, build("wrap_i32({0})", made.code)) if mode == "ballot" else made


@rule(stubs.match_any_sync)
def _match_any(c: Any, mask: V, value: V) -> V:
    return V(I32, build("wrap_i32({0})", helper(c, I32, "match_any", mask, value).code))


@rule(stubs.match_all_sync)
def _match_all(c: Any, mask: V, value: V) -> V:
    code = helper(c, I32, "match_all", mask, value).code
    return c.apart(code, (I32, BOOL), lambda one: one if one.t == BOOL else V(I32, build("wrap_i32({0})", one.code)))


rule(stubs.activemask)(lambda c: helper(c, U32, "activemask"))
rule(stubs.lanemask_lt)(lambda c: V(U32, build("((1 << _t.lane) - 1)")))
rule(stubs.nanosleep)(lambda c, duration: helper(c, Known(None), "nanosleep", duration))


# --- bits and numbers -------------------------------------------------------------------------------------------------
for _name in ("popc", "clz", "ffs", "brev"):

    @rule(getattr(stubs, _name))
    def _bits(c: Any, value: V, *, name: str = _name) -> V:
        if not is_int(value.t):
            raise c.fail(f"cuda.{name} of {value.t}; must be an integer")
        size = 8 * value.t.dtype.itemsize
        size = size if name == "popc" else max(32, size)
        code = build(f"{name}({{0}}, {size})", value.code)
        if name == "brev":
            return V(U32 if size == 32 else U64, code)
        return V(I64 if name == "popc" and size > 32 else I32, code, NOT_CONSTANT, 7)


@rule(stubs.selp)
def _selp(c: Any, test: V, a: V, b: V) -> V:
    t = unify(a.t, b.t)
    test, a, b = c.truth(test), c.converted(a, t), c.converted(b, t)
    return V(t, build("({1}, {2})[not {0}]", test.code, a.code, b.code), NOT_CONSTANT, max(a.bits, b.bits))


@rule(stubs.fma)
def _fma(c: Any, x: V, y: V, z: V) -> V:
    t = Num(np.result_type(*(one.t.dtype for one in (x, y, z))))
    t = t if is_float(t) else F64
    return plain(c, t, ops.fma, *(c.converted(one, t) for one in (x, y, z)))


@rule(stubs.cbrt)
def _cbrt(c: Any, value: V) -> V:
    made = plain(c, F64, device.cbrt, c.converted(value, F64))
    return V(F32, build("f32({0})", made.code)) if value.t == F32 else made


# --- atomics, and loads and stores with cache hints -------------------------------------------------------------------
def _atomic(c: Any, name: str, array: V, at: V | None, value: V, old: V | None = None) -> V:
    if not isinstance(array.t, Arr) or array.t.dtype.names:
        raise c.fail(f"cuda.atomic.{name} on {array.t}; must be an array of numbers")
    if array.t.is_const:
        raise c.fail(f"cuda.atomic.{name} on an array that is constant in kernels")
    if array.t.dtype.str[1:] not in ATOMIC_TYPES[name]:
        raise c.fail(f"cuda.atomic.{name} on elements of type {array.t.dtype} is not supported")
    t, ndim = Num(array.t.dtype), array.t.ndim
    if at is None:
        if ndim != 1:
            raise c.fail(f"cuda.atomic.{name} on an array of {ndim} dimensions; must have 1")
        at = c.number(0)
    elif ndim == 1 and is_number(at.t):
        at = c.converted(at, I64)  # Numba takes any number here
    indices = _indices(c, at, ndim, f"atomic.{name}")
    compare = "None" if old is None else c.converted(old, t)
    op = {"and_": "and", "or_": "or", "compare_and_swap": "cas"}.get(name, name)
    if c.unit.successor and name in ("max", "min"):
        op = f"nan{name}"  # a number takes the place of what is none
    return V(t, invoked(array.code, "atomic", repr(op), c.converted(value, t), compare, *indices))


def _indices(c: Any, index: V, ndim: int, name: str) -> list[V]:
    parts = [c.as_index(one) for one in c.parts_of(index)]
    if len(parts) != ndim:
        raise c.fail(f"cuda.{name}: {len(parts)} indices for an array of {ndim} dimensions")
    return parts


for _name in ATOMIC_TYPES:
    rule(getattr(stubs.atomic, _name))(lambda c, array, at, value, *, name=_name: _atomic(c, name, array, at, value))
rule(stubs.atomic.cas)(lambda c, array, at, old, value: _atomic(c, "cas", array, at, value, old))  # type: ignore[attr-defined]
rule(stubs.atomic.compare_and_swap)(  # type: ignore[attr-defined]
    lambda c, array, old, value: _atomic(c, "compare_and_swap", array, None, value, old)
)
for _name in stubs.LOADS:
    rule(getattr(stubs, _name))(
        lambda c, array, at, *, name=_name: c.element(array, _indices(c, at, array.t.ndim, name))
    )
for _name in stubs.STORES:
    rule(getattr(stubs, _name))(
        lambda c, array, at, value, *, name=_name: V(
            Known(None), c.store_element(array, _indices(c, at, array.t.ndim, name), value)
        )
    )
