"""The reference's LogFMT: codes, the range that has them, and how far values move."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nbep import reference

BF16 = reference.BF16


def columns(seed: int, exponent: int = -3) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.uniform(-1, 1, 128) * 2.0**exponent).astype(BF16)


def code_values(scale: reference.logfmt_scale) -> np.ndarray:
    """What each code from 0 to 511 means, in float64."""
    steps = float(scale.least) + np.arange(511) * float(scale.step)
    return np.concatenate([[0.0], np.exp2(steps)])


@settings(max_examples=40)
@given(seed=st.integers(0, 1 << 20), exponent=st.integers(-40, -1))
def test_every_value_gets_the_code_that_is_nearest(seed, exponent):
    x = columns(seed, exponent)
    scale = reference.logfmt_scale(x)
    codes, is_negative = reference.encode_logfmt(x, scale)
    values = code_values(scale)
    magnitudes = np.abs(x.astype(np.float64))
    best = np.abs(values[:, None] - magnitudes).min(axis=0)
    assert ((codes >= 0) & (codes <= 511)).all()
    # Within float32's rounding of the logarithms.
    assert (np.abs(values[codes] - magnitudes) <= best + 2e-5 * magnitudes).all()
    assert (is_negative == np.signbit(x)).all()


@settings(max_examples=40)
@given(seed=st.integers(0, 1 << 20), exponent=st.integers(-40, -1))
def test_values_move_by_at_most_half_a_step(seed, exponent):
    x = columns(seed, exponent)
    scale = reference.logfmt_scale(x)
    half_step = np.exp2(float(scale.step)) - 1
    want = x.astype(np.float64)
    got = reference.through_logfmt(x)
    assert (np.abs(got - want) <= (half_step / 2 + 2e-5) * np.abs(want)).all()


def test_largest_and_smallest_keep_their_value():
    x = columns(3)
    magnitudes = np.abs(x.astype(np.float32))
    got = np.abs(reference.through_logfmt(x))
    for i in (magnitudes.argmax(), magnitudes.argmin()):
        assert got[i] == pytest.approx(magnitudes[i], rel=1e-5)


def test_what_is_below_two_to_the_minus_32_of_the_largest_becomes_zero():
    x = np.full(128, 0.5, BF16)
    x[1], x[2], x[3] = 2.0**-32, 2.0**-33, -(2.0**-60)
    codes, _ = reference.encode_logfmt(x, reference.logfmt_scale(x))
    assert codes[:4].tolist() == [511, 17, 1, 0]  # a factor of 2 is 510 / 32 steps
    got = reference.through_logfmt(x)
    assert got[2] == pytest.approx(2.0**-33, rel=1e-5)
    assert got[3] == 0
    assert np.signbit(got[3])


@pytest.mark.parametrize(
    "values",
    [
        [1.0, 0.5],  # the largest is not below 1
        [0.5, 0.5],  # no range
        [0.0, 0.0],
        [np.inf, 0.5],
        [np.nan, np.nan],
    ],
    ids=str,
)
def test_columns_without_a_range_below_one_stay_as_they_are(values):
    x = np.array(values * 64, BF16)
    assert reference.logfmt_scale(x) is None
    assert reference.through_logfmt(x).astype(BF16).tobytes() == x.tobytes()


def test_nan_among_other_values_becomes_zero():
    """As in DeepEP: neither the largest nor the smallest value is a NaN, and its logarithm is none."""
    x = columns(4)
    x[7] = np.nan
    assert reference.through_logfmt(x)[7] == 0


def test_each_128_columns_decide_for_themselves():
    x = np.concatenate([columns(5), np.full(128, 3, BF16), columns(6)])
    got = reference.through_logfmt(x)
    assert (got[128:256] == 3).all()
    assert got[:128].tobytes() == reference.through_logfmt(x[:128]).tobytes()
    assert got[256:].tobytes() == reference.through_logfmt(x[256:]).tobytes()
    assert (got[:128] != x[:128].astype(np.float32)).any()
