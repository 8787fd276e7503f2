"""The cast kernels against the reference."""

import numpy as np
import pytest
from arrays import assert_kind, to_numpy, to_target
from hypothesis import given, settings
from hypothesis import strategies as st
from parts import both_parts
from target import spawn

import nbep
from nbep import reference


def tokens(seed: int, num_tokens: int, hidden: int, exponent: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = np.ldexp(rng.standard_normal((num_tokens, hidden), np.float32), exponent)
    x[rng.random(x.shape) < 0.1] = 0
    return x.astype(reference.BF16)


def cast_and_back(x: np.ndarray, round_scale: bool = False, column_major: bool = False):
    """x in FP8, its scales, and x cast back, by one rank."""

    def main(comm):
        x_fp8, scales = nbep.per_token_cast_to_fp8(to_target(x), round_scale, column_major)
        back = nbep.per_token_cast_back(x_fp8, scales)
        assert_kind(x_fp8, scales, back)
        return to_numpy((x_fp8, scales, back))

    return spawn(main, 1)[0]


def check_cast(x: np.ndarray, round_scale: bool, column_major: bool) -> None:
    x_fp8, scales, back = cast_and_back(x, round_scale, column_major)
    want_fp8, want_scales = reference.per_token_cast_to_fp8(x, round_scale)
    assert x_fp8.tobytes() == want_fp8.tobytes()
    assert scales.tobytes() == want_scales.tobytes()
    assert scales.flags.f_contiguous if column_major else scales.flags.c_contiguous
    assert back.tobytes() == reference.per_token_cast_back(want_fp8, want_scales).tobytes()


@pytest.mark.parametrize("max_examples", both_parts([12], thorough=[50], long=[200]))
def test_cast_and_cast_back_are_the_references_bits(max_examples):
    @settings(max_examples=max_examples)
    @given(
        seed=st.integers(0, 1 << 20),
        num_tokens=st.integers(0, 4),
        num_scales=st.integers(1, 4),
        exponent=st.integers(-140, 120),
        round_scale=st.booleans(),
        column_major=st.booleans(),
    )
    def check(seed, num_tokens, num_scales, exponent, round_scale, column_major):
        check_cast(tokens(seed, num_tokens, 128 * num_scales, exponent), round_scale, column_major)

    check()


@pytest.mark.parametrize("round_scale", [False, True])
def test_every_finite_bf16_casts_like_the_reference(round_scale):
    bits = np.arange(1 << 16, dtype=np.uint16)[:: 16 + 1]
    values = bits.view(reference.BF16)
    finite = values[np.isfinite(values.astype(np.float32))]
    check_cast(finite[: len(finite) // 128 * 128].reshape(-1, 128), round_scale, False)


@pytest.mark.parametrize("round_scale", [False, True])
def test_a_nan_stays_one_and_leaves_its_neighbours_alone(round_scale):
    x = tokens(3, 4, 256, 2)
    x[1, 5], x[2, 130], x[3, 128:] = np.nan, -np.nan, np.nan
    check_cast(x, round_scale, False)
    x_fp8, scales, back = (array.astype(np.float32) for array in cast_and_back(x, round_scale))
    assert (np.isnan(x_fp8) == np.isnan(x.astype(np.float32))).all()
    assert (np.isnan(back) == np.isnan(x_fp8)).all()
    without = cast_and_back(np.where(np.isnan(x.astype(np.float32)), 0, x).astype(reference.BF16), round_scale)
    assert scales.tobytes() == without[1].tobytes()


@pytest.mark.parametrize("round_scale", [False, True])
def test_an_infinity_makes_its_128_columns_nan(round_scale):
    x = tokens(4, 2, 256, 2)
    x[0, 3], x[1, 200] = np.inf, -np.inf
    check_cast(x, round_scale, False)
    back = cast_and_back(x, round_scale)[2].astype(np.float32)
    assert np.isnan(back).reshape(2, 2, 128).all(axis=2).tolist() == [[True, False], [False, True]]
    assert np.isfinite(back[0, 128:]).all()
    assert np.isfinite(back[1, :128]).all()


def test_zeros_and_constants_round_trip_exactly():
    x = np.zeros((3, 128), reference.BF16)
    x[1:] = [[7], [-448]]
    assert cast_and_back(x)[2].tobytes() == x.tobytes()


@pytest.mark.emulator_only("a GPU's arrays are cast by a rank")
def test_cast_needs_no_rank():
    x = tokens(1, 2, 128, 0)
    x_fp8, scales = nbep.per_token_cast_to_fp8(x)
    want = reference.per_token_cast_to_fp8(x)
    assert x_fp8.tobytes() == want[0].tobytes()
    assert scales.tobytes() == want[1].tobytes()
    assert nbep.per_token_cast_back(x_fp8, scales).tobytes() == reference.per_token_cast_back(*want).tobytes()
