"""What compiled plain kernels are made of: arrays whose accesses are the engine's, and what `numba.cuda` offers.

A word is 64 bits. The first words of a kernel's arguments are the sizes of its blocks and of its grid, x, y, z each.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.errors import TypingError
from numba.cpython import slicing
from numba.extending import (
    intrinsic,
    make_attribute_wrapper,
    models,
    overload,
    overload_attribute,
    register_jitable,
    register_model,
)

from nbep.device.compilers.cpu import how, site_of_call
from nbep.emulator.engine import access, meeting, schedule
from nbep.emulator.engine.state import OUT_OF_BOUNDS, READ_ONLY, UNWRITTEN
from nbep.emulator.engine.words import COMPILED, I1, I8, I32, I64, VOID, call, pointer
from nbep.emulator.machine.orders import SCOPES

from . import stubs
from .math_rules import BINARY, UNARY

GLOBAL, SHARED = 0, -1  # spaces; a local array's is the number of bytes from an element to its flags
LOCAL_BYTES = 6 << 10  # of a kernel: with a flag for each byte, less than the guard of a stack
WORD = types.int64
ATOMIC = {GLOBAL: how("relaxed", "gpu", False), SHARED: how("relaxed", "cta", False)}


def machine(builder, name: str, *values: Any) -> Any:
    one = COMPILED[f"nbep_{name}"]
    given = [value if isinstance(value, ir.Value) else I64(int(value)) for value in values]
    return call(builder, one.symbol, VOID if one.result == types.none else I64, given)


# --- arrays -----------------------------------------------------------------------------------------------------------
class Elements(types.Type):
    """An array of a kernel."""

    def __init__(self, dtype: Any, ndim: int, space: int = GLOBAL, is_const: bool = False):
        self.dtype, self.ndim, self.space, self.is_const = dtype, ndim, space, is_const
        super().__init__(name=f"elements({dtype}, {ndim}, {space}, {is_const})")


@register_model(Elements)
class _Model(models.StructModel):
    """base: the address of element 0"""

    def __init__(self, manager: Any, t: Elements):
        sizes = types.UniTuple(WORD, t.ndim)
        super().__init__(manager, t, [("base", WORD), ("shape", sizes), ("strides", sizes)])


make_attribute_wrapper(Elements, "shape", "shape")
make_attribute_wrapper(Elements, "strides", "strides")


@overload_attribute(Elements, "size")
def _size(array):
    def size(array):
        number = 1
        for n in array.shape:
            number *= n
        return number

    return size


@overload_attribute(Elements, "ndim")
def _ndim(array):
    ndim = array.ndim
    return lambda array: ndim


@overload(len)
def _len(array):
    return (lambda array: array.shape[0]) if isinstance(array, Elements) else None


@cache
def array_of(t: Elements) -> Any:
    """What makes an array of the address of its element 0, its shape and its strides."""
    sizes = types.UniTuple(WORD, t.ndim)

    def generate(context, builder, signature, values):
        made = cgutils.create_struct_proxy(t)(context, builder)
        made.base, made.shape, made.strides = values
        return made._getvalue()

    return intrinsic(lambda typingctx, base, shape, strides: (t(WORD, sizes, sizes), generate))


@cache
def stack_of(nbytes: int) -> Any:
    """What gives the address of bytes of a thread's stack, behind which lie their flags, all 0."""

    def generate(context, builder, signature, values):
        memory = cgutils.alloca_once(builder, ir.ArrayType(I8, 2 * nbytes))
        memory.align = 16
        cgutils.memset(builder, cgutils.gep_inbounds(builder, memory, 0, nbytes), I64(nbytes), 0)
        return builder.ptrtoint(memory, I64)

    return intrinsic(lambda typingctx: (WORD(), generate))


def parts_of(index: Any) -> tuple[Any, ...]:
    parts = index.types if isinstance(index, types.BaseTuple) else (index,)
    return tuple(types.unliteral(t) for t in parts)


def walk(context, builder, array: Any, index: Any, values: Any) -> tuple[Any, list, list]:
    """The address that an index of an array leads to, and the shape and the strides of what is there."""
    there = cgutils.create_struct_proxy(array)(context, builder, values[0])
    kinds = parts_of(index)
    parts = cgutils.unpack_tuple(builder, values[1]) if isinstance(index, types.BaseTuple) else [values[1]]
    at, shape, strides = there.base, [], []
    sizes, steps = (cgutils.unpack_tuple(builder, one) for one in (there.shape, there.strides))
    for i, (n, step) in enumerate(zip(sizes, steps, strict=True)):
        if i >= len(parts):
            shape.append(n)
            strides.append(step)
        elif isinstance(kinds[i], types.SliceType):
            part = context.make_helper(builder, kinds[i], parts[i])
            slicing.guard_invalid_slice(context, builder, kinds[i], part)
            slicing.fix_slice(builder, part, n)
            at = builder.add(at, builder.mul(part.start, step))
            shape.append(slicing.get_slice_length(builder, part))
            strides.append(slicing.fix_stride(builder, part, step))
        else:
            here = context.cast(builder, parts[i], kinds[i], WORD)
            inside = builder.icmp_unsigned("<", builder.add(here, n), builder.shl(n, I64(1)))
            with builder.if_then(builder.not_(inside), likely=False):
                machine(builder, "fault", OUT_OF_BOUNDS, at)
            here = builder.select(builder.icmp_signed("<", here, I64(0)), builder.add(here, n), here)
            at = builder.add(at, builder.mul(here, step))
    return at, shape, strides


def size_of(context, t: Any) -> int:
    return context.get_abi_sizeof(context.data_model_manager[t].get_data_type())


def flags_of(builder, array: Any, at: Any, size: int) -> tuple[Any, Any]:
    """Where the flags of an element of a local array are, and what they are once it is written."""
    kind = ir.IntType(8 * size)
    return pointer(builder, builder.add(at, I64(array.space)), kind), kind(int.from_bytes(b"\1" * size))


def convert(context, builder, value: Any, of: Any, to: Any) -> Any:
    """A number of another type. Of integers, the nearest to a float; 0 for what is no number."""
    if not (isinstance(of, types.Float) and isinstance(to, types.Integer)):
        return context.cast(builder, value, of, to)
    name = f"llvm.fpto{'s' if to.signed else 'u'}i.sat.i{to.bitwidth}.f{of.bitwidth}"
    kind = ir.FunctionType(ir.IntType(to.bitwidth), [value.type])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [value])


@intrinsic
def view(typingctx, array, index):
    kept = array.ndim - sum(not isinstance(t, types.SliceType) for t in parts_of(index))
    made = Elements(array.dtype, kept, array.space, array.is_const)

    def generate(context, builder, signature, values):
        at, *sizes = walk(context, builder, array, index, values)
        there = cgutils.create_struct_proxy(made)(context, builder)
        there.base, there.shape, there.strides = at, *(cgutils.pack_array(builder, one) for one in sizes)
        return there._getvalue()

    return made(array, index), generate


@intrinsic
def load(typingctx, array, index):
    t = array.dtype

    def generate(context, builder, signature, values):
        at, size = walk(context, builder, array, index, values)[0], size_of(context, t)
        if array.space > 0:
            flags, written = flags_of(builder, array, at, size)
            with builder.if_then(builder.icmp_unsigned("!=", builder.load(flags, align=1), written), likely=False):
                machine(builder, "fault", UNWRITTEN, at)
        else:
            at = machine(builder, "load" if array.space == GLOBAL else "load_shared", at, size, 0)
        return context.unpack_value(builder, t, pointer(builder, at, context.get_data_type(t)))

    return t(array, index), generate


@intrinsic
def store(typingctx, array, index, value):
    t, of = array.dtype, types.unliteral(value)

    def generate(context, builder, signature, values):
        at, size = walk(context, builder, array, index, values)[0], size_of(context, t)
        new = convert(context, builder, values[2], of, t)
        if array.is_const:
            machine(builder, "fault", READ_ONLY, at)
        elif array.space > 0:
            flags, written = flags_of(builder, array, at, size)
            context.pack_value(builder, t, new, pointer(builder, at, context.get_data_type(t)))
            builder.store(written, flags, align=1)
        else:
            words = cgutils.alloca_once(builder, ir.ArrayType(I64, 2), zfill=True)
            context.pack_value(builder, t, new, builder.bitcast(words, context.get_data_type(t).as_pointer()))
            two = [builder.load(cgutils.gep_inbounds(builder, words, 0, i)) for i in (0, 1)]
            machine(builder, "store" if array.space == GLOBAL else "store_shared", at, size, *two, 0)
        return context.get_dummy_value()

    return types.none(array, index, of), generate


def _is_element(array: Any, index: Any) -> bool:
    parts = parts_of(index)
    is_whole = isinstance(array, Elements) and len(parts) == array.ndim
    return is_whole and all(isinstance(t, (types.Integer, types.Boolean)) for t in parts)


@overload(operator.getitem)
def _getitem(array, index):
    if _is_element(array, index):
        return lambda array, index: load(array, index)
    kinds = types.Integer, types.Boolean, types.SliceType
    is_view = isinstance(array, Elements) and all(isinstance(t, kinds) for t in parts_of(index))
    return (lambda array, index: view(array, index)) if is_view and len(parts_of(index)) <= array.ndim else None


@overload(operator.setitem)
def _setitem(array, index, value):
    is_number = isinstance(value, (types.Number, types.Boolean))
    return (lambda array, index, value: store(array, index, value)) if is_number and _is_element(array, index) else None


# --- numbers and words ------------------------------------------------------------------------------------------------
@cache
def number_of(t: Any) -> Any:
    """What makes a number of this type of another one."""

    def typer(typingctx, x):
        of = types.unliteral(x)
        if not isinstance(of, (types.Number, types.Boolean)):
            raise TypingError(f"no number: {of}")
        return t(of), lambda context, builder, signature, values: convert(context, builder, values[0], of, t)

    return intrinsic(typer)


def whole(builder, t: Any, value: Any) -> Any:
    """Its bits, as an integer."""
    return builder.bitcast(value, ir.IntType(t.bitwidth)) if isinstance(t, types.Float) else value


def widened(builder, t: Any, value: Any, width: int = 64) -> Any:
    if value.type.width == width:
        return value
    return (builder.sext if isinstance(t, types.Integer) and t.signed else builder.zext)(value, ir.IntType(width))


@intrinsic
def bits(typingctx, x):
    t = types.unliteral(x)
    if not isinstance(t, (types.Integer, types.Boolean, types.Float)):
        raise TypingError(f"a word cannot be made of {t}")
    return WORD(t), lambda context, builder, signature, values: widened(builder, t, whole(builder, t, values[0]))


@intrinsic
def like(typingctx, x, bits):
    """The value of a word, of the type of another value."""
    t = types.unliteral(x)

    def generate(context, builder, signature, values):
        kind = context.get_value_type(t)
        width = t.bitwidth if isinstance(t, types.Float) else kind.width
        value = builder.trunc(values[1], ir.IntType(width)) if width < 64 else values[1]
        return builder.bitcast(value, kind)

    return t(t, WORD), generate


def _of_bits(result: Callable, least: int, emit: Callable) -> Any:
    """A function of the bits of an integer, of at least so many. result: its type, by their number"""

    def typer(typingctx, x):
        t = types.unliteral(x)
        if not isinstance(t, types.Integer):
            raise TypingError(f"must be an integer, not {t}")
        size = max(least, t.bitwidth)
        to = result(size)

        def generate(context, builder, signature, values):
            made = emit(builder, widened(builder, t, values[0], size))
            return context.cast(builder, made, types.Integer.from_bitwidth(size, signed=False), to)

        return to(t), generate

    return intrinsic(typer)


def _find_first(builder, x):
    zero = x.type(0)
    return builder.select(builder.icmp_unsigned("==", x, zero), zero, builder.add(builder.cttz(x, I1(0)), x.type(1)))


def _rounded(function: Callable, names: str) -> Callable:
    """A function of Python's `math`, whose result for float32 is rounded once."""
    space = {"f": function, "f32": np.float32, "f64": np.float64}
    plain = eval(f"lambda {names}: f({names})", space)
    wide = eval(f"lambda {names}: f32(f({', '.join(f'f64({x})' for x in names.split(', '))}))", space)

    def choose(x, y=types.float32):
        is_narrow = y == types.float32 or (function is math.pow and isinstance(y, types.Integer))
        return wide if x == types.float32 and is_narrow else plain

    made = eval(f"lambda {names}: None", {})
    overload(made, strict=False)(eval(f"lambda {names}: choose({names})", {"choose": choose}))
    return made


# --- atomics ----------------------------------------------------------------------------------------------------------
def _atomic(change: Callable) -> Any:
    """change: what an element becomes, of what it is and of the operands; of two, the first is compared"""

    def made(typingctx, array, index, given):
        t = array.dtype
        if array.is_const or array.space > 0 or len(parts_of(index)) != array.ndim or t.bitwidth < 32:
            raise TypingError("such an atomic is interpreted")

        def generate(context, builder, signature, values):
            at, size = walk(context, builder, array, index, values)[0], t.bitwidth // 8
            operands = [
                convert(context, builder, value, of, t)
                for value, of in zip(cgutils.unpack_tuple(builder, values[2]), parts_of(given), strict=True)
            ]
            is_global = array.space == GLOBAL
            begun = ("begin_atomic", at, size, ATOMIC[GLOBAL]) if is_global else ("begin_shared_atomic", at, size)
            place = pointer(builder, machine(builder, *begun), context.get_data_type(t))
            old = context.unpack_value(builder, t, place)
            kinds = [t] * (1 + len(operands))
            new = context.compile_internal(builder, change, t(*kinds), [old, *operands])
            has_written = I64(1)
            if len(operands) == 2:
                is_same = context.compile_internal(
                    builder, lambda a, b: a == b, types.boolean(t, t), [old, operands[0]]
                )
                has_written = builder.zext(is_same, I64)
            context.pack_value(builder, t, new, place)
            # A cell of 4 bytes is compared with its sign.
            before = widened(builder, types.int64, whole(builder, t, old))
            name = "end_atomic" if is_global else "end_shared_atomic"
            machine(builder, name, at, size, before, has_written, ATOMIC[array.space])
            return old

        return t(array, index, given), generate

    return intrinsic(made)


ATOMICS: dict[str, Callable] = {
    "add": lambda old, x: old + x, "sub": lambda old, x: old - x, "exch": lambda old, x: x,
    "and_": lambda old, x: old & x, "or_": lambda old, x: old | x, "xor": lambda old, x: old ^ x,
    "max": lambda old, x: x if x > old else old, "min": lambda old, x: x if x < old else old,
    "inc": lambda old, x: old - old if old >= x else old + 1,
    "dec": lambda old, x: x if old == 0 or old > x else old - 1,
    "nanmax": lambda old, x: x if old != old else old if x != x else max(old, x),
    "nanmin": lambda old, x: x if old != old else old if x != x else min(old, x),
}  # fmt: skip
_cas = _atomic(lambda old, compare, x: x if old == compare else old)


def _of_one(change: Callable) -> Callable:
    atomic = _atomic(change)
    return lambda array, index, value: atomic(array, index, (value,))


# --- who a thread is: expressions that stand in its place, with the names of NAMES -----------------------------------
about, argument = access.about_thread, access.argument
_PLACES = "{0} % {1}", "{0} // {1} % {2}", "{0} // ({1} * {2})"
DIMENSIONS: dict[Any, list[str]] = {
    stub: [
        f"i32({place.format(f'about({which})', f'argument({3 * which})', f'argument({3 * which + 1})')})"
        for place in _PLACES
    ]
    for which, stub in enumerate((stubs.threadIdx, stubs.blockIdx))
} | {
    stub: [f"i32(argument({first + i}))" for i in range(3)] for first, stub in ((0, stubs.blockDim), (3, stubs.gridDim))
}
GRIDS = {
    stubs.grid: [
        f"(i64({DIMENSIONS[stubs.blockIdx][i]}) * argument({i}) + {DIMENSIONS[stubs.threadIdx][i]})" for i in range(3)
    ],
    stubs.gridsize: [f"(argument({i}) * argument({i + 3}))" for i in range(3)],
}
i32, i64 = np.int32, np.int64
NAMES = {"about": about, "argument": argument, "i32": i32, "i64": i64, "turn": schedule.turn}


# --- meetings ---------------------------------------------------------------------------------------------------------
def _meeting(has_test: bool, decode: Callable) -> Any:
    """A call of cuda.syncthreads. decode: the result, of how many predicates hold and << 32 how many do not"""

    def generate(context, builder, signature, values):
        threads = machine(builder, "about_thread", access.ABOUT.index("block_dim"))
        test = builder.zext(values[0], I64) if values else I64(1)
        site = site_of_call(SimpleNamespace(name="syncthreads")) or 1  # type: ignore[arg-type]
        made = decode(builder, machine(builder, "meet", 0, threads, 2, test, site))
        return context.get_dummy_value() if made is None else widened(builder, None, made, 32)

    if has_test:
        return intrinsic(lambda typingctx, predicate: (types.int32(types.boolean), generate))
    return intrinsic(lambda typingctx: (types.none(), generate))


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


def _syncwarp(mask=0xFFFFFFFF):
    meeting.collect(meeting.SYNC, real(mask), 0, 0, 0)


def _fence(scope: str) -> Callable:
    reach = SCOPES[scope]
    return lambda: access.fence(reach)


_PLAIN: dict[Any, Callable] = {
    stubs.syncwarp: _syncwarp, stubs.match_all_sync: _match_all, stubs.nanosleep: lambda duration: schedule.pause(),
    stubs.threadfence: _fence("gpu"), stubs.threadfence_block: _fence("cta"), stubs.threadfence_system: _fence("sys"),
    stubs.ballot_sync: lambda mask, test: i32(meeting.collect(meeting.BALLOT, real(mask), i64(test != 0), 0, 0)),
    stubs.match_any_sync: lambda mask, value: i32(meeting.collect(meeting.MATCH, real(mask), bits(value), 0, 0)),
    stubs.selp: lambda test, a, b: a if test else b,
    stubs.atomic.cas: lambda array, index, old, value: _cas(array, index, (old, value)),  # type: ignore[attr-defined]
    stubs.atomic.compare_and_swap: lambda array, old, value: _cas(array, 0, (old, value)),  # type: ignore[attr-defined]
    **{getattr(stubs.atomic, name): _of_one(change) for name, change in ATOMICS.items()},
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
    stubs.syncthreads: _meeting(False, lambda builder, made: None),
    stubs.syncthreads_count: _meeting(True, lambda builder, made: builder.trunc(made, I32)),
    stubs.syncthreads_or: _meeting(
        True, lambda builder, made: builder.icmp_unsigned("!=", builder.trunc(made, I32), I32(0))
    ),
    stubs.syncthreads_and: _meeting(
        True, lambda builder, made: builder.icmp_unsigned("==", builder.lshr(made, I64(32)), I64(0))
    ),
    stubs.popc: _of_bits(lambda n: types.int64 if n > 32 else types.int32, 1, lambda b, x: b.ctpop(x)),
    stubs.clz: _of_bits(lambda n: types.int32, 32, lambda b, x: b.ctlz(x, I1(0))),
    stubs.ffs: _of_bits(lambda n: types.int32, 32, _find_first),
    stubs.brev: _of_bits(lambda n: types.uint32 if n == 32 else types.uint64, 32, lambda b, x: b.bitreverse(x)),
    **{stub: register_jitable(function) for stub, function in _PLAIN.items()},
    **{getattr(math, name): _rounded(getattr(math, name), "x") for name in UNARY},
    **{getattr(math, name): _rounded(getattr(math, name), "x, y") for name in BINARY},
}
