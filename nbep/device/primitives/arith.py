"""Arithmetic whose bits must be the same on every target.

Kernel integers are Python ints, 64 bits wide on the device; s32 and u32 wrap. Floats are float32. The compiler may fuse
`a * b + c` into one rounding; f32_mul_rn and f32_add_rn are never fused.
"""

import math

import numpy as np

from nbep.emulator import EmulatorError, current_thread
from nbep.emulator.machine.faults import error_at
from nbep.emulator.machine.kinds import whole

from ..jit import primitive


def _check_u32(name, a, b):
    """A GPU takes the low 32 bits of each, and gives anything for a division by 0: here all that is an error."""
    if (a | b) >> 32 != 0 or b == 0:
        message = f"{name}({a}, {b}): both must be 0 to 2**32 - 1, and the second one not 0"
        thread = current_thread()
        raise ValueError(message) if thread is None else error_at(thread, EmulatorError, message)


@primitive("", "s32", "s32", emit="same", effect="pure")
def s32(x):
    """Wrap to -2**31 .. 2**31 - 1."""
    return ((whole(x) + 0x80000000) & 0xFFFFFFFF) - 0x80000000


@primitive("", "u32", "u32", emit="same", effect="pure")
def u32(x):
    """Wrap to 0 .. 2**32 - 1."""
    return whole(x) & 0xFFFFFFFF


@primitive("", "s64", "s64", emit="same", effect="pure")
def s64(x):
    """Wrap to -2**63 .. 2**63 - 1."""
    return ((whole(x) + (1 << 63)) & ((1 << 64) - 1)) - (1 << 63)


@primitive("", "f32", "any", emit="same", effect="pure")
def f32(x):
    """An int or float as float32, rounded to nearest even."""
    return np.float32(x)


@primitive("", "u32", ("u32", "u32"), emit="udiv", effect="pure")
def u32_div(a, b):
    """a // b for 0 <= a, b < 2**32 and b > 0: one third of the instructions of a 64-bit division."""
    _check_u32("u32_div", a, b)
    return a // b


@primitive("", "u32", ("u32", "u32"), emit="urem", effect="pure")
def u32_mod(a, b):
    """a % b for 0 <= a, b < 2**32 and b > 0."""
    _check_u32("u32_mod", a, b)
    return a % b


@primitive("prmt.b32 $0, $1, 0, 0x0123;", "u32", "u32", effect="pure")
def byteswap_u32(x):
    """The four bytes of a u32 in the opposite order."""
    return int.from_bytes((int(x) & 0xFFFFFFFF).to_bytes(4, "little"), "big")


@primitive("popc.b32 $0, $1;", "u32", "u32", effect="pure")
def popc_u32(x):
    """How many bits of a u32 are set."""
    return (x & 0xFFFFFFFF).bit_count()


@primitive("bfind.u32 $0, $1;", "u32", "u32", effect="pure")
def bfind_u32(x):
    """The position of the highest set bit of a u32; 2**32 - 1 if none is set."""
    return ((x & 0xFFFFFFFF).bit_length() - 1) & 0xFFFFFFFF


@primitive("{ .reg .b32 t; brev.b32 t, $1; bfind.shiftamt.u32 t, t; add.s32 $0, t, 1; }", "u32", "u32", effect="pure")
def ffs_u32(x):
    """One plus the position of the lowest set bit of a u32; 0 if none is set."""
    x &= 0xFFFFFFFF
    return (x & -x).bit_length()


@primitive("add.rn.f32 $0, $1, $2;", "f32", ("f32", "f32"), effect="pure")
def f32_add_rn(a, b):
    """a + b, rounded to nearest even, never fused."""
    return a + b


@primitive("mul.rn.f32 $0, $1, $2;", "f32", ("f32", "f32"), effect="pure")
def f32_mul_rn(a, b):
    """a * b, rounded to nearest even, never fused."""
    return a * b


@primitive("div.rn.f32 $0, $1, $2;", "f32", ("f32", "f32"), effect="pure")
def f32_div_rn(a, b):
    """a / b, rounded to nearest even."""
    return a / b


@primitive("max.f32 $0, $1, $2;", "f32", ("f32", "f32"), effect="pure")
def f32_max(a, b):
    """The larger one; the other one if one is NaN; +0 of two zeros."""
    if a > b:
        return a
    if b > a:
        return b
    if a == b:
        return b if math.copysign(1.0, a) < 0 else a
    return a if b != b else b


@primitive("abs.f32 $0, $1;", "f32", "f32", effect="pure")
def f32_abs(x):
    """x without its sign."""
    return abs(x)
