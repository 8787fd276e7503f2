"""Layers import downwards only, and starting nbep stays light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "nbep").rglob("*.py"))
# Lowest first. A file may import from its own layer and from those before it.
LAYERS = ("nbep.emulator", "nbep.device", "nbep.host", "nbep")
# Likewise the rooms inside one of them, packages or files; the package itself may import all of them.
ROOMS = {
    "nbep.emulator": [
        {name} for name in (
            "clock", "process_lock", "machine", "models", "schedule", "tracing", "run", "reports", "world", "process",
        )
    ],
    "nbep.host": [
        {
            "arguments", "dtypes", "target.base", "target.current", "target.forks", "target.launches", "target.lent",
            "target.memory", "target.new_arrays", "target.streams", "target.views",
        },
        {"ranks"}, {"faults"}, {"target"}, {"transport"}, {""}, {"symmetric", "connect", "spawn", "cast"}, {"buffer"},
    ],
}  # fmt: skip
# Files that may import each other, for types: a thread has a block and a warp, which have threads.
CLUSTER = "access", "block", "bulk", "faults", "stream", "thread", "warp"
NATURAL = [{f"nbep.emulator.machine.{name}" for name in CLUSTER}]
LIGHT = {*sys.stdlib_module_names, "greenlet", "ml_dtypes", "nbep", "numpy"}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path) for path in FILES}


def layer(module: str) -> int:
    return next(i for i, prefix in enumerate(LAYERS) if module == prefix or module.startswith(prefix + "."))


def imports(path: Path) -> list[tuple[str, bool]]:
    """(module, whether it is imported at the top of the file), those for types too; relative imports as absolute."""
    package = module_name(path) if path.name == "__init__.py" else module_name(path).rpartition(".")[0]
    tree = ast.parse(path.read_text())
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, node in tree.body) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base += [node.module] if node.module else []
            for alias in node.names:
                module = ".".join([*base, alias.name])
                found.append((module if module in MODULES else ".".join(base), node in tree.body))
    return found


def room(module: str, folder: str) -> int:
    """The place of a module's room in its folder: the longest name that fits. That of the folder itself is the highest.

    A file that no room names is in the room "", if there is one.
    """
    inside = module.removeprefix(folder).removeprefix(".")
    fits = [
        (len(name), number)
        for number, names in enumerate(ROOMS[folder])
        for name in names
        if name in (inside, "") or inside.startswith(name + ".")
    ]
    return max(fits)[1] if inside else len(ROOMS[folder])


def test_modules_import_downwards_only():
    upwards = [
        f"{module_name(path)} imports {module}"
        for path in FILES
        for module, _ in imports(path)
        if module.split(".")[0] == "nbep" and module != "nbep.version" and layer(module) > layer(module_name(path))
    ]
    assert upwards == []


@pytest.mark.parametrize("folder", ROOMS)
def test_rooms_import_downwards_only(folder):
    upwards = [
        f"{name} imports {module}"
        for path in FILES
        if (name := module_name(path)).startswith(folder)
        for module, _ in imports(path)
        if module.startswith(folder) and room(module, folder) > room(name, folder)
    ]
    assert upwards == []


@pytest.mark.parametrize("folder", ROOMS)
def test_no_files_import_each_other_in_a_circle(folder):
    graph = {
        module_name(path): {module for module, _ in imports(path)} & MODULES
        for path in FILES
        if module_name(path).startswith(folder)
    }

    def reach(name: str) -> set[str]:
        found: set[str] = set()
        ahead = [name]
        while ahead:
            for module in graph.get(ahead.pop(), set()) - found:
                found.add(module)
                ahead.append(module)
        return found

    reached = {name: reach(name) for name in graph}
    circles = [{one for one in reached[name] if name in reached.get(one, ())} for name in graph]
    assert [sorted(circle) for circle in circles if circle and not any(circle <= natural for natural in NATURAL)] == []


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


DEEP_EP_VERBS = {"Buffer.__init__", "NormalVerbs.dispatch"} | {
    f"LowLatencyVerbs.low_latency_{verb}" for verb in ("dispatch", "combine")
}


def test_functions_of_the_host_have_at_most_eight_positional_parameters():
    """But those whose signatures are DeepEP's: a call goes on from them as one object."""
    longer = set()
    for path in FILES:
        if not module_name(path).startswith(("nbep.host", "nbep.deep_ep")):
            continue
        tree = ast.parse(path.read_text())
        names = {f: c.name + "." for c in ast.walk(tree) if isinstance(c, ast.ClassDef) for f in c.body}
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                given = [arg.arg for arg in (*node.args.posonlyargs, *node.args.args) if arg.arg not in ("self", "cls")]
                longer |= {names.get(node, "") + node.name} if len(given) > 8 else set()
    assert longer == DEEP_EP_VERBS
