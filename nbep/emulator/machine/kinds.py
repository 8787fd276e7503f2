"""The kinds of access a primitive makes: their size, their meaning in Python, and how they touch bytes fast.

A segment keeps one typed view of its memory per kind, so that an aligned access is one index into a `memoryview`.
Integers wrap on a store as they do on the device; vectors are tuples of unsigned 32-bit integers. Kernels of nbep
have no float16, float64 and complex numbers: plain Numba kernels do, see `nbep/lab/numba_cuda`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from mmap import mmap
from operator import index
from typing import Any, NamedTuple

import numpy as np
from ml_dtypes import bfloat16

_V2 = struct.Struct("2I")
_V4 = struct.Struct("4I")
_C64 = struct.Struct("2f")
_C128 = struct.Struct("2d")
_U32 = 0xFFFFFFFF


class Loaded:
    """A number that was loaded, and that notes what is asked of it: what wraps it must not take the number itself."""

    __slots__ = ()


def whole(x: Any) -> Any:
    """An integer of Python's own, or one that notes what is asked of it."""
    return x if isinstance(x, Loaded) else int(x)


class Kind(NamedTuple):
    """One kind: `size` bytes, `code` as `memoryview.cast` spells it; `get`/`put` where indexing is not enough."""

    size: int
    code: str
    signed: bool
    get: Callable[[Any, int], Any] | None = None
    put: Callable[[Any, int, Any], None] | None = None


def _put_f32(view: Any, offset: int, value: Any) -> None:
    view[offset >> 2] = np.float32(value)


def _put_f16(view: Any, offset: int, value: Any) -> None:
    view[offset >> 1] = int(np.float16(value).view(np.uint16))


def _get_bf16(view: Any, offset: int) -> Any:
    return np.uint16(view[offset >> 1]).view(bfloat16)


def _put_bf16(view: Any, offset: int, value: Any) -> None:
    view[offset >> 1] = int(bfloat16(value).view(np.uint16))


def _put_f64(view: Any, offset: int, value: Any) -> None:
    view[offset >> 3] = float(value)


def _put_c64(view: Any, offset: int, value: Any) -> None:
    _C64.pack_into(view, offset, np.float32(value.real), np.float32(value.imag))


def _put_c128(view: Any, offset: int, value: Any) -> None:
    _C128.pack_into(view, offset, value.real, value.imag)


def _put_v2(view: Any, offset: int, value: tuple[int, int]) -> None:
    x, y = value
    _V2.pack_into(view, offset, x & _U32, y & _U32)


def _put_v4(view: Any, offset: int, value: tuple[int, int, int, int]) -> None:
    x, y, z, w = value
    _V4.pack_into(view, offset, x & _U32, y & _U32, z & _U32, w & _U32)


KINDS: dict[str, Kind] = {
    "u8": Kind(1, "B", False),
    "s8": Kind(1, "b", True),
    "u16": Kind(2, "H", False),
    "s16": Kind(2, "h", True),
    "u32": Kind(4, "I", False),
    "s32": Kind(4, "i", True),
    "u64": Kind(8, "Q", False),
    "s64": Kind(8, "q", True),
    "f32": Kind(4, "f", True, lambda view, offset: np.float32(view[offset >> 2]), _put_f32),
    "f16": Kind(2, "H", True, lambda view, offset: np.uint16(view[offset >> 1]).view(np.float16), _put_f16),
    "bf16": Kind(2, "H", True, _get_bf16, _put_bf16),
    "f64": Kind(8, "d", True, lambda view, offset: view[offset >> 3], _put_f64),
    "c64": Kind(8, "B", True, lambda view, offset: np.complex64(complex(*_C64.unpack_from(view, offset))), _put_c64),
    "c128": Kind(16, "B", True, lambda view, offset: complex(*_C128.unpack_from(view, offset)), _put_c128),
    "v2": Kind(8, "B", False, _V2.unpack_from, _put_v2),
    "v4": Kind(16, "B", False, _V4.unpack_from, _put_v4),
}


def wrap(value: int, kind: str) -> int:
    """`value` reduced to the integer `kind`, as a store on the device reduces it."""
    size, _, signed, _, _ = KINDS[kind]
    bits = 8 * size
    value = int(value) & ((1 << bits) - 1)
    return value - (1 << bits) if signed and value >> (bits - 1) else value


def range_of(kind: str) -> tuple[int, int]:
    """The least and the largest value of an integer `kind`."""
    size, _, signed, _, _ = KINDS[kind]
    bits = 8 * size - signed
    return -(signed << bits), (1 << bits) - 1


def encode(value: Any, name: str) -> bytes:
    """The bytes that a store of kind `name` writes."""
    size, code, _, _, put = KINDS[name]
    if put is None:
        return (index(value) & ((1 << 8 * size) - 1)).to_bytes(size, "little")
    data = bytearray(size)
    view: Any = memoryview(data)
    put(view if code == "B" else view.cast(code), 0, value)
    return bytes(data)


def decode(data: bytearray, name: str) -> Any:
    """What a load of kind `name` makes of its bytes."""
    kind = KINDS[name]
    view: Any = memoryview(data)
    if kind.code != "B":
        view = view.cast(kind.code)
    return view[0] if kind.get is None else kind.get(view, 0)


def _get_above(name: str, lowest: int) -> Callable[[Any, int], Any]:
    """In place of `get`: a load that raises an IndexError below an offset."""
    size, _, _, get, _ = KINDS[name]
    shift = size.bit_length() - 1

    def get_above(view: Any, offset: int) -> Any:
        if offset < lowest:
            raise IndexError
        return view[offset >> shift] if get is None else get(view, offset)

    return get_above


def _put_above(name: str, lowest: int) -> Callable[[Any, int, Any], None]:
    """In place of `put`, likewise. Integers wrap."""
    size, _, _, _, put = KINDS[name]
    shift = size.bit_length() - 1

    def put_above(view: Any, offset: int, value: Any) -> None:
        if offset < lowest:
            raise IndexError
        if put is not None:
            return put(view, offset, value)
        try:
            view[offset >> shift] = value
        except (ValueError, OverflowError):
            view[offset >> shift] = wrap(value, name)
        return None

    return put_above


class Views(dict):
    """kind -> (view, shift, misfit, convert, shadow, written), made at the first access of that kind.

    `offset & misfit` is non-zero when misaligned.  `convert` is None when `view[offset >> shift]` is the access.
    `shadow` is None when all bytes are initialised; else a view of one flag byte per byte, compared with `written`
    (indexed by `offset >> shift` like `view` when `convert` is None, the plain bytes otherwise).

    lowest: the first offset that may be accessed; `convert` raises an IndexError below it, so others pay nothing for it
    """

    __slots__ = ("memory", "shadow", "storing", "lowest")

    def __init__(self, memory: memoryview, shadow: bytearray | mmap | None, storing: bool, lowest: int = 0):
        super().__init__()
        self.lowest = lowest
        self.memory = memory
        self.shadow = shadow
        self.storing = storing

    def __missing__(self, name: str) -> tuple:
        kind = KINDS[name]
        size = kind.size
        memory: Any = self.memory
        whole = len(self.memory) // size * size  # casting needs a multiple; an index past it is out of bounds anyway
        shadow: Any = self.shadow
        convert = kind.put if self.storing else kind.get
        if self.lowest:
            convert = (_put_above if self.storing else _get_above)(name, self.lowest)
        written: Any = b"\1" * size
        if shadow is not None and convert is None:
            bits: Any = memoryview(shadow)
            shadow = bits[:whole].cast("BHIQ"[size.bit_length() - 1])
            written = int.from_bytes(written, "little")
        view = memory if kind.code == "B" else memory[:whole].cast(kind.code)
        entry = self[name] = (view, size.bit_length() - 1, size - 1, convert, shadow, written)
        return entry
