"""The code that the emulator's engine runs, kept in the cache: the machine, and each kernel.

first process    source --Numba, LLVM--> object --> cache --> memory
later processes                                     cache --> memory     (numba is not imported)
"""

from __future__ import annotations

import hashlib
import json
import platform
import time
from collections.abc import Callable
from functools import cache as once
from functools import partial
from importlib import metadata
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np

import nbep.emulator.engine
from nbep.emulator.engine import Stopped

from . import cache
from .diagnosis import explain
from .jit import KernelSpec, spec_of
from .terminal import progress

PACKAGES = "numba", "llvmlite", "numpy"


class Code:
    """The machine and kernels as they are needed; see `nbep.emulator.engine.world`.

    only_kept: what is not in the cache is not compiled, and stops the run; model: of memory
    """

    def __init__(self, only_kept: bool = False, model: str = "sc"):
        self.only_kept, self.model = only_kept, model
        self._names: dict[KernelSpec, str] = {}

    def machine(self) -> Any:
        if self.only_kept and not is_kept(f"machine-{self.model}"):
            raise Stopped("the machine is not in the cache")
        return machine(self.model)

    def entry(self, function: Callable) -> int:
        """Where a kernel begins.

        Raises: Stopped if it is not in the cache and should be, or has no spec; CompileError if Numba refuses it
        """
        try:
            spec = spec_of(function)
        except TypeError as error:
            raise Stopped(str(error)) from error
        if spec not in self._names:
            self._names[spec] = f"{spec.label}-{self.model}-{code_key(spec)}"
        name = self._names[spec]
        make = partial(_compile_kernel, spec, model=self.model)
        found = load(name, spec.label, make, self.model, self.only_kept)
        if found is None:
            raise Stopped(f"{spec.label} is not in the cache")
        return found


@once
def machine(model: str) -> Any:
    """The machine of a memory model."""
    from nbep.emulator.engine.build import Library

    return Library(*_object_of(f"machine-{model}", f"the emulator, {model}", lambda: _compile_machine(model)), model)


def load(name: str, what: str, make: Callable[[str], tuple[bytes, list[str]]], model: str, only_kept: bool) -> Any:
    """The address of a compiled function, kept in the cache; None if it is not there and should be.

    make: its object, and the symbol in it
    """
    from nbep.emulator.engine.build import Library

    if only_kept and not is_kept(name):
        return None
    if not _loaded.get(name):
        machine(model)
        library = Library(*_object_of(name, what, lambda: make(f"nbep_kernel_{name}")), model)
        (_loaded[name],) = library.addresses.values()
    return _loaded[name]


def is_kept(name: str) -> bool:
    return name in _loaded or (cache.cache_folder() / _file(name)).is_file()


def _file(name: str) -> str:
    return f"{name}-{source_key()}.cpu"


_loaded: dict[str, int] = {}  # where kernels begin; of the machine and of what is being loaded 0


def prefill(spec: KernelSpec, model: str = "sc") -> float:
    """Have a kernel in the cache, with the machine. The CPU seconds that it took.

    Raises: CompileError if Numba refuses it
    """
    start = time.process_time()
    Code(model=model).entry(spec.function)
    return time.process_time() - start


# Modules of the machine that are compiled for one model alone.
ONLY = dict.fromkeys(("knowledge", "notes", "races", "signals", "copy_signals", "host_signals"), "checked")
ONLY |= {"pending": "delayed", "delayed": "delayed"}


def _compile_machine(model: str) -> tuple[bytes, list[str]]:
    import nbep.emulator.engine.host_signals
    import nbep.emulator.engine.meeting  # noqa: F401 - with all that it is above
    from nbep.emulator.engine.build import compile_functions
    from nbep.emulator.engine.words import COMPILED

    functions: dict[str, Any] = {
        one.symbol: (one.function, one.result, one.arguments)
        for one in COMPILED.values()
        if ONLY.get(one.function.__module__.rpartition(".")[2], model) == model
    }
    return compile_functions(functions, model), list(functions)


def _compile_kernel(spec: KernelSpec, symbol: str, model: str = "sc") -> tuple[bytes, list[str]]:
    from nbep.emulator.engine.build import compile_functions

    from .compilers import cpu

    try:
        cpu.register()
        return compile_functions({symbol: (cpu.entry_of(spec), None, ())}, model), [symbol]
    except Exception as error:
        from .compile import CompileError

        raise CompileError(f"{spec.name} for the CPU: {explain(error, spec.function)}") from error


def _object_of(name: str, what: str, make: Callable[[], tuple[bytes, list[str]]]) -> tuple[bytes, list[str]]:
    """An object and its symbols, from the cache if they are there. The first line of a file has the symbols."""
    file = _file(name)
    _loaded[name] = 0
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
    parts = [f"{name} {metadata.version(name)}" for name in PACKAGES]
    parts += [platform.python_version(), llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()]
    digest.update("\n".join(parts).encode())
    return digest.hexdigest()[:24]


def code_key(spec: KernelSpec) -> str:
    """A digest of the code of a kernel and of all that it calls, as it is in this process: some of it may be edited."""
    return digest_of([spec.base or spec.function], (spec.params, [repr(hint) for hint in spec.hints.values()]))


def digest_of(functions: list[Any], more: Any) -> str:
    """A digest of functions, of all that they call, and of what `repr` says of something more."""
    digest = hashlib.sha256(repr(more).encode())
    seen: set[int] = set()
    open_ones = list(functions)
    while open_ones:
        one = open_ones.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if hasattr(one, "versions"):  # see `by_type`
            open_ones += one.versions.values()
        one = getattr(one, "__wrapped__", one)
        if not isinstance(one, FunctionType):
            digest.update(repr(_plain(one)).encode())
            continue
        digest.update(f"{one.__module__} {one.__qualname__}".encode())
        for code in _codes(one.__code__):
            digest.update(code.co_code + repr((code.co_names, code.co_varnames, _plain(code.co_consts))).encode())
            found = [one.__globals__[name] for name in code.co_names if name in one.__globals__]
            inside = [module for module in found if isinstance(module, ModuleType)]
            open_ones += found
            open_ones += [vars(module)[name] for module in inside for name in code.co_names if name in vars(module)]
        open_ones += [cell.cell_contents for cell in one.__closure__ or ()]
        open_ones += one.__defaults__ or ()
    return digest.hexdigest()[:16]


def _codes(code: CodeType) -> list[CodeType]:
    """A function's code, and that of those inside it."""
    return [code, *(inner for one in code.co_consts if isinstance(one, CodeType) for inner in _codes(one))]


def _plain(one: Any) -> Any:
    """What of a value is the same in each process."""
    if isinstance(one, tuple):
        return tuple(_plain(part) for part in one)
    if isinstance(one, np.ndarray):
        return one.dtype.str, one.shape, one.tobytes()
    if isinstance(one, int | float | str | bytes | np.generic | None):
        return one
    return getattr(one, "__name__", type(one).__name__), [*getattr(one, "__annotations__", ())]
