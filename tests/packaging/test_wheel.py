"""What a wheel of nbep has in it."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_folder_with_modules_is_a_package():
    """setuptools finds packages by their __init__.py; the names of deep_ep are a folder of modules for the path."""
    found = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]
    assert found["include"] == ["nbep", "nbep.*"]
    folders = {module.parent for module in (ROOT / "nbep").rglob("*.py")}
    assert ROOT / "nbep" / "deep_ep" / "names" in folders
    assert [str(folder) for folder in folders if not (folder / "__init__.py").exists()] == []
