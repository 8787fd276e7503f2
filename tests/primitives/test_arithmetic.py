"""Casts wrap, and float32 arithmetic has the instruction's corner cases."""

import numpy as np
import pytest

from nbep.device import primitives as ptx
from nbep.emulator import EmulatorError, World


@pytest.mark.parametrize(
    ("x", "signed", "unsigned"),
    [
        (0, 0, 0),
        (2**31 - 1, 2**31 - 1, 2**31 - 1),
        (2**31, -(2**31), 2**31),
        (-1, -1, 2**32 - 1),
        (2**32 + 5, 5, 5),
        (-(2**31) - 1, 2**31 - 1, 2**31 - 1),
    ],
)
def test_casts_wrap_to_32_bits(x, signed, unsigned):
    assert ptx.s32(x) == signed
    assert ptx.u32(x) == unsigned


def test_s64_wraps_to_64_bits():
    assert ptx.s64(2**63) == -(2**63)
    assert ptx.s64(-(2**63) - 1) == 2**63 - 1
    assert ptx.s64(-5) == -5


def test_float32_constants_round_to_nearest_even():
    assert ptx.f32(16777217) == np.float32(16777216)
    assert isinstance(ptx.f32(1), np.float32)


@pytest.mark.parametrize(("a", "b"), [(0, 1), (7, 3), (2**32 - 1, 1), (2**32 - 1, 2**31), (5, 2**32 - 1)])
def test_unsigned_division_is_that_of_naturals(a, b):
    assert ptx.u32_div(a, b) * b + ptx.u32_mod(a, b) == a
    assert 0 <= ptx.u32_mod(a, b) < b


@pytest.mark.parametrize("function", [ptx.u32_div, ptx.u32_mod])
@pytest.mark.parametrize(("a", "b"), [(-1, 3), (3, -1), (1 << 32, 3), (3, 1 << 32), (3, 0), (np.int32(-1), 3)])
def test_what_a_gpu_would_divide_otherwise_is_refused(function, a, b):
    with pytest.raises(ValueError, match=rf"{function.__name__}\({a}, {b}\): both must be 0 to 2\*\*32 - 1, and"):
        function(a, b)


def test_a_kernel_that_divides_a_negative_number_stops_at_its_line():
    def divide(out):
        ptx.u32_mod(out - out - 1, 4)

    world = World(1, 0)

    def host():
        stream = world.ranks[0].create_stream("main")
        stream.launch(divide, (5,), 1, 32)
        stream.synchronize()

    with pytest.raises(EmulatorError, match=r"u32_mod\(-1, 4\)(?s:.*)test_arithmetic.py:\d+ \(divide\)"):
        world.run([host])


@pytest.mark.parametrize(
    ("x", "ones", "lowest"), [(0, 0, 0), (1, 1, 1), (0x80000000, 1, 32), (-1, 32, 1), (0b10100, 2, 3), (1 << 32, 0, 0)]
)
def test_bit_counts_look_at_32_bits(x, ones, lowest):
    assert ptx.popc_u32(x) == ones
    assert ptx.ffs_u32(x) == lowest
    assert ptx.bfind_u32(x) == ((x & 0xFFFFFFFF).bit_length() - 1) % 2**32


@pytest.mark.parametrize(("x", "swapped"), [(0x01020304, 0x04030201), (0x80, 1 << 31), (-2, 0xFEFFFFFF), (1 << 32, 0)])
def test_byte_swaps_look_at_32_bits(x, swapped):
    assert ptx.byteswap_u32(x) == swapped


@pytest.mark.parametrize(
    ("a", "b", "larger"),
    [(1, 2, 2), (2, 1, 2), (np.nan, 1, 1), (1, np.nan, 1), (-0.0, 0.0, 0.0), (0.0, -0.0, 0.0), (-np.inf, -5, -5)],
)
def test_f32_max_prefers_numbers_to_nan_and_plus_to_minus_zero(a, b, larger):
    result = ptx.f32_max(np.float32(a), np.float32(b))
    assert result == np.float32(larger)
    assert np.signbit(result) == np.signbit(np.float32(larger))


def test_float32_operations_round_once_and_stay_float32():
    a, b = np.float32(1 + 2**-23), np.float32(1 - 2**-24)
    for operation, exact in ((ptx.f32_add_rn, a + b), (ptx.f32_mul_rn, a * b), (ptx.f32_div_rn, a / b)):
        result = operation(a, b)
        assert isinstance(result, np.float32)
        assert result == exact
    assert ptx.f32_abs(np.float32(-0.0)).view(np.uint32) == 0
    assert ptx.f32_mul_rn(np.float32(2**-100), np.float32(2**-40)) == np.float32(2**-140)
