"""`nbep check --engine` and `nbep compile --emulator`."""

import subprocess
import sys

import pytest

from nbep.device import compile as compile_command
from nbep.device.engine import Code
from nbep.device.kernels.get_dispatch_layout import get_dispatch_layout
from nbep.emulator.engine import world
from nbep.lab.check.command import main as check

KERNEL = """
from nbep.lang import I32, InOut, kernel, st_weak_s32, thread_idx

@kernel(max_threads=32)
def number(memory: InOut, first: I32):
    st_weak_s32(memory + 4 * thread_idx(), first + thread_idx())
"""


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path):
    monkeypatch.setenv("NBEP_ENGINE", "python")


@pytest.mark.parametrize("said", [["--engine", "compiled"], []], ids=["compiled", "auto"])
def test_a_search_runs_compiled_kernels(said, monkeypatch, capsys):
    """Where nothing is said, those of the cache; one seed alone is run by Python."""
    if not said:
        monkeypatch.delenv("NBEP_ENGINE")
    runs = []
    run = world.CompiledWorld.run
    monkeypatch.setattr(world.CompiledWorld, "run", lambda self, functions: runs.append(self) or run(self, functions))
    for model in "checked", "delayed":
        Code(model=model).entry(get_dispatch_layout)
    assert check(["intranode.layout", "--tokens", "9", *said, "--seeds", "4", "--jobs", "1"]) == 0
    assert {"checked", "delayed"} <= {world.model for world in runs}
    assert "nothing found" in capsys.readouterr().out
    runs.clear()
    assert check(["intranode.layout", "--tokens", "9", *said, "--seed", "4"]) == 0
    assert len(runs) == len(said) // 2


@pytest.mark.parametrize("more", [["--trace", "one.json"], ["--all"], ["--strategy", "few_preemptions"]])
def test_what_is_not_compiled_is_a_wrong_argument(more, capsys):
    with pytest.raises(SystemExit):
        check(["intranode.layout", "--engine", "compiled", *more])
    assert "--engine compiled: takes no --all, --trace or few_preemptions" in capsys.readouterr().err


@pytest.mark.thorough
def test_one_process_compiles_for_the_cpu_and_for_a_gpu():
    """What one compiler is told of a function is nothing to the other one."""
    pytest.importorskip("numba.cuda.extending")
    code = """if True:
        from nbep.device import engine
        from nbep.device.compile import compile_to_ptx
        from nbep.device.kernels.get_dispatch_layout import get_dispatch_layout
        from nbep.device.jit import spec_of
        spec = spec_of(get_dispatch_layout)
        engine._compile_kernel(spec, "nbep_one")
        print(".entry" in compile_to_ptx(spec, (9, 0)))
        engine._compile_kernel(spec, "nbep_two")
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr


def test_compile_fills_the_cache(monkeypatch, tmp_path, capsys):
    file = tmp_path / "own.py"
    file.write_text(KERNEL)
    monkeypatch.setenv("NBEP_CACHE_DIR", str(tmp_path / "cache"))
    assert compile_command.main([str(file), "--emulator"]) == 0
    assert [path.name.partition("-")[0] for path in (tmp_path / "cache").glob("number-*.cpu")] == ["number"]
    assert "s of CPU" in capsys.readouterr().out
