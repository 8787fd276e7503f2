"""The code that the emulator's engine runs, kept in the cache: the machine, and each kernel.

first process      source --Numba--> LLVM's code --> cache --> object --> cache --> memory
another model                                        cache --> object --> cache --> memory
later processes                                                           cache --> memory     (without Numba)
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable, Iterator
from functools import cache as once
from functools import partial
from importlib import metadata
from itertools import chain
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np

import nbep.emulator.engine
from nbep.emulator.engine import Stopped
from nbep.emulator.engine.build import Library, compile_functions, emit

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
        self._name_of = once(lambda spec: f"{spec.label}-{code_key(spec)}")

    def machine(self) -> Any:
        if self.only_kept and not is_kept("machine", self.model):
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
        name = self._name_of(spec)
        found = load(name, spec.label, partial(_compile_kernel, spec), self.model, self.only_kept)
        if found is None:
            raise Stopped(f"{spec.label} is not in the cache")
        return found


@once
def machine(model: str) -> Library:
    """The machine of a memory model."""
    parts = {"machine": lambda: _compile_machine("")}
    if model in ONLY.values():
        parts[f"machine_{model}"] = lambda: _compile_machine(model)
    return _library_of("machine", f"the emulator, {model}", parts, model)


def load(name: str, what: str, make: Callable[[str], bytes], model: str, only_kept: bool) -> int | None:
    """The address of a compiled function, kept in the cache; None if it is not there and should be.

    make: LLVM's code of it, with the symbol that is given
    """
    if only_kept and not is_kept(name, model):
        return None
    if not _loaded.get((name, model)):
        machine(model)
        symbol = f"nbep_kernel_{name}"
        library = _library_of(name, what, {name: lambda: (make(symbol), [symbol])}, model)
        (_loaded[name, model],) = library.addresses.values()
    return _loaded[name, model]


Made = tuple[bytes, list[str]]  # code and its symbols


def _library_of(name: str, what: str, parts: dict[str, Callable[[], Made]], model: str) -> Library:
    """What parts are for a model, loaded. Where it is not in the cache the parts may be, as they are for all models."""

    def made() -> Made:
        with progress(f"compiling {what} for the CPU", None):
            codes, symbols = zip(*(_kept(_file(part, "bc"), make) for part, make in parts.items()), strict=True)
            return emit(codes, model), [*chain.from_iterable(symbols)]

    _loaded[name, model] = 0
    return Library(*_kept(_file(f"{name}-{model}"), made), model)


def _kept(file: str, make: Callable[[], Made]) -> Made:
    """What a file of the cache has, its symbols in the first line; made and kept there if it is not there."""
    kept = cache.read(file)
    if kept is None:
        code, symbols = make()
        cache.keep(file, json.dumps(symbols).encode() + b"\n" + code)
        return code, symbols
    head, _, code = kept.partition(b"\n")
    return code, json.loads(head)


def is_kept(name: str, model: str) -> bool:
    return (name, model) in _loaded or (cache.cache_folder() / _file(f"{name}-{model}")).is_file()


def _file(name: str, kind: str = "cpu") -> str:
    return f"{name}-{source_key()}.{kind}"


_loaded: dict[tuple[str, str], int] = {}  # where kernels begin; of the machine and of what is being loaded 0


# Modules of the machine that are compiled for one model alone.
ONLY = dict.fromkeys(("knowledge", "notes", "races", "signals", "copy_signals", "host_signals"), "checked")
ONLY |= {"pending": "delayed", "delayed": "delayed"}


def _compile_machine(only: str) -> Made:
    """The machine's functions: those of all models, or those of one alone."""
    import nbep.emulator.engine.host_signals
    import nbep.emulator.engine.meeting  # noqa: F401 - with all that it is above
    from nbep.emulator.engine.words import COMPILED

    functions: dict[str, Any] = {
        one.symbol: (one.function, one.result, one.arguments)
        for one in COMPILED.values()
        if ONLY.get(one.function.__module__.rpartition(".")[2], "") == only
    }
    return compile_functions(functions), list(functions)


def _compile_kernel(spec: KernelSpec, symbol: str) -> bytes:
    from .compilers import cpu

    try:
        cpu.register()
        for one in called_by([spec.base or spec.function]):
            cpu.check_unedited(one)
        return compile_functions({symbol: (cpu.entry_of(spec), None, ())}, cpu.INTEGER_ERRORS)
    except Exception as error:
        from .compile import CompileError

        raise CompileError(f"{spec.name} for the CPU: {explain(error, spec.function)}") from error


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
    for one in called_by(functions):
        if not isinstance(one, FunctionType):
            digest.update(repr(plain(one)).encode())
            continue
        digest.update(f"{one.__module__} {one.__qualname__}".encode())
        for code in _codes(one.__code__):
            digest.update(code.co_code + repr((code.co_names, code.co_varnames, plain(code.co_consts))).encode())
    return digest.hexdigest()[:16]


def called_by(functions: list[Any]) -> Iterator[Any]:
    """Functions, all that they call, and the values that they name."""
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
        yield one
        if isinstance(one, FunctionType):
            open_ones += named_by(one)


def named_by(function: FunctionType) -> list[Any]:
    """What the names of a function mean, with those of modules, and its defaults."""
    named: list[Any] = []
    for code in _codes(function.__code__):
        found = [function.__globals__[name] for name in code.co_names if name in function.__globals__]
        inside = [module for module in found if isinstance(module, ModuleType)]
        named += found
        named += [vars(module)[name] for module in inside for name in code.co_names if name in vars(module)]
    return [*named, *(cell.cell_contents for cell in function.__closure__ or ()), *(function.__defaults__ or ())]


def _codes(code: CodeType) -> list[CodeType]:
    """A function's code, and that of those inside it."""
    return [code, *(inner for one in code.co_consts if isinstance(one, CodeType) for inner in _codes(one))]


def plain(one: Any) -> Any:
    """What of a value is the same in each process."""
    if isinstance(one, tuple):
        return tuple(plain(part) for part in one)
    if isinstance(one, np.ndarray):
        return one.dtype.str, one.shape, one.tobytes()
    if isinstance(one, int | float | str | bytes | np.generic | None):
        return one
    names = (getattr(one, kind, None) for kind in ("__name__", "name"))
    return next((name for name in names if isinstance(name, str)), type(one).__name__), [
        *getattr(one, "__annotations__", ())
    ]
