"""Runs the tests of numba-cuda-mlir, numba-cuda's successor, on the emulator, for who has its repository.

    python tools/numba_mlir_tests.py FOLDER FILE                  all of FOLDER, its tests/; writes what comes out
    python tools/numba_mlir_tests.py FOLDER FILE test_sm.py ...   these alone, beside what FILE has
    python tools/numba_mlir_tests.py --page FILE                  write it into records/numba_programs.md

It calls `pytest --nbep-cuda` for each file, with this module as a plugin: what the tests take of its `testing` is
replaced as `numba_tests.py` does. Tests that ask for what a compiler makes, or for its own modules, are not counted.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numba_tests as theirs
import pytest

LIMIT_S = 10  # of CPU, of a test
FOLDERS = ("ast_transforms", "runtime", "numba_cuda_tests/cudapy", ".")  # not of the driver, not doc_examples
NOT_COUNTED = re.compile(  # what a test says that asks for machine code, for the compiler's modules or for a driver
    r"makes no machine code|is not a package|cannot run on the emulator|is not supported on the emulator: No module|"
    r"cannot import name|"
    r"DynamicLibNotFound|(compiler|descriptor|extending|core)' has no attribute|_compile_as_device_callee|"
    r"No module named '(torch|cupy|cffi|scipy)|numba\.types' has no attribute 'f(4|8)E|has no attribute 'f64'|"
    r"cProfile|'Device' object has no attribute|nvidia-smi|cuobjdump|nvcc|exit=1$"
)
REASONS = (  # of what a failing test says, or of its name
    (r"test_tuple_index|test_raise_only|test_exception", "an error in a kernel is raised, also without `debug=True`"),
    (r"which no thread has written", "finding: it loads what no thread has written"),
    (r"DataRace|OutOfBounds|DeadlockError|Divergence", "finding"),
    (r"test_vector_type", "`cuda.vector` and arrays of vector types are not supported"),
    (r"complex32", "`complex32` is not supported"),
    (r"intrin'", "clusters, tensor memory and other `cuda.intrin` are not supported"),
    (r"text|of type <[US]|string|test_assign_const|XYZ", "text in arrays is not supported"),
    (r"Color|test_tuple_enum|test_enum|IntEnum", "a variable cannot be one of several members of an Enum"),
    (r"numpy\.(zeros|ones|empty|arange|full)", "memory that a kernel allocates is not supported"),
    (r"MyCustomDType|data model|struct_model|ExtType", "types of its extension API are not supported"),
    (r"'ctypes'|\*' not understood|CPointer|carray|address", "pointers are not supported"),
    (r"TestAnnotationsAsSignatures|TestExplicitSignatures|TestTypeCoercion", "annotations are no signatures here"),
    (r"view_different_width_F", "a view of another width of an array in F order is not supported"),
    (r"DID NOT WARN|missing_source|[Ww]arning|lineinfo", "it expects a warning of its compiler"),
    (r"test_dispatcher|test_jit_compat|LaunchBounds", "it asks how its dispatcher keeps what it has compiled"),
    (r"test_errors|test_analysis|test_make_function|invalid_align|test_ssa", "its compiler says it in other words"),
    (r"from_dtype_caching", "records of one layout have one type, aligned or not"),
    (r"test_issue_9229|TimeoutError", "it takes longer than the limit"),
    (r"external_stream", "streams of other libraries cannot be emulated"),
    (r"subprocess|BrokenProcessPool|pickle", "it starts a process that has no emulator"),
)  # fmt: skip
PAGE = theirs.PAGE
OUTCOMES: dict[str, list[str]] = {}


# --- as a plugin ------------------------------------------------------------------------------------------------------
def _none(*_: Any, **__: Any) -> Any:
    raise NotImplementedError("the emulator makes no machine code")


def _in_process(code: str, timeout: int = 0) -> tuple[str, str]:
    done = theirs.InProcess.run(["python", "-c", code], text=True)
    return done.stdout, done.stderr


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    theirs.install()
    checks = dict.fromkeys(("assertFileCheckMatches", "assertFileCheckAsm", "assertFileCheckLLVM"), _none)
    theirs._module(
        "numba_cuda_mlir.testing", NumbaCUDATestCase=type("NumbaCUDATestCase", (theirs.CUDATestCase,), checks),
        IS_NUMPY_2=True, filecheck=_none, filecheck_with_comments=_none, captured_output=_none,
        run_in_subprocess=_in_process,
    )  # fmt: skip
    theirs._module(
        "numba_cuda_mlir.tools", get_gpu_compute_capability=lambda kind=tuple: (9, 0) if kind is tuple else "sm_90",
        get_cuda_runtime_version=lambda: (13, 0), get_max_ptx_version=_none, generate_mangled_name=_none,
    )  # fmt: skip
    sys.modules["numba.cuda.testing"]._get_device_compute_capability = lambda: (9, 0)  # type: ignore[attr-defined]
    from numba.cuda.core import config

    config.CUDA_LOW_OCCUPANCY_WARNINGS = 0


def pytest_collection_modifyitems(items: list[Any]) -> None:
    for module in {item.module for item in items if hasattr(item.module, "subprocess")}:
        module.subprocess = theirs.InProcess


def _late(*_: Any) -> None:
    raise TimeoutError(f"took more than {LIMIT_S} s of CPU")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: Any) -> Any:
    signal.signal(signal.SIGPROF, _late)
    signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
    try:
        return (yield)
    except BaseException as error:
        OUTCOMES[item.nodeid] = ["failed", f"{type(error).__name__}: {error}"[:600]]
        raise
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def pytest_runtest_logreport(report: Any) -> None:
    said = OUTCOMES.get(report.nodeid, ["", ""])[1] if report.failed else ""
    if report.failed or report.when == "call" or report.skipped:
        passes = report.passed or hasattr(report, "wasxfail")
        OUTCOMES[report.nodeid] = ["passed" if passes else report.outcome, said or str(report.longrepr)[-300:]]


def pytest_collectreport(report: Any) -> None:
    if not report.passed:
        OUTCOMES[report.nodeid] = [report.outcome, str(report.longrepr)[-600:]]


def pytest_sessionfinish() -> None:
    Path(os.environ["OUTCOMES"]).write_text(json.dumps(OUTCOMES))


def pytest_runtest_logfinish() -> None:
    if len(OUTCOMES) % 20 == 0:  # a test may end the process
        pytest_sessionfinish()


# --- as a program -----------------------------------------------------------------------------------------------------
def run(files: list[Path], folder: Path, there: Path) -> dict[str, list[str]]:
    """What became of the tests of some files."""
    own, part = Path(__file__).resolve().parent, Path(f"{there}.part")
    path = f"{own}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    options = (
        "--nbep-cuda", "--nbep-cuda-memory-model=sc", "-p", "numba_mlir_tests", "-p", "no:cacheprovider", "--tb=short",
        "--continue-on-collection-errors", "-c", "/dev/null", f"--rootdir={folder}",
    )  # fmt: skip
    command = [sys.executable, "-m", "pytest", *options, *files]
    part.unlink(missing_ok=True)
    environment = {**os.environ, "PYTHONPATH": path, "OUTCOMES": str(part)}
    subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL)
    return json.loads(part.read_text())


def reason_of(name: str, said: str) -> str | None:
    return next((reason for pattern, reason in REASONS if re.search(pattern, f"{name} {said}")), None)


def write_page(outcomes: dict[str, list[str]]) -> int:
    """The table. Raises: KeyError for failures without a reason"""
    count: Counter[str] = Counter()
    failures: dict[str, list[str]] = {}
    for name, (outcome, said) in outcomes.items():
        kind = "not counted" if outcome != "passed" and (outcome == "skipped" or NOT_COUNTED.search(said)) else outcome
        count[kind] += 1
        if kind == "failed":
            failures.setdefault(reason_of(name, said) or f"?? {name}: {said}", []).append(name)
    unknown = [reason for reason in failures if reason.startswith("??")]
    if unknown:
        raise KeyError("without a reason:\n" + "\n".join(unknown))
    passed, failed, others = (count[one] for one in ("passed", "failed", "not counted"))
    rows = [
        f"{passed} tests pass, {failed} fail: {100 * passed / (passed + failed):.1f} % of those that ran.",
        f"{others} others ask for machine code, for modules of the compiler, for a driver or for another package.",
        "", "| why they fail | how many | in |", "| --- | --- | --- |",
    ]  # fmt: skip
    for reason, names in sorted(failures.items(), key=lambda one: -len(one[1])):
        files = sorted({Path(name.partition("::")[0]).stem for name in names})
        rows.append(f"| {reason} | {len(names)} | {', '.join(files)} |")
    text = "<!-- successor -->\n" + "\n".join(rows) + "\n<!-- /successor -->"
    page = PAGE.read_text()
    PAGE.write_text(re.sub(r"<!-- successor -->.*<!-- /successor -->", lambda _: text, page, flags=re.DOTALL))
    return 0


def main() -> int:
    if sys.argv[1] == "--page":
        return write_page(json.loads(Path(sys.argv[2]).read_text()))
    folder, there = Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve()
    named = [folder / one for one in sys.argv[3:]]
    for files in [named] if named else [sorted((folder / name).glob("test_*.py")) for name in FOLDERS]:
        begin, found = time.monotonic(), run(files, folder, there)
        before = json.loads(there.read_text()) if there.exists() else {}
        again = {str(file.relative_to(folder)) for file in files}
        kept = {name: one for name, one in before.items() if name.partition("::")[0] not in again}
        there.write_text(json.dumps({**kept, **found}))
        print(dict(Counter(one[0] for one in found.values())), f"{time.monotonic() - begin:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
