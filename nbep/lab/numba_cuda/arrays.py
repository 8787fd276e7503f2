"""Arrays as kernels see them: elements at strides, in the memory of the device, of a block or of a thread.

Each element that a kernel loads or stores is one call of `ld` or `st`, which says who does it. With the memory model
"sc" and without a tracer these go to NumPy's views of the memory; else to the emulator's thread, whose memory model
decides what is seen and checked. A twin of the array has a flag for each byte that somebody has written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from nbep.emulator.machine.access import OPS
from nbep.emulator.machine.memory import Allocation

from . import ops, reports
from .types import AS_SCALARS, Num

KIND_OF = {
    "b1": "u8", "i1": "s8", "i2": "s16", "i4": "s32", "i8": "s64", "u1": "u8", "u2": "u16", "u4": "u32", "u8": "u64",
    "f2": "f16", "f4": "f32", "f8": "f64", "c8": "c64", "c16": "c128", "m8": "s64", "M8": "s64",
    "V2": "bf16",
}  # fmt: skip
_ONES = b"\1" * 16


def flag_type(dtype: np.dtype) -> np.dtype:
    """The same layout with a flag byte for each byte: all of an element's flags are one unsigned integer."""
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return np.dtype((flag_type(base), shape))
    if dtype.names is None:
        return np.dtype("c16") if dtype.itemsize == 16 else np.dtype(f"u{dtype.itemsize}")
    fields = [dtype.fields[name] for name in dtype.names]  # type: ignore[index]
    return np.dtype(
        {
            "names": list(dtype.names),
            "formats": [flag_type(field[0]) for field in fields],
            "offsets": [field[1] for field in fields],
            "itemsize": dtype.itemsize,
        }
    )


class Space:
    """Where an array lies. allocation: None for memory of one thread; is_fast: see `_fast`"""

    __slots__ = ("allocation", "is_shared", "world", "is_fast")

    def __init__(self, world: Any, allocation: Allocation | None, is_shared: bool = False, is_fast: bool = True):
        self.world = world
        self.allocation = allocation
        self.is_shared = is_shared
        self.is_fast = is_fast or allocation is None


class KArray:
    """An array of a kernel. nd: NumPy's view of its bytes; flags: of what is written, None if all is."""

    __slots__ = ("nd", "flags", "space", "name", "is_const", "ld", "st", "_start", "_fields")

    def __init__(self, nd: np.ndarray, flags: np.ndarray | None, space: Space, name: str, is_const: bool = False):
        self.nd = nd
        self.flags = flags
        self.space = space
        self.name = name
        self.is_const = is_const
        self._start: int | None = None
        self._fields: dict[str, KArray] = {}
        if nd.dtype.names is None:
            make = _fast if space.is_fast else _exact
            self.ld, self.st = make(self)

    shape = property(lambda self: self.nd.shape)
    ndim = property(lambda self: self.nd.ndim)
    size = property(lambda self: self.nd.size)
    itemsize = property(lambda self: self.nd.itemsize)
    nbytes = property(lambda self: self.nd.nbytes)
    strides = property(lambda self: self.nd.strides)
    dtype = property(lambda self: self.nd.dtype)
    T = property(lambda self: self.changed(lambda nd: nd.T))

    def __len__(self) -> int:
        return self.nd.shape[0]

    @property
    def own_bytes(self) -> bytes | None:
        """What it holds, if it is of one thread alone: a loop may count its turns there. Else None."""
        return self.nd.tobytes() if self.space.allocation is None else None

    @property
    def start(self) -> int:
        """The byte of its allocation at which its element 0 lies."""
        if self._start is None:
            allocation = self.space.allocation
            first = np.frombuffer(allocation.memory, np.uint8) if allocation.nbytes else None  # type: ignore[union-attr]
            self._start = address_of(self.nd) - (0 if first is None else address_of(first))
        return self._start

    def like(self, nd: np.ndarray, flags: np.ndarray | None, name: str | None = None) -> KArray:
        return KArray(nd, flags, self.space, name or self.name, self.is_const)

    def changed(self, change: Callable[[np.ndarray], np.ndarray], name: str | None = None) -> KArray:
        """Another view of its bytes, and of their flags."""
        return self.like(change(self.nd), None if self.flags is None else change(self.flags), name)

    def sub(self, thread: Any, *index: Any) -> KArray:
        """Some of it: a slice, a row."""
        try:
            return self.changed(lambda nd: nd[index])
        except IndexError:
            raise reports.bad_index(thread, self, tuple(i for i in index if i is not Ellipsis), False) from None

    def rec(self, thread: Any, *index: Any) -> KArray:
        """An element of a structured array."""
        return self.sub(thread, *index, Ellipsis)

    def field(self, name: str) -> KArray:
        made = self._fields.get(name)
        if made is None:
            made = self._fields[name] = self.changed(lambda nd: nd[name], f"{self.name}.{name}")
        return made

    def part(self, name: str) -> KArray:
        """The real or the imaginary parts of complex numbers."""
        nd = self.nd.real if name == "real" else self.nd.imag
        flags = self.flags
        if flags is not None:
            code = flag_type(nd.dtype)
            start = 0 if name == "real" else code.itemsize
            flags = np.ndarray(flags.shape, code, _bytes_of(flags) if flags.size else b"", start, flags.strides)
        return self.like(nd, flags, f"{self.name}.{name}")

    def reshape(self, *shape: Any) -> KArray:
        shape = shape[0] if shape and isinstance(shape[0], tuple) else shape
        return self.changed(lambda nd: nd.reshape(shape))

    def ravel(self) -> KArray:
        return self.reshape(-1)

    def transpose(self, *axes: Any) -> KArray:
        return self.changed(lambda nd: nd.transpose(*axes))

    def view(self, dtype: np.dtype) -> KArray:
        return self.like(self.nd.view(dtype), None if self.flags is None else self.flags.view(flag_type(dtype)))

    def items(self, thread: Any) -> Iterator[Any]:
        """What a `for` over it goes through."""
        one = self.nd.ndim == 1 and self.nd.dtype.names is None
        for i in range(self.nd.shape[0]):
            yield self.ld(thread, i) if one else self.sub(thread, i, *((Ellipsis,) if self.nd.ndim == 1 else ()))

    def every(self, thread: Any) -> Iterator[Any]:
        """All of its elements, in C order."""
        for index in np.ndindex(*self.nd.shape):
            yield self.ld(thread, *index)

    def assign(self, thread: Any, value: Any, *index: Any) -> None:
        """`a[index] = value`, for more than an element, or for a record."""
        there = self.sub(thread, *index, *(() if any(one is Ellipsis for one in index) else (Ellipsis,)))
        if there.nd.dtype.names is not None:
            for name in there.nd.dtype.names:
                there.field(name).assign(thread, value.field(name) if isinstance(value, KArray) else value[name])
            return
        if isinstance(value, KArray):
            source = value.changed(lambda nd: np.broadcast_to(nd, there.nd.shape))
            of, to = Num(value.nd.dtype), Num(there.nd.dtype)
            for at in np.ndindex(*there.nd.shape):
                there.st(thread, ops.convert(source.ld(thread, *at), of, to), *at)
            return
        for at in np.ndindex(*there.nd.shape):
            one = value
            if isinstance(value, tuple):
                one = ops.from_numpy(there.nd.dtype.type(value[at[-1]]), there.nd.dtype)
            there.st(thread, one, *at)

    def atomic(self, thread: Any, op: str, value: Any, compare: Any, *index: Any) -> Any:
        """Replace an element in one step; what was there."""
        space = self.space
        dtype = self.nd.dtype
        change = ATOMICS[op]
        if space.allocation is None:
            old = self.ld(thread, *index)
            self.st(thread, reduced(change(old, value, compare), dtype), *index)
            return old
        if space.is_fast:
            thread.left -= 1
            if thread.left < 0:
                thread.pause()
            thread.left += 2  # what comes next is one step with this
            old = self.ld(thread, *index)
            new = reduced(change(old, value, compare), dtype)
            if thread.looks and not thread.is_silent:
                thread.looks[-1] = thread.looks[-1]._replace(verb="atomic")
            if new is old or new == old:
                thread.left -= 1
            else:
                self.st(thread, new, *index)
            return old
        at = self.offset(thread, index, True)
        kind = self.kind
        if op in ("max", "min") and dtype.kind == "f":
            op = f"float {op}"
        if space.is_shared:
            old = thread.atomic_shared(op, at, kind, value, "relaxed", compare)
        else:
            old = thread.atomic(op, space.allocation.number << 32 | at, kind, value, "relaxed", "gpu", compare)
        if thread.looks is not None:
            if space.allocation.read(at, kind) != old:
                thread.note("store", space.allocation, at, kind, None)
            old = thread.note("atomic", space.allocation, at, kind, old)
        return old

    def change(self, thread: Any, *what: Any) -> None:
        """`atomic` where nobody asks what was there."""
        thread.is_silent = True
        self.atomic(thread, *what)
        thread.is_silent = False

    def ld_silently(self, thread: Any, *index: Any) -> Any:
        """`ld` of what is only stored: see `loops`"""
        if thread.looks is None:
            return self.ld(thread, *index)
        thread.is_silent = True
        value = self.ld(thread, *index)
        thread.is_silent = False
        return value

    @property
    def kind(self) -> str:
        return KIND_OF[self.nd.dtype.str[1:]]

    def offset(self, thread: Any, index: tuple, storing: bool) -> int:
        """The byte of the allocation where an element lies."""
        at = self.start
        shape = self.nd.shape
        if len(index) != len(shape):
            raise reports.bad_index(thread, self, index, storing)
        for i, n, stride in zip(index, shape, self.nd.strides, strict=True):
            if not -n <= i < n:
                raise reports.bad_index(thread, self, index, storing)
            at += (i if i >= 0 else i + n) * stride
        return at


def _bytes_of(array: np.ndarray) -> Any:
    """The memory behind an array with strides of at least 0, from its element 0 on."""
    import ctypes

    from nbep.emulator.machine.arrays import extent

    low, high = extent(array)
    return (ctypes.c_uint8 * (high - low)).from_address(low)


def reduced(value: Any, dtype: np.dtype) -> Any:
    """What is left of a result in an element of this type."""
    if dtype.kind in "iu":
        return ops.wrap(int(value), 8 * dtype.itemsize, dtype.kind == "i")
    return ops.from_numpy(dtype.type(value), dtype)


def _nan_aware(choose: Callable[[Any, Any], Any]) -> Callable[[Any, Any, Any], Any]:
    """Minimum or maximum of a cell and an operand: no number loses against a number."""
    return lambda old, operand, _: operand if old != old else old if operand != operand else choose(old, operand)


ATOMICS: dict[str, Callable[[Any, Any, Any], Any]] = {
    **OPS,
    "sub": lambda old, operand, _: old - operand,
    "xor": lambda old, operand, _: old ^ operand,
    "inc": lambda old, operand, _: 0 if old >= operand else old + 1,
    "dec": lambda old, operand, _: operand if old == 0 or old > operand else old - 1,
    "nanmax": _nan_aware(max),
    "nanmin": _nan_aware(min),
    "max": lambda old, operand, _: operand if operand > old else old,  # what is no number stays, and does nothing
    "min": lambda old, operand, _: operand if operand < old else old,
}
for _name in ("sub", "xor", "inc", "dec", "nanmax", "nanmin"):
    OPS.setdefault(_name, ATOMICS[_name])
for _name in ("max", "min"):
    OPS[f"float {_name}"] = ATOMICS[_name]


def _fast(array: KArray) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Loads and stores of "sc", where all see a store at once."""
    nd, flags, world, allocation = array.nd, array.flags, array.space.world, array.space.allocation
    code = nd.dtype.str[1:]
    get = nd.__getitem__ if code in AS_SCALARS or nd.dtype.kind in "mM" else nd.item
    put = nd.__setitem__
    as_scalar = get is not nd.item
    is_own = array.space.allocation is None
    flag = None if flags is None else flags.item
    set_flag = None if flags is None else flags.__setitem__
    written = None if flags is None else np.frombuffer(_ONES, flags.dtype, 1).item()

    def load(thread: Any, *index: Any) -> Any:
        if not is_own:
            thread.left -= 1
            if thread.left < 0:
                thread.pause()
        try:
            if flag is not None and flag(*index) != written:
                raise reports.unwritten(thread, array, index)
            value = get(index) if as_scalar else get(*index)
        except (IndexError, ValueError):
            raise reports.bad_index(thread, array, index, False) from None
        if is_own or thread.looks is None:
            return value
        return thread.note("load", allocation, array.offset(thread, index, False), array.kind, value)

    def store(thread: Any, value: Any, *index: Any) -> None:
        if not is_own:
            thread.left -= 1
            if thread.left < 0:
                thread.pause()
            world.has_changed = True
        if array.is_const:
            raise reports.read_only(thread, array, index)
        try:
            put(index, value)
            if set_flag is not None:
                set_flag(index, written)
        except (IndexError, ValueError):
            raise reports.bad_store(thread, array, index, value) from None
        if thread.looks is not None:
            if is_own:
                thread.forget_turn()
            else:
                thread.note("store", allocation, array.offset(thread, index, True), array.kind, None)

    return load, store


def _exact(array: KArray) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Loads and stores by the emulator's threads, as their memory model has them."""
    dtype, space = array.nd.dtype, array.space
    kind, is_shared, offset, allocation = array.kind, space.is_shared, array.offset, space.allocation
    assert allocation is not None
    base = allocation.number << 32
    is_bool, unit = dtype.kind == "b", dtype if dtype.kind in "mM" else None

    def load(thread: Any, *index: Any) -> Any:
        at = offset(thread, index, False)
        value = thread.load_shared(at, kind, "weak") if is_shared else thread.load(base | at, kind, "weak", "cta")
        if thread.looks is not None:
            value = thread.note("load", allocation, at, kind, value)
        if is_bool:
            return bool(value)
        return value if unit is None else np.int64(value).view(unit)

    def store(thread: Any, value: Any, *index: Any) -> None:
        if array.is_const:
            raise reports.read_only(thread, array, index)
        if value is reports.UNDEFINED:
            raise reports.bad_store(thread, array, index, value)
        at = offset(thread, index, True)
        if is_bool:
            value = int(bool(value))
        elif unit is not None:
            value = int(value.astype("i8"))
        if is_shared:
            thread.store_shared(at, kind, value, "weak")
        else:
            thread.store(base | at, kind, value, "weak", "cta")
        if thread.looks is not None:
            thread.note("store", allocation, at, kind, None)

    return load, store


def address_of(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def names_of_elements(shape: tuple[int, ...], strides: tuple[int, ...], start: int = 0) -> Callable[[int], str]:
    """How people write the element that has a byte, for arrays in C or F order: `[5, 15]`."""
    order = sorted(range(len(shape)), key=lambda axis: -strides[axis])

    def describe(offset: int) -> str:
        left, index = offset - start, [0] * len(shape)
        for axis in order:
            if strides[axis] > 0:
                index[axis], left = divmod(left, strides[axis])
        return f"[{', '.join(map(str, index))}]"

    return describe


def local_array(world: Any, shape: tuple[int, ...], dtype: np.dtype, name: str) -> KArray:
    """An array of one thread, in which nothing is written."""
    nd = np.empty(shape, dtype)
    return KArray(nd, np.zeros(shape, flag_type(dtype)), Space(world, None), name)
