"""Layers import downwards only, and starting nbep stays light."""

import ast
import subprocess
import sys

import pytest
from file_imports import FILES, ROOT, imported_modules, imports, module_name

# Lowest first. A file may import from its own layer and from those before it.
LAYERS = ("nbep.emulator", "nbep.device", "nbep.host", "nbep")
# The same inside a layer, by the longest name that fits: a room is a package, or a file on its own.
ROOMS = (
    ("nbep.emulator.process_lock",),
    ("nbep.emulator.process_lock",),
    ("nbep.emulator.machine",),
    ("nbep.emulator.models",),
    ("nbep.emulator.schedule",),
    ("nbep.emulator.tracing",),
    ("nbep.emulator.run",),
    ("nbep.emulator.reports",),
    ("nbep.emulator.world",),
    ("nbep.emulator.engine",),
    ("nbep.emulator.process",),
    ("nbep.emulator",),
    (
        "nbep.host.arguments",
        "nbep.host.entry",
        "nbep.host.target.base",
        "nbep.host.target.launches",
        "nbep.host.target.checked_arrays",
        "nbep.host.target.memory",
        "nbep.host.target.arrays",
    ),
    ("nbep.host.ranks",),
    ("nbep.host.faults",),
    ("nbep.host.target",),
    ("nbep.host.transport",),
    ("nbep.host.reports",),
    ("nbep.host.shared_memory", "nbep.host.spawn"),
    ("nbep.host",),
    ("nbep.host.cast",),
    ("nbep.host.buffer", "nbep.host.elastic.buffer"),
)
LEAVES = ("nbep.registry", "nbep.version")  # import nothing of nbep
LAYERS_WITHOUT_CIRCLES = ("nbep.emulator", "nbep.host")
# These know each other: a thread has a block and a warp, which have threads.
CLUSTER = {
    f"nbep.emulator.machine.{name}" for name in ("access", "block", "bulk", "faults", "stream", "thread", "warp")
}
LIGHT = {*sys.stdlib_module_names, "greenlet", "lazy_loader", "ml_dtypes", "nbep", "numpy"}


def layer(module: str) -> int:
    return next(i for i, prefix in enumerate(LAYERS) if is_in(module, prefix))


def is_in(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def room(module: str) -> int:
    """The number of its room; modules outside of all rooms are in none."""
    found = [(len(name), i) for i, names in enumerate(ROOMS) for name in names if is_in(module, name)]
    return max(found)[1] if found else -1


def test_modules_import_downwards_only():
    upwards = [
        f"{module_name(path)} imports {module}"
        for path in FILES
        for module, _ in imports(path)
        if module.split(".")[0] == "nbep" and module not in LEAVES and layer(module) > layer(module_name(path))
    ]
    assert upwards == []


def test_rooms_of_a_layer_import_downwards_only():
    upwards = [
        f"{module} imports {imported}"
        for module, all_imported in imported_modules().items()
        for imported in all_imported
        if room(module) >= 0 and room(imported) > room(module)
    ]
    assert upwards == []


def test_no_files_of_a_layer_import_each_other_in_a_circle():
    """Imports for types alone count, too. What imports nothing that is left goes, until only circles are left."""
    for package in LAYERS_WITHOUT_CIRCLES:
        left = {
            module: found - CLUSTER if module in CLUSTER else found
            for module, found in imported_modules().items()
            if is_in(module, package)
        }
        while ends := [module for module, found in left.items() if not found & left.keys() - {module}]:
            for module in ends:
                del left[module]
        assert sorted(left) == []


def test_emulator_starts_without_anything_heavy():
    heavy = [
        f"{module_name(path)} imports {module}"
        for path in FILES
        for module, at_top in imports(path)
        if layer(module_name(path)) == 0
        and at_top
        and module.split(".")[0] not in LIGHT
        and not is_in(module_name(path), "nbep.emulator.engine")  # loaded when it is asked for
    ]
    assert heavy == []


def test_no_file_has_more_than_500_lines():
    files = [*FILES, *(ROOT / "tests").rglob("*.py")]
    assert [str(path) for path in files if len(path.read_text().splitlines()) > 500] == []


@pytest.mark.parametrize(
    ("statement", "fewer_than"),
    [("import nbep", 6), ("import nbep.emulator", 7), ("from nbep.emulator import World", 80)],
)
def test_an_import_loads_only_what_it_asks_for(statement, fewer_than):
    code = f"import sys; {statement}; print(*sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(out.stdout.split())
    assert not loaded & {"numba", "mpi4py", "matplotlib", "torch"}
    assert sum(name.split(".")[0] == "nbep" for name in loaded) < fewer_than


@pytest.mark.parametrize("package", ["nbep", "nbep.emulator"])
def test_every_public_name_is_there_when_somebody_asks_for_it(package):
    """In a process of its own: what another test has imported is there already."""
    code = f"import {package} as package; print(*[name for name in package.__all__ if getattr(package, name) is None])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == []


def test_buffers_and_emulated_ranks_load_neither_numba_nor_mpi_nor_matplotlib_nor_torch():
    code = "import sys, nbep; nbep.Buffer, nbep.spawn; print(*sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"numba", "mpi4py", "matplotlib", "torch"} & set(out.stdout.split())


DEEP_EP_VERBS = {
    *("Buffer.__init__", "NormalVerbs.dispatch"),
    *(f"LowLatencyVerbs.low_latency_{verb}" for verb in ("dispatch", "combine")),
    *(f"Elastic{name}" for name in ("Buffer.__init__", "Verbs.dispatch", "Verbs.combine")),
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
