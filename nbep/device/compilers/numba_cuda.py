"""Kernels by numba-cuda: the one module that knows its extension interface.

 @primitive        overload -> intrinsic -> one llvmlite InlineAsm
 @device_function  register_jitable
 @by_type          overload, which takes the version of the type
 @external         overload -> intrinsic -> a call of a function that is linked later

Importing it imports numba.
"""

import re
from contextlib import contextmanager
from typing import Any

from llvmlite import ir
from numba.cuda import compiler, dispatcher, types
from numba.cuda.core.errors import TypingError
from numba.cuda.extending import intrinsic, overload, register_jitable

from .. import jit
from ..compiler_hints import assume_sizes, keep_loops
from ..jit import ComputeCapability, KernelSpec, PrimitiveSpec
from .kinds import (
    BITS,
    DYNAMIC_SHARED,
    DYNAMIC_SHARED_ALIGNMENT,
    WORDS,
    Kinds,
    constraints,
    hold_to,
    result_kinds,
    version_by_type,
    with_parameters,
)

I1, I32, I64, F32 = ir.IntType(1), ir.IntType(32), ir.IntType(64), ir.FloatType()
KINDS = Kinds(types, TypingError)


def _register_type(kind: str):
    return F32 if kind == "f32" else ir.IntType(BITS[kind])


def _lower_argument(builder, kind: str, value) -> list:
    """The operands that one argument stands for."""
    if kind in WORDS:
        return [builder.trunc(builder.extract_value(value, i), I32) for i in range(WORDS[kind])]
    if kind in ("f32", "any", "s64"):
        return [value]
    if kind == "pred":
        truth = value if value.type == I1 else builder.icmp_unsigned("!=", value, value.type(0))
        return [builder.zext(truth, I32)]
    return [builder.trunc(value, I32)]


def _raise_result(builder, kind: str, value):
    """A register's value as its Numba type."""
    if kind == "pred":
        return builder.icmp_unsigned("!=", value, I32(0))
    if kind in ("f32", "s64"):
        return value
    return builder.sext(value, I64) if kind == "s32" else builder.zext(value, I64)


def _call_ptx(builder, spec: PrimitiveSpec, operands: list) -> list:
    result_types = [_register_type(kind) for kind in result_kinds(spec)]
    if not result_types:
        result: ir.Type = ir.VoidType()
    elif len(result_types) == 1:
        result = result_types[0]
    else:
        result = ir.LiteralStructType(result_types)
    function_type = ir.FunctionType(result, [operand.type for operand in operands])
    asm = ir.InlineAsm(function_type, spec.ptx, constraints(spec), side_effect=spec.effect != "pure")
    call = builder.call(asm, operands, attrs=("convergent",) if spec.effect == "converge" else ())
    if len(result_types) > 1:
        return [builder.extract_value(call, i) for i in range(len(result_types))]
    return [call] if result_types else []


def _call_symbol(builder, spec: PrimitiveSpec, operands: list) -> list:
    """A call of a function of another module, which is declared in this one."""
    kinds = result_kinds(spec)
    result = _register_type(kinds[0]) if kinds else ir.VoidType()
    function = builder.module.globals.get(spec.symbol)
    if function is None:
        function = ir.Function(builder.module, ir.FunctionType(result, [v.type for v in operands]), spec.symbol)
    call = builder.call(function, operands, attrs=("convergent",))
    return [call] if kinds else []


def _dynamic_shared(builder, *_):
    module = builder.module
    memory = module.globals.get(DYNAMIC_SHARED)
    if memory is None:
        memory = ir.GlobalVariable(module, ir.ArrayType(ir.IntType(8), 0), DYNAMIC_SHARED, addrspace=3)
        memory.linkage = "external"
        memory.align = DYNAMIC_SHARED_ALIGNMENT
    return builder.ptrtoint(memory, I32)


EMIT: dict[str, Any] = {
    "same": lambda builder, x: x,
    "udiv": lambda builder, a, b: builder.udiv(a, b),
    "urem": lambda builder, a, b: builder.urem(a, b),
    "dynamic_shared": _dynamic_shared,
}


def _intrinsic_of(spec: PrimitiveSpec, compute_capability: ComputeCapability):
    missing = compute_capability < spec.since
    result_type = KINDS.result_type(spec.returns)

    def codegen(context, builder, signature, args):
        operands = [op for kind, arg in zip(spec.args, args, strict=True) for op in _lower_argument(builder, kind, arg)]
        if missing:
            _call_ptx(builder, jit.TRAP, [])
            return context.get_constant_null(signature.return_type)
        if spec.symbol:
            values = _call_symbol(builder, spec, operands)
        elif spec.emit:
            values = [EMIT[spec.emit](builder, *operands)]
        else:
            values = _call_ptx(builder, spec, operands)
        if spec.effect == "converge":
            builder.function.attributes.add("convergent")
        if not values:
            return context.get_dummy_value()
        kinds = result_kinds(spec)
        values = [_raise_result(builder, kind, value) for kind, value in zip(kinds, values, strict=True)]
        if len(values) == 1:
            return values[0]
        return context.make_tuple(builder, signature.return_type, values)

    def typer(context, *given):
        arguments = [KINDS.argument_type(spec, kind, arg) for kind, arg in zip(spec.args, given, strict=True)]
        return result_type(*arguments), codegen

    source = "def made(typingctx, {0}): return typer(typingctx, {0})"
    return intrinsic(with_parameters(spec.function, source, {"typer": typer}))


def _register_primitive(spec: PrimitiveSpec, compute_capability: ComputeCapability) -> None:
    if spec.constant is not None:
        value = spec.constant(compute_capability)
        overload(spec.function)((lambda: lambda: True) if value else (lambda: lambda: False))
        return
    if spec.below is not None and compute_capability < spec.since:
        target = spec.below
    else:
        target = _intrinsic_of(spec, compute_capability)
    source = "def made({0}): return lambda {0}: target({0})"
    overload(spec.function)(with_parameters(spec.function, source, {"target": target}))


_registered: set = set()


def register(compute_capability: ComputeCapability) -> None:
    """Tell Numba about every function recorded since the last call.

    Raises: RuntimeError if an earlier call named another compute capability
    """
    hold_to(compute_capability)
    for function in jit.DEVICE_FUNCTIONS:
        if function not in _registered:
            register_jitable(function)
            _registered.add(function)
    for function in jit.FUNCTIONS_BY_TYPE:
        if function not in _registered:
            overload(function)(version_by_type(function))
            _registered.add(function)
    for spec in (*jit.PRIMITIVES.values(), *jit.EXTERNALS):
        if spec.function not in _registered:
            _register_primitive(spec, compute_capability)
            _registered.add(spec.function)


def lock():
    return compiler.global_compiler_lock


def lower(spec: KernelSpec, cc: ComputeCapability, lineinfo: bool):
    """The library of LLVM modules that a kernel becomes."""
    with _stand_in_device(cc):
        library, _ = compiler._compile_pyfunc_with_fixup(
            spec.function,
            types.void(*(KINDS.parameter_type(hint) for hint in spec.hints.values())),
            device=False,
            cc=cc,
            abi="numba",
            lineinfo=lineinfo,
            launch_bounds=(spec.threads_on(cc), spec.min_blocks),
        )
    return library


def text_of(spec: KernelSpec, cc: ComputeCapability) -> str:
    """LLVM's text of a kernel and of what it calls, before any optimization: it has every path of the source."""
    with lock():
        register(cc)
        return "\n".join(map(str, lower(spec, cc, lineinfo=False).modules))


def to_ptx(library, spec: KernelSpec, cc: ComputeCapability) -> str:
    _mark_convergent(library.modules)
    kernel, *others = map(str, library.modules)
    if spec.is_own:
        kernel = assume_sizes(kernel, spec.params)
    library._llvm_strs = [keep_loops(module) for module in (kernel, *others)]
    with _stand_in_device(cc):
        (ptx,) = library.get_asm_strs(cc=cc)
    ptx = ptx.replace(library._entry_name, spec.entry_name)
    # Numba declares one environment pointer for each function for the sake of its CPU target; no instruction uses them.
    return re.sub(r"^\.common \.global \S+ \d+ \.u64 _ZN08NumbaEnv\w+;\n", "", ptx, flags=re.MULTILINE)


def _mark_convergent(modules) -> None:
    """Tell LLVM that any function may hold a barrier or a shuffle.

    Numba does not, and until such a function is inlined LLVM may duplicate or move calls of it, as if lanes could
    arrive one by one. LLVM drops the mark by itself from functions without such instructions.
    """
    for module in modules:
        for function in module.functions:
            if not function.name.startswith("llvm."):
                function.attributes.add("convergent")


@contextmanager
def _stand_in_device(cc: ComputeCapability):
    """While a kernel compiles, Numba takes `cc` for the current device's, whether or not there is one."""

    class Device:
        compute_capability = cc

    real = dispatcher.get_current_device
    dispatcher.get_current_device = Device
    try:
        yield
    finally:
        dispatcher.get_current_device = real
