"""What each file of nbep imports, read from its source."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "nbep").rglob("*.py"))


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> list[tuple[str, bool]]:
    """(module, whether it is imported at the top of the file); relative imports as absolute names."""
    return [(module, at_top) for module, at_top, _ in _imports(path)]


@cache
def _imports(path: Path) -> list[tuple[str, bool, list[str]]]:
    package = module_name(path) if path.name == "__init__.py" else module_name(path).rpartition(".")[0]
    tree = tree_of(path)
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, node in tree.body, [""]) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found.append((module, node in tree.body, [alias.name for alias in node.names]))
    return found


@cache
def imported_modules() -> dict[str, set[str]]:
    """What each module of nbep imports from it, for types alone too: `from a import b` is a.b if that is a module."""
    modules = {module_name(path): path for path in FILES}
    return {
        module: {
            full if (full := f"{imported}.{name}") in modules else imported
            for imported, name in imported_names(path)
            if imported in modules
        }
        for module, path in modules.items()
    }


def imported_names(path: Path) -> list[tuple[str, str]]:
    """(module, name) of each import; relative imports as absolute names."""
    return [(module, name) for module, _, names in _imports(path) for name in names]
