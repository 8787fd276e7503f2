"""What compiled plain kernels are made of: arrays whose accesses are the engine's, numbers, 64-bit words, atomics."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from functools import cache
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

from nbep.device.compilers.cpu import Emitter, how
from nbep.emulator.engine.state import OUT_OF_BOUNDS, READ_ONLY, UNWRITTEN
from nbep.emulator.engine.words import I1, I8, I64, pointer

from .arrays import ATOMICS

GLOBAL, SHARED, CONSTANT = 0, -1, -2  # spaces; a local array's is the number of bytes from an element to its flags
LOCAL_BYTES = 6 << 10  # of a kernel: with a flag for each byte, less than the guard of a stack
WORD = types.int64
ATOMIC = {GLOBAL: how("relaxed", "gpu", False), SHARED: how("relaxed", "cta", False)}


def machine(builder, name: str, *values: Any) -> Any:
    return Emitter(builder, None, []).machine(name, *values)


# --- arrays -----------------------------------------------------------------------------------------------------------
class Elements(types.Type):
    """An array of a kernel; of no dimension: one element of it, such as a record."""

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
        return made_of(context, builder, t, *values)

    return intrinsic(lambda typingctx, base, shape, strides: (t(WORD, sizes, sizes), generate))


def made_of(context, builder, t: Elements, base: Any, shape: Any, strides: Any) -> Any:
    made = cgutils.create_struct_proxy(t)(context, builder)
    made.base, made.shape, made.strides = base, shape, strides
    return made._getvalue()


@cache
def stack_of(nbytes: int) -> Any:
    """What gives the address of bytes of a thread's stack, behind which lie their flags, all 0."""

    def generate(context, builder, signature, values):
        memory = cgutils.alloca_once(builder, ir.ArrayType(I8, 2 * nbytes))
        memory.align = 16
        cgutils.memset(builder, cgutils.gep_inbounds(builder, memory, 0, nbytes), I64(nbytes), 0)
        return builder.ptrtoint(memory, I64)

    return intrinsic(lambda typingctx: (WORD(), generate))


def constant_of(data: bytes) -> Any:
    """What gives the address of bytes that nobody changes."""

    def generate(context, builder, signature, values):
        there = ir.Constant(ir.ArrayType(I8, len(data)), bytearray(data))
        return builder.ptrtoint(cgutils.global_constant(builder, "constant", there), I64)

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
        return made_of(context, builder, made, at, *(cgutils.pack_array(builder, one, I64) for one in sizes))

    return made(array, index), generate


@intrinsic(prefer_literal=True)
def field(typingctx, array, name):
    """A field of a record, or that of all records of an array: a view of it."""
    there = array.dtype.fields[name.literal_value]
    t = there.type
    of = t.dtype if isinstance(t, types.NestedArray) else t
    made = Elements(of, array.ndim + getattr(t, "ndim", 0), array.space, array.is_const)

    def generate(context, builder, signature, values):
        records = cgutils.create_struct_proxy(array)(context, builder, values[0])
        sizes = (
            [*cgutils.unpack_tuple(builder, getattr(records, what)), *map(I64, getattr(t, what, ()))]
            for what in ("shape", "strides")
        )
        at = builder.add(records.base, I64(there.offset))
        return made_of(context, builder, made, at, *(cgutils.pack_array(builder, one, I64) for one in sizes))

    return made(array, name), generate


@intrinsic
def load(typingctx, array, index):
    t = array.dtype

    def generate(context, builder, signature, values):
        at, size = walk(context, builder, array, index, values)[0], size_of(context, t)
        if array.space > 0:
            flags, written = flags_of(builder, array, at, size)
            with builder.if_then(builder.icmp_unsigned("!=", builder.load(flags, align=1), written), likely=False):
                machine(builder, "fault", UNWRITTEN, at)
        elif array.space != CONSTANT:
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


def _is_number(array: Any, index: Any) -> bool:
    """Whether an index of an array names one number."""
    parts = parts_of(index)
    is_whole = isinstance(array, Elements) and len(parts) == array.ndim and not isinstance(array.dtype, types.Record)
    return is_whole and all(isinstance(t, (types.Integer, types.Boolean)) for t in parts)


def _field(array: Any, index: Any) -> Any:
    """Numba's type of a field that an index names, if it does."""
    is_name = isinstance(index, types.StringLiteral) and isinstance(getattr(array, "dtype", None), types.Record)
    return array.dtype.fields[index.literal_value].type if is_name else None


@overload(operator.getitem)
def _getitem(array, index):
    if _is_number(array, index):
        return lambda array, index: load(array, index)
    if t := _field(array, index):
        is_view = array.ndim or isinstance(t, (types.NestedArray, types.Record))
        return (lambda array, index: field(array, index)) if is_view else lambda array, index: field(array, index)[()]
    kinds = types.Integer, types.Boolean, types.SliceType
    is_view = isinstance(array, Elements) and all(isinstance(t, kinds) for t in parts_of(index))
    return (lambda array, index: view(array, index)) if is_view and len(parts_of(index)) <= array.ndim else None


@overload(operator.setitem)
def _setitem(array, index, value):
    if isinstance(value, (types.Number, types.Boolean)):
        if _is_number(array, index):
            return lambda array, index, value: store(array, index, value)
        if _field(array, index) and not array.ndim:
            return lambda array, index, value: store(field(array, index), (), value)
    if isinstance(getattr(value, "dtype", None), types.Record) and value.dtype == (_field(array, index) or array.dtype):
        elements = [
            f"[{name!r}]{[*at] or ''}"
            for name, one in value.dtype.fields.items()
            for at in np.ndindex(getattr(one.type, "shape", ()))
        ]
        names: dict[str, Any] = {}
        lines = ["    there = array[index]", *(f"    there{one} = value{one}" for one in elements)]
        exec("\n".join(["def assign(array, index, value):", *lines]), names)
        return names["assign"]
    return None


# --- numbers and words ------------------------------------------------------------------------------------------------
@cache
def number_of(t: Any) -> Any:
    """What makes a number of this type of another one."""

    def typer(typingctx, x):
        of = types.unliteral(x)
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


def of_bits(result: Callable, least: int, emit: Callable) -> Any:
    """A function of the bits of an integer, of at least so many. result: its type, by their number"""

    def typer(typingctx, x):
        t = types.unliteral(x)
        size = max(least, t.bitwidth)
        to = result(size)

        def generate(context, builder, signature, values):
            made = emit(builder, widened(builder, t, values[0], size))
            return context.cast(builder, made, types.Integer.from_bitwidth(size, signed=False), to)

        return to(t), generate

    return intrinsic(typer)


def find_first(builder, x):
    zero = x.type(0)
    return builder.select(builder.icmp_unsigned("==", x, zero), zero, builder.add(builder.cttz(x, I1(0)), x.type(1)))


def rounded(function: Callable, names: str) -> Callable:
    """A function of Python's `math`, whose result for float32 is rounded once."""
    space = {"f": function, "f32": np.float32, "f64": np.float64}
    code = f"f({', '.join(f'f64({x})' for x in names.split(', '))})"
    plain, wide = eval(f"lambda {names}: {code}", space), eval(f"lambda {names}: f32({code})", space)

    def made(*given):
        is_narrow = given[-1] == types.float32 or (function is math.pow and isinstance(given[-1], types.Integer))
        return wide if given[0] == types.float32 and is_narrow else plain

    overload(made, strict=False)(made)
    return made


@cache
def into_array(function: np.ufunc) -> Any:
    """A function of NumPy of each element of an array, whose results go into another one."""

    @register_jitable
    def apply(array, out):
        for i in range(out.shape[0]):
            if array.shape[0] != out.shape[0] and array.shape[0] != 1:
                raise ValueError
            out[i] = function(array[i % array.shape[0]])

    return apply


# --- atomics ----------------------------------------------------------------------------------------------------------
def atomic(change: Callable) -> Any:
    """change: what an element becomes, of what it is, of an operand, and of what it is compared with"""

    @intrinsic
    def made(typingctx, array, index, operand, compare):
        t, of = array.dtype, [types.unliteral(operand), types.unliteral(compare)]
        if array.space > 0 or t.bitwidth < 32:
            raise TypingError("such an atomic is interpreted")

        def generate(context, builder, signature, values):
            at, size = walk(context, builder, array, index, values)[0], t.bitwidth // 8
            given = [convert(context, builder, one, kind, t) for one, kind in zip(values[2:], of, strict=True)]
            is_global = array.space == GLOBAL
            begun = ("begin_atomic", at, size, ATOMIC[GLOBAL]) if is_global else ("begin_shared_atomic", at, size)
            place = pointer(builder, machine(builder, *begun), context.get_data_type(t))
            old = context.unpack_value(builder, t, place)
            new = context.compile_internal(builder, change, t(t, t, t), [old, *given])
            has_written: Any = 1
            if change is ATOMICS["cas"]:
                has_written = context.compile_internal(builder, lambda a, b: int(a == b), WORD(t, t), [old, given[1]])
            context.pack_value(builder, t, new, place)
            # A cell of 4 bytes is compared with its sign.
            before = widened(builder, types.int64, whole(builder, t, old))
            name = "end_atomic" if is_global else "end_shared_atomic"
            machine(builder, name, at, size, before, has_written, ATOMIC[array.space])
            return old

        return t(array, index, *of), generate

    return made


def of_one(change: Callable) -> Callable:
    changed = atomic(change)
    return lambda array, index, value: changed(array, index, value, value)
