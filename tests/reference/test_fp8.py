"""The reference's FP8 cast."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nbep import reference

BF16 = reference.BF16


@pytest.mark.parametrize("value", [1, 3, 7, 11, 15, -13])
def test_constant_blocks_round_trip_integers_exactly(value):
    x = np.full((2, 256), value, BF16)
    assert np.array_equal(reference.per_token_cast_back(*reference.per_token_cast_to_fp8(x)), x)


def test_zeros_stay_zeros_under_the_floor_of_amax():
    x_fp8, scales = reference.per_token_cast_to_fp8(np.zeros((1, 128), BF16))
    assert np.all(x_fp8.astype(np.float32) == 0)
    assert scales[0, 0] == np.float32(1e-4) * np.float32(1 / 448)


def test_each_group_of_128_columns_has_its_own_scale():
    x = np.ones((1, 256), BF16)
    x[0, 128:] = 448
    _, scales = reference.per_token_cast_to_fp8(x)
    assert scales[0].tolist() == [np.float32(1) / np.float32(448), 1]


@pytest.mark.parametrize(("amax", "expected"), [(448, 1.0), (224, 0.5), (450, 2.0), (1, 2.0**-8)])
def test_rounded_scales_are_the_next_power_of_two(amax, expected):
    _, scales = reference.per_token_cast_to_fp8(np.full((1, 128), amax, BF16), round_scale=True)
    assert scales[0, 0] == expected


@settings(max_examples=40)
@given(seed=st.integers(0, 1 << 20), exponent=st.integers(-10, 30), round_scale=st.booleans())
def test_cast_and_back_is_off_by_at_most_half_a_step(seed, exponent, round_scale):
    x = np.ldexp(np.random.default_rng(seed).standard_normal((3, 128), np.float32), exponent).astype(BF16)
    x_fp8, scales = reference.per_token_cast_to_fp8(x, round_scale)
    back = reference.per_token_cast_back(x_fp8, scales).astype(np.float32)
    exact = x.astype(np.float32)
    # e4m3 keeps 4 significant bits and subnormals in steps of 2**-9; bf16 rounds once more.
    allowed = np.abs(exact) * (2.0**-4 + 2.0**-8) + scales * 2.0**-10
    assert np.all(np.abs(back - exact) <= allowed)
    assert np.all(np.isfinite(x_fp8.astype(np.float32)))


def test_scales_have_the_bits_of_a_product_with_a_constant_as_in_deep_ep():
    amax = np.random.default_rng(1).uniform(1, 100, 400).astype(BF16)
    x = np.repeat(amax[:, None], 128, axis=1)
    _, scales = reference.per_token_cast_to_fp8(x)
    expected = amax.astype(np.float32) * np.float32(1 / 448)
    assert np.array_equal(scales[:, 0], expected)
    assert (expected != amax.astype(np.float32) / np.float32(448)).mean() > 0.3
