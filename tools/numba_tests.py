"""Runs numba-cuda's own tests on the emulator, for who has them: they come with the package.

    python tools/numba_tests.py                       all modules about what kernels mean
    python tools/numba_tests.py test_atomics test_sm  these
    python tools/numba_tests.py --failures            with the last line of each failure
    python tools/numba_tests.py --save FILE [...]     add what comes out to a file of JSON
    python tools/numba_tests.py --page FILE           write it into records/numba_programs.md, with REASONS

A test fails if it fails, and is skipped if its own decorators say so. What their `testing` and `support` take from the
driver is replaced by the little that tests about kernels need.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib
import io
import json
import re
import signal
import subprocess
import sys
import time
import unittest
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import nbep.numba_cuda
import numpy as np

from nbep.lab.numba_cuda import session
from nbep.lab.numba_cuda.code import exec_with_source

LIMIT_S = 60  # of CPU
AS_FOR_SIMULATOR = ("test_laplace", "test_matmul")  # modules whose sizes for Numba's simulator are taken
# Atomics, sync, math, arrays, records, indexing, warps, cooperative groups, random numbers: what kernels mean.
SEMANTICS = """
test_alignment test_array test_array_args test_array_methods test_array_reductions test_atomics test_bfloat16
test_bfloat16_bindings test_blackscholes
test_boolean test_cache_hints test_casting test_complex test_complex_kernel test_const_string test_constmem
test_cooperative_groups test_cuda_array_interface test_cuda_jit_no_types test_datetime test_device_array_capture
test_device_func test_enums test_exception test_fastmath test_flow_control test_forall test_freevar test_frexp_ldexp
test_globals test_idiv test_intrinsics test_iterators test_lang test_laplace test_libdevice test_localmem
test_mandel test_math test_matmul test_minmax test_montecarlo test_multithreads test_nondet test_operator
test_optimization test_powi test_print test_py2_div_issue test_random test_record_dtype test_recursion
test_reduction test_retrieve_autoconverted_arrays test_slicing test_sm test_sm_creation test_ssa test_sync
test_transpose test_ufuncs test_userexc test_vector_type test_warp_ops
""".split()  # noqa: SIM905


PAGE = Path(__file__).resolve().parents[1] / "records" / "numba_programs.md"
UNWRITTEN = "finding: it reads shared memory that no thread has written"
MODEL = "types with a data model of their own, of Numba's extension API, are not supported"
# module, its tests, why they fail
REASONS = (
    ("test_array", "test_carray test_farray", "pointers as arguments (`CPointer`) are not supported"),
    ("test_array_methods", "test_array_copy", "memory that a kernel allocates is not supported"),
    ("test_const_string", "test_assign_const_byte_string test_assign_const_unicode_string",
     "text in arrays is not supported"),
    ("test_const_string", "test_assign_const_bytes_in_record test_assign_const_string_in_record",
     "text in records is not supported"),
    ("test_const_string", "test_const_string", "it asks for LLVM's code"),
    ("test_cuda_array_interface", "test_ownership", "it looks into the driver's queue of deallocations"),
    ("test_cuda_array_interface", "test_from_dtype_caching_distiguish_custom_dtypes",
     "records of one layout have one type, aligned or not"),
    ("test_enums", "test_compare", "`is` of members of two IntEnums compares their numbers"),
    ("test_enums", "test_return_from_device_func", "a variable cannot be one of several members of an Enum"),
    ("test_enums", "test_int_enum_no_conversion", "it asks Numba's typing context"),
    ("test_exception", "test_exception", "finding: an index out of range, which without `debug=True` goes unnoticed"),
    ("test_freevar", "test_freevar", UNWRITTEN),
    ("test_intrinsics", "test_issue_9229", "5.7 billion threads"),
    ("test_localmem", "test_struct_model_type_arr test_type_with_struct_data_model", MODEL),
    ("test_sm", "test_issue_2393", UNWRITTEN),
    ("test_sm_creation", "test_global_build_tuple test_global_constant_tuple test_global_constants", UNWRITTEN),
    ("test_sm_creation", "test_type_with_struct_data_model", MODEL),
    ("test_ssa", "test_undefined_var", "it expects a warning; who comes there gets an error"),
    ("test_ssa", "test_issue3976 test_issue5219", "`@overload` is not supported"),
)  # fmt: skip


def _module(name: str, **names: Any) -> ModuleType:
    made = sys.modules[name] = ModuleType(name)
    made.__dict__.update(names)
    return made


class CUDATestCase(unittest.TestCase):
    """What their test cases are made of."""

    random = np.random.RandomState(42)
    FLOAT16_RTOL = np.finfo(np.float16).eps
    ulps: Any = None

    @contextlib.contextmanager
    def assertRefCount(self, *objects: Any) -> Iterator[None]:
        yield

    def assertPreciseEqual(
        self, first: Any, second: Any, prec: str = "exact", ulps: int = 1, msg: Any = None, **_: Any
    ) -> None:
        if isinstance(first, (tuple, list)):
            self.assertEqual(len(first), len(second), msg)
            for one, other in zip(first, second, strict=True):
                self.assertPreciseEqual(one, other, prec, ulps, msg)
            return
        if prec == "exact":
            np.testing.assert_array_equal(first, second, msg or "")
        else:
            eps = np.finfo(np.float32 if prec == "single" else np.float64).eps
            for part in (np.real, np.imag):
                np.testing.assert_allclose(part(first), part(second), rtol=ulps * eps * 4, atol=eps)

    def reset_module_warnings(self, module: Any) -> None:
        pass

    def assertStridesEqual(self, first: Any, second: Any) -> None:
        self.assertEqual(first.strides, second.strides)

    @contextlib.contextmanager
    def assertTypingError(self) -> Iterator[Any]:
        from numba.core.errors import TypingError

        with self.assertRaises(TypingError) as caught:
            yield caught


class Mixin:
    """What counts their allocations."""


class ForeignArray:
    """An array with nothing but the interface."""

    def __init__(self, arr: Any):
        self._arr = arr

    @property
    def __cuda_array_interface__(self) -> Any:
        return self._arr.__cuda_array_interface__


@contextlib.contextmanager
def captured(name: str) -> Iterator[io.StringIO]:
    before = getattr(sys, name)
    setattr(sys, name, io.StringIO())
    try:
        yield getattr(sys, name)
    finally:
        setattr(sys, name, before)


@contextlib.contextmanager
def override_config(name: str, value: Any) -> Iterator[None]:
    from numba.cuda.core import config

    before = getattr(config, name, None)
    setattr(config, name, value)
    try:
        yield
    finally:
        setattr(config, name, before)


def install(simulator: bool = False) -> None:
    """Their modules can be imported from now on. simulator: on Numba's, which NUMBA_ENABLE_CUDASIM=1 chooses"""
    if not simulator:
        nbep.numba_cuda.install()
    builtins.exec = exec_with_source  # type: ignore[assignment]
    keep = lambda test: test  # noqa: E731
    for_reason = lambda reason=None: keep  # noqa: E731
    skip_sim = lambda reason: unittest.skip(reason)  # noqa: E731
    names = {
        "skip_on_cudasim": for_reason, "skip_unless_cudasim": skip_sim, "skip_if_external_memmgr": for_reason,
        "skip_under_cuda_memcheck": for_reason, "skip_on_arm": for_reason, "skip_on_wsl2": for_reason,
        "skip_unless_cc_50": keep, "skip_unless_cc_53": keep, "skip_unless_cc_60": keep, "skip_unless_cc_75": keep,
        "skip_unless_cc_90": keep, "xfail_unless_cudasim": unittest.expectedFailure, "skip_if_cudadevrt_missing": keep,
        "skip_on_standalone_numba_cuda": keep, "skip_if_nvjitlink_missing": for_reason,
        "cc_X_or_above": lambda *_: True,
        "skip_if_cuda_includes_missing": keep, "skip_if_curand_kernel_missing": keep,
        "skip_unless_conda_cudatoolkit": skip_sim, "skip_without_nvdisasm": skip_sim, "skip_with_nvdisasm": for_reason,
        "skip_on_nvjitlink_13_1_sm_120": for_reason,
    }  # fmt: skip
    _module(
        "numba.cuda.testing", unittest=unittest, CUDATestCase=CUDATestCase, TestCase=CUDATestCase,
        ForeignArray=ForeignArray, test_data_dir=None, numba_cuda_dir=None, **names,
    )  # fmt: skip
    _module(
        "numba.cuda.tests.support", TestCase=CUDATestCase, captured_stdout=lambda: captured("stdout"),
        captured_stderr=lambda: captured("stderr"), override_config=override_config,
        skip_unless_cffi=unittest.skip("cffi"),
        skip_if_py314=keep, expected_failure_py314=keep, linux_only=keep, windows_only=unittest.skip("Windows"),
        IS_NUMPY_2=True, MemoryLeakMixin=Mixin, EnableNRTStatsMixin=Mixin, skip_if_numpy_2=unittest.skip("NumPy 2"),
        run_in_subprocess=lambda *_: (_ for _ in ()).throw(unittest.SkipTest("starts a process with a GPU")),
    )  # fmt: skip


class Result(unittest.TestResult):
    """What became of each test."""

    def __init__(self) -> None:
        super().__init__()
        self.passed: list[Any] = []

    def startTest(self, test: Any) -> None:
        super().startTest(test)
        with contextlib.suppress(Exception):
            session.reset()  # what an earlier one has left
        signal.setitimer(signal.ITIMER_PROF, LIMIT_S)

    def stopTest(self, test: Any) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)
        super().stopTest(test)

    def addError(self, test: Any, error: Any) -> None:
        reason = _needs(error[1])
        if reason:
            self.addSkip(test, reason)
        else:
            super().addError(test, error)

    def addSuccess(self, test: Any) -> None:
        self.passed.append(test)

    def addSubTest(self, test: Any, subtest: Any, error: Any) -> None:
        reason = None if error is None else _needs(error[1])
        if reason:
            self.addSkip(test, reason)
        else:
            super().addSubTest(test, subtest, error)


def _needs(error: BaseException) -> str | None:
    """What a test asks for that says nothing of what kernels mean."""
    text = str(error)
    if isinstance(error, NotImplementedError) and "no machine code" in text:
        return "asks for machine code"
    if isinstance(error, NotImplementedError) and "functions of C, C++ or PTX" in text:
        return "links code of C, C++ or PTX"
    return text if type(error).__name__ == "Skipped" else None  # as pytest skips a test


class InProcess:
    """For `subprocess`: runs `python -c CODE` here."""

    CalledProcessError = subprocess.CalledProcessError

    @staticmethod
    def run(command: list[str], text: bool = False, **_: Any) -> Any:
        with captured("stdout") as out, captured("stderr") as error, warnings.catch_warnings():
            warnings.simplefilter("always")
            exec_with_source(command[2], {"__name__": "__main__"})
        said = [one.getvalue() if text else one.getvalue().encode() for one in (out, error)]
        return subprocess.CompletedProcess(command, 0, *said)


def _late(*_: Any) -> None:
    raise TimeoutError(f"took more than {LIMIT_S} s of CPU")


def run(name: str, folder: str = "cudapy") -> Result:
    """The tests of one module."""
    result = Result()
    with override_config("ENABLE_CUDASIM", name in AS_FOR_SIMULATOR):
        _run(name, folder, result)
    return result


def _run(name: str, folder: str, result: Result) -> None:
    try:
        module = importlib.import_module(f"numba.cuda.tests.{folder}.{name}")
    except unittest.SkipTest as reason:
        result.skipped.append((name, str(reason)))  # type: ignore[arg-type]
        return
    except Exception as error:
        result.errors.append((name, f"cannot be imported: {type(error).__name__}: {error}"))  # type: ignore[arg-type]
        return
    if hasattr(module, "subprocess"):
        module.subprocess = InProcess
    suite = unittest.defaultTestLoader.loadTestsFromModule(module)
    functions = [one for one in vars(module).items() if one[0].startswith("test_") and isinstance(one[1], FunctionType)]
    suite.addTests(unittest.FunctionTestCase(function, description=name) for name, function in functions)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        suite.run(result)


def main() -> int:
    arguments = [one for one in sys.argv[1:] if not one.startswith("--")]
    saved = Path(arguments.pop(0)) if {"--save", "--page"} & set(sys.argv) else None
    if saved is not None and "--page" in sys.argv:
        return write_page(json.loads(saved.read_text()))
    install()
    signal.signal(signal.SIGPROF, _late)
    total = [0, 0, 0]
    for name in arguments or SEMANTICS:
        folder, _, module = name.rpartition("/")
        begin = time.process_time()
        result = run(module, folder or "cudapy")
        bad = [*result.failures, *result.errors]
        counts = len(result.passed) + len(result.expectedFailures), len(bad), len(result.skipped)
        total = [a + b for a, b in zip(total, counts, strict=True)]
        if saved is not None:
            before = json.loads(saved.read_text()) if saved.exists() else {}
            names = sorted({str(test).split()[0] for test, _ in bad})
            saved.write_text(json.dumps({**before, name: [counts[0], len(bad), names, counts[2]]}))
        print(
            f"{name:40} {counts[0]:4} pass {counts[1]:4} fail {counts[2]:4} skip {time.process_time() - begin:7.1f} s",
            flush=True,
        )
        if "--failures" in sys.argv:
            for test, text in bad:
                print(f"    {str(test).split()[0]}: {_last(text)}")
        if "--full" in sys.argv:
            for test, text in bad:
                print(f"--- {test}\n{text}")
    rate = 100 * total[0] / max(1, total[0] + total[1])
    print(f"{'all':40} {total[0]:4} pass {total[1]:4} fail {total[2]:4} skip; {rate:.1f} % of those that ran")
    return 0


def write_page(results: dict[str, Any]) -> int:
    """What came out, and the reason of each failure. Raises: KeyError for a failure without one, and the reverse"""
    failing = {(module, test) for module, (_, _, tests, _) in results.items() for test in tests}
    given = {(module, test) for module, tests, _ in REASONS for test in tests.split()}
    if failing != given:
        raise KeyError(
            f"without a reason: {sorted(failing - given)}; reasons of tests that pass: {sorted(given - failing)}"
        )
    passed, failed, skipped = (sum(one[i] for one in results.values()) for i in (0, 1, 3))
    rows = [
        f"{passed} tests pass, {failed} fail: {100 * passed / (passed + failed):.1f} % of those that ran.",
        f"{skipped} others ask for machine code, link C, C++ or PTX, or need another package.",
        "", "| tests | why they fail |", "| --- | --- |",
    ]  # fmt: skip
    rows += [f"| {module}: {', '.join(tests.split())} | {reason} |" for module, tests, reason in REASONS]
    text = "<!-- theirs -->\n" + "\n".join(rows) + "\n<!-- /theirs -->"
    page = PAGE.read_text()
    PAGE.write_text(re.sub(r"<!-- theirs -->.*<!-- /theirs -->", lambda _: text, page, flags=re.DOTALL))
    return 0


def _last(text: str) -> str:
    lines = [one for one in text.strip().splitlines() if one.strip()]
    errors = [
        one
        for one in lines
        if not one.startswith(" ")
        and ("Error" in one or "Divergence" in one or "Exception" in one or "OutOfBounds" in one or "Uninit" in one)
    ]
    return " | ".join(errors[-1:] + lines[-2:])[:260]


if __name__ == "__main__":
    sys.exit(main())
