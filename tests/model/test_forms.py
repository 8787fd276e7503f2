"""Forms are exact, and what has none, or more than one, is refused."""

from fractions import Fraction

import pytest

from research.model.counts import NotLinear, Sample, evaluate, find_bound, find_form, show


def samples(*rows):
    return [Sample({"a": a, "b": b, "none": 0, "a again": a}, number) for a, b, number in rows]


def test_coefficients_are_found_as_fractions():
    found = find_form(["a", "b"], samples((2, 4, 5), (4, 20, 16), (6, 0, 9)))
    assert found == {"a": Fraction(3, 2), "b": Fraction(1, 2)}


def test_features_that_are_always_0_and_copies_are_not_in_a_form():
    assert find_form(["none", "a", "a again"], samples((1, 0, 3), (2, 0, 6))) == {"a": 3}


def test_a_count_that_grows_otherwise_is_refused():
    with pytest.raises(NotLinear, match="but a run has counted 1"):
        find_form(["a"], samples((1, 0, 1), (2, 0, 4), (3, 0, 9)))


def test_a_count_that_is_off_by_one_in_a_million_is_refused():
    with pytest.raises(NotLinear):
        find_form(["a", "b"], samples((10**6, 1, 10**6), (2 * 10**6, 3, 2 * 10**6), (5 * 10**6, 7, 5 * 10**6 + 1)))


def test_runs_that_do_not_tell_two_features_apart_are_refused():
    with pytest.raises(NotLinear, match="2 runs do not tell a, b apart"):
        find_form(["a", "b"], samples((1, 2, 3), (2, 4, 6)))


def test_a_bound_is_the_least_multiple_of_the_first_feature_that_has_one():
    assert find_bound(["b", "a"], samples((2, 1, 3), (4, 5, 7), (0, 0, 0))) == {"b": 3}
    assert find_bound(["none", "a", "b"], samples((2, 1, 3), (4, 5, 7), (0, 0, 0))) == {"a": 2}
    with pytest.raises(NotLinear, match="no bound among a"):
        find_bound(["a"], samples((0, 1, 1), (1, 1, 1)))


def test_a_form_gives_the_count_of_features_that_are_means():
    assert evaluate({"a": Fraction(1, 2), "b": Fraction(3)}, {"a": 5.0, "b": 0.5}) == 4.0


def test_a_form_reads_as_a_sum():
    assert show({"rows": Fraction(1), "chunks": Fraction(4), "rings": Fraction(-1, 2)}) == "rows + 4 chunks - 1/2 rings"
    assert show({}) == "0"
