"""`pytest --quarter K`: four runs with K from 0 to 3 run each test once."""

import pytest

pytest_plugins = ["pytester"]

TESTS = """
import pytest

@pytest.fixture(scope="module")
def dear():
    return object()

@pytest.mark.parametrize("number", [*range(5), *(pytest.param(n, marks=pytest.mark.thorough) for n in range(5, 11))])
def test_many(number): ...

@pytest.mark.parametrize("number", range(5))
def test_that_shares(dear, number): ...

def test_that_shares_too(dear): ...

@pytest.fixture(scope="module", params=range(8))
def of_number(request):
    return request.param

@pytest.mark.parametrize("letter", "abc")
def test_for_all(of_number, letter): ...

def test_for_all_too(of_number): ...

def test_alone(tmp_path_factory): ...
"""


@pytest.fixture
def quarter(pytester):
    """K and further arguments -> names of the tests in that quarter."""
    pytester.makepyfile(TESTS)
    pytester.makeini("[pytest]\nmarkers = thorough")

    def collect(number, *arguments):
        lines = pytester.runpytest("-p", "quarters", "--collect-only", "-q", f"--quarter={number}", *arguments).outlines
        return [line.partition("::")[2] for line in lines if "::" in line]

    return collect


def test_each_test_is_in_one_quarter(quarter):
    names = [name for number in range(4) for name in quarter(number)]
    assert len(names) == len(set(names)) == 11 + 5 + 1 + 8 * 3 + 8 + 1


def test_the_tests_of_a_function_are_dealt_out_evenly(quarter):
    counts = [sum(name.startswith("test_many") for name in quarter(number)) for number in range(4)]
    assert sorted(counts) == [2, 3, 3, 3]


def test_what_a_file_makes_once_is_needed_by_one_quarter(quarter):
    counts = [sum(name.startswith("test_that_shares") for name in quarter(number)) for number in range(4)]
    assert sorted(counts) == [0, 0, 0, 6]


def test_what_a_file_makes_for_each_parameter_is_dealt_out(quarter):
    for number in range(4):
        names = [name for name in quarter(number) if name.startswith("test_for_all")]
        first, second = sorted({name.partition("[")[2][0] for name in names})
        assert len(names) == 8
        assert int(second) == int(first) + 4


def test_marks_do_not_move_a_test_to_another_quarter(quarter):
    thorough = {f"test_many[{number}]" for number in range(5, 11)}
    for number in range(4):
        assert set(quarter(number, "-m", "thorough")) == thorough & set(quarter(number))
