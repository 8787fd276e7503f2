"""The lower half of nbep knows nothing of experts. docs/architecture.md says which folder is in which half."""

import ast
import pkgutil
import re
import sys
from functools import cache
from importlib import import_module

import pytest
from file_imports import FILES, ROOT, imported_modules, module_name, tree_of

from nbep.doors import MOVED

PAGE = (ROOT / "docs" / "architecture.md").read_text()
TABLE = PAGE[PAGE.index("## Two halves") : PAGE.index("## Folders")]
LOWER, UPPER = "lower", "upper"
PATHS = {
    path.removesuffix(".py").replace("/", "."): half
    for half, cells in re.findall(r"^\| (lower|upper) \| (.*) \|$", TABLE, re.MULTILINE)
    for path in re.findall(r"\]\(\.\./([\w/.]+?)(?:/__init__\.py)?\)", cells)
}


def half_of(module: str) -> str:
    """That of the longest path in the table that holds the module; the upper one holds the rest."""
    found = [path for path in PATHS if module == path or module.startswith(f"{path}.")]
    return PATHS[max(found, key=len)] if found else UPPER


def test_the_table_names_files_that_there_are_and_both_halves():
    modules = {module_name(path) for path in FILES}
    assert set(PATHS) <= modules
    assert set(PATHS.values()) == {LOWER, UPPER}
    sizes = {half: sum(half_of(module) == half for module in modules) for half in (LOWER, UPPER)}
    assert min(sizes.values()) > 150


def test_the_lower_half_imports_nothing_of_the_upper_one():
    """For types alone, and within functions, too. `nbep` itself is of the upper half."""
    upwards = [
        f"{module} imports {imported}"
        for module, every in imported_modules().items()
        for imported in every
        if half_of(module) == LOWER and half_of(imported) == UPPER
    ]
    assert upwards == []


@cache
def names_of(half: str) -> frozenset[str]:
    """Device functions, kernels and classes of a half, of two words and more: one word may mean anything."""
    return frozenset(
        node.name
        for path in FILES
        if half_of(module_name(path)) == half
        for node in tree_of(path).body
        if isinstance(node, ast.ClassDef) or (isinstance(node, ast.FunctionDef) and node.decorator_list)
        if re.search(r"[a-z](_|[A-Z])[a-z]", node.name)
    )


def texts(tree: ast.AST) -> list[str]:
    """Strings that a program uses: docstrings may speak of anything."""
    spoken = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    constants = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in spoken]
    return [node.value for node in constants if isinstance(node.value, str)]


PLACES = re.compile(r"nbep[./](?:device[./](?:kernels|layout)|deep_ep|specimens|bench|demo)\b")
# Of a class of the emulator, which happens to be called like a device function.
OWN = {"has_failed"}


def test_no_text_of_the_lower_half_names_what_is_in_the_upper_one():
    upper = names_of(UPPER) - names_of(LOWER) - OWN
    named = [
        f"{module_name(path)}: {text!r}"
        for path in FILES
        if half_of(module_name(path)) == LOWER
        for text in texts(tree_of(path))
        if text in upper or PLACES.search(text)
    ]
    assert named == []


def test_no_text_of_the_emulator_names_a_protocol():
    protocols = {
        node.name
        for path in (ROOT / "nbep" / "device" / "protocols").glob("*.py")
        for node in tree_of(path).body
        if isinstance(node, ast.FunctionDef)
    }
    named = [
        f"{module_name(path)}: {text!r}"
        for path in (ROOT / "nbep" / "emulator").rglob("*.py")
        for text in texts(tree_of(path))
        if (text in protocols and "_" in text) or "protocols" in text
    ]
    assert named == []


@pytest.mark.parametrize("short", sorted(MOVED))
def test_a_short_name_is_a_door_to_the_same_module(short):
    """With what stands in it, as an attribute, and by its old name, as programs of save_call import it."""
    module = import_module(short)
    assert module is import_module(MOVED[short]) is sys.modules[short]
    assert module.__name__ == module.__spec__.name == MOVED[short]
    for inner in pkgutil.iter_modules(getattr(module, "__path__", ())):
        assert import_module(f"{short}.{inner.name}") is import_module(f"{MOVED[short]}.{inner.name}")
