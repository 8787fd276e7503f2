"""Conversions give, bit for bit, what the PTX instructions give."""

import ml_dtypes
import numpy as np
import pytest

from nbep.device import primitives as ptx
from nbep.device.primitives.convert import (
    e4m3x4_to_f32x4_software,
    f32_to_e4m3_software,
    f32x2_to_bf16x2_software,
    f32x4_to_e4m3x4_software,
)

E4M3 = ml_dtypes.float8_e4m3fn
SPECIAL_BITS = np.array(
    [
        0x00000000, 0x80000000,              # zeros
        0x00000001, 0x80000001, 0x007FFFFF,  # float32 subnormals
        0x7F800000, 0xFF800000,              # infinities
        0x7F800001, 0x7FC00000, 0xFFC00000, 0x7FFFFFFF, 0xFFFFFFFF,  # NaNs
        0x43E00000, 0x43E00001, 0x43E7FFFF, 0x43E80000, 0x43E80001, 0xC3E80001, 0x43F00000,  # about 448, 464 and 480
        0x3A800000, 0x3A800001, 0xBA800000, 0xBA800001,  # 2**-10, half of the least e4m3
        0x3C7FFFFF, 0x3C800000,              # the least normal e4m3
        0x7F7FFFFF, 0xFF7FFFFF, 0x7F7F7FFF, 0x7F7F8000,  # the largest float32, and where BF16 overflows
    ],
    dtype=np.uint32,
)  # fmt: skip


def bits_around(patterns: np.ndarray) -> np.ndarray:
    """float32 bits of the patterns, and of their neighbours on both sides."""
    patterns = patterns.astype(np.uint32)
    return np.concatenate([patterns, patterns + np.uint32(1), patterns - np.uint32(1)])


def f32_samples() -> np.ndarray:
    """Every sign, exponent and 7 leading mantissa bits, ties and their neighbours among them; and random bits."""
    random = np.random.default_rng(0).integers(0, 1 << 32, 20_000, dtype=np.uint32)
    bits = np.concatenate([SPECIAL_BITS, bits_around(np.arange(1 << 16, dtype=np.uint32) << 16), random])
    return bits.view(np.float32)


def fours(values):
    padded = np.concatenate([values, np.zeros(-len(values) % 4, values.dtype)])
    return padded.reshape(-1, 4)


def e4m3_bytes(convert) -> np.ndarray:
    """The samples through a conversion of four float32 at a time."""
    words = [convert(*four) for four in fours(f32_samples())]
    return np.array(words, np.uint32).view(np.uint8)[: len(f32_samples())]


def expected_e4m3(values: np.ndarray) -> np.ndarray:
    """ml_dtypes rounds to nearest even too, but gives NaN for what satfinite clamps."""
    with np.errstate(invalid="ignore"):
        finite = np.clip(values, np.float32(-448), np.float32(448)).astype(E4M3).view(np.uint8)
    return np.where(np.isnan(values), np.uint8(0x7F), finite)


def differences(values, got, expected) -> list[str]:
    wrong = np.flatnonzero(got != expected)[:10]
    return [f"{values[i]!r} ({values.view(np.uint32)[i]:#x}): {got[i]:#x}, not {expected[i]:#x}" for i in wrong]


def test_all_bf16_become_the_float32_with_their_bits_on_top():
    for low in range(0, 1 << 16, 2):
        a, b = ptx.bf16x2_to_f32x2(low | (low + 1) << 16)
        assert (a.view(np.uint32), b.view(np.uint32)) == (low << 16, (low + 1) << 16)


def test_all_bf16_mean_what_ml_dtypes_says():
    patterns = np.arange(1 << 16, dtype=np.uint16)
    ours = np.array([ptx.bf16x2_to_f32x2(int(p))[0] for p in patterns], np.float32)
    np.testing.assert_array_equal(ours, patterns.view(ml_dtypes.bfloat16).astype(np.float32))


@pytest.mark.parametrize("convert", [ptx.f32x2_to_bf16x2, f32x2_to_bf16x2_software])
@pytest.mark.parametrize("sticky", [0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
def test_float32_rounds_to_the_nearest_even_bf16(sticky, convert):
    values = (np.arange(0, 1 << 32, 1 << 16, dtype=np.uint32) | np.uint32(sticky)).view(np.float32)
    words = [convert(a, b) for a, b in values.reshape(-1, 2)]
    got = np.array(words, np.uint32).view(np.uint16)
    with np.errstate(invalid="ignore", over="ignore"):
        expected = values.astype(ml_dtypes.bfloat16).view(np.uint16)
    expected = np.where(np.isnan(values), np.uint16(0x7FFF), expected)
    assert differences(values, got, expected) == []


def test_all_e4m3_mean_what_ml_dtypes_says():
    patterns = np.arange(256, dtype=np.uint8)
    ours = np.array([ptx.e4m3x4_to_f32x4(int(word)) for word in patterns.view(np.uint32)], np.float32).ravel()
    np.testing.assert_array_equal(ours, patterns.view(E4M3).astype(np.float32))
    np.testing.assert_array_equal(np.signbit(ours[patterns != 0xFF]), patterns[patterns != 0xFF] >= 0x80)


def test_all_e4m3_round_trip():
    for code in range(256):
        word = code * 0x01010101
        back = ptx.f32x4_to_e4m3x4(*ptx.e4m3x4_to_f32x4(word))
        assert back == (0x7F7F7F7F if code & 0x7F == 0x7F else word)


def test_float32_rounds_to_the_nearest_even_e4m3_and_saturates():
    values = f32_samples()
    assert differences(values, e4m3_bytes(ptx.f32x4_to_e4m3x4), expected_e4m3(values)) == []


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (np.nan, 0x7F),
        (-np.nan, 0x7F),
        (np.inf, 0x7E),
        (-np.inf, 0xFE),
        (464.0, 0x7E),
        (1e30, 0x7E),
        (-449.0, 0xFE),
        (0.0, 0x00),
        (-0.0, 0x80),
        (-1e-30, 0x80),
    ],
)
@pytest.mark.parametrize("convert", [ptx.f32x4_to_e4m3x4, f32x4_to_e4m3x4_software])
def test_e4m3_is_finite_unless_the_input_is_nan(convert, value, code):
    one = np.float32(1)
    assert convert(one, np.float32(value), one, one) == 0x38380038 | code << 8


def test_software_e4m3_gives_the_same_bits():
    values = f32_samples()
    assert differences(values, e4m3_bytes(f32x4_to_e4m3x4_software), expected_e4m3(values)) == []


def test_software_e4m3_matches_at_every_threshold():
    codes = np.arange(127, dtype=np.uint8).view(E4M3).astype(np.float32)
    ties = ((codes[:-1] + codes[1:]) / np.float32(2)).view(np.uint32)
    values = bits_around(np.concatenate([ties, ties | np.uint32(1 << 31)])).view(np.float32)
    got = np.array([f32_to_e4m3_software(value) for value in values], np.uint8)
    assert differences(values, got, expected_e4m3(values)) == []


def test_software_e4m3_decodes_to_the_same_bits():
    for word in np.arange(256, dtype=np.uint8).view(np.uint32):
        hardware, software = ptx.e4m3x4_to_f32x4(int(word)), e4m3x4_to_f32x4_software(int(word))
        assert [x.view(np.uint32) for x in hardware] == [x.view(np.uint32) for x in software]


def test_values_keep_their_place_in_the_word():
    two, four, eight, sixteen = (np.float32(2**i) for i in range(1, 5))
    assert ptx.f32x4_to_e4m3x4(two, four, eight, sixteen) == 0x58504840
    assert ptx.e4m3x4_to_f32x4(0x58504840) == (2, 4, 8, 16)
    assert ptx.f32x2_to_bf16x2(two, four) == 0x40804000
    assert ptx.bf16x2_to_f32x2(0x40804000) == (2, 4)


def test_float32_bits_go_both_ways():
    for bits in SPECIAL_BITS:
        assert ptx.f32_bits_u32(ptx.u32_bits_f32(int(bits))) == int(bits)
    assert ptx.u32_bits_f32(-1).view(np.uint32) == 0xFFFFFFFF


def test_ue8m0_is_the_exponent_of_a_power_of_two():
    for exponent in range(-126, 128):
        power = np.float32(2.0**exponent)
        assert ptx.f32_to_ue8m0(power) == exponent + 127
        assert ptx.ue8m0_to_f32(exponent + 127) == power


def test_logarithms_and_powers_are_the_nearest_float32():
    for exponent in range(-149, 128):
        power = np.float32(np.ldexp(1.0, exponent))
        assert ptx.f32_log2_approx(power) == exponent
        assert ptx.f32_exp2_approx(np.float32(exponent)) == power
    assert ptx.f32_log2_approx(np.float32(10)) == np.float32(3.321928094887362)
    assert ptx.f32_exp2_approx(np.float32(0.5)) == np.float32(1.4142135623730951)
    assert ptx.f32_exp2_approx(np.float32(-np.inf)) == 0
    for result in (ptx.f32_log2_approx(np.float32(3)), ptx.f32_exp2_approx(np.float32(3.5))):
        assert isinstance(result, np.float32)


@pytest.mark.parametrize("x", [0.0, -0.0])
def test_the_logarithm_of_zero_is_minus_infinity(x):
    assert ptx.f32_log2_approx(np.float32(x)) == -np.inf


@pytest.mark.parametrize(
    ("x", "whole"),
    [(0.0, 0), (0.999, 0), (1.0, 1), (7.5, 7), (511.99997, 511), (-0.5, 0), (-8.0, 0), (4294967040, 4294967040)],
)
def test_the_floor_of_a_float32_is_no_less_than_zero(x, whole):
    assert ptx.f32_floor_u32(np.float32(x)) == whole
    assert isinstance(ptx.f32_floor_u32(np.float32(x)), int)
