"""Stand-ins for what a client imports besides deep_ep: the few files that call it run as they are, on a CPU.

real       a module of the client: its file is loaded from the source tree
given      what the run needs of the other modules, by its full name
the rest   classes that are false, that answer every call and every attribute with another such class, and that
           can be subclassed
"""

import sys
from collections.abc import Mapping
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any


class _Meta(type):
    def __bool__(cls) -> bool:
        return False

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if "stands_in" in vars(cls):
            return make(f"{cls.__name__}()")
        return super().__call__(*args, **kwargs)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return make(name)

    def __getitem__(cls, index: Any) -> Any:
        return make(f"{cls.__name__}[]")


def make(name: str) -> Any:
    return _Meta(name, (), {"stands_in": True})


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return make(name)


class StandIns(MetaPathFinder, Loader):
    """Answers the imports of the modules of one package, whose folder lies in root."""

    def __init__(self, root: Path, real: set[str], given: Mapping[str, Any]):
        self._root, self._real, self._given = root, real, given
        self._packages = {name.partition(".")[0] for name in real}

    def install(self) -> None:
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] not in self._packages:
            return None
        if name in self._real:
            return spec_from_file_location(name, self._root / (name.replace(".", "/") + ".py"))
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        for name, value in self._given.items():
            owner, _, attribute = name.rpartition(".")
            if owner == module.__name__:
                setattr(module, attribute, value)
