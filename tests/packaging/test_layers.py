"""Layers import downwards only, and starting nbep stays light."""

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "nbep").rglob("*.py"))
# Lowest first. A file may import from its own layer and from those before it.
LAYERS = ("nbep.emulator", "nbep.device", "nbep.host", "nbep")
LIGHT = {*sys.stdlib_module_names, "greenlet", "ml_dtypes", "nbep", "numpy"}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer(module: str) -> int:
    return next(i for i, prefix in enumerate(LAYERS) if module == prefix or module.startswith(prefix + "."))


def imports(path: Path) -> list[tuple[str, bool]]:
    """(module, whether it is imported at the top of the file); relative imports as absolute names."""
    package = module_name(path) if path.name == "__init__.py" else module_name(path).rpartition(".")[0]
    tree = ast.parse(path.read_text())
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, node in tree.body) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            found.append((".".join([*base, *([node.module] if node.module else [])]), node in tree.body))
    return found


def test_modules_import_downwards_only():
    upwards = [
        f"{module_name(path)} imports {module}"
        for path in FILES
        for module, _ in imports(path)
        if module.split(".")[0] == "nbep" and module != "nbep.version" and layer(module) > layer(module_name(path))
    ]
    assert upwards == []


def test_emulator_starts_without_anything_heavy():
    heavy = [
        f"{module_name(path)} imports {module}"
        for path in FILES
        for module, at_top in imports(path)
        if layer(module_name(path)) == 0 and at_top and module.split(".")[0] not in LIGHT
    ]
    assert heavy == []


def test_no_file_has_more_than_500_lines():
    files = [*FILES, *(ROOT / "tests").rglob("*.py")]
    assert [str(path) for path in files if len(path.read_text().splitlines()) > 500] == []


def test_import_nbep_does_not_load_numba_or_mpi_or_matplotlib():
    code = "import sys, nbep; print(*sorted({'numba', 'mpi4py', 'matplotlib', 'torch'} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == []
