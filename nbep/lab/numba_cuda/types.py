"""Types of what kernels compute with, and Numba's rules for them.

A number's type is a NumPy dtype. Its values are Python's: an int of any integer type (always in its range), a bool, a
float of float64, a complex of complex128; those of the other types are NumPy scalars, which round as the device does.

`result_of` and its neighbours are the rules of Numba's typing context for CUDA; a test compares all pairs with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np


@dataclass(frozen=True)
class Num:
    """A number."""

    dtype: np.dtype

    def __str__(self) -> str:
        return str(self.dtype)


@dataclass(frozen=True)
class Arr:
    """An array. is_const: kernels may not store to it"""

    dtype: np.dtype
    ndim: int
    layout: str = "A"
    is_const: bool = False

    def __str__(self) -> str:
        return f"array({self.dtype}, {self.ndim}d, {self.layout})"


@dataclass(frozen=True)
class Tup:
    """A tuple. of: the class of a named tuple"""

    items: tuple[Any, ...]
    of: type = tuple

    def __str__(self) -> str:
        return f"{self.of.__name__}({', '.join(map(str, self.items))})"


@dataclass(frozen=True)
class Rec:
    """One element of a structured array."""

    dtype: np.dtype

    def __str__(self) -> str:
        return f"record({self.dtype})"


@dataclass(frozen=True)
class Vec:
    """A vector type of CUDA, such as float32x4."""

    name: str
    dtype: np.dtype
    size: int

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Iter:
    """What a `for` may go through; item: the type of each turn."""

    item: Any

    def __str__(self) -> str:
        return f"iterable({self.item})"


@dataclass(frozen=True)
class Opt:
    """A value of another type, or None: what Numba calls an Optional. Who computes with it needs a value."""

    of: Any

    def __str__(self) -> str:
        return f"Optional({self.of})"


class Known:
    """A value that is known before the kernel runs: a module, a function, a type, text, None, a tuple of those."""

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Known):
            return False
        if self.value is other.value:
            return True
        try:
            return type(self.value) is type(other.value) and bool(self.value == other.value)
        except (TypeError, ValueError):
            return False

    def __hash__(self) -> int:
        return hash(type(self.value))

    def __str__(self) -> str:
        return "none" if self.value is None else repr(self.value)

    __repr__ = __str__


class Unknown:
    """The type of what a call returns that has not returned yet: a recursive one."""

    def __str__(self) -> str:
        return "not known yet"


UNKNOWN = Unknown()
NONE = Known(None)


@cache
def num(name: str) -> Num:
    return Num(np.dtype(name))


BOOL, I8, I16, I32, I64 = (num(name) for name in ("?", "i1", "i2", "i4", "i8"))
U8, U16, U32, U64 = (num(name) for name in ("u1", "u2", "u4", "u8"))
F16, F32, F64, C64, C128 = (num(name) for name in ("f2", "f4", "f8", "c8", "c16"))
BF16 = Num(np.dtype(ml_dtypes.bfloat16))
AS_SCALARS = ("f2", "f4", "c8", "V2")  # types whose values are NumPy's scalars; V2 is bfloat16


def is_int(t: Any) -> bool:
    return isinstance(t, Num) and t.dtype.kind in "iub"


def is_float(t: Any) -> bool:
    return isinstance(t, Num) and (t.dtype.kind == "f" or t == BF16)


def is_complex(t: Any) -> bool:
    return isinstance(t, Num) and t.dtype.kind == "c"


def is_number(t: Any) -> bool:
    return isinstance(t, Num) and (t.dtype.kind in "biufc" or t == BF16)


def wide(*types: Num) -> Num:
    """The type of 64 bits in which integers are computed."""
    return I64 if any(t.dtype.kind in "ib" for t in types) else U64


def _inexact(a: Num, b: Num) -> Num:
    """The least inexact type to which both go safely, as Numba sees it: no small unsigned integer goes to a float."""
    halves = "f2" in (a.dtype.str[1:], b.dtype.str[1:])
    wider = {"u1": I16.dtype if halves else U8.dtype, "u2": U32.dtype}
    return Num(np.promote_types(*(wider.get(one.dtype.str[1:], one.dtype) for one in (a, b))))


def _with_bf16(other: Num) -> Num | None:
    """The type in which a bfloat16 and another number come together: no literal of Python keeps it one."""
    if other.dtype.str[1:] in ("V2", "i1", "u1"):
        return BF16
    return None if is_complex(other) else F32 if other.dtype.str[1:] in ("b1", "i2", "f2", "f4") else F64


def at_least_f32(t: Num) -> Num:
    return F32 if t in (F16, BF16) else t


def result_of(op: str, a: Num, b: Num) -> Num | None:
    """The type of `a op b` by Numba's rules, and of its operands before; None where it has none. op: as ast spells it.

    Shifts and powers keep the type of the left operand: see `operand_types`.
    """
    both_ints = is_int(a) and is_int(b)
    if BF16 in (a, b):
        both = _with_bf16(b if a == BF16 else a)
        if both is None or op not in ("Add", "Sub", "Mult", "Div", "FloorDiv", "Mod", "Pow"):
            return None
        return F32 if op == "Pow" and is_int(b) else both if op in ("Add", "Sub", "Mult", "Div") else at_least_f32(both)
    if both_ints:
        if op in ("LShift", "RShift"):
            return wide(a)
        return F64 if op == "Div" else BOOL if op.startswith("Bit") and a == b == BOOL else wide(a, b)
    if op in ("Add", "Sub", "Mult", "Div"):
        return _inexact(a, b)
    if op in ("FloorDiv", "Mod"):
        return None if is_complex(a) or is_complex(b) else at_least_f32(_inexact(a, b))
    if op == "Pow":
        return at_least_f32(a if is_float(a) and is_int(b) else _inexact(a, b))
    return None


def compared(a: Num, b: Num) -> Num | None:
    """The type in which Numba compares two numbers; None if it does not."""
    if BF16 in (a, b):
        return _with_bf16(b if a == BF16 else a)
    if is_int(a) and is_int(b):
        return Num(np.promote_types(a.dtype, b.dtype))
    return _inexact(a, b)


def unify(a: Any, b: Any) -> Any:
    """The type of a variable that has either; None if there is none."""
    if a == b or b is UNKNOWN:
        return a
    if a is UNKNOWN:
        return b
    if isinstance(a, Opt) or isinstance(b, Opt) or (a == NONE) != (b == NONE):
        held = [one.of if isinstance(one, Opt) else one for one in (a, b) if one != NONE]
        both = unify(held[0], held[-1])
        return None if both is None or isinstance(both, Known) else Opt(both)
    if isinstance(a, Num) and isinstance(b, Num):
        if is_number(a) and is_number(b) and BF16 not in (a, b):
            return Num(np.promote_types(a.dtype, b.dtype))
        return None
    if isinstance(a, Tup) and isinstance(b, Tup) and len(a.items) == len(b.items) and a.of is b.of:
        items = tuple(unify(x, y) for x, y in zip(a.items, b.items, strict=True))
        return None if None in items else Tup(items, a.of)
    if isinstance(a, Arr) and isinstance(b, Arr) and a.dtype == b.dtype and a.ndim == b.ndim:
        return Arr(a.dtype, a.ndim, "A", a.is_const or b.is_const)
    return None


def type_of_int(value: int) -> Num:
    """The type of an integer literal."""
    return I64 if -(1 << 63) <= value < 1 << 63 else U64


def dtype_of(given: Any) -> np.dtype:
    """The dtype that a type of Numba, a dtype or a class stands for."""
    if isinstance(given, np.dtype):
        return given
    if isinstance(given, (type, str)):
        return np.dtype(given)
    if getattr(given, "fields", None) is not None and hasattr(given, "aligned"):
        return _record_dtype(given)
    name = str(getattr(given, "name", given))
    if name == "__nv_bfloat16":
        return BF16.dtype
    if name.startswith(("np", "Literal")) or hasattr(given, "instance_type"):
        return dtype_of(given.instance_type)
    if hasattr(given, "bitwidth") or name in ("bool", "boolean", "complex64", "complex128"):
        return np.dtype({"boolean": "bool"}.get(name, name))
    return np.dtype(name)


def _record_dtype(given: Any) -> np.dtype:
    """The dtype of a record type of Numba."""
    types = [field.type for field in given.fields.values()]
    formats = [np.dtype((dtype_of(t.dtype), t.shape)) if hasattr(t, "shape") else dtype_of(t) for t in types]
    offsets = [field.offset for field in given.fields.values()]
    whole = {"names": list(given.fields), "formats": formats, "offsets": offsets, "itemsize": given.size}
    return np.dtype(whole, align=given.aligned)  # type: ignore[call-overload]
