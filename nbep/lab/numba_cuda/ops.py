"""What kernels compute, where Python's own operators are not the device's: division, powers, conversions, bits."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from .types import AS_SCALARS, BF16, Num

INF, NAN = math.inf, math.nan
f16, f32, c64, bf16 = np.float16, np.float32, np.complex64, BF16.dtype.type


def wrap(value: int, bits: int, signed: bool) -> int:
    """An integer reduced to its type."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if signed and value >> (bits - 1) else value


def _wrapping(bits: int) -> Callable[[int], int]:
    half, mask = 1 << bits - 1, (1 << bits) - 1
    return lambda value: ((value + half) & mask) - half


wrap_i8, wrap_i16, wrap_i32, wrap_i64 = map(_wrapping, (8, 16, 32, 64))


def to_int(value: Any, bits: int, signed: bool) -> int:
    """A float cut off to an integer. The device takes the nearest there is, and 0 for what is no number."""
    least, most = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
    try:
        return min(max(int(value), least), most)
    except OverflowError:
        return most if value > 0 else least
    except ValueError:
        return 0


def div(a: Any, b: Any) -> Any:
    """a / b of float64, complex128 or integers."""
    try:
        return a / b
    except ZeroDivisionError:
        if isinstance(a, complex) or isinstance(b, complex):
            return complex(np.complex128(a) / np.complex128(b))
        if a == 0 or a != a:
            return NAN
        return math.copysign(INF, a) * math.copysign(1.0, b)
    except OverflowError:
        return float(np.float64(a) / np.float64(b))


def floordiv(a: int, b: int) -> int:
    """a // b of integers; 0 for b = 0, as Numba compiles it."""
    return a // b if b else 0


def mod(a: int, b: int) -> int:
    return a % b if b else 0


def not_zero(value: Any) -> Any:
    """A divisor, in a kernel with debug=True."""
    if value == 0:
        raise ZeroDivisionError("division by zero")
    return value


def float_floordiv(a: Any, b: Any) -> Any:
    return a // b if b else type(a)(np.float64(a) / np.float64(b))


def float_mod(a: Any, b: Any) -> Any:
    return a % b if b else type(a)(NAN)


def int_pow(a: int, b: int) -> int:
    """a ** b of integers; a negative power of what is neither 1 nor -1 is cut off to 0."""
    if b >= 0:
        return pow(a, b, 1 << 64) if b > 64 else a**b
    return a if a == 1 or (a == -1 and b & 1) else 1 if a == -1 else 0


def float_pow(a: float, b: float) -> float:
    try:
        return math.pow(a, b)
    except (OverflowError, ValueError):
        return float(np.power(np.float64(a), np.float64(b)))


def f32_pow(a: Any, b: Any) -> Any:
    return f32(float_pow(float(a), float(b)))


def complex_pow(a: complex, b: complex) -> complex:
    return complex(np.power(np.complex128(a), np.complex128(b)))


def shift_left(a: int, b: int) -> int:
    """a << b of 64 bits, not yet reduced. The amount counts modulo 64, as the compiler does for constants."""
    return a << (b & 63)


def shift_right(a: int, b: int) -> int:
    return a >> (b & 63)


# --- conversions ------------------------------------------------------------------------------------------------------
INEXACT = {
    "f2": "f16({0})", "f4": "f32({0})", "f8": "float({0})", "c8": "c64({0})", "c16": "complex({0})", "V2": "bf16({0})",
}  # fmt: skip


def conversion(of: Num, to: Num) -> str | None:
    """How a value {0} of one number type becomes one of another, as code; "" if it is one, None if it cannot."""
    a, b = of.dtype, to.dtype
    if a == b:
        return ""
    is_real = a.kind in "biuf" or of == BF16
    if b.kind == "b":
        return "bool({0})"
    if b.kind in "iu" and a.kind in "iub":
        bits = 8 * b.itemsize
        if a.kind == "b" or np.can_cast(a, b, "safe"):
            return "int({0})" if a.kind == "b" else ""
        return f"wrap_i{bits}({{0}})" if b.kind == "i" else f"({{0}} & {(1 << bits) - 1:#x})"
    if b.kind in "iu":
        if is_real:
            return f"to_int({{0}}, {8 * b.itemsize}, {b.kind == 'i'})"
        return "int({0}.astype('i8'))" if a.kind in "mM" else None
    if b.kind in "fc" or to == BF16:
        return INEXACT[b.str[1:]] if is_real or (a.kind == b.kind == "c") else None
    if b.kind in "mM" and a.kind in "iu":
        return f"np.{'datetime64' if b.kind == 'M' else 'timedelta64'}({{0}}, {np.datetime_data(b)[0]!r})"
    return f"{{0}}.astype('{b.str}')" if b.kind in "mM" and a.kind == b.kind else None


def convert(value: Any, of: Num, to: Num) -> Any:
    """A value of one number type as one of another."""
    code = conversion(of, to)
    if code is None:
        raise TypeError(f"cannot convert {of} to {to}")
    return value if not code else eval(code.format("value"), {**NAMES, "value": value})


def from_numpy(value: Any, dtype: np.dtype) -> Any:
    """A NumPy scalar as kernels have it."""
    if dtype.kind in "mM":
        return value
    if dtype.str[1:] in AS_SCALARS:
        return dtype.type(value)
    return value.item() if isinstance(value, np.generic) else value


def to_numpy(value: Any, t: Num) -> Any:
    """A kernel's value as a NumPy scalar of its type."""
    return value if t.dtype.kind in "mM" else t.dtype.type(value)


# --- bits -------------------------------------------------------------------------------------------------------------
def popc(value: int, bits: int) -> int:
    return (value & ((1 << bits) - 1)).bit_count()


def clz(value: int, bits: int) -> int:
    return bits - (value & ((1 << bits) - 1)).bit_length()


def ffs(value: int, bits: int) -> int:
    value &= (1 << bits) - 1
    return (value & -value).bit_length()


def brev(value: int, bits: int) -> int:
    return int(f"{value & ((1 << bits) - 1):0{bits}b}"[::-1], 2)


# --- mathematics ------------------------------------------------------------------------------------------------------
def quiet(function: Callable[..., Any], of_numpy: Callable[..., Any] | None = None, kind: type = float) -> Any:
    """A function of `math` or `cmath` that returns what the device does where Python raises. kind: float or complex"""

    def call(*args: Any) -> Any:
        try:
            return function(*args)
        except (ValueError, OverflowError, ZeroDivisionError):
            with np.errstate(all="ignore"):
                return NAN if of_numpy is None else kind(of_numpy(*map(np.dtype(kind).type, args)))

    return call


def _gamma(x: float) -> float:
    if x == 0:
        return math.copysign(INF, x)
    return INF if x > 0 else NAN


def _lgamma(x: float) -> float:
    return INF


def round_to(value: float, digits: int) -> float:
    return value if math.isinf(value) or math.isnan(value) else round(value, digits)


def ldexp(value: float, exponent: int) -> float:
    try:
        return math.ldexp(value, exponent)
    except OverflowError:
        return math.copysign(INF, value)


def fma(a: Any, b: Any, c: Any) -> Any:
    """a * b + c rounded once, of float64: exactly, with integers; of float32: float64 has the product exactly."""
    if isinstance(a, np.float32):
        return f32(float(a) * float(b) + float(c))
    if isinstance(a, np.float16):
        return f16(float(a) * float(b) + float(c))
    if not (math.isfinite(a) and math.isfinite(b) and math.isfinite(c)):
        return a * b + c
    from fractions import Fraction

    exact = Fraction(a) * Fraction(b) + Fraction(c)
    try:
        return float(exact) if exact else a * b + c
    except OverflowError:
        return a * b + c


# What the code of kernels calls. It has no __name__: by that the frames of this package are known.
NAMES = {name: value for name, value in globals().items() if not name.startswith("_")}
