"""Short names of what stands in nbep/lab and nbep/specimens: `nbep.debug` is `nbep.lab.debug`, the same module."""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

HOMES = {
    "lab": ("check", "debug", "litmus", "notebook", "numba_cuda", "puzzle", "trace"),
    "specimens": ("scenarios", "views", "workloads"),
}
MOVED = {f"nbep.{name}": f"nbep.{home}.{name}" for home, names in HOMES.items() for name in names}


def place_of(name: str) -> str | None:
    """The full name of a module by its short one: "nbep.lab.trace.style" for "nbep.trace.style"."""
    first, second, *rest = (*name.split("."), "")
    home = MOVED.get(f"{first}.{second}")
    return home and ".".join((home, *rest[:-1]))


class Doors(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if place_of(name) else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(place_of(spec.name) or "")
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Put the module's own spec back, in place of which the import system has put the door's."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


sys.meta_path.insert(0, Doors())
