"""The few files of a client that call deep_ep, run as they are; stand-ins for what else they import.

real       a module of the client: its file is loaded from the source tree
given      what the run needs of the other modules, by its full name
the rest   classes that are false, that answer every call and every attribute with another such class, and that
           can be subclassed
edits      (file name, old text, new text): faults that are planted
copy       a name for this copy of the client: torch has one operation of a name, so the namespaces of its own
           operations get it, too
"""

import linecache
import re
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

Edit = tuple[str, str, str]
NAMESPACES = re.compile(r"""(?:Library\(\s*|custom_op\(\s*)["'](\w+)(?:["']|::)""")


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


class _Source(Loader):
    def __init__(self, path: Path, edits: Sequence[Edit], copy: str):
        self._path, self._edits, self._copy = path, edits, copy

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Raises: ValueError for an edit whose old text is not there, or there more than once"""
        text, name = self._path.read_text(), str(self._path)
        for file, old, new in self._edits:
            if file == self._path.name:
                if text.count(old) != 1:
                    raise ValueError(f"edits: {old!r} is {text.count(old)} times in {file}; must be there once")
                text = text.replace(old, new)
        for namespace in set(NAMESPACES.findall(text)) if self._copy else ():
            text = re.sub(rf"""(["']|ops\.){namespace}(?=["'.]|::)""", rf"\g<1>{namespace}_{self._copy}", text)
        if self._edits:  # else the lines of the file are those of the text
            name += f" {self._copy}"
            linecache.cache[name] = (len(text), None, text.splitlines(True), name)
        module.__file__ = name
        exec(compile(text, name, "exec"), vars(module))


class StandIns(MetaPathFinder, Loader):
    """Answers the imports of the modules of the packages that real modules are of, and of `also`. root: their folder"""

    def __init__(
        self,
        root: Path,
        real: set[str],
        given: Mapping[str, Any],
        also: Sequence[str] = (),
        edits: Sequence[Edit] = (),
        copy: str = "",
    ):
        self._root, self._real, self._given, self._edits, self._copy = root, real, given, edits, copy
        self._packages = {name.partition(".")[0] for name in real} | set(also)

    def install(self) -> None:
        sys.meta_path.insert(0, self)

    def load(self) -> dict[str, ModuleType]:
        """The real modules, new ones; imports that they make later find stand-ins, too."""
        for name in [name for name in sys.modules if name.partition(".")[0] in self._packages]:
            del sys.modules[name]
        sys.meta_path[:] = [each for each in sys.meta_path if getattr(each, "_packages", None) != self._packages]
        self.install()
        return {name: import_module(name) for name in sorted(self._real)}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] not in self._packages:
            return None
        if name in self._real:
            file = self._root / (name.replace(".", "/") + ".py")
            return ModuleSpec(name, _Source(file, self._edits, self._copy), origin=str(file))
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        for name, value in self._given.items():
            owner, _, attribute = name.rpartition(".")
            if owner == module.__name__:
                setattr(module, attribute, value)
