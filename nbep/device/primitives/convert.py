"""Conversions between float32 and BF16, FP8 (e4m3) and UE8M0, bit for bit those of the PTX instructions.

 BF16    the upper half of a float32; rounded to nearest even, NaN becomes 0x7fff
 e4m3    sign, 4 exponent and 3 mantissa bits, largest 448; rounded to nearest even, larger values and infinities become
         448 (satfinite), NaN becomes 0x7f. ml_dtypes differs: its cast gives NaN for what is too large
 UE8M0   the exponent byte of a float32: powers of two

Several values share a u32 word; the first one is in its low bits. Source: PTX ISA "cvt".
"""

import math
from bisect import bisect_right
from math import copysign
from struct import Struct

import numpy as np

from ..cards import SM80, SM89
from ..jit import device_function, primitive
from .arith import f32_mul_rn

_pack_f32x2 = Struct("<2f").pack
_unpack_u32x2 = Struct("<2I").unpack


def _e4m3_values() -> np.ndarray:
    """The 127 finite magnitudes, ascending, as float32."""
    codes = np.arange(127)
    exponent, mantissa = codes >> 3, codes & 7
    subnormal = mantissa / 8.0 * 2.0**-6
    return np.where(exponent == 0, subnormal, (1 + mantissa / 8.0) * 2.0 ** (exponent - 7)).astype(np.float32)


def _e4m3_thresholds() -> list[float]:
    """For each code but the first, the least float32 that rounds to it or to a larger one."""
    values = _e4m3_values()
    middle = (values[:-1] + values[1:]) / np.float32(2)
    # The middle of two codes rounds to the even one, so above an even code it does not count yet.
    middle[0::2] = np.nextafter(middle[0::2], np.float32(np.inf))
    return [float(x) for x in middle]


_BF16_TO_F32 = list((np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32))
_E4M3_THRESHOLDS = _e4m3_thresholds()
_E4M3_NAN = np.uint32(0x7FFFFFFF).view(np.float32)
_E4M3_TO_F32 = [*_e4m3_values(), _E4M3_NAN, *-_e4m3_values(), _E4M3_NAN]


@primitive("mov.b32 $0, $1;", "u32", "f32", effect="pure")
def f32_bits_u32(x):
    """The bits of a float32."""
    return int(x.view(np.uint32))


@primitive("mov.b32 $0, $1;", "f32", "u32", effect="pure")
def u32_bits_f32(bits):
    """The float32 with these bits."""
    return np.uint32(bits & 0xFFFFFFFF).view(np.float32)


@primitive(
    "{ .reg .b32 t; shl.b32 t, $2, 16; mov.b32 $0, t; and.b32 t, $2, 0xffff0000; mov.b32 $1, t; }",
    ("f32", "f32"),
    "u32",
    effect="pure",
)
def bf16x2_to_f32x2(word):
    """Two BF16 as float32; exact."""
    return _BF16_TO_F32[word & 0xFFFF], _BF16_TO_F32[(word >> 16) & 0xFFFF]


@primitive("lg2.approx.f32 $0, $1;", "f32", "f32", effect="pure")
def f32_log2_approx(x):
    """About log2(x); -infinity for 0. A GPU is off by up to 2**-22, the emulator rounds to nearest even."""
    return np.float32(np.log2(np.float64(x))) if x > 0 else np.float32(-np.inf)


@primitive("ex2.approx.f32 $0, $1;", "f32", "f32", effect="pure")
def f32_exp2_approx(x):
    """About 2**x. A GPU is off by up to 2 units in the last place, the emulator rounds to nearest even."""
    return np.float32(np.exp2(np.float64(x)))


@primitive("cvt.rmi.u32.f32 $0, $1;", "u32", "f32", effect="pure")
def f32_floor_u32(x):
    """The largest integer up to x, 0 if x is negative."""
    return max(math.floor(float(x)), 0)


@device_function
def bf16_bits(bits):
    """The BF16 of the float32 with these bits, in integer arithmetic."""
    if bits & 0x7FFFFFFF > 0x7F800000:
        return 0x7FFF
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


@device_function
def f32x2_to_bf16x2_software(low, high):
    """f32x2_to_bf16x2 below sm_80."""
    return bf16_bits(f32_bits_u32(low)) | (bf16_bits(f32_bits_u32(high)) << 16)


@primitive(
    "cvt.rn.bf16x2.f32 $0, $2, $1;",
    "u32",
    ("f32", "f32"),
    effect="pure",
    since=SM80,
    below=f32x2_to_bf16x2_software,
)
def f32x2_to_bf16x2(low, high):
    """Two float32 as BF16."""
    a, b = _unpack_u32x2(_pack_f32x2(low, high))
    if a & 0x7FFFFFFF <= 0x7F800000 and b & 0x7FFFFFFF <= 0x7F800000:  # no NaN: to the nearest, ties to even
        return (a + 0x7FFF + (a >> 16 & 1)) >> 16 | (b + 0x7FFF + (b >> 16 & 1)) & 0xFFFF0000
    return bf16_bits(a) | bf16_bits(b) << 16


@device_function
def f32_to_e4m3_software(x):
    """One float32 as an e4m3 byte, in integer arithmetic: what f32x4_to_e4m3x4 does below sm_89."""
    bits = f32_bits_u32(x)
    sign = (bits >> 24) & 0x80
    magnitude = bits & 0x7FFFFFFF
    if magnitude > 0x7F800000:
        return 0x7F
    if magnitude >= 0x43E00000:  # 448
        return sign | 0x7E
    if magnitude >= 0x3C800000:  # 2**-6, the least normal e4m3
        return sign | ((magnitude - (120 << 23) + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20)
    if magnitude <= 0x3A800000:  # 2**-10, half of the least subnormal
        return sign
    mantissa = (magnitude & 0x7FFFFF) | 0x800000
    shift = 141 - (magnitude >> 23)
    return sign | ((mantissa + (1 << (shift - 1)) - 1 + ((mantissa >> shift) & 1)) >> shift)


@device_function
def f32x4_to_e4m3x4_software(a, b, c, d):
    """f32x4_to_e4m3x4 below sm_89."""
    return (
        f32_to_e4m3_software(a)
        | (f32_to_e4m3_software(b) << 8)
        | (f32_to_e4m3_software(c) << 16)
        | (f32_to_e4m3_software(d) << 24)
    )


def _e4m3_byte(x):
    if x > 0.0:
        return bisect_right(_E4M3_THRESHOLDS, x)
    if x < 0.0:
        return bisect_right(_E4M3_THRESHOLDS, -x) | 0x80
    return 0x7F if x != x else 0x80 if copysign(1.0, x) < 0 else 0


@primitive(
    "{ .reg .b16 lo, hi; cvt.rn.satfinite.e4m3x2.f32 lo, $2, $1;"
    " cvt.rn.satfinite.e4m3x2.f32 hi, $4, $3; mov.b32 $0, {lo, hi}; }",
    "u32",
    ("f32", "f32", "f32", "f32"),
    effect="pure",
    since=SM89,
    below=f32x4_to_e4m3x4_software,
)
def f32x4_to_e4m3x4(a, b, c, d):
    """Four float32 as e4m3."""
    return _e4m3_byte(float(a)) | _e4m3_byte(float(b)) << 8 | _e4m3_byte(float(c)) << 16 | _e4m3_byte(float(d)) << 24


@device_function
def e4m3_to_f32_software(byte):
    """One e4m3 byte as float32: what e4m3x4_to_f32x4 does below sm_89."""
    magnitude = byte & 0x7F
    if magnitude == 0x7F:
        return u32_bits_f32(0x7FFFFFFF)
    # As the bits of a float32, e4m3 is too small by the difference of the exponents' biases; subnormals too.
    scaled = f32_mul_rn(u32_bits_f32(magnitude << 20), u32_bits_f32((120 + 127) << 23))
    return u32_bits_f32(f32_bits_u32(scaled) | ((byte & 0x80) << 24))


@device_function
def e4m3x4_to_f32x4_software(word):
    """e4m3x4_to_f32x4 below sm_89."""
    return (
        e4m3_to_f32_software(word),
        e4m3_to_f32_software(word >> 8),
        e4m3_to_f32_software(word >> 16),
        e4m3_to_f32_software(word >> 24),
    )


@primitive(
    "{ .reg .b16 lo, hi, h; .reg .b32 t; mov.b32 {lo, hi}, $4;"
    " cvt.rn.f16x2.e4m3x2 t, lo; mov.b32 {h, lo}, t; cvt.f32.f16 $0, h; cvt.f32.f16 $1, lo;"
    " cvt.rn.f16x2.e4m3x2 t, hi; mov.b32 {h, hi}, t; cvt.f32.f16 $2, h; cvt.f32.f16 $3, hi; }",
    ("f32", "f32", "f32", "f32"),
    "u32",
    effect="pure",
    since=SM89,
    below=e4m3x4_to_f32x4_software,
)
def e4m3x4_to_f32x4(word):
    """Four e4m3 as float32; exact."""
    return (
        _E4M3_TO_F32[word & 0xFF],
        _E4M3_TO_F32[(word >> 8) & 0xFF],
        _E4M3_TO_F32[(word >> 16) & 0xFF],
        _E4M3_TO_F32[(word >> 24) & 0xFF],
    )


@device_function
def f32_to_ue8m0(x):
    """The exponent byte of a power of two from 2**-126 to 2**127."""
    return (f32_bits_u32(x) >> 23) & 0xFF


@device_function
def ue8m0_to_f32(byte):
    """The power of two with this exponent byte, 1 to 254."""
    return u32_bits_f32((byte & 0xFF) << 23)
