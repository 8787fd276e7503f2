"""The base installation has no compiler and no MPI: emulator and demo do without, and the rest says what to install."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from nbep.device.extras import EXTRAS, install_line, what_is_missing

# As if the packages of the extras were not there.
WITHOUT = """
import sys
for name in ("cuda", "mpi4py", "numba_cuda", "nvshmem", "torch"):
    sys.modules[name] = None
    if name == "cuda":
        sys.modules["cuda.bindings"] = None
"""
LINE = "pip install '.[cuda]' in a copy of nbep's repository, or '.[cuda12]' for a driver of CUDA 12"
ROOT = Path(__file__).parents[2]
ON_AN_INDEX = "build", "numba", "nvidia-cuda-nvdisasm", "pytest-cov", "pytest-xdist", "torch", "triton"


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
    assert what_is_missing(ImportError("cannot import name 'x' from 'numba_cuda'", name="numba_cuda")) is None
    assert what_is_missing(ModuleNotFoundError(name="mpi4py.MPI")) == f"mpi4py is not installed: {install_line('mpi')}"


def test_each_line_that_installs_something_works_in_a_copy_of_the_repository():
    """What a page or a message tells people to install is an extra of this folder, or a package of an index."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert set(EXTRAS.values()) <= set(extras)
    folders = [ROOT / name for name in ("nbep", "docs", "notebooks", "examples", "puzzles", "tools")]
    files = [file for folder in folders for kind in ("py", "md", "ipynb") for file in folder.rglob(f"*.{kind}")]
    seen = set()
    for file in [*files, *ROOT.glob("*.md")]:
        text = "" if file.name == "CHANGELOG.md" else file.read_text()
        assert not re.search(r"(?<!/)\bnbep\[[a-z]", text), file
        seen |= set(re.findall(r"pip install (?:-\w+ )*'?([^\s'`\"]+)", text))
    own = {what for what in seen if what.startswith(".")} - {".[{extra}]"}
    used = {extra for what in own for extra in re.sub(r"^\.(/nbep)?\[?|\]$", "", what).split(",") if extra}
    assert used <= set(extras), own
    assert seen - own <= {".[{extra}]", *ON_AN_INDEX}
