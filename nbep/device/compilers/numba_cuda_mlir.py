"""Kernels by numba-cuda-mlir: the one module that knows its extension interface.

 @primitive, @external           type_callable + lower_builtin -> one llvm.inline_asm, or a call
 @device_function, @by_type      type_callable + lower_builtin -> a call of a device function, which MLIR inlines

What it makes of a kernel is taken as LLVM's text, and compared with numba-cuda's; from there to PTX, nbep's own steps
and NVVM are those of numba-cuda.
records/compilers.md says which of its insides are used here, and what should change there.
"""

import inspect
import itertools
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from cuda.bindings import nvvm
from numba_cuda_mlir import cuda, tools
from numba_cuda_mlir._mlir import ir
from numba_cuda_mlir._mlir.dialects import arith, func, llvm
from numba_cuda_mlir._mlir.passmanager import PassManager
from numba_cuda_mlir.descriptor import mlir_target
from numba_cuda_mlir.extending import lower_builtin, refresh_registries, register_model, type_callable
from numba_cuda_mlir.lowering_utilities import context as mlir_context
from numba_cuda_mlir.mlir_compiler import compile_mlir
from numba_cuda_mlir.mlir_optimization import get_base_pipeline, get_llvmir
from numba_cuda_mlir.models import PrimitiveModel
from numba_cuda_mlir.numba_cuda import types
from numba_cuda_mlir.numba_cuda.core import ir as numba_ir
from numba_cuda_mlir.numba_cuda.core.compiler_lock import global_compiler_lock
from numba_cuda_mlir.numba_cuda.core.errors import TypingError
from numba_cuda_mlir.numba_cuda.typing.typeof import typeof

from .. import jit
from ..compiler_hints import assume_sizes, keep_loops
from ..jit import ComputeCapability, KernelSpec, PrimitiveSpec
from ..orders import check_orders
from ..types import is_named_tuple
from . import numba_cuda
from .kinds import (
    BITS,
    DYNAMIC_SHARED,
    DYNAMIC_SHARED_ALIGNMENT,
    WORDS,
    Kinds,
    constraints,
    hold_to,
    result_kinds,
    with_parameters,
)

KINDS = Kinds(types, TypingError)
ERROR_CODE = re.compile(r"(?<= = )cmpxchg \S+ @__numba_cuda_mlir_error_code, .*")


def _integer(width: int):
    return ir.IntegerType.get_signless(width)


def _register_type(kind: str):
    return ir.F32Type.get() if kind == "f32" else _integer(BITS[kind])


@register_model(types.Function)
class FunctionModel(PrimitiveModel):
    """A function that is an argument: an operand that is never read. Without it, a call of such a callee fails."""

    def __init__(self, manager, numba_type):
        super().__init__(manager, numba_type, _integer(1))


# Values. MLIR's integers have no sign; Numba's types say which they have.


def _as_s64(value, given):
    """An integer or truth value as int64."""
    if not isinstance(value, ir.Value):
        return arith.constant(_integer(64), int(value))
    if isinstance(value.type, ir.IndexType):
        return arith.index_cast(_integer(64), value)
    if value.type.width == 64:
        return value
    given = types.unliteral(given)
    is_signed = isinstance(given, types.Integer) and given.signed
    return (arith.extsi if is_signed else arith.extui)(_integer(64), value)


def _as_f32(value, given):
    if not isinstance(value, ir.Value):
        return arith.constant(ir.F32Type.get(), float(value))
    given = types.unliteral(given)
    if given == types.float32:
        return value
    if isinstance(given, types.Float):
        return arith.truncf(ir.F32Type.get(), value)
    convert = arith.sitofp if isinstance(given, types.Integer) and given.signed else arith.uitofp
    return convert(ir.F32Type.get(), value)


def _lower_argument(kind: str, value, given) -> list:
    """The operands that one argument stands for."""
    if kind in WORDS:
        parts = zip(value, types.unliteral(given).types, strict=True)
        return [arith.trunci(_integer(32), _as_s64(word, part)) for word, part in parts]
    if kind in ("f32", "any"):
        return [_as_f32(value, given)]
    whole = _as_s64(value, given)
    if kind == "s64":
        return [whole]
    if kind == "pred":
        truth = arith.cmpi(arith.CmpIPredicate.ne, whole, arith.constant(_integer(64), 0))
        return [arith.extui(_integer(32), truth)]
    return [arith.trunci(_integer(32), whole)]


def _raise_result(kind: str, value):
    """A register's value as its Numba type."""
    if kind == "pred":
        return arith.cmpi(arith.CmpIPredicate.ne, value, arith.constant(_integer(32), 0))
    if kind in ("f32", "s64"):
        return value
    return (arith.extsi if kind == "s32" else arith.extui)(_integer(64), value)


def _call_ptx(spec: PrimitiveSpec, operands: list) -> list:
    registers = [_register_type(kind) for kind in result_kinds(spec)]
    result = None
    if registers:
        result = registers[0] if len(registers) == 1 else llvm.StructType.get_literal(registers)
    call = llvm.inline_asm(result, operands, spec.ptx, constraints(spec), has_side_effects=spec.effect != "pure")
    if len(registers) > 1:
        return [llvm.extractvalue(register, call, [i]) for i, register in enumerate(registers)]
    return [call] if registers else []


def _declare_in(builder, name: str, make: Callable[[], object]) -> None:
    """Put a declaration at the head of the module, once."""
    body = builder.mlir_gpu_module.bodyRegion.blocks[0]
    names = (op.attributes["sym_name"].value for op in body.operations if "sym_name" in op.attributes)
    if name not in names:
        with ir.InsertionPoint.at_block_begin(body):
            make()


def _call_symbol(builder, spec: PrimitiveSpec, operands: list) -> list:
    """A call of a function of another module, which is declared in this one."""
    registers = [_register_type(kind) for kind in result_kinds(spec)]
    signature = ir.FunctionType.get([operand.type for operand in operands], registers)
    _declare_in(builder, spec.symbol, lambda: func.FuncOp(spec.symbol, signature, visibility="private"))
    call = func.call(result=registers, callee=spec.symbol, operands_=operands)
    return [call] if registers else []


def _dynamic_shared(builder):
    def declare():
        attributes = {
            "sym_name": ir.StringAttr.get(DYNAMIC_SHARED),
            "global_type": ir.TypeAttr.get(ir.Type.parse("!llvm.array<0 x i8>")),
            "linkage": ir.Attribute.parse("#llvm.linkage<external>"),
            "addr_space": ir.IntegerAttr.get(_integer(32), 3),
            "alignment": ir.IntegerAttr.get(_integer(64), DYNAMIC_SHARED_ALIGNMENT),
        }
        ir.Operation.create("llvm.mlir.global", attributes=attributes, regions=1)

    _declare_in(builder, DYNAMIC_SHARED, declare)
    pointer = llvm.mlir_addressof(ir.Type.parse("!llvm.ptr<3>"), ir.FlatSymbolRefAttr.get(DYNAMIC_SHARED))
    return llvm.ptrtoint(_integer(32), pointer)


EMIT: dict[str, Any] = {
    "same": lambda builder, x: x,
    "udiv": lambda builder, a, b: arith.divui(a, b),
    "urem": lambda builder, a, b: arith.remui(a, b),
    "dynamic_shared": _dynamic_shared,
}


# Functions.


def _declare(function: Callable, typing: Callable, lowering: Callable) -> None:
    """Tell the compiler how calls of a function are typed and lowered.

    typing(context, given) -> the type of the result; lowering(builder, target, variables)
    """
    parameters = inspect.signature(function).parameters
    heads = ", ".join(name if p.default is p.empty else f"{name}=None" for name, p in parameters.items())
    source = f"def made(context):\n    def typer({heads}): return typing(context, [{{0}}])\n    return typer"
    type_callable(function)(with_parameters(function, source, {"typing": typing}))

    @lower_builtin(function, types.VarArg(types.Any))
    def lower(builder, target, args, kws):
        lowering(builder, target, inspect.signature(function).bind(*args, **dict(kws)).args)


def _declare_primitive(spec: PrimitiveSpec, missing: bool) -> None:
    def typing(context, given):
        for kind, one in zip(spec.args, given, strict=True):
            KINDS.argument_type(spec, kind, one)
        return KINDS.result_type(spec.returns)

    def lowering(builder, target, variables):
        pairs = [(builder.load_var(v), builder.get_numba_type(v.name)) for v in variables]
        operands = [op for kind, pair in zip(spec.args, pairs, strict=True) for op in _lower_argument(kind, *pair)]
        kinds = result_kinds(spec)
        if missing:
            _call_ptx(jit.TRAP, [])
            values = [arith.constant(_register_type(kind), 0) for kind in kinds]
        elif spec.symbol:
            values = _call_symbol(builder, spec, operands)
        elif spec.emit:
            values = [EMIT[spec.emit](builder, *operands)]
        else:
            values = _call_ptx(spec, operands)
        values = [_raise_result(kind, value) for kind, value in zip(kinds, values, strict=True)]
        builder.store_var(target, None if not values else values[0] if len(values) == 1 else tuple(values))

    _declare(spec.function, typing, lowering)


def _declare_constant(spec: PrimitiveSpec, value: bool) -> None:
    _declare(
        spec.function,
        lambda context, given: types.boolean,
        lambda builder, target, variables: builder.store_var(target, arith.constant(_integer(1), int(value))),
    )


def _declare_call(function: Callable, choose: Callable[[tuple], Callable]) -> None:
    """Calls of a function go to the one that `choose` names for the types of the arguments."""

    def typing(context, given):
        given = tuple(one for one in given if one is not None)  # a default stands last
        return typeof(_dispatcher(choose(given))).get_call_type(context, given, {}).return_type

    def lowering(builder, target, variables):
        chosen = _dispatcher(choose(tuple(builder.get_numba_type(v.name) for v in variables)))
        operands = [_without_functions(builder, variable) for variable in variables]
        builder.store_var(target, builder.build_user_defined_function_call(target, chosen, operands, []))

    _declare(function, typing, lowering)


_dispatchers: dict[Callable, object] = {}


def _dispatcher(function: Callable):
    if function not in _dispatchers:
        _dispatchers[function] = cuda.jit(device=True)(function)
    return _dispatchers[function]


_numbers = itertools.count()


def _without_functions(builder, variable):
    """A variable whose value can be an operand: functions in it are numbers, see FunctionModel, and None is nothing."""

    def is_plain(value) -> bool:
        return isinstance(value, ir.Value) if not isinstance(value, tuple | list) else all(map(is_plain, value))

    def plain(value):
        if isinstance(value, tuple | list):
            return tuple(map(plain, value))
        if inspect.isfunction(value):
            return arith.constant(_integer(1), 0)
        return () if value is None or isinstance(value, ir.NoneType) else value

    given = builder.get_numba_type(variable.name)
    value = builder.load_var(variable)
    if isinstance(given, types.NoneType) or is_plain(value):
        return variable
    name = f"$nbep_operand_{next(_numbers)}"
    builder.fndesc.typemap[name] = given
    builder.varmap[name] = plain(value)
    return numba_ir.Var(scope=variable.scope, name=name, loc=variable.loc)


def _declare_tuple(kind: Any) -> None:
    """Let kernels make a NamedTuple, which 0.6.0 types but does not lower."""

    @lower_builtin(kind, types.VarArg(types.Any))
    def lower(builder, target, args, kws):
        given = {**dict(zip(kind._fields, args, strict=False)), **dict(kws)}
        fields = builder.get_numba_type(target.name).types
        values = []
        for name, field in zip(kind._fields, fields, strict=True):
            value = builder.load_var(given[name])
            if inspect.isfunction(value):
                values.append(arith.constant(_integer(1), 0))  # see FunctionModel
                continue
            if isinstance(field, types.Integer) and field.bitwidth == 64:
                value = _as_s64(value, builder.get_numba_type(given[name].name))
            values.append(builder._coerce_value_to_numba_type(field, value))
        builder.store_var(target, tuple(values))


_declared: set = set()


def _is_new(thing) -> bool:
    is_new = thing not in _declared
    _declared.add(thing)
    return is_new


def register(compute_capability: ComputeCapability) -> None:
    """Declare everything recorded since the last call.

    Raises: RuntimeError if an earlier call named another compute capability
    """
    hold_to(compute_capability)
    tools._cached_cc = compute_capability  # else it asks the driver for the card, even to compile for another one
    mlir_target.ensure_initialized()
    for function in filter(_is_new, jit.DEVICE_FUNCTIONS):
        _declare_call(function, partial(_fixed, function))
        _declare_tuples_of(function)
    for chosen in filter(_is_new, jit.FUNCTIONS_BY_TYPE):
        _declare_call(chosen, partial(_version, chosen))
    for spec in (*jit.PRIMITIVES.values(), *jit.EXTERNALS):
        if not _is_new(spec.function):
            continue
        missing = compute_capability < spec.since
        if spec.constant is not None:
            _declare_constant(spec, spec.constant(compute_capability))
        elif missing and spec.below is not None:
            _declare_call(spec.function, partial(_fixed, spec.below))
        else:
            _declare_primitive(spec, missing)


def _fixed(function, given):
    return function


def _version(chosen, given):
    first = given[0]
    kind = first.types[first.fields.index(chosen.field)] if chosen.field else first
    return chosen.versions[kind.instance_class]


def _declare_tuples_of(function: Callable) -> None:
    for value in list(function.__globals__.values()):
        if is_named_tuple(value) and _is_new(value):
            _declare_tuple(value)


# From a kernel to PTX.


def lock():
    return global_compiler_lock


def lower(spec: KernelSpec, cc: ComputeCapability, lineinfo: bool) -> str:
    """The LLVM text that a kernel becomes.

    Raises: LostOrder if a thread could execute its memory instructions in an order that numba-cuda's text lacks
    """
    _declare_tuples_of(spec.function)
    refresh_registries(typing=False, include_uninitialized_cuda=False)
    options: dict[str, Any] = {"launch_bounds": (spec.threads_on(cc), spec.min_blocks), "chip": f"sm_{cc[0]}{cc[1]}"}
    if lineinfo:
        options["lineinfo"] = True
    parameters = tuple(KINDS.parameter_type(hint) for hint in spec.hints.values())
    compiled = compile_mlir(spec.function, types.void, parameters, targetoptions=options)
    with mlir_context.get_context():
        module = compiled.metadata["mlir_module"]
        PassManager.parse(get_base_pipeline()).run(module.operation)
        compiled.metadata["mlir_module_optimized"] = module.operation.get_asm(enable_debug_info=lineinfo)
    # It has no other error model than Python's: an atomic exchange at every division notes that the divisor was 0, in
    # a cell that nbep never reads. The exchange goes, and LLVM drops the branch. numba-cuda's has none, either.
    text = ERROR_CODE.sub("insertvalue { i32, i1 } undef, i1 false, 1", get_llvmir(compiled))
    text = re.sub(r"^define (?!ptx_kernel|internal)", "define internal ", text, flags=re.MULTILINE)
    check_orders(text, numba_cuda.text_of(spec, cc))
    return text


def to_ptx(text: str, spec: KernelSpec, cc: ComputeCapability) -> str:
    text = _mark_convergent(text)
    if spec.is_own:
        text = assume_sizes(text, spec.params)
    if "!nvvmir.version" not in text:
        text += f"\n!nvvmir.version = !{{!99999}}\n!99999 = !{{{', '.join(f'i32 {n}' for n in nvvm.ir_version())}}}\n"
        text = text.replace(" nocreateundeforpoison", "")
    match = re.search(r"^define ptx_kernel .*?@\"?([^\s\"(]+)", text, re.MULTILINE)
    assert match is not None
    return _compile(keep_loops(text), cc).replace(match[1], spec.entry_name)


def _mark_convergent(text: str) -> str:
    """Tell LLVM which inline PTX needs its lanes together: 0.6.0 has no way to say so of llvm.inline_asm."""
    together = {spec.ptx for spec in jit.PRIMITIVES.values() if spec.effect == "converge" and spec.ptx}
    outside = {spec.symbol for spec in jit.EXTERNALS}
    lines = []
    for line in text.split("\n"):
        asm = re.search(r'call .* asm sideeffect "([^"]*)"', line)
        called = re.search(r"call .*@([\w.$]+)\(", line)
        if (asm and asm[1] in together) or (called and (called[1] in outside or called[1].startswith("_Z"))):
            head, mark, tail = line.partition(", !")
            line = f"{head} convergent{mark}{tail}"
        elif line.startswith("define "):
            line = re.sub(r"\)( #\d+)? \{$", r")\1 convergent {", line)
        lines.append(line)
    return "\n".join(lines)


def _compile(text: str, cc: ComputeCapability) -> str:
    """NVVM's PTX of LLVM's text. Raises: RuntimeError with its messages"""
    program = nvvm.create_program()
    try:
        data = text.encode()
        nvvm.add_module_to_program(program, data, len(data), "nbep")
        options = [f"-arch=compute_{cc[0]}{cc[1]}"]
        try:
            nvvm.compile_program(program, len(options), options)
        except nvvm.nvvmError as error:
            log = bytearray(nvvm.get_program_log_size(program))
            nvvm.get_program_log(program, log)
            raise RuntimeError(f"NVVM: {error}\n{log.decode(errors='replace')}") from error
        ptx = bytearray(nvvm.get_compiled_result_size(program))
        nvvm.get_compiled_result(program, ptx)
        return ptx.decode().rstrip("\0")
    finally:
        nvvm.destroy_program(program)
