"""What a release of nbep has in it, and that it runs where nothing else of nbep is."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from processes import LIMIT_S, once_per_run

import nbep
from nbep.version import __version__

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FILES = {path.relative_to(ROOT).as_posix() for path in (ROOT / "nbep").rglob("*.*") if path.suffix != ".pyc"}
WHEEL, SDIST = f"nbep-{__version__}-py3-none-any.whl", f"nbep-{__version__}.tar.gz"


def test_every_folder_with_modules_is_a_package():
    """setuptools finds packages by their __init__.py; the names of deep_ep are a folder of modules for the path."""
    assert PYPROJECT["tool"]["setuptools"]["packages"]["find"]["include"] == ["nbep", "nbep.*"]
    folders = {module.parent for module in (ROOT / "nbep").rglob("*.py")}
    assert ROOT / "nbep" / "deep_ep" / "names" in folders
    assert [str(folder) for folder in folders if not (folder / "__init__.py").exists()] == []


def run(*command: object, cwd: Path) -> str:
    """What a command prints, without what the tests add to Python's path. Fails if the command does."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def files_of_a_clone() -> set[str]:
    """What git has, or will have: without what builds and tests leave behind."""
    names = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT).split("\0")
    return {name for name in names if (ROOT / name).is_file()}


def test_the_package_says_its_version():
    assert nbep.__version__ == __version__


@pytest.fixture(scope="module")
def dist(tmp_path_factory) -> Path:
    """The folder that `python -m build` makes in a copy of the tree: the sdist, and the wheel that comes from it."""

    def build() -> str:
        folder = tmp_path_factory.mktemp("release")
        for name in files_of_a_clone():
            (folder / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / "tree" / name)
        python = clean_python(folder)
        run(python, "-m", "pip", "install", "--quiet", "build", cwd=folder)
        run(python, "-m", "build", folder / "tree", cwd=folder)
        return str(folder / "tree" / "dist")

    return Path(once_per_run(tmp_path_factory, "dist", build))


def clean_python(folder: Path) -> Path:
    """The interpreter of a new virtual environment."""
    run(sys.executable, "-m", "venv", folder / "venv", cwd=folder)
    return folder / "venv" / "bin" / "python"


@pytest.mark.thorough
def test_wheel_and_sdist_have_every_file_of_the_package_and_the_licence(dist):
    assert {path.name for path in dist.iterdir()} == {WHEEL, SDIST}
    with zipfile.ZipFile(dist / WHEEL) as wheel:
        names = {name for name in wheel.namelist() if not re.match(r"nbep-[^/]*\.dist-info/", name)}
        licences = [name for name in wheel.namelist() if name.endswith("/licenses/LICENSE")]
    assert names == FILES
    assert licences
    with tarfile.open(dist / SDIST) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert names >= files_of_a_clone()


@pytest.mark.thorough
@pytest.mark.parametrize("file", [WHEEL, SDIST], ids=["wheel", "sdist"])
def test_it_installs_and_runs_in_a_clean_environment(file, dist, tmp_path):
    python = clean_python(tmp_path)
    run(python, "-m", "pip", "install", "--quiet", dist / file, cwd=tmp_path)
    where = run(python, "-c", "import nbep; print(nbep.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(tmp_path / "venv")
    command = tmp_path / "venv" / "bin" / "nbep"
    assert run(command, "--version", cwd=tmp_path) == f"nbep {__version__}\n"
    assert run(command, "info", cwd=tmp_path).startswith(f"nbep {__version__}")
    run(
        command, "demo", "--ranks", 2, "--tokens", 4, "--no-picture", "--html", "page.html", cwd=tmp_path
    )  # reads data files
    assert (tmp_path / "page.html").exists()
