"""Kernels for the CPU, for `nbep.emulator.engine`: primitives as calls of its machine. Importing this imports numba.

A primitive's Python body says what it does: `current_thread().load(address, "s32", "acquire", "sys")`. It is run once,
with a thread that writes down what it is asked for; LLVM's instructions for that call stand wherever a kernel calls the
primitive. A body that asks no thread is arithmetic, and Numba compiles it. So there is one source for both.
"""

from __future__ import annotations

import operator
import sys
import zlib
from collections.abc import Callable
from functools import partial
from itertools import count
from types import FunctionType
from typing import Any, NamedTuple, get_type_hints

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import callconv, imputils
from numba.core.errors import TypingError
from numba.core.ir import Del
from numba.core.registry import cpu_target
from numba.core.typing.templates import Registry, make_intrinsic_template, make_overload_template
from numba.extending import intrinsic

from nbep.emulator.engine import Stopped, access, meeting, schedule, signals
from nbep.emulator.engine.access import ABOUT
from nbep.emulator.engine.state import DIVIDED, FAULT_REPORTED, TRAPPED
from nbep.emulator.engine.words import COMPILED, F32, I1, I32, I64, VOID, call, emitting, pointer
from nbep.emulator.machine.carrier import CURRENT
from nbep.emulator.machine.kinds import KINDS as SIZES
from nbep.emulator.machine.orders import ACQUIRES, RELEASES, SCOPES, WEAK
from nbep.emulator.machine.orders import POLLED as POLLED_ORDERS

from .. import jit
from ..engine import named_by, plain
from ..jit import KernelSpec, PrimitiveSpec
from ..types import param_type
from .kinds import WORDS, Kinds, version_by_type, with_parameters

KINDS = Kinds(types, TypingError)


# --- what a body asks its thread for -----------------------------------------------------------------------------


class Operand:
    """An argument of the primitive, by its place. Nothing can be computed with it."""

    def __init__(self, index: int):
        self.index = index


class Attribute(NamedTuple):
    """A number of the thread: who it is."""

    name: str


class Asked(NamedTuple):
    method: str
    arguments: tuple[Any, ...]


class Asking:
    """Stands for the thread, and writes down what it is asked for."""

    def __init__(self) -> None:
        self.asked: list[Asked] = []
        for name in ABOUT:
            setattr(self, name, Attribute(name))
        self.fault_deadline = None

    def __getattr__(self, method: str) -> Callable:
        def ask(*arguments: Any) -> Asked:
            self.asked.append(Asked(method, arguments))
            return self.asked[-1]

        return ask


def asked_by(spec: PrimitiveSpec) -> Asked | Attribute | None:
    """What a primitive asks its thread for; None if it is arithmetic."""
    if spec.name in ASKED:
        return ASKED[spec.name]
    body = getattr(spec.function, "__wrapped__", spec.function)
    thread: Any = Asking()
    token = CURRENT.set(thread)
    try:
        result = body(*map(Operand, range(len(spec.args))))
    except Exception:  # arithmetic on operands: whatever it raises for what is no number
        assert not thread.asked, f"{spec.name}: its body computes with what its thread gives it"
        return None
    finally:
        CURRENT.reset(token)
    if not thread.asked:
        return result if isinstance(result, Attribute) else None
    (asked,) = thread.asked
    used = {one for one in asked.arguments if isinstance(one, Operand)}
    assert len(used) == len(spec.args), f"{spec.name}: its body does more than to ask its thread for {asked}"
    return asked


# Those whose bodies do more than that.
ASKED: dict[str, Asked | Attribute] = {
    "bar_red_and": Asked("barrier", (Operand(0), Operand(1), Operand(2))),
    "fault_due": Asked("fault_due", (Operand(0), Operand(1))),
    "fault_reported": Asked("stop", (FAULT_REPORTED,)),
    "trap": Asked("stop", (TRAPPED,)),
    "serving": Asked("nothing", ()),
    "prefetch_l2": Asked("nothing", ()),
}


# --- LLVM's instructions for it ----------------------------------------------------------------------------------


class Emitter:
    """The instructions for one call. Values are those of operands; constants are Python's."""

    def __init__(self, builder: Any, spec: Any, values: list[Any]):
        self.builder, self.spec, self.values = builder, spec, values

    def value(self, one: Any) -> Any:
        if isinstance(one, Operand):
            return self.values[one.index]
        return self.attribute(one.name) if isinstance(one, Attribute) else one

    def word(self, value: Any) -> Any:
        """As 64 bits."""
        builder = self.builder
        if isinstance(value, int | bool):
            return I64(int(value))
        if value.type == F32:
            return builder.zext(builder.bitcast(value, I32), I64)
        return builder.zext(value, I64) if value.type.width < 64 else value

    def machine(self, name: str, *values: Any) -> Any:
        one = COMPILED[f"nbep_{name}"]
        result = VOID if one.result == types.none else I64
        return call(self.builder, one.symbol, result, [self.word(value) for value in values])

    def attribute(self, name: str) -> Any:
        return self.machine("about_thread", ABOUT.index(name))

    def loaded(self, place: Any, kind: str) -> Any:
        builder = self.builder
        if kind in WORDS:
            words = [builder.load(pointer(builder, builder.add(place, I64(4 * i)), I32)) for i in range(WORDS[kind])]
            return [builder.zext(word, I64) for word in words]
        to = F32 if kind == "f32" else ir.IntType(8 * SIZES[kind].size)
        value = builder.load(pointer(builder, place, to))
        if kind in ("f32", "s64"):
            return value
        return builder.sext(value, I64) if kind == "s32" else builder.zext(value, I64)

    def stored(self, value: Any, kind: str) -> list[Any]:
        """The 16 bytes that a store writes, of which the kind takes some."""
        builder = self.builder
        if kind not in WORDS:
            return [self.word(value), I64(0)]
        words = [builder.and_(builder.extract_value(value, i), I64(0xFFFFFFFF)) for i in range(WORDS[kind])]
        words += [I64(0)] * (4 - len(words))
        return [builder.or_(words[i], builder.shl(words[i + 1], I64(32))) for i in (0, 2)]

    # The methods of `machine.Thread`; others are one call of the machine, most by their own name.

    def __getattr__(self, method: str) -> Callable:
        name, *more = DIRECT.get(method, (method,))
        return lambda *given: self.machine(name, *given, *more)

    def load(self, address, kind, order, scope):
        return self.loaded(self.machine("load", address, SIZES[kind].size, how(order, scope)), kind)

    def load_shared(self, address, kind, order):
        return self.loaded(self.machine("load_shared", address, SIZES[kind].size, how(order, "cta")), kind)

    def store(self, address, kind, value, order, scope):
        self.machine("store", address, SIZES[kind].size, *self.stored(value, kind), how(order, scope, False))

    def store_shared(self, address, kind, value, order):
        self.machine("store_shared", address, SIZES[kind].size, *self.stored(value, kind), how(order, "cta", False))

    def atomic(self, op, address, kind, operand, order, scope, compare=0):
        size, way = SIZES[kind].size, how(order, scope, False)
        if order == "relaxed":
            way |= use_of_result()
        return self.machine("atomic", ATOMICS[op], address, size, operand, compare, way)

    def atomic_shared(self, op, address, kind, operand, order, compare=0):
        size = SIZES[kind].size
        return self.machine("atomic_shared", ATOMICS[op], address, size, operand, compare, how(order, "cta", False))

    def fence(self, order, scope):
        self.machine("fence", SCOPES[scope] if order in RELEASES else 0)

    def collect(self, name, mask, value, operand):
        return self.machine("collect", name, mask, value, operand, site_of_call(self.spec.name))

    def syncwarp(self, mask):
        self.collect(meeting.SYNC, mask, 0, 0)

    def shfl(self, mode, mask, value, lane_or_delta):
        return self.collect(SHUFFLES[mode], mask, value, lane_or_delta)

    def vote(self, mode, mask, predicate):
        return self.collect(VOTES[mode], mask, predicate, 0)

    def match_any(self, mask, value):
        return self.collect(meeting.MATCH, mask, value, 0)

    def barrier(self, number, expected, predicate=True):
        return self.machine("meet", number, expected, True, predicate, 0)

    def barrier_arrive(self, number, expected):
        self.machine("meet", number, expected, False, True, 0)

    def stop(self, reason):
        self.machine("fault", reason, 0)

    def nothing(self):
        pass


# method -> the function of the machine that has another name, and arguments behind those that are given
DIRECT: dict[str, tuple[Any, ...]] = {
    "fence_proxy_async": ("fence_proxy",),
    "fence_proxy_async_global": ("fence_proxy_global",),
    "mbarrier_init": ("init_mbarrier",),
    "mbarrier_inval": ("inval_mbarrier",),
    "mbarrier_arrive": ("arrive_mbarrier", 0),
    "mbarrier_arrive_expect_tx": ("arrive_mbarrier",),
    "mbarrier_try_wait": ("try_wait_mbarrier",),
    "bulk_commit_group": ("commit_group",),
    "bulk_wait_group": ("wait_group", False),
    "bulk_wait_group_read": ("wait_group", True),
}
SHUFFLES = {"idx": meeting.SHFL_IDX, "xor": meeting.SHFL_XOR, "up": meeting.SHFL_UP, "down": meeting.SHFL_DOWN}
VOTES = {"any": meeting.ANY, "all": meeting.ALL, "ballot": meeting.BALLOT}
ATOMICS = {name: getattr(access, value) for name, value in {
    "add": "ADD", "exch": "EXCHANGE", "cas": "COMPARE", "max": "MAX", "min": "MIN", "or": "OR", "and": "AND",
}.items()}  # fmt: skip


def how(order: str, scope: str, loads: bool = True) -> int:
    """How memory is accessed, as a number; see `nbep.emulator.engine.access`."""
    look = access.CONSTANT if order == "nc" else access.POLLED if loads and order in POLLED_ORDERS else access.PLAIN
    reach = 0 if order in WEAK else SCOPES[scope]
    return look | reach << signals.REACH | signals.ACQUIRE * (order in ACQUIRES) | signals.RELEASE * (order in RELEASES)


def site_of_call(name: str) -> int:
    """A number for the call that Numba lowers now, the same for all types of arguments of the function it stands in."""
    lower, instruction = lowered_now()
    place = f"{lower.loc.filename}:{lower.loc.line}"
    return zlib.crc32(f"{place} {instruction.target.name} {name}".encode())


def lowered_now() -> tuple[Any, Any]:
    """What lowers a function of a kernel, and the instruction for which this is called."""
    frame = sys._getframe(1)
    while frame.f_code.co_name != "lower_inst":
        assert frame.f_back is not None
        frame = frame.f_back
    return frame.f_locals["self"], frame.f_locals["inst"]


def use_of_result() -> int:
    """What a function does with the result of the call that Numba lowers now; see `models.pending.is_unused`."""
    lower, call = lowered_now()
    if not call.target.is_temp:  # it has a name
        return 0
    body = (one for block in lower.func_ir.blocks.values() for one in block.body if not isinstance(one, Del))
    uses = [one for one in body if one is not call and call.target.name in map(str, one.list_vars())]
    if not uses:
        return signals.UNUSED
    is_returned = all(getattr(getattr(one, "value", None), "op", "") == "cast" for one in uses)
    return signals.RETURNED if is_returned else 0


# --- telling Numba -----------------------------------------------------------------------------------------------


def _by_machine(spec: PrimitiveSpec, asked: Asked | Attribute) -> None:
    """Let a primitive be the call that it asks for."""
    result = KINDS.result_type(spec.returns)

    def generate(context, builder, signature, values):
        emitter = Emitter(builder, spec, list(values))
        if isinstance(asked, Attribute):
            made = emitter.attribute(asked.name)
        else:
            made = getattr(emitter, asked.method)(*map(emitter.value, asked.arguments))
        if spec.returns is None:
            return context.get_dummy_value()
        if spec.returns in WORDS:
            return context.make_tuple(builder, signature.return_type, made)
        if spec.returns == "pred":
            return builder.icmp_signed("!=", made, I64(0))
        if spec.returns == "f32" and made.type != F32:
            return builder.bitcast(builder.trunc(made, I32), F32)
        return made

    def typer(*given):
        kinds = zip(spec.args, given, strict=True)
        return result(*(KINDS.argument_type(spec, kind, one) for kind, one in kinds)), generate

    source = "def made(context, {0}): return typer({0})" if spec.args else "def made(context): return typer()"
    _let_be(spec.function, with_parameters(spec.function, source, {"typer": typer}))


def _let_be(function: Callable, typer: Callable) -> None:
    """Let calls of a function be an intrinsic, with no function in between to compile."""
    handle = intrinsic(typer)
    _tell(function, make_intrinsic_template(handle, typer, function.__name__, prefer_literal=False, kwargs={}))


@emitting(types.int64, types.int64)
def _count_ones(builder, x):
    return builder.ctpop(x)


@emitting(types.int64, types.int64)
def _leading_zeros(builder, x):
    return builder.ctlz(x, I1(0))


@emitting(types.int64, types.float32)
def _bits_of(builder, x):
    return builder.zext(builder.bitcast(x, I32), I64)


@emitting(types.float32, types.int64)
def _float_of(builder, bits):
    return builder.bitcast(builder.trunc(bits, I32), F32)


M32 = 0xFFFFFFFF


def _of_u32(function: Callable) -> Callable:
    def of_two(a, b):
        if (a | b) >> 32 != 0 or b == 0:
            schedule.fault(DIVIDED, a)
        return np.int64(function(np.uint32(a), np.uint32(b)))

    return of_two


# Arithmetic whose bodies are Python that Numba does not compile, or not to what Python makes of them.
ARITHMETIC: dict[str, Callable] = {
    "s32": lambda x: ((np.int64(x) + 0x80000000) & M32) - 0x80000000,
    "u32": lambda x: np.int64(x) & M32,
    "s64": lambda x: np.int64(x),
    "u32_div": _of_u32(operator.floordiv),
    "u32_mod": _of_u32(operator.mod),
    "byteswap_u32": lambda x: (x & 255) << 24 | (x >> 8 & 255) << 16 | (x >> 16 & 255) << 8 | (x >> 24 & 255),
    "popc_u32": lambda x: _count_ones(x & M32),
    "bfind_u32": lambda x: (63 - _leading_zeros(x & M32)) & M32,
    "ffs_u32": lambda x: 64 - _leading_zeros((x & M32) & -(x & M32)),
    "f32_bits_u32": lambda x: _bits_of(x),
    "u32_bits_f32": lambda bits: _float_of(bits),
    "bf16x2_to_f32x2": lambda word: (_float_of((word & 0xFFFF) << 16), _float_of(word & 0xFFFF0000)),
    "has_tma": lambda: True,
}
_known: dict[Any, Any] = {}  # the functions that Numba knows: it compiles a function once


# What the CPU knows of nbep's functions. Numba's own registry is read by numba-cuda, too.
_registry = Registry()


def _tell(function: Callable, template: Any) -> None:
    _registry.register(template)
    _registry.register_global(function, types.Function(template))
    cpu_target.typing_context.install_registry(_registry)


def _overload(function: Callable, choose: Callable, strict: bool = True) -> None:
    """As numba.extending.overload, for the CPU alone."""
    options = {"nopython": True, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    _tell(function, make_overload_template(function, choose, options, strict, "never"))


def _inner(function: Callable) -> None:
    """Let compiled functions call one."""
    _overload(function, lambda *args, **kwargs: function, strict=False)


def _is_new(function: Any) -> bool:
    """Whether Numba does not know a function yet; it does from now on."""
    is_new = function not in _known
    if is_new:
        _known[function] = _meaning(function)
    return is_new


def _meaning(function: Any) -> Any:
    """What two functions have in common that Numba compiles to the same."""
    names = named_by(function) if isinstance(function, FunctionType) else []
    return getattr(function, "__code__", None), [one if callable(one) else plain(one) for one in names]


def check_unedited(function: Any) -> None:
    """Raises: Stopped if Numba knows a function with another code than it has, or with other names"""
    if isinstance(function, FunctionType) and _known.get(function) not in (None, _meaning(function)):
        raise Stopped(f"{function.__name__} was edited after it was compiled")


def register() -> None:
    """Tell Numba about every function recorded since the last call."""
    for function in jit.DEVICE_FUNCTIONS:
        if _is_new(function):
            _inner(function)
    for by_type in jit.FUNCTIONS_BY_TYPE:
        if _is_new(by_type):
            _overload(by_type, version_by_type(by_type))
    for spec in jit.PRIMITIVES.values():
        if not _is_new(spec.function):
            continue
        asked = asked_by(spec)
        if asked is not None:
            _by_machine(spec, asked)
            continue
        body = ARITHMETIC.get(spec.name) or spec.below
        if body is None:
            _inner(spec.function)
        else:
            source = "def made({0}): return lambda {0}: body({0})"
            if spec.name in ARITHMETIC:
                _inner(body)
            _overload(spec.function, with_parameters(spec.function, source, {"body": body}), strict=False)


def entry_of(spec: KernelSpec) -> Callable:
    """A function without arguments that calls a kernel with those of this thread's launch."""
    kernel, words = spec.base or spec.function, count()
    names: dict[str, Any] = {"kernel": kernel, "argument": access.argument, "int32": np.int32, "f32": _float_of}

    def build(hint: Any) -> str:
        leaf = param_type(hint)
        if leaf is not None:
            text = f"argument({next(words)})"
            return {"q": text, "i": f"int32({text})", "f": f"f32({text})"}[leaf.code]
        name = f"kind_{hint.__name__}"
        names[name] = hint
        fields = get_type_hints(hint, include_extras=True)
        return f"{name}({', '.join(map(build, fields.values()))})"

    exec(f"def entry(): kernel({', '.join(map(build, spec.hints.values()))})", names)
    if _is_new(kernel):
        _inner(kernel)
    return names["entry"]


# --- integers: where Python's arithmetic raises an error, and Numba's gives 0 or anything -------------------------


class IntegerErrors(callconv.NumpyErrorModel):
    """What arithmetic raises, in the terms of Numba: a division of integers by 0, and none of floats."""

    def fp_zero_division(self, builder, exc_args=None, loc=None):
        is_raised = exc_args is not None and exc_args[0].startswith("integer")
        if is_raised:
            self.call_conv.return_user_exc(builder, ZeroDivisionError, exc_args, loc)
        return is_raised


INTEGER_ERRORS = "nbep"
callconv.error_models[INTEGER_ERRORS] = IntegerErrors
_lowered = imputils.Registry("nbep")


def _shift(context, builder, signature, arguments, to_left):
    result = signature.return_type
    value, amount = map(context.cast, [builder] * 2, arguments, signature.args, [result] * 2)
    right = builder.ashr if result.signed else builder.lshr
    if not isinstance(context.error_model, IntegerErrors):
        return (builder.shl if to_left else right)(value, amount)
    zero, last = amount.type(0), amount.type(result.bitwidth - 1)
    with builder.if_then(builder.icmp_signed("<", amount, zero), likely=False):
        context.call_conv.return_user_exc(builder, ValueError, ("negative shift count",))
    is_far = builder.icmp_unsigned(">", amount, last)
    near = builder.select(is_far, last, amount)
    if to_left or not result.signed:
        return builder.select(is_far, zero, (builder.shl if to_left else right)(value, near))
    return right(value, near)


for one in operator.lshift, operator.ilshift, operator.rshift, operator.irshift:
    _lowered.lower(one, types.Integer, types.Integer)(partial(_shift, to_left="lshift" in one.__name__))
cpu_target.target_context.refresh()  # first with Numba's own: intrinsics go to the first registry that there is
cpu_target.target_context.install_registry(_lowered)
