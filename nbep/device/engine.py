"""The code that the emulator's engine runs, kept in the cache: the machine, and each kernel.

first process    source --Numba, LLVM--> object --> cache --> memory
later processes                                     cache --> memory     (numba is not imported)
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable
from functools import cache as once
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import nbep.emulator.engine
from nbep.emulator.engine import Stopped, switch

from . import cache
from .jit import KernelSpec, spec_of
from .terminal import progress

PACKAGES = "numba", "llvmlite", "numpy"


def why_not() -> str | None:
    """Why kernels cannot be compiled for the CPU here; None if they can."""
    missing = [name for name in ("numba", "llvmlite") if find_spec(name) is None]
    if missing:
        return f"compiled kernels need {' and '.join(missing)}: pip install numba"
    return switch.why_not()


class Code:
    """The machine and kernels as they are needed; see `nbep.emulator.engine.world`.

    only_kept: what is not in the cache is not compiled, and stops the run
    """

    def __init__(self, only_kept: bool = False):
        self.only_kept = only_kept

    def machine(self) -> Any:
        if self.only_kept and not _is_kept("machine"):
            raise Stopped("the machine is not in the cache")
        return _machine()

    def entry(self, function: Callable) -> int:
        """Where a kernel begins.

        Raises: Stopped if it is not in the cache and should be, or has no spec; CompileError if Numba refuses it
        """
        try:
            spec = spec_of(function)
        except TypeError as error:
            raise Stopped(str(error)) from error
        if self.only_kept and not _is_kept(_name(spec)):
            raise Stopped(f"{spec.label} is not in the cache")
        return _entry(spec)


@once
def _machine() -> Any:
    from nbep.emulator.engine.build import Library

    return Library(*_object_of("machine", "the emulator", _compile_machine))


@once
def _entry(spec: KernelSpec) -> int:
    from nbep.emulator.engine.build import Library

    _machine()
    name = _name(spec)
    library = Library(*_object_of(name, spec.label, lambda: _compile_kernel(spec, f"nbep_kernel_{name}")))
    (address,) = library.addresses.values()
    return address


def _name(spec: KernelSpec) -> str:
    return f"{spec.label}-{own_key(spec)}"


def _is_kept(name: str) -> bool:
    return name in _loaded or (cache.cache_folder() / _file(name)).is_file()


def _file(name: str) -> str:
    return f"{name}-{source_key()}.cpu"


_loaded: set[str] = set()


def _compile_machine() -> tuple[bytes, list[str]]:
    import nbep.emulator.engine.meeting  # noqa: F401 - with all that it is above
    from nbep.emulator.engine.build import compile_functions
    from nbep.emulator.engine.words import COMPILED

    functions: dict[str, Any] = {one.symbol: (one.function, one.result, one.arguments) for one in COMPILED.values()}
    return compile_functions(functions), list(functions)


def _compile_kernel(spec: KernelSpec, symbol: str) -> tuple[bytes, list[str]]:
    from nbep.emulator.engine.build import compile_functions

    from .compilers import cpu

    cpu.register()
    return compile_functions({symbol: (cpu.entry_of(spec), None, ())}), [symbol]


def _object_of(name: str, what: str, make: Callable[[], tuple[bytes, list[str]]]) -> tuple[bytes, list[str]]:
    """An object and its symbols, from the cache if they are there. The first line of a file has the symbols."""
    file = _file(name)
    _loaded.add(name)
    kept = cache.read(file)
    if kept is None:
        with progress("compiling for the CPU", 1) as advance:
            advance(description=what)
            code, symbols = make()
            advance()
        cache.keep(file, json.dumps(symbols).encode() + b"\n" + code)
        return code, symbols
    head, _, code = kept.partition(b"\n")
    return code, json.loads(head)


@once
def source_key() -> str:
    """A digest of all that an object depends on, besides the source of a kernel that is not nbep's."""
    import llvmlite.binding as llvm

    digest = hashlib.sha256()
    for folder in (Path(__file__).parent, Path(nbep.emulator.engine.__file__).parent):
        for path in sorted(folder.rglob("*.py")):
            digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    parts = [f"{name} {metadata.version(name)}" for name in PACKAGES if find_spec(name) is not None]
    parts += [platform.python_version(), llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()]
    digest.update("\n".join(parts).encode())
    return digest.hexdigest()[:24]


def own_key(spec: KernelSpec) -> str:
    """A digest of a kernel's code and of what it calls; nbep's own is in `source_key`."""
    digest = hashlib.sha256(repr(spec.hints).encode())
    open_ones: list[Any] = [spec.base or spec.function]
    seen: set[int] = set()
    while open_ones:
        one = open_ones.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, FunctionType):
            if (one.__module__ or "").startswith("nbep.device."):
                digest.update(f"{one.__module__} {one.__qualname__}".encode())
                continue
            names = [name for code in _codes(one.__code__) for name in code.co_names]
            open_ones += [one.__globals__[name] for name in sorted(set(names)) if name in one.__globals__]
            open_ones += [cell.cell_contents for cell in one.__closure__ or ()]
            open_ones += one.__defaults__ or ()
            for code in _codes(one.__code__):
                digest.update(code.co_code + repr((code.co_names, code.co_varnames, _plain(code.co_consts))).encode())
        elif isinstance(one, ModuleType):
            digest.update(one.__name__.encode())
        elif isinstance(one, type):
            digest.update(f"{one.__qualname__} {getattr(one, '__annotations__', '')}".encode())
        else:
            digest.update(repr(one).encode())
    return digest.hexdigest()[:12]


def _codes(code: CodeType) -> list[CodeType]:
    """A function's code, and that of those inside it."""
    return [code, *(inner for one in code.co_consts if isinstance(one, CodeType) for inner in _codes(one))]


def _plain(constants: tuple) -> tuple:
    return tuple(one for one in constants if not isinstance(one, CodeType))
