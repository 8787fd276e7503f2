"""How recorded functions become code for a GPU. This is the one module that knows Numba's extension interface.

 @primitive        overload -> intrinsic -> one llvmlite InlineAsm
 @device_function  register_jitable
 @by_type          overload, which takes the version of the type
 @external         overload -> intrinsic -> a call of a function that is linked later

Importing it imports numba. `register(compute_capability)` tells Numba about everything recorded so far.
"""

import inspect
import sys

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic, overload, register_jitable

from . import jit
from .diagnosis import outwards, place_of
from .jit import ComputeCapability, PrimitiveSpec

I1, I32, I64, F32 = ir.IntType(1), ir.IntType(32), ir.IntType(64), ir.FloatType()
WORDS = {"v2": 2, "v4": 4}
LLVM_TYPE = {"s32": I32, "u32": I32, "u8": I32, "pred": I32, "smem": I32, "s64": I64, "f32": F32}
CONSTRAINT = {I32: "r", I64: "l", F32: "f"}
DYNAMIC_SHARED = "nbep_dynamic_shared"
DYNAMIC_SHARED_ALIGNMENT = 1024


def numba_type(kind: str):
    """The Numba type of a result. All integers are int64: uint64 and int64 would meet as float64."""
    if kind in WORDS:
        return types.UniTuple(types.int64, WORDS[kind])
    return {"f32": types.float32, "pred": types.boolean}.get(kind, types.int64)


def _result_type(returns):
    if returns is None:
        return types.none
    if isinstance(returns, tuple):
        return types.UniTuple(numba_type(returns[0]), len(returns))
    return numba_type(returns)


def _argument_type(spec: PrimitiveSpec, kind: str, given):
    """The Numba type that an argument is cast to, after a check that the cast loses nothing by surprise."""
    given = types.unliteral(given)
    if kind == "any" and isinstance(given, (types.Number, types.Boolean)):
        return numba_type(spec.returns)
    if kind in WORDS:
        if isinstance(given, types.BaseTuple) and len(given) == WORDS[kind]:
            if all(isinstance(types.unliteral(item), types.Integer) for item in given):
                return types.UniTuple(types.int64, WORDS[kind])
        raise types_error(spec, f"needs a tuple of {WORDS[kind]} integers, not {given}")
    if kind == "f32":
        if given == types.float32:
            return given
        raise types_error(
            spec,
            f"needs float32, not {given}: a float constant or an integer makes float64 of the float32 that it meets; "
            f"write f32(0.5), f32(n)",
        )
    if kind == "pred" and isinstance(given, types.Boolean):
        return given
    if isinstance(given, (types.Integer, types.Boolean)):
        return types.int64
    raise types_error(spec, f"needs an integer, not {given}")


def types_error(spec: PrimitiveSpec, text: str) -> Exception:
    """The error, with the line of the kernel or its helper, which Numba leaves out."""
    from numba.cuda.core.errors import TypingError

    place = place_of(outwards(sys._getframe(1)))
    return TypingError(f"{spec.name} {text}" + ("" if place is None else f" (at {place[0]}:{place[1]})"))


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


def _call_ptx(builder, ptx: str, result_kinds: list[str], operands: list, effect: str) -> list:
    result_types = [LLVM_TYPE[kind] for kind in result_kinds]
    if not result_types:
        result: ir.Type = ir.VoidType()
    elif len(result_types) == 1:
        result = result_types[0]
    else:
        result = ir.LiteralStructType(result_types)
    constraints = [f"={CONSTRAINT[t]}" for t in result_types] + [CONSTRAINT[operand.type] for operand in operands]
    pure = effect == "pure"
    if not pure:
        constraints.append("~{memory}")
    function_type = ir.FunctionType(result, [operand.type for operand in operands])
    asm = ir.InlineAsm(function_type, ptx, ",".join(constraints), side_effect=not pure)
    call = builder.call(asm, operands, attrs=("convergent",) if effect == "converge" else ())
    if len(result_types) > 1:
        return [builder.extract_value(call, i) for i in range(len(result_types))]
    return [call] if result_types else []


def _call_symbol(builder, symbol: str, result_kinds: list[str], operands: list) -> list:
    """A call of a function of another module, which is declared in this one."""
    result = LLVM_TYPE[result_kinds[0]] if result_kinds else ir.VoidType()
    function = builder.module.globals.get(symbol)
    if function is None:
        function = ir.Function(builder.module, ir.FunctionType(result, [value.type for value in operands]), symbol)
    call = builder.call(function, operands, attrs=("convergent",))
    return [call] if result_kinds else []


def dynamic_shared_address(builder):
    """The 32-bit shared address of the block's dynamic shared memory."""
    module = builder.module
    memory = module.globals.get(DYNAMIC_SHARED)
    if memory is None:
        memory = ir.GlobalVariable(module, ir.ArrayType(ir.IntType(8), 0), DYNAMIC_SHARED, addrspace=3)
        memory.linkage = "external"
        memory.align = DYNAMIC_SHARED_ALIGNMENT
    return builder.ptrtoint(memory, I32)


def _intrinsic_of(spec: PrimitiveSpec, compute_capability: ComputeCapability):
    if spec.returns is None:
        result_kinds = []
    elif isinstance(spec.returns, tuple):
        result_kinds = list(spec.returns)
    else:
        result_kinds = ["u32"] * WORDS[spec.returns] if spec.returns in WORDS else [spec.returns]
    missing = compute_capability < spec.since
    result_type = _result_type(spec.returns)

    def codegen(context, builder, signature, args):
        operands = [op for kind, arg in zip(spec.args, args, strict=True) for op in _lower_argument(builder, kind, arg)]
        if missing:
            _call_ptx(builder, "trap;", [], [], "memory")
            return context.get_constant_null(signature.return_type)
        if spec.symbol:
            values = _call_symbol(builder, spec.symbol, result_kinds, operands)
        elif spec.emit is not None:
            values = [spec.emit(builder, *operands)]
        else:
            values = _call_ptx(builder, spec.ptx, result_kinds, operands, spec.effect)
        if spec.effect == "converge":
            builder.function.attributes.add("convergent")
        if not values:
            return context.get_dummy_value()
        values = [_raise_result(builder, kind, value) for kind, value in zip(result_kinds, values, strict=True)]
        if len(values) == 1:
            return values[0]
        return context.make_tuple(builder, signature.return_type, values)

    def typer(context, *given):
        arguments = [_argument_type(spec, kind, arg) for kind, arg in zip(spec.args, given, strict=True)]
        return result_type(*arguments), codegen

    return intrinsic(_with_parameters(spec, "typer(typingctx, {0})", "def", {"typer": typer}))


def _with_parameters(spec: PrimitiveSpec, call: str, form: str, names: dict):
    """A function with the primitive's own parameter names, which Numba matches arguments by."""
    parameters = ", ".join(inspect.signature(spec.function).parameters)
    if form == "def":
        source = f"def made(typingctx, {parameters}): return {call.format(parameters)}"
    else:
        source = f"def made({parameters}): return lambda {parameters}: {call.format(parameters)}"
    exec(source, names)
    made = names["made"]
    made.__name__ = made.__qualname__ = spec.name
    made.__doc__ = spec.function.__doc__
    return made


def _register_primitive(spec: PrimitiveSpec, compute_capability: ComputeCapability) -> None:
    if spec.constant is not None:
        value = spec.constant(compute_capability)
        overload(spec.function)((lambda: lambda: True) if value else (lambda: lambda: False))
        return
    if spec.below is not None and compute_capability < spec.since:
        target = spec.below
    else:
        target = _intrinsic_of(spec, compute_capability)
    overload(spec.function)(_with_parameters(spec, "target({0})", "lambda", {"target": target}))


_registered: set = set()
_registered_for: list[ComputeCapability] = []


def register(compute_capability: ComputeCapability) -> None:
    """Tell Numba about every function recorded since the last call.

    Numba keeps what it compiled, so one process compiles for one compute capability.

    Raises: RuntimeError if an earlier call named another compute capability
    """
    if _registered_for and _registered_for[0] != compute_capability:
        raise RuntimeError(
            f"this process compiles for sm_{_registered_for[0][0]}{_registered_for[0][1]}; compile for "
            f"sm_{compute_capability[0]}{compute_capability[1]} in another process"
        )
    _registered_for[:] = [compute_capability]
    for function in jit.DEVICE_FUNCTIONS:
        if function not in _registered:
            register_jitable(function)
            _registered.add(function)
    for function in jit.FUNCTIONS_BY_TYPE:
        if function not in _registered:
            _register_by_type(function)
            _registered.add(function)
    for spec in (*jit.PRIMITIVES.values(), *jit.EXTERNALS):
        if spec.function not in _registered:
            _register_primitive(spec, compute_capability)
            _registered.add(spec.function)


def _register_by_type(function) -> None:
    first, *others = inspect.signature(function).parameters  # Numba matches arguments by these names
    kind = f"{first}.types[{first}.fields.index({function.field!r})]" if function.field else first
    names = {"versions": function.versions}
    exec(f"def made({', '.join((first, *others))}): return versions[{kind}.instance_class]", names)
    overload(function)(names["made"])


def mark_convergent(modules) -> None:
    """Tell LLVM that any function may hold a barrier or a shuffle.

    Numba does not, and until such a function is inlined LLVM may duplicate or move calls of it, as if lanes could
    arrive one by one. LLVM drops the mark by itself from functions without such instructions.
    """
    for module in modules:
        for function in module.functions:
            if not function.name.startswith("llvm."):
                function.attributes.add("convergent")
