"""What a call in a kernel means: rules for what Python, NumPy, `math` and `numba.cuda` offer there.

A rule is a function of the compiler and of the values that are passed; how many it takes is how many the call takes.
"""

from __future__ import annotations

import ast
import enum
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from numba.core.errors import NumbaWarning

from . import device, stubs
from .code import build
from .env import NOT_CONSTANT, V, called
from .types import (
    AS_SCALARS,
    BOOL,
    C64,
    C128,
    F32,
    F64,
    I8,
    I16,
    I32,
    I64,
    U64,
    UNKNOWN,
    Arr,
    Iter,
    Known,
    Num,
    Rec,
    Tup,
    Vec,
    dtype_of,
    is_complex,
    is_float,
    is_int,
    is_number,
    unify,
)

MOST_PRINTED = 32  # of vprintf
TOO_MANY = "CUDA print() cannot print more than 32 items. The raw format string will be emitted by the kernel instead."
Rule = Callable[..., V]
RULES: dict[int, tuple[Any, Rule]] = {}  # by the id of what is called, which stays there


def rule(*functions: Any) -> Callable[[Rule], Rule]:
    def register(made: Rule) -> Rule:
        for function in functions:
            RULES[id(function)] = (function, made)
        return made

    return register


def call(c: Any, node: ast.Call) -> V:
    """A call, whatever it is of."""
    if isinstance(node.func, ast.Attribute):
        base = c.held(c.value(node.func.value))
        if not isinstance(base.t, Known):
            args, kwargs = arguments(c, node)
            return method(c, base, node.func.attr, args, kwargs)
        function = c.attribute(base, node.func.attr)
    else:
        function = c.value(node.func)
    if not isinstance(function.t, Known):
        raise c.fail(f"a value of type {function.t} cannot be called")
    args, kwargs = arguments(c, node)
    return call_known(c, function.t.value, args, kwargs)


def arguments(c: Any, node: ast.Call) -> tuple[list[V], dict[str, V]]:
    args: list[V] = []
    name = c.target_name
    for one in node.args:
        if isinstance(one, ast.Starred):
            value = c.made_real(c.value(one.value))
            if not isinstance(value.t, Tup):
                raise c.fail(f"*{value.t} is not supported in kernels")
            args += c.items_of(value)
        else:
            args.append(c.value(one))
    kwargs: dict[str, V] = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise c.fail("** is not supported in kernels")
        kwargs[keyword.arg] = c.value(keyword.value)
    c.target_name = name
    return args, kwargs


def call_known(c: Any, function: Any, args: list[V], kwargs: dict[str, V]) -> V:
    from . import cuda_rules, math_rules  # noqa: F401 - they register their rules
    from .statements import LocalFunction

    if isinstance(function, LocalFunction) or hasattr(function, "py_func"):
        return c.unit.call_function(c, function, args, kwargs)
    args, kwargs = [c.held(one) for one in args], {name: c.held(one) for name, one in kwargs.items()}
    found = RULES.get(id(function))
    if found is not None:
        takes = inspect.signature(found[1])
        try:
            takes.bind(c, *args, **kwargs)
        except TypeError:
            name = repr(function) if isinstance(function, stubs.Stub) else function.__name__
            count = sum(one.default is one.empty for one in takes.parameters.values()) - 1
            raise c.fail(f"{name}: takes {count} arguments, {len(args)} given") from None
        return found[1](c, *args, **kwargs)
    if isinstance(function, stubs.VectorStub):
        return vector(c, function, args)
    if isinstance(function, type) and issubclass(function, tuple) and hasattr(function, "_fields"):
        bound = inspect.signature(function).bind(*args, **kwargs)
        bound.apply_defaults()
        made = c.tuple_of([one if isinstance(one, V) else c.known(one) for one in bound.arguments.values()])
        return V(Tup(made.t.items, function), made.code, made.const)
    if isinstance(function, type) and issubclass(function, enum.Enum) and len(args) == 1 and args[0].is_known:
        return c.known(function(args[0].known))
    if isinstance(function, np.ufunc):
        return math_rules.ufunc(c, function, args)
    if getattr(function, "__module__", None) in ("numba.cuda.libdevice", "numba_cuda.numba.cuda.libdevice"):
        return math_rules.libdevice(c, function, args)
    name = getattr(function, "__name__", None)
    if name == "literal_unroll":
        return args[0]
    if args and isinstance(args[0].t, Arr) and getattr(np, name or "", None) is function:
        return math_rules.array_method(c, args[0], str(name), args[1:], kwargs)
    if function is np.dtype and len(args) == 1 and args[0].is_known:
        return c.known(np.dtype(args[0].known))
    if is_type(function):
        return cast(c, dtype_of(function), args)
    if isinstance(function, type) and issubclass(function, BaseException):
        raise c.fail("an exception can only be raised")
    name = getattr(function, "__qualname__", None) or repr(function)
    where = getattr(function, "__module__", None)
    if inspect.isfunction(function):
        raise c.fail(f"`{name}` is no device function: decorate it with @cuda.jit(device=True)")
    raise c.fail(f"{where + '.' if where else ''}{name} is not supported in kernels")


def is_type(value: Any) -> bool:
    """Whether it stands for a type of numbers, so that a call of it converts."""
    if isinstance(value, np.dtype) or (isinstance(value, type) and issubclass(value, np.generic)):
        return True
    return hasattr(value, "bitwidth") or str(value) in ("bool", "boolean", "complex64", "complex128")


def attribute_of(c: Any, value: Any, name: str) -> V:
    """An attribute of something that is known."""
    if isinstance(value, stubs.Dim3):
        if name not in ("x", "y", "z"):
            raise c.fail(f"{value!r} has no {name!r}")
        letter = {"threadIdx": "t", "blockIdx": "b", "blockDim": "d", "gridDim": "g"}[value._name]
        return V(I32, build(f"_w.{letter}{name}"), NOT_CONSTANT, 31 if letter in "bg" else 11)
    if isinstance(value, enum.Enum) and name in ("value", "name"):
        return c.known(getattr(value, name))
    try:
        found = getattr(value, name)
    except AttributeError:
        what = getattr(value, "__name__", None) or repr(value)
        raise c.fail(f"{what} has no attribute {name!r}") from None
    return c.known(found)


def method(c: Any, base: V, name: str, args: list[V], kwargs: dict[str, V]) -> V:
    t = base.t
    if isinstance(t, Arr):
        from .math_rules import array_method

        return array_method(c, base, name, args, kwargs)
    if is_number(t) and name == "conjugate":
        return V(t, build("{0}.conjugate()", base.code)) if is_complex(t) else base
    if isinstance(t, Num) and name == "view" and len(args) == 1:
        to = dtype_of(args[0].known)
        if to.itemsize != t.dtype.itemsize:
            raise c.fail(f"view of {t} as {to}: their sizes differ")
        code = build(f"np.{t.dtype.name}({{0}}).view('{to.str}')", base.code)
        return V(Num(to), build("{0}.item()", code) if to.str[1:] not in AS_SCALARS else code)
    if isinstance(t, Tup) and name in ("count", "index"):
        return V(I64, build(f"{{0}}.{name}({{1}})", base.code, args[0].code))
    if is_int(t) and name == "bit_count" and not args:
        return V(Num(np.dtype("u1")), build("abs({0}).bit_count()", base.code), NOT_CONSTANT, 7)
    if is_number(t) and name == "item":
        return base
    raise c.fail(f"a value of type {t} has no method {name!r} in kernels")


def helper(c: Any, t: Any, name: str, *args: V, before: tuple[Any, ...] = (), bits: int = 64) -> V:
    """A call of a function of `device`: it is passed the thread, who that is, and what stands before the arguments."""
    first = ["_t", "_w", *map(repr, before)]
    return V(t, called(c.keep(getattr(device, name)), *first, *args), NOT_CONSTANT, bits)


def plain(c: Any, t: Any, function: Any, *args: V) -> V:
    """A call of a function that only computes."""
    return V(t, called(c.keep(function), *args))


def _parts(c: Any, value: V, count: int = 1) -> list[V]:
    """The numbers of a vector, in the order in which they are used; `count` times a number."""
    name = c.temporary()
    if isinstance(value.t, Vec):
        first = V(Num(value.t.dtype), build(f"({name} := {{0}})[0]", value.code))
        return [first, *(V(first.t, build(f"{name}[{i}]")) for i in range(1, value.t.size))]
    if count == 1 or not isinstance(value.t, Num):
        return [value] * count
    return [V(value.t, build(f"({name} := {{0}})", value.code)), *[V(value.t, build(name))] * (count - 1)]


def of_vectors(c: Any, t: Vec, values: list[V], compute: Callable[..., V]) -> V:
    """What numba-cuda-mlir computes of vectors and numbers, part by part."""
    parts = zip(*(_parts(c, one, t.size) for one in values), strict=True)
    codes = [c.converted(compute(*some), Num(t.dtype)).code for some in parts]
    return V(t, ast.Tuple(codes, ast.Load()))


def vector(c: Any, stub: stubs.VectorStub, args: list[V]) -> V:
    dtype = np.dtype(stub.base)
    parts = [part for one in args for part in _parts(c, one)]
    if len(parts) != stub.size:
        raise c.fail(f"{stub!r}: takes {stub.size} values, {len(parts)} given")
    codes = [c.converted(one, Num(dtype)).code for one in parts]
    return V(Vec(stub._name, dtype, stub.size), ast.Tuple(codes, ast.Load()))


def cast(c: Any, dtype: np.dtype, args: list[V]) -> V:
    if dtype.kind == "c" and len(args) == 2:
        return c.converted(_complex(c, *args), Num(dtype))
    if len(args) != 1:
        raise c.fail(f"{dtype}: takes 1 arguments, {len(args)} given")
    value = args[0]
    if isinstance(value.t, Known) and isinstance(value.t.value, enum.Enum):
        value = c.known(value.t.value.value)
    if dtype.kind in "mM" and isinstance(value.t, Known):
        return V(Num(dtype), build(c.keep(dtype.type(value.t.value))))
    if value.t is UNKNOWN:
        return V(Num(dtype), value.code)
    if not isinstance(value.t, Num):
        raise c.fail(f"{value.t} cannot become {dtype}")
    return c.converted(value, Num(dtype))


# --- builtins ---------------------------------------------------------------------------------------------------------
@rule(int)
def _int(c: Any, value: V) -> V:
    if isinstance(value.t, Known) and isinstance(value.t.value, enum.IntEnum):
        return c.number(int(value.t.value))
    if is_float(value.t) or value.t == BOOL:
        return c.converted(value, I64)
    if not is_int(value.t):
        raise c.fail(f"int of {value.t}")
    return value


@rule(float)
def _float(c: Any, value: V) -> V:
    if isinstance(value.t, Known) and isinstance(value.t.value, str):
        return c.number(float(value.t.value))
    if not (is_int(value.t) or is_float(value.t)):
        raise c.fail(f"float of {value.t}")
    return value if is_float(value.t) else c.converted(value, F64)


@rule(bool)
def _bool(c: Any, value: V) -> V:
    truth = c.truth(value)
    return V(BOOL, build("bool({0})", truth.code), truth.const)


@rule(complex)
def _complex(c: Any, *args: V) -> V:
    t = C64 if all(one.t == F32 for one in args) else C128
    if len(args) == 1:
        return c.converted(args[0], t if not is_complex(args[0].t) else C128)
    made = build("complex({0}, {1})", *(c.converted(one, F64).code for one in args))
    return V(t, build("c64({0})", made) if t == C64 else made)


@rule(len)
def _len(c: Any, value: V) -> V:
    t = value.t
    if isinstance(t, Tup):
        return c.number(len(t.items))
    if isinstance(t, Known) and isinstance(t.value, (tuple, str)):
        return c.number(len(t.value))
    if isinstance(t, Arr):
        return V(I64, build("{0}.shape[0]", value.code), NOT_CONSTANT, 48)
    raise c.fail(f"len of {t}")


@rule(range)
def _range(c: Any, *args: V) -> V:
    if not 1 <= len(args) <= 3 or not all(is_int(one.t) or one.t is UNKNOWN for one in args):
        raise c.fail(f"range of {', '.join(str(one.t) for one in args)}; takes one to three integers")
    t = I32 if all(one.t in (I32, I16, I8) for one in args) else U64 if all(one.t == U64 for one in args) else I64
    return V(Iter(t), called("range", *args), NOT_CONSTANT, max(one.bits for one in args[:2]))


def _extreme(name: str) -> Rule:
    def extreme(c: Any, *args: V) -> V:
        if len(args) == 1 and isinstance(args[0].t, Tup):
            args = tuple(c.items_of(args[0]))
        t = args[0].t
        for one in args:
            t = unify(t, one.t)
            if t is None or not is_number(one.t):
                raise c.fail(f"{name} of {', '.join(str(one.t) for one in args)}")
        if is_complex(t):
            raise c.fail(f"{name} of complex numbers")
        result, *others = [c.converted(one, t) for one in args]
        sign = "<" if name == "min" else ">"
        for one in others:
            a, b = c.temporary(), c.temporary()
            template = f"{name}({{0}}, {{1}})"
            if is_float(t):
                template = f"({b} if (({b} := {{1}}) {sign} ({a} := {{0}})) or {a} != {a} else {a})"
            result = V(t, build(template, result.code, one.code), NOT_CONSTANT, max(result.bits, one.bits))
        return result

    return extreme


rule(min)(_extreme("min"))
rule(max)(_extreme("max"))


@rule(abs)
def _abs(c: Any, value: V) -> V:
    t = value.t
    if c.unit.successor and isinstance(t, Vec):
        return of_vectors(c, t, [value], lambda one: _abs(c, one))
    if t == BOOL:
        return c.converted(value, I8)
    code = build("abs({0})", value.code)
    if is_complex(t):
        return V(F32, build("f32({0})", code)) if t == C64 else V(F64, code)
    if not is_number(t) and not (isinstance(t, Num) and t.dtype.kind == "m"):
        raise c.fail(f"abs of {t}")
    if is_int(t) and t.dtype.kind == "i":
        return V(t, build(f"wrap({{0}}, {8 * t.dtype.itemsize}, True)", code))
    return V(t, code)


@rule(round)
def _round(c: Any, value: V, digits: V | None = None) -> V:
    value = value if is_float(value.t) else c.converted(value, F64)
    if digits is None:
        return V(I64, build("round(float({0}))", value.code))
    return V(value.t, build(c.conversion_to(value.t), build("round_to(float({0}), {1})", value.code, digits.code)))


@rule(divmod)
def _divmod(c: Any, *args: V) -> V:
    names = [c.temporary() for _ in args]
    first = [
        V(one.t, build(f"({name} := {{0}})", one.code), NOT_CONSTANT, one.bits)
        for one, name in zip(args, names, strict=True)
    ]
    again = [V(one.t, build(name), one.const, one.bits) for one, name in zip(args, names, strict=True)]
    return c.tuple_of([c.binary("FloorDiv", *first), c.binary("Mod", *again)])


@rule(pow)
def _pow(c: Any, value: V, power: V) -> V:
    return c.binary("Pow", value, power)


@rule(enumerate)
def _enumerate(c: Any, value: V, start: V | None = None) -> V:
    inner = c.iterated(value)
    return V(Iter(Tup((I64, inner.t.item))), called("enumerate", inner, start or "0"))


@rule(zip)
def _zip(c: Any, *args: V) -> V:
    inner = [c.iterated(one) for one in args]
    return V(Iter(Tup(tuple(one.t.item for one in inner))), called("zip", *inner))


@rule(iter, reversed)
def _iter(c: Any, *args: V) -> V:
    raise c.fail("iter and reversed are not supported in kernels")


@rule(tuple)
def _tuple(c: Any, value: V | None = None) -> V:
    if value is None:
        return c.tuple_of([])
    if isinstance(value.t, Tup):
        return value
    raise c.fail(f"tuple of {value.t}")


@rule(print)
def _print(c: Any, *args: V) -> V:
    values: list[V] = []
    for one in args:
        if isinstance(one.t, Known) and isinstance(one.t.value, stubs.Dim3):
            values.append(c.tuple_of([attribute_of(c, one.t.value, axis) for axis in "xyz"]))
        elif isinstance(one.t, Known) and not isinstance(one.t.value, (str, type(None))):
            raise c.fail(f"print of {one.t}")
        elif isinstance(one.t, (Arr, Rec)):
            raise c.fail(f"print of {one.t} is not supported in kernels")
        else:
            values.append(one)
    if len(values) > MOST_PRINTED:
        formats = " ".join("%lld" if is_int(one.t) else "%f" if is_float(one.t) else "%s" for one in values)
        warnings.warn(TOO_MANY, NumbaWarning, stacklevel=2)
        values = [V(Known(formats), ast.Constant(formats))]
    return helper(c, Known(None), "print_line", *values)


@rule(isinstance)
def _isinstance(c: Any, value: V, kind: V) -> V:
    t, wanted = value.t, kind.known
    kinds = {int: is_int(t) and t != BOOL, float: is_float(t), bool: t == BOOL, complex: is_complex(t)}
    kinds[tuple] = isinstance(t, Tup)
    kinds[str] = isinstance(t, Known) and isinstance(t.value, str)
    found = any(
        kinds[one] if one in kinds else is_type(one) and t == Num(dtype_of(one))
        for one in (wanted if isinstance(wanted, tuple) else (wanted,))
    )
    return V(BOOL, ast.Constant(found), found)


@rule(slice)
def _slice(c: Any, *args: V) -> V:
    return V(Known(slice(None)), called("slice", *args))


@rule(sum)
def _sum(c: Any, *args: V) -> V:
    raise c.fail("sum is not supported in kernels; write a loop")
