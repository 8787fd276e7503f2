"""From functions to machine code: Numba makes LLVM's code of each, all of an object are optimized together.

The first takes most of the time, and serves all memory models: `emit` says which of them it is.

An object has C functions of integers, and calls those of others by their symbols. It belongs to no process: it is kept
in the cache, and is loaded without Numba. Importing this imports llvmlite.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import llvmlite.binding as llvm

from .state import DIRECTORY, TABLES_SYMBOL, address_of
from .switch import SWITCH, switch_module

OPTIMIZATION = 2
ASKED = "checked", "delayed"  # which of them it is, compiled functions ask: see `words`


# --- loading: what needs no Numba --------------------------------------------------------------------------------


def target_machine() -> Any:
    """A new one: an execution engine frees the one that it is given."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    llvm.initialize_native_asmparser()
    target = llvm.Target.from_default_triple()
    features = llvm.get_host_cpu_features().flatten()
    return target.create_target_machine(
        llvm.get_host_cpu_name(), features, OPTIMIZATION, codemodel="jitdefault", jit=True
    )


@cache
def _linker() -> Any:
    """What loads objects. Their symbols are those of the tables, of the switch, of C, and of objects before them."""
    llvm.add_symbol(TABLES_SYMBOL, address_of(DIRECTORY))
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), target_machine())
    engine.add_module(
        llvm.parse_assembly(
            switch_module() + f"define i64 @nbep_switch_at() {{ ret i64 ptrtoint (ptr @{SWITCH} to i64) }}\n"
        )
    )
    engine.finalize_object()
    where = ctypes.CFUNCTYPE(ctypes.c_int64)(engine.get_function_address("nbep_switch_at"))
    llvm.add_symbol(SWITCH, where())
    return engine


class Library:
    """A loaded object: its functions by symbol, as those are called for "sc"."""

    def __init__(self, code: bytes, symbols: list[str], model: str = "sc"):
        engine = _linker()
        engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        engine.finalize_object()
        self.addresses = {symbol: engine.get_function_address(symbol_of(symbol, model)) for symbol in symbols}
        for symbol, address in self.addresses.items():
            llvm.add_symbol(symbol_of(symbol, model), address)

    def function(self, symbol: str, result: Any, *arguments: Any) -> Callable:
        """A function, as Python calls it: while it runs, no other thread of Python's does."""
        return ctypes.PYFUNCTYPE(result, *arguments)(self.addresses[symbol])


# --- compiling ---------------------------------------------------------------------------------------------------


def compile_functions(functions: dict[str, tuple[Callable, Any, tuple]], error_model: str = "numpy") -> bytes:
    """LLVM's code of some functions. symbol -> the function, Numba's type of its result, and those of its arguments

    error_model: what arithmetic raises, by Numba's name for it
    Where None is the type, the function that others call gives 0, or another number if it has raised something.

    Raises: numba.core.errors.NumbaError for what Numba does not compile
    """
    from numba.core import errors, types
    from numba.core.compiler import Flags, compile_extra
    from numba.core.compiler_lock import global_compiler_lock
    from numba.core.registry import cpu_target

    typing, target = cpu_target.typing_context, cpu_target.target_context
    flags = Flags()
    flags.no_cpython_wrapper = flags.no_cfunc_wrapper = True
    flags.error_model = error_model
    with global_compiler_lock, plain_libraries(target.codegen()), variables_checked(), warnings.catch_warnings():
        warnings.simplefilter("ignore", errors.NumbaWarning)
        typing.refresh()
        target.refresh()
        library = target.codegen().create_library("nbep")
        for symbol, (function, result, arguments) in functions.items():
            made = compile_extra(typing, target, function, arguments, result or types.none, flags, {})
            library.add_linking_library(made.library)
            library.add_llvm_module(llvm.parse_assembly(_as_c(symbol, made.fndesc.llvm_func_name, result, arguments)))
        module = library._final_module
        for one in _all_under(library):
            part = one._get_module_for_linking()
            for function in part.functions:
                if not function.is_declaration:
                    function.linkage = "weak_odr"  # else what nobody calls yet would be left out
            module.link_in(part, preserve=True)
        for function in module.functions:
            if not function.is_declaration:
                function.linkage = "external" if function.name in functions else "internal"
        return module.as_bitcode()


def emit(codes: Iterable[bytes], model: str) -> bytes:
    """The object of some LLVM code for a memory model, with the symbols that `symbol_of` says."""
    answers = "\n".join(f"define linkonce_odr i64 @nbep_is_{one}() {{ ret i64 {int(model == one)} }}" for one in ASKED)
    module = llvm.parse_assembly(answers)
    for code in codes:
        module.link_in(llvm.parse_bitcode(code))
    for function in module.functions:
        if function.name.startswith("nbep_") and function.name != SWITCH:
            function.name = symbol_of(function.name, model)
    machine = target_machine()
    options = llvm.create_pipeline_tuning_options(speed_level=OPTIMIZATION)
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)
    return machine.emit_object(module)


def symbol_of(symbol: str, model: str) -> str:
    """Machines of two models, and kernels that call them, may be loaded at once."""
    return symbol if model == "sc" else symbol.replace("nbep_", f"nbep_{model}_", 1)


def _as_c(symbol: str, name: str, result: Any, arguments: tuple) -> str:
    """LLVM's text of a C function that calls one of Numba, which wants places for its result and its error."""
    kinds = ["ptr", "ptr", *(LLVM_NAMES[kind.name] for kind in arguments)]
    given = [f"{kind} %a{i}" for i, kind in enumerate(kinds)]
    returned = "i64" if result is None else LLVM_NAMES[result.name]
    made = "zext i32 %status to i64" if result is None else f"load {returned}, ptr %a0"
    ending = "ret void" if returned == "void" else f"%value = {made}\nret {returned} %value"
    return f"""
declare i32 @"{name}"({", ".join(kinds)})
define {returned} @{symbol}({", ".join(given[2:])}) {{
%a0 = alloca i64
%a1 = alloca ptr
%status = call i32 @"{name}"({", ".join(given)})
{ending}
}}
"""


LLVM_NAMES = {"int64": "i64", "float64": "double", "none": "void"}


@contextmanager
def plain_libraries(codegen: Any) -> Iterator[None]:
    """While this is open, Numba only makes text: it optimizes nothing, and loads nothing."""
    usual, codegen._library_class = codegen._library_class, _plain_class()
    codegen.set_env = lambda name, env: None  # what is not loaded has no globals to set
    try:
        yield
    finally:
        codegen._library_class = usual
        del codegen.set_env


@cache
def _plain_class() -> Any:
    from numba.core.codegen import JITCodeLibrary

    class Plain(JITCodeLibrary):
        def _optimize_functions(self, module: Any) -> None:
            module.data_layout = self._codegen._data_layout

        def finalize(self) -> None:
            self._finalized = True

        def get_pointer_to_function(self, name: str) -> int:
            return 0

    return Plain


@contextmanager
def variables_checked() -> Iterator[None]:
    """While this is open, Numba refuses functions in which a variable may have no value, where it would only warn."""
    from numba.core import errors, ssa

    def refuse(name: str, place: Any) -> None:
        raise errors.NumbaWarning(f"variable {name} may have no value", loc=place)

    usual, ssa._warn_about_uninitialized_variable = ssa._warn_about_uninitialized_variable, refuse
    try:
        yield
    finally:
        ssa._warn_about_uninitialized_variable = usual


def _all_under(library: Any) -> list[Any]:
    """What a library is linked with, in any number of steps, without itself."""
    found: dict[Any, None] = {}
    open_ones = [library]
    while open_ones:
        for one in open_ones.pop()._linking_libraries:
            if one not in found and one is not library:
                found[one] = None
                open_ones.append(one)
    return list(found)
