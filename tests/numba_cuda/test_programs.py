"""Programs as they are: `nbep run`, `nbep check`, `pytest --nbep-cuda`."""

import json
import re
import subprocess
import sys
from collections import Counter
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from parts import both_parts, crossed
from processes import LIMIT_S

from nbep.lab.check import main as check
from nbep.lab.numba_cuda import session
from nbep.lab.numba_cuda.command import main as run

HEAD = "import numpy as np\nfrom numba import cuda\n\n"
RIGHT = HEAD + (
    "@cuda.jit\ndef kernel(a):\n    a[cuda.grid(1)] = cuda.grid(1)\n\n"
    "a = np.zeros(64)\nkernel[2, 32](a)\nprint(a.sum())\n"
)
RACE = HEAD + (
    "@cuda.jit\ndef kernel(a, out):\n    part = cuda.shared.array(64, np.float32)\n    i = cuda.threadIdx.x\n"
    "    part[i] = 0\n    cuda.syncthreads()\n    part[i] = a[i]\n    out[i] = part[63 - i]\n\n"
    "a = np.arange(64, dtype=np.float32)\nout = np.zeros(64)\nkernel[1, 64](a, out)\nassert (out == a[::-1]).all()\n"
)
# What a program may launch last, and what that is; and how a program, or a test, may end.
LAUNCHES = {
    "OutOfBounds": "kernel[1, 1](there, 4)",
    "DataRace": "kernel[1, 2](there, 3)",
    "": "kernel[1, 1](there, 3)",
}
PROGRAM = """\
import atexit, os, sys, threading
import numpy as np
import pytest
from numba import cuda

@cuda.jit
def kernel(a, i):
    a[i] += 1

there = cuda.to_device(np.zeros(4))

def launch():
    {launch}

def launch_and_wait():
    launch()
    cuda.synchronize()

"""
ENDS = {
    "launch()": 0,
    "launch()\nsys.exit()": 0,
    "launch()\nsys.exit(3)": 3,
    "launch()\nsys.exit('in words')": "in words",
    "launch()\nexit(4)": 4,
    "launch()\nos._exit(3)": 3,
    "launch()\nraise KeyError('its own')": "its own",
    "launch()\ncuda.close()": 0,
    "launch()\ncuda.current_context().reset()\nsys.exit(3)": 3,
    "atexit.register(launch)": 0,
    "atexit.register(launch_and_wait)\nsys.exit(3)": 3,
    "threading.Thread(target=launch).start()": 0,
    "threading.Thread(target=launch_and_wait).start()\nsys.exit(3)": 3,
    "try:\n    launch_and_wait()\nexcept Exception:\n    sys.exit(3)": 0,
}
OUTCOMES = {  # of a test that launches, where nothing is wrong
    "def test_returns():\n    launch()": "passed",
    "def test_skips():\n    launch()\n    pytest.skip('so far')": "skipped",
    "def test_fails():\n    launch()\n    assert False": "failed",
    "def test_gives_up():\n    launch()\n    pytest.xfail('known')": "xfailed",
    "def test_has_threads():\n    thread = threading.Thread(target=launch_and_wait)\n    thread.start()\n"
    "    thread.join()": "passed",
    "@pytest.fixture\ndef made():\n    launch()\ndef test_has_a_fixture(made): ...": "passed",
    "@pytest.fixture\ndef lent():\n    yield\n    launch()\ndef test_gives_back(lent): ...": "passed",
    "launch()\ndef test_of_a_module_that_launches(): ...": "passed",
}  # fmt: skip


def called(folder, *words):
    done = subprocess.run(
        [sys.executable, *(() if words[0].endswith(".py") else ("-m",)), *words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_run_prints_what_the_program_prints(tmp_path):
    (tmp_path / "script.py").write_text(RIGHT)
    assert called(tmp_path, "nbep", "run", "script.py") == (0, "2016.0\n")


def test_run_reports_a_race_with_both_lines_first(tmp_path):
    (tmp_path / "script.py").write_text(RACE)
    status, text = called(tmp_path, "nbep", "run", "script.py")
    lines = text.splitlines()
    assert status == 1
    assert lines[0].startswith("DataRace: data race on part[")
    assert {line.partition("    <-")[0].strip() for line in lines[1:3]} == {
        "script.py:10: part[i] = a[i]",
        "script.py:11: out[i] = part[63 - i]",
    }


def test_run_refuses_what_is_no_file(tmp_path):
    status, text = called(tmp_path, "nbep", "run", "none.py")
    assert status == 2
    assert "there is no such file" in text


@pytest.mark.parametrize("how", [("--seeds", "6", "--jobs", "1"), ("--seed", "1"), ("--all", "--minutes", "1")])
def test_check_finds_the_race_of_a_script(tmp_path, capsys, how):
    (tmp_path / "script.py").write_text(RACE)
    assert status_of(check, [str(tmp_path / "script.py"), *how]) == 1
    assert "DataRace: data race on part[" in capsys.readouterr().out


@pytest.mark.parametrize("scenario", ["script.py", "intranode.layout"])
def test_check_writes_the_trace_of_a_run(tmp_path, monkeypatch, capsys, scenario):
    (tmp_path / "script.py").write_text(RACE)
    monkeypatch.chdir(tmp_path)
    run = scenario, "--seed", "1", "--trace"
    for name in ("run.html", "run.json"):
        assert status_of(check, [*run, name]) == (scenario == "script.py")
    kernel = "kernel" if scenario == "script.py" else "get_dispatch_layout"
    events = json.loads((tmp_path / "run.json").read_text())["traceEvents"]
    assert any(event.get("cat") == "launch" and event["name"] == kernel for event in events)
    page = (tmp_path / "run.html").read_text()
    assert page.startswith("<!doctype html>")
    assert ("part[22]" in page) is (scenario == "script.py")
    assert ('"title":"The finding","text":"DataRace stops' in page) is (scenario == "script.py")
    assert any(event["name"].startswith("DataRace: data race on part[") for event in events) is (
        scenario == "script.py"
    )
    assert "for ever" not in capsys.readouterr().out
    assert status_of(check, [*run, "run.txt"]) == status_of(check, [scenario, "--trace", "run.html"]) == 2


SUCCESSOR = """\
import numba_cuda_mlir
import numpy as np
from cuda.core import Device, LaunchConfig, launch
from numba_cuda_mlir import cuda, types
from numba_cuda_mlir.cuda import float32
from numba_cuda_mlir.numba_cuda.core.errors import TypingError
from numba_cuda_mlir.numba_cuda.cudadrv.devicearray import DeviceNDArray

@cuda.jit
def kernel(a, sizes, maximum):
    first = cuda.shared.array(sizes[0], types.float32)
    rest = cuda.shared_array(shape=0, dtype=float32)
    i = cuda.threadIdx.x
    first[i], rest[i] = a[i], 1
    cuda.syncthreads()
    both = cuda.float32x2(first[31 - i], rest.size) + 1
    cuda.atomic.max(maximum, 0, both.y)
    squares = first * first
    a[i] = both.x + squares[i]

device = Device()
stream = device.create_stream()
a = cuda.to_device(np.arange(32, dtype=np.float32))
maximum = cuda.to_device(np.array([np.nan], np.float32))
launch(stream, LaunchConfig(1, 32, shmem_size=4 * 80), kernel, a, np.array([32]), maximum)
stream.sync()
expected = np.arange(32)[::-1] + 1 + np.arange(32) ** 2
print((a.copy_to_host() == expected).all(), maximum.copy_to_host(), isinstance(a, DeviceNDArray))
"""


def test_a_program_of_numba_cudas_successor_runs_and_is_judged(tmp_path, capsys):
    script = tmp_path / "script.py"
    script.write_text(SUCCESSOR)
    assert called(tmp_path, "nbep", "run", "script.py") == (0, "True [49.] True\n")
    script.write_text(SUCCESSOR.replace("    cuda.syncthreads()\n", ""))
    assert status_of(check, [str(script), "--seed", "0"]) == 1
    said = capsys.readouterr().out
    assert "first[31]" in said or "data race on first[" in said
    script.write_text(SUCCESSOR.replace("4 * 80", "4 * 31"))
    assert status_of(run, [str(script)]) == 1
    assert "takes 128 dynamic bytes; the launch has 124" in capsys.readouterr().err


PROJECT = HEAD + (
    "@cuda.jit\ndef right(a):\n    a[cuda.grid(1)] += 1\n\n"
    "@cuda.jit\ndef lock(a):\n    while cuda.atomic.cas(a, 0, 0, 1): pass\n    a[1] += 1\n"
    "    cuda.atomic.exch(a, 0, 0)\n\n"
    "@cuda.jit\ndef count(a):\n    i = 0\n    while cuda.atomic.add(a, 0, 0) == 0: i += 1\n\n"
    "import unittest\nclass Test(unittest.TestCase):\n    def test_right(self):\n"
    "        a = np.zeros(8)\n        right[2, 4](a)\n        assert (a == 1).all()\n\n"
    "def test_lock():\n    lock[8, 1](np.zeros(2, np.int32))\n\n"
    "def test_count():\n    count[1, 1](np.zeros(1, np.int32))\n\n"
)


@pytest.mark.parametrize("workers", both_parts(["0"], thorough=["2"]))
def test_a_test_suite_runs_under_the_seeds_and_limits_of_its_pyproject(tmp_path, workers):
    (tmp_path / "pyproject.toml").write_text("[tool.nbep]\nseeds = 3\nmax_calls = 2000\n")
    (tmp_path / "test_it.py").write_text(PROJECT)
    status, text = called(tmp_path, "pytest", "--nbep-cuda", "-n", workers, "-p", "no:cacheprovider")
    assert status == 1
    assert "2 failed, 1 passed" in text
    assert re.search(r"E +test_it\.py:11: a\[1\] \+= 1    <- stored by.*\nE +test_it\.py:11: .*\n", text), text
    assert "limit: after 2,000 calls" in text or "endless loop" in text
    assert "numba_cuda/dispatcher.py" not in text
    launches = 3 + 1 + 1  # what fails is not run again
    assert f"nbep: {launches} launches of 3 kernels, memory model checked, 3 seeds\n" in text


def test_an_option_of_pyproject_that_is_none_is_an_error(tmp_path):
    (tmp_path / "pyproject.toml").write_text("[tool.nbep]\nseed = 3\n")
    assert "has no 'seed'; it has memory_model, seeds" in called(tmp_path, "pytest", "--nbep-cuda")[1]


@pytest.mark.thorough
def test_the_workflow_of_the_page_has_ten_lines_and_its_command_runs(tmp_path):
    lines = (Path(__file__).parents[2] / "docs/examples/numba/gpu_tests.yml").read_text().splitlines()
    assert len(lines) == 10
    (tmp_path / "test_it.py").write_text(PROJECT.partition("def test_lock")[0])
    command = lines[-1].partition("run: ")[2].replace("auto", "1").split()
    status, text = called(tmp_path, *command, "-p", "no:cacheprovider")
    assert (status, "nbep: 1 launches of 1 kernels, memory model checked, seed 0\n" in text) == (0, True), text


def test_check_of_a_right_script_finds_nothing(tmp_path, capsys):
    (tmp_path / "script.py").write_text(RIGHT)
    assert status_of(check, [str(tmp_path / "script.py"), "--seeds", "4", "--jobs", "1"]) == 0
    assert "8 runs: nothing found" in capsys.readouterr().out


@pytest.mark.parametrize("finding", LAUNCHES)
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_whatever_ends_a_program_what_it_launched_is_judged_first(tmp_path, capsys, end, finding):
    """And its own exit status is kept if nothing is wrong."""
    script = tmp_path / "script.py"
    script.write_text(PROGRAM.format(launch=LAUNCHES[finding]) + end)
    status = status_of(run, [str(script)])
    assert status == (1 if finding else ENDS[end])
    assert finding in capsys.readouterr().err
    found = status_of(check, [str(script), "--seed", "0"])
    said = capsys.readouterr().out
    assert found == (1 if finding else int(ENDS[end] != 0))
    assert (finding or (f"exit status {ENDS[end]}" if found and "raise" not in end else "")) in said


def status_of(main, argv):
    """How a command ends: its status, what the program says as the last thing, or its own error."""
    try:
        return main(argv)
    except SystemExit as end:
        return end.code or 0
    except KeyError as error:
        return error.args[0]
    finally:
        assert session.current(create=False) is None


@pytest.mark.parametrize("finding", both_parts(["DataRace"], thorough=["OutOfBounds", ""]))
def test_whatever_ends_a_test_what_it_launched_is_judged_first(tmp_path, finding):
    for number, test in enumerate(OUTCOMES):
        (tmp_path / f"test_{number}.py").write_text(PROGRAM.format(launch=LAUNCHES[finding]) + test)
    installed = any(one.name == "nbep_cuda" for one in entry_points(group="pytest11"))
    plugin = () if installed else ("-p", "nbep.numba_cuda.pytest_plugin")
    options = "--nbep-cuda", "-q", "-rA", "-p", "no:cacheprovider", "--continue-on-collection-errors"
    _, text = called(tmp_path, "pytest", *plugin, *options)
    outcomes = Counter(OUTCOMES.values()) if not finding else {"failed": 5, "error": 3, "passed": 1}
    last = text.splitlines()[-1]
    assert all(re.search(rf"\b{count} {outcome}", last) for outcome, count in outcomes.items()), text
    summary = text.partition("short test summary")[2]
    assert not finding or summary.count(f" - {finding[:8]}") + summary.count(f"errors.{finding[:8]}") == 8, text


@pytest.mark.parametrize("finding", both_parts(["DataRace"], thorough=["OutOfBounds", ""]))
def test_a_program_that_installs_the_emulator_itself_ends_with_what_is_found(tmp_path, finding):
    lines = PROGRAM.format(launch=LAUNCHES[finding]).replace("DataRace", "")
    head = "import nbep.numba_cuda\nnbep.numba_cuda.install()\nfrom nbep.numba_cuda import session\n"
    (tmp_path / "script.py").write_text(head + "session.OPTIONS['memory_model'] = 'checked'\n" + lines + "launch()\n")
    status, text = called(tmp_path, "script.py")
    assert status == bool(finding)
    assert text.startswith(finding)


@pytest.mark.parametrize(
    ("how", "finding"),
    crossed(
        [("fork", "DataRace"), ("spawn", "OutOfBounds"), ("forkserver", "")], ("fork", "spawn", "forkserver"), LAUNCHES
    ),
)
def test_processes_of_a_program_have_the_emulator_and_their_findings_count(tmp_path, how, finding):
    (tmp_path / "script.py").write_text(
        PROGRAM.format(launch=LAUNCHES[finding])
        + "if __name__ == '__main__':\n    import multiprocessing\n"
        + f"    process = multiprocessing.get_context('{how}').Process(target=launch)\n"
        + "    process.start()\n    process.join()\n    sys.exit(process.exitcode and 3)\n"
    )
    command = ("check", "script.py", "--seed", "0") if finding == "DataRace" else ("run", "script.py")
    status, text = called(tmp_path, "nbep", *command)
    assert status == bool(finding), text
    assert finding in text
