"""A kernel does not compile: the first line of the error says why, and at which line of which file."""

import inspect
import math

import numpy as np
import pytest

from nbep.device.compile import CompileError, compile_kernel
from nbep.device.jit import device_function, kernel
from nbep.device.primitives import f32, ld_nc_f32, st_weak_f32, st_weak_s32
from nbep.device.types import F32, I32, In, Out

pytestmark = pytest.mark.compile


def plain(v):
    return v + 1


@device_function
def sum_up(out, x, n):
    acc = 0.0
    for i in range(n):
        acc += ld_nc_f32(x + 4 * i)
    st_weak_f32(out, acc)  # here: float64


@device_function
def call_plain(v):
    return plain(v)  # here: plain


@kernel()
def float64_in_a_helper(out: Out, x: In, n: I32):
    sum_up(out, x, n)


@kernel()
def divides(out: Out, x: F32):
    st_weak_f32(out, x / 3)  # here: divides


@kernel()
def plain_function_in_a_helper(out: Out, n: I32):
    st_weak_s32(out, call_plain(n))


@kernel()
def numpy_function(out: Out, x: F32):
    st_weak_f32(out, np.exp(x))  # here: numpy


@kernel()
def misspelt(out: Out, n: I32):
    st_weak_s32(out, missspelt(n))  # noqa: F821 # here: misspelt


@kernel()
def makes_a_list(out: Out, n: I32):
    numbers = [1, 2]  # here: list
    st_weak_s32(out, numbers[n])


@kernel()
def formats(out: Out, n: I32):
    print(f"{n}")  # here: formats


@kernel()
def raises(out: Out, n: I32):
    raise ValueError(n)  # here: raises


@kernel()
def indexes(out: Out, n: I32):
    out[0] = n  # here: indexes


@kernel()
def unifies(out: Out, n: I32):
    v = 1 if n > 0 else (1, 2)
    st_weak_s32(out, v)  # here: unifies


@kernel()
def lacks_an_argument(out: Out):
    st_weak_s32(out)  # here: lacks


def line_of(mark: str) -> int:
    source = inspect.getsource(inspect.getmodule(plain)).splitlines()
    return next(number for number, line in enumerate(source, 1) if line.endswith(f"# here: {mark}"))


@pytest.mark.parametrize(
    ("function", "cause", "mark"),
    [
        (float64_in_a_helper, "st_weak_f32 needs float32, not float64: .* write f32", "float64"),
        (divides, "st_weak_f32 needs float32, not float64: .* write f32", "divides"),
        (plain_function_in_a_helper, "plain is a plain Python function; .* @device_function", "plain"),
        (numpy_function, "np.exp: a kernel cannot call NumPy's functions", "numpy"),
        (misspelt, "name 'missspelt' is not defined", "misspelt"),
        (makes_a_list, "a kernel can make no list", "list"),
        (formats, "a kernel can make no list, dict, set or string", "formats"),
        (raises, "a kernel can neither raise nor catch exceptions", "raises"),
        (indexes, "an address is a number: memory is read and written by primitives", "indexes"),
        (lacks_an_argument, "missing a required argument: 'value'", "lacks"),
    ],
)
def test_the_first_lines_say_the_cause_and_the_line(function, cause, mark):
    with pytest.raises(CompileError, match=cause) as caught:
        compile_kernel(function)
    first, place, source = str(caught.value).splitlines()
    assert first.startswith(f"{function.__name__} for sm_90: ")
    assert place == f"  at {__file__}:{line_of(mark)}"
    assert source.endswith(f"# here: {mark}")


def test_what_is_not_known_is_said_in_numbas_words():
    with pytest.raises(CompileError, match=r"unifies for sm_90: Cannot unify .*\n  at .*test_compile_errors\.py:\d+"):
        compile_kernel(unifies)


def test_a_parameter_of_another_type_is_refused():
    @kernel()
    def flagged(out: Out, flag: bool):
        """Only its parameters matter."""

    with pytest.raises(TypeError, match=r"flagged: flag must be In, Out, .*I32"):
        compile_kernel(flagged)


def test_functions_of_math_compile():
    @kernel()
    def exponential(out: Out, x: F32):
        st_weak_f32(out, f32(math.exp(x)))

    assert compile_kernel(exponential).report.spill_stores == 0
