"""Numbers in kernels have the types that Numba gives to them, and wrap, round and divide as on the device."""

import itertools
import math

import ml_dtypes
import numpy as np
import pytest

from nbep.lab.numba_cuda import stubs, types
from nbep.lab.numba_cuda.code import KernelTypeError, exec_with_source
from nbep.lab.numba_cuda.dispatcher import jit

NAMES = ("bool", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16", "bfloat16")
OPERATORS = {
    "Add": "add", "Sub": "sub", "Mult": "mul", "Div": "truediv", "FloorDiv": "floordiv", "Mod": "mod",
    "LShift": "lshift", "RShift": "rshift", "BitAnd": "and_", "BitOr": "or_", "BitXor": "xor", "Pow": "pow",
}  # fmt: skip
# Numba has int32 where any integer is meant: a bool to the power of an int32 is float32, which no program can want.
STRANGE = {("Pow", "bool", "i4")}


def numbas_context():
    """Numba's typing of kernels, and its type for one of `NAMES`."""
    pytest.importorskip("numba_cuda")
    from numba.cuda import types as numbas
    from numba.cuda.descriptor import cuda_target

    cuda_target.typing_context.refresh()
    of_numba = {name: getattr(numbas, "boolean" if name == "bool" else np.dtype(name).name) for name in NAMES}
    return cuda_target.typing_context, of_numba


@pytest.mark.compile
@pytest.mark.parametrize("op", OPERATORS)
def test_operators_give_the_types_that_numbas_typing_context_gives(op):
    import operator

    context, of_numba = numbas_context()
    for a, b in itertools.product(NAMES, NAMES):
        try:
            signature = context.resolve_function_type(getattr(operator, OPERATORS[op]), (of_numba[a], of_numba[b]), {})
            wanted = None if signature is None else str(signature.return_type).removeprefix("__nv_")
        except Exception:
            wanted = None
        found = types.result_of(op, types.num(a), types.num(b))
        if (op, a, b) not in STRANGE:
            assert (None if found is None else str(found)) == wanted, f"{a} {op} {b}"


@pytest.mark.compile
@pytest.mark.parametrize("ndim", [1, 2])
@pytest.mark.parametrize("atomic", stubs.ATOMICS)
def test_atomics_take_the_types_that_numba_cuda_declares(atomic, ndim):
    from numba.cuda import stubs as numbas_stubs
    from numba.cuda import types as numbas

    context, of_numba = numbas_context()
    operands = {"compare_and_swap": 2, "cas": 2}.get(atomic, 1)
    index = [] if atomic == "compare_and_swap" else [numbas.intp if ndim == 1 else numbas.UniTuple(numbas.intp, ndim)]
    at = "" if not index else "0, " if ndim == 1 else "(0, 0), "
    names = {"cuda": stubs}
    exec_with_source(f"def kernel(a, x):\n    cuda.atomic.{atomic}(a, {at}{', '.join(operands * ['x'])})\n", names)
    key = getattr(numbas_stubs.atomic, atomic)
    for name in NAMES:
        t = of_numba[name]
        signature = (numbas.Array(t, ndim, "C"), *index, *operands * [t])
        try:
            is_declared = context.resolve_function_type(key, signature, {}) is not None
        except Exception:  # TypingError, of one of several classes
            is_declared = False
        dtype = np.dtype(name)
        try:
            jit(names["kernel"]).specialized((types.Arr(dtype, ndim, "C"), types.num(name)))
            is_taken = True
        except KernelTypeError:
            is_taken = False
        assert is_taken is is_declared, f"{atomic} on {name}"


def run(cuda, kernel, out, *args):
    cuda.jit(kernel)[1, 1](out, *args)
    return out


def test_int32_times_int32_is_int64_and_a_store_wraps(cuda):
    def kernel(out, a, b):
        out[0] = a[0] * b[0]

    big = np.array([2**31 - 1], np.int32)
    assert run(cuda, kernel, np.zeros(1, np.int64), big, big)[0] == (2**31 - 1) ** 2
    assert run(cuda, kernel, np.zeros(1, np.int32), big, big)[0] == 1


def test_int64_wraps_and_uint64_too(cuda):
    def kernel(out, a, b):
        out[0] = a[0] * b[0] + a[0]

    with np.errstate(all="ignore"):
        for dtype in (np.int64, np.uint64):
            a, b = np.array([2**62 + 12345], dtype), np.array([7], dtype)
            assert run(cuda, kernel, np.zeros(1, dtype), a, b)[0] == (a * b + a)[0]


def test_float32_stays_float32_and_literals_make_float64(cuda):
    def kernel(out, a, b):
        out[0] = a[0] * b[0] + a[0]
        out[1] = a[0] * 1.1

    a, b = np.array([1.1], np.float32), np.array([3.3], np.float32)
    out = run(cuda, kernel, np.zeros(2), a, b)
    assert out[0] == np.float32(a[0] * b[0]) + a[0]
    assert out[1] == float(a[0]) * 1.1


def test_variable_of_two_types_has_their_common_type(cuda):
    def kernel(out, a, take):
        x = 0
        if take:
            x = a[0]
        out[0] = x * a[0]

    a = np.array([1.1], np.float32)  # int64 and float32 are float64 together
    assert run(cuda, kernel, np.zeros(1), a, 1)[0] == float(a[0]) * float(a[0])


def test_loop_that_makes_an_integer_a_float(cuda):
    def kernel(out, n):
        total = 0
        for i in range(n):
            total += i / 2
        out[0] = total

    assert run(cuda, kernel, np.zeros(1), 5)[0] == 5.0
    assert run(cuda, kernel, np.ones(1), 0)[0] == 0.0


def test_division_and_remainder(cuda):
    def kernel(out, a, b):
        out[0] = a[0] // b[0]
        out[1] = a[0] % b[0]
        out[2] = a[0] / b[0]

    out = run(cuda, kernel, np.zeros(3), np.array([-7]), np.array([2]))
    assert list(out) == [-4, 1, -3.5]
    out = run(cuda, kernel, np.zeros(3), np.array([7]), np.array([0]))
    assert list(out) == [0, 0, math.inf]


def test_shifts(cuda):
    def kernel(out, a, n):
        out[0] = a[0] << n
        out[1] = a[0] >> n

    out = run(cuda, kernel, np.zeros(2, np.int64), np.array([-5], np.int32), 62)
    assert list(out) == [-(5 << 62) + (1 << 64), -1]


def test_functions_of_float32_are_float32(cuda):
    def kernel(out, a):
        out[0] = math.sin(a[0])

    a = np.array([0.5], np.float32)
    assert run(cuda, kernel, np.zeros(1), a)[0] == np.float32(math.sin(0.5))


def test_what_the_device_makes_of_numbers_that_python_refuses(cuda):
    def kernel(out, a):
        out[0] = math.exp(a[0])
        out[1] = math.sqrt(-a[0])
        out[2] = math.log(a[0] - a[0])
        out[3] = a[0] ** 1000.0

    out = run(cuda, kernel, np.zeros(4), np.array([1e4]))
    assert out[0] == out[3] == math.inf
    assert math.isnan(out[1])
    assert out[2] == -math.inf


def test_floats_cut_off_to_integers_saturate(cuda):
    def kernel(out, a):
        for i in range(out.size):
            out[i] = a[i]

    out = run(cuda, kernel, np.zeros(4, np.int32), np.array([2.9, -2.9, 1e30, math.nan]))
    assert list(out) == [2, -2, 2**31 - 1, 0]


def test_complex_float16_and_bool(cuda):
    def kernel(z, h, b):
        z[0] = z[1] * z[1] + 1
        h[0] = h[1] + h[1]
        b[0] = h[1] > 1 and z[1].real == 1.0

    z, h, b = np.array([0, 1 + 2j], np.complex64), np.array([0, 1.5], np.float16), np.zeros(1, bool)
    cuda.jit(kernel)[1, 1](z, h, b)
    assert z[0] == -2 + 4j
    assert h[0] == 3
    assert b[0]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("out[0] = [i for i in range(3)]", "ListComp"),
        ("out[0] = open('x')", "io.open"),
        ("out[0] = plain(1)", "no device function"),
        ("out[0] = undefined", "`undefined` is not defined"),
        ("out[0] = 'text'", "for an element of type float64"),
        ("cuda.atomic.add(out, 0, cuda.threadIdx)", "threadIdx"),
        ("out.no_such()", "no_such"),
        ("with out: pass", "With"),
        ("cuda.shared.array(out.size, 'f4')", "must be known"),
    ],
)
def test_what_is_not_supported_is_an_error_that_names_it_and_the_line(cuda, tmp_path, source, words):
    path = tmp_path / "kernel.py"
    path.write_text(f"def plain(x):\n    return x\n\n\ndef kernel(out):\n    {source}\n")
    names = {"cuda": cuda}
    exec(compile(path.read_text(), str(path), "exec"), names)
    with pytest.raises(KernelTypeError) as caught:
        cuda.jit(names["kernel"])[1, 1](np.zeros(1))
    assert words in str(caught.value)
    assert f"{path}:6" in str(caught.value)


def test_bfloat16_is_stored_loaded_and_rounded_once(cuda, memory_model):
    from numba.cuda.bf16 import bfloat16, hfma, int32_to_bfloat16_rd, int32_to_bfloat16_ru

    def kernel(out, a, wide):
        tile = cuda.shared.array(4, bfloat16)
        i = cuda.threadIdx.x
        tile[i] = a[i] * a[i] + a[i]
        cuda.syncthreads()
        out[i] = hfma(tile[3 - i], a[0], bfloat16(1))
        if i == 0:
            wide[0] = a[1] * 2  # an int64: together they are float64
            wide[1] = int32_to_bfloat16_rd(np.int32(257))
            wide[2] = int32_to_bfloat16_ru(np.int32(257))

    bf16 = ml_dtypes.bfloat16
    a = np.array([1.01, 3.3, -7.7, 100], bf16)
    out, wide = np.zeros(4, bf16), np.zeros(3)
    cuda.jit(kernel)[1, 4](out, a, wide)
    for i in range(4):
        tile = bf16(bf16(a[3 - i] * a[3 - i]) + a[3 - i])
        assert out[i] == bf16(float(tile) * float(a[0]) + 1)
    assert list(wide) == [2 * float(a[1]), 256, 258]
