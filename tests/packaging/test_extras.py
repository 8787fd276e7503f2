"""The base installation has no compiler and no MPI: emulator and demo do without, and the rest says what to install."""

import subprocess
import sys

import pytest

from nbep.device.extras import what_is_missing

# As if the packages of the extras were not there.
WITHOUT = """
import sys
for name in ("cuda", "llvmlite", "mpi4py", "numba", "numba_cuda", "nvshmem", "torch"):
    sys.modules[name] = None
    if name == "cuda":
        sys.modules["cuda.bindings"] = None
"""
LINE = "pip install 'nbep[cuda]', or 'nbep[cuda12]' for a driver of CUDA 12"


def run(program: str, returncode: int = 0) -> subprocess.CompletedProcess:
    done = subprocess.run([sys.executable, "-c", WITHOUT + program], capture_output=True, text=True, check=False)
    assert done.returncode == returncode, done.stderr
    return done


def test_ranks_on_the_emulator_need_no_extra():
    program = """
import numpy as np, nbep
from nbep.host.target.resolve import why_no_gpu
print(why_no_gpu())
def main(comm):
    buffer = nbep.Buffer(comm, 1 << 16)
    counts = buffer.get_dispatch_layout(np.array([[0], [1]]), 2)[0]
    buffer.destroy()
    return counts.tolist()
print(nbep.spawn(main, 2))
"""
    assert run(program).stdout.splitlines() == [f"cuda is not installed: {LINE}", "[[1, 1], [1, 1]]"]


def test_the_demo_needs_no_extra(tmp_path):
    picture = tmp_path / "rings.png"
    argv = ["demo", "--ranks", "2", "--tokens", "8", "--out", str(picture)]
    assert "All 16 checks passed" in run(f"from nbep.cli import main; sys.exit(main({argv}))").stdout
    assert picture.exists()


@pytest.mark.parametrize(("command", "package"), [("compile", "cuda")])
def test_a_command_says_which_line_installs_what_it_lacks(command, package):
    done = run(f"from nbep.cli import main; sys.exit(main({command.split()}))", returncode=1)
    assert done.stderr == f"nbep {command.split()[0]}: {package} is not installed: {LINE}\n"


def test_only_packages_of_extras_are_named():
    assert what_is_missing(ModuleNotFoundError("No module named 'elsewhere'", name="elsewhere")) is None
    assert what_is_missing(ImportError("cannot import name 'x' from 'numba'", name="numba")) is None
    assert what_is_missing(ModuleNotFoundError(name="mpi4py.MPI")) == "mpi4py is not installed: pip install 'nbep[mpi]'"
