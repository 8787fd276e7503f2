"""Programs as they are: `nbep run`, `nbep check`, `pytest --nbep-cuda`."""

import json
import subprocess
import sys
from importlib.metadata import entry_points

import pytest
from processes import LIMIT_S

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
TESTS = HEAD + (
    "@cuda.jit\ndef kernel(a, i):\n    a[i] += 1\n\n"
    "def test_right():\n    a = np.zeros(4)\n    kernel[1, 1](a, 3)\n    assert a[3] == 1\n\n"
    "def test_race():\n    kernel[1, 2](np.zeros(4), 3)\n\n"
    "def test_that_waits_for_nothing():\n    kernel[1, 1](cuda.to_device(np.zeros(4)), 4)\n"
)


def called(folder, *words):
    done = subprocess.run(
        [sys.executable, "-m", *words], cwd=folder, capture_output=True, text=True, timeout=LIMIT_S, check=False
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
def test_check_finds_the_race_of_a_script(tmp_path, how):
    (tmp_path / "script.py").write_text(RACE)
    status, text = called(tmp_path, "nbep", "check", "script.py", *how)
    assert status == 1
    assert "DataRace: data race on part[" in text


@pytest.mark.parametrize("scenario", ["script.py", "intranode.layout"])
def test_check_writes_the_trace_of_a_run(tmp_path, scenario):
    (tmp_path / "script.py").write_text(RACE)
    run = ("nbep", "check", scenario, "--seed", "1", "--trace")
    for name in ("run.html", "run.json"):
        status, text = called(tmp_path, *run, name)
        assert status == (scenario == "script.py"), text
    kernel = "kernel" if scenario == "script.py" else "get_dispatch_layout"
    events = json.loads((tmp_path / "run.json").read_text())["traceEvents"]
    assert any(event.get("cat") == "launch" and event["name"] == kernel for event in events)
    page = (tmp_path / "run.html").read_text()
    assert page.startswith("<!doctype html>")
    assert ("part[22]" in page) is (scenario == "script.py")
    assert called(tmp_path, *run, "run.txt")[0] == 2
    assert called(tmp_path, "nbep", "check", scenario, "--trace", "run.html")[0] == 2


def test_check_of_a_right_script_finds_nothing(tmp_path):
    (tmp_path / "script.py").write_text(RIGHT)
    status, text = called(tmp_path, "nbep", "check", "script.py", "--seeds", "4", "--jobs", "1")
    assert status == 0
    assert "8 runs: nothing found" in text


def test_pytest_runs_kernels_on_the_emulator_and_blames_the_test_that_launched(tmp_path):
    (tmp_path / "test_kernels.py").write_text(TESTS)
    installed = any(one.name == "nbep_cuda" for one in entry_points(group="pytest11"))
    plugin = () if installed else ("-p", "nbep.numba_cuda.pytest_plugin")
    status, text = called(tmp_path, "pytest", *plugin, "--nbep-cuda", "-q", "-p", "no:cacheprovider", "test_kernels.py")
    assert status == 1
    assert "2 failed, 1 passed" in text
    assert "FAILED test_kernels.py::test_race" in text
    assert "FAILED test_kernels.py::test_that_waits_for_nothing" in text
