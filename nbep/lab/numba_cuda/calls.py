"""What a call in a kernel means: rules for what Python, NumPy, `math` and `numba.cuda` offer there."""

from __future__ import annotations

import ast
import enum
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from numba.core.errors import NumbaWarning

from . import stubs
from .code import build, constant, placed
from .env import NOT_CONSTANT, V
from .types import (
    AS_SCALARS,
    BOOL,
    F64,
    I32,
    I64,
    UNKNOWN,
    Arr,
    Iter,
    Known,
    Num,
    Other,
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
Rule = Callable[[Any, list[V], dict[str, V], ast.AST], V]
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
        base = c.held(c.value(node.func.value), node)
        if not isinstance(base.t, Known):
            args, kwargs = arguments(c, node)
            return method(c, base, node.func.attr, args, kwargs, node)
        function = c.attribute(base, node.func.attr, node.func)
    else:
        function = c.value(node.func)
    if not isinstance(function.t, Known):
        raise c.fail(node, f"a value of type {function.t} cannot be called")
    args, kwargs = arguments(c, node)
    return call_known(c, function.t.value, args, kwargs, node)


def arguments(c: Any, node: ast.Call) -> tuple[list[V], dict[str, V]]:
    args: list[V] = []
    name = c.target_name
    for one in node.args:
        if isinstance(one, ast.Starred):
            value = c.made_real(c.value(one.value), node)
            if not isinstance(value.t, Tup):
                raise c.fail(node, f"*{value.t} is not supported in kernels")
            args += [c.tuple_item(value, c.number(i, node), node) for i in range(len(value.t.items))]
        else:
            args.append(c.value(one))
    kwargs: dict[str, V] = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise c.fail(node, "** is not supported in kernels")
        kwargs[keyword.arg] = c.value(keyword.value)
    c.target_name = name
    return args, kwargs


def call_known(c: Any, function: Any, args: list[V], kwargs: dict[str, V], node: ast.AST) -> V:
    from . import cuda_rules, halves, math_rules  # noqa: F401 - they register their rules
    from .statements import LocalFunction

    if isinstance(function, LocalFunction) or hasattr(function, "py_func"):
        return c.unit.call_function(c, function, args, kwargs, node)
    args, kwargs = [c.held(one, node) for one in args], {name: c.held(one, node) for name, one in kwargs.items()}
    found = RULES.get(id(function))
    if found is not None:
        return found[1](c, args, kwargs, node)
    if isinstance(function, stubs.VectorStub):
        return vector(c, function, args, node)
    if isinstance(function, type) and issubclass(function, tuple) and hasattr(function, "_fields"):
        bound = inspect.signature(function).bind(*args, **kwargs)
        bound.apply_defaults()
        made = c.tuple_of([one if isinstance(one, V) else c.known(one, node) for one in bound.arguments.values()], node)
        return V(Tup(made.t.items, function), made.code, made.const)
    if isinstance(function, type) and issubclass(function, enum.Enum) and len(args) == 1 and args[0].is_known:
        return c.known(function(args[0].known), node)
    if isinstance(function, np.ufunc):
        return math_rules.ufunc(c, function, args, kwargs, node)
    if getattr(function, "__module__", None) in ("numba.cuda.libdevice", "numba_cuda.numba.cuda.libdevice"):
        return math_rules.libdevice(c, function, args, node)
    name = getattr(function, "__name__", None)
    if name == "literal_unroll":
        return args[0]
    if args and isinstance(args[0].t, Arr) and getattr(np, name or "", None) is function:
        from .array_rules import array_method

        return array_method(c, args[0], str(name), args[1:], kwargs, node)
    if function is np.dtype and len(args) == 1 and args[0].is_known:
        return c.known(np.dtype(args[0].known), node)
    if is_type(function):
        return cast(c, dtype_of(function), args, node)
    if isinstance(function, type) and issubclass(function, BaseException):
        raise c.fail(node, "an exception can only be raised")
    name = getattr(function, "__qualname__", None) or repr(function)
    where = getattr(function, "__module__", None)
    if inspect.isfunction(function):
        raise c.fail(node, f"`{name}` is no device function: decorate it with @cuda.jit(device=True)")
    raise c.fail(node, f"{where + '.' if where else ''}{name} is not supported in kernels")


def is_type(value: Any) -> bool:
    """Whether it stands for a type of numbers, so that a call of it converts."""
    if isinstance(value, np.dtype) or (isinstance(value, type) and issubclass(value, np.generic)):
        return True
    return hasattr(value, "bitwidth") or str(value) in ("bool", "boolean", "complex64", "complex128")


def attribute_of(c: Any, value: Any, name: str, node: ast.AST) -> V:
    """An attribute of something that is known."""
    if isinstance(value, stubs.Dim3):
        if name not in ("x", "y", "z"):
            raise c.fail(node, f"{value!r} has no {name!r}")
        letter = {"threadIdx": "t", "blockIdx": "b", "blockDim": "d", "gridDim": "g"}[value._name]
        return V(I32, build(f"_w.{letter}{name}", node), NOT_CONSTANT, 31 if letter in "bg" else 11)
    if isinstance(value, enum.Enum) and name in ("value", "name"):
        return c.known(getattr(value, name), node)
    try:
        found = getattr(value, name)
    except AttributeError:
        what = getattr(value, "__name__", None) or repr(value)
        raise c.fail(node, f"{what} has no attribute {name!r}") from None
    return c.known(found, node)


def method(c: Any, base: V, name: str, args: list[V], kwargs: dict[str, V], node: ast.AST) -> V:
    t = base.t
    if isinstance(t, Other):
        if t.name == "grid group" and name == "sync":
            c.compiled.uses.add("grid")
            return helper(c, I32, "grid_sync", [], node)
        raise c.fail(node, f"a {t} has no method {name!r}")
    if isinstance(t, Arr):
        from .array_rules import array_method

        return array_method(c, base, name, args, kwargs, node)
    if is_number(t) and name == "conjugate":
        return V(t, build("{0}.conjugate()", node, base.code)) if is_complex(t) else base
    if isinstance(t, Num) and name == "view" and len(args) == 1:
        to = dtype_of(args[0].known)
        if to.itemsize != t.dtype.itemsize:
            raise c.fail(node, f"view of {t} as {to}: their sizes differ")
        code = build(f"np.{t.dtype.name}({{0}}).view('{to.str}')", node, base.code)
        return V(Num(to), build("{0}.item()", node, code) if to.str[1:] not in AS_SCALARS else code)
    if isinstance(t, Tup) and name in ("count", "index"):
        return V(I64, build(f"{{0}}.{name}({{1}})", node, base.code, args[0].code))
    if is_int(t) and name == "bit_count" and not args:
        return V(Num(np.dtype("u1")), build("abs({0}).bit_count()", node, base.code), NOT_CONSTANT, 7)
    if is_number(t) and name == "item":
        return base
    raise c.fail(node, f"a value of type {t} has no method {name!r} in kernels")


def helper(c: Any, t: Any, name: str, args: list[V], node: ast.AST, *before: Any, bits: int = 64) -> V:
    """A call of a function of `device`: it is passed the thread and who that is."""
    from . import device

    keep = c.keep(getattr(device, name))
    first = "".join(f", {one!r}" for one in before)
    holes = "".join(f", {{{i}}}" for i in range(len(args)))
    return V(t, build(f"{keep}(_t, _w{first}{holes})", node, *(one.code for one in args)), NOT_CONSTANT, bits)


def plain(c: Any, t: Any, function: Any, args: list[V], node: ast.AST, *more: Any) -> V:
    """A call of a function that only computes."""
    keep = c.keep(function)
    holes = ", ".join([*(f"{{{i}}}" for i in range(len(args))), *map(repr, more)])
    return V(t, build(f"{keep}({holes})", node, *(one.code for one in args)))


def need(c: Any, args: list[V], count: int, what: str, node: ast.AST) -> None:
    if len(args) != count:
        raise c.fail(node, f"{what}: takes {count} arguments, {len(args)} given")


def _parts(c: Any, value: V, node: ast.AST, count: int = 1) -> list[V]:
    """The numbers of a vector, in the order in which they are used; `count` times a number."""
    name = c.temporary()
    if isinstance(value.t, Vec):
        first = V(Num(value.t.dtype), build(f"({name} := {{0}})[0]", node, value.code))
        return [first, *(V(first.t, build(f"{name}[{i}]", node)) for i in range(1, value.t.size))]
    if count == 1 or not isinstance(value.t, Num):
        return [value] * count
    return [V(value.t, build(f"({name} := {{0}})", node, value.code)), *[V(value.t, build(name, node))] * (count - 1)]


def of_vectors(c: Any, t: Vec, values: list[V], compute: Callable[..., V], node: ast.AST) -> V:
    """What numba-cuda-mlir computes of vectors and numbers, part by part."""
    parts = zip(*(_parts(c, one, node, t.size) for one in values), strict=True)
    codes = [c.converted(compute(*some), Num(t.dtype), node).code for some in parts]
    return V(t, placed(ast.Tuple(codes, ast.Load()), node))


def vector(c: Any, stub: stubs.VectorStub, args: list[V], node: ast.AST) -> V:
    dtype = np.dtype(stub.base)
    parts = [part for one in args for part in _parts(c, one, node)]
    if len(parts) != stub.size:
        raise c.fail(node, f"{stub!r}: takes {stub.size} values, {len(parts)} given")
    codes = [c.converted(one, Num(dtype), node).code for one in parts]
    return V(Vec(stub._name, dtype, stub.size), placed(ast.Tuple(codes, ast.Load()), node))


def cast(c: Any, dtype: np.dtype, args: list[V], node: ast.AST) -> V:
    if dtype.kind == "c" and len(args) == 2:
        return c.converted(_complex(c, args, {}, node), Num(dtype), node)
    need(c, args, 1, str(dtype), node)
    value = args[0]
    if isinstance(value.t, Known) and isinstance(value.t.value, enum.Enum):
        value = c.known(value.t.value.value, node)
    if dtype.kind in "mM" and isinstance(value.t, Known):
        return V(Num(dtype), placed(ast.Name(c.keep(dtype.type(value.t.value)), ast.Load()), node))
    if value.t is UNKNOWN:
        return V(Num(dtype), value.code)
    if not isinstance(value.t, Num):
        raise c.fail(node, f"{value.t} cannot become {dtype}")
    return c.converted(value, Num(dtype), node)


# --- builtins ---------------------------------------------------------------------------------------------------------
@rule(int)
def _int(c: Any, args: list[V], kwargs: dict[str, V], node: ast.AST) -> V:
    value = args[0]
    if isinstance(value.t, Known) and isinstance(value.t.value, enum.IntEnum):
        return c.number(int(value.t.value), node)
    if is_float(value.t) or value.t == BOOL:
        return c.converted(value, I64, node)
    if not is_int(value.t):
        raise c.fail(node, f"int of {value.t}")
    return value


@rule(float)
def _float(c: Any, args: list[V], kwargs: dict[str, V], node: ast.AST) -> V:
    if isinstance(args[0].t, Known) and isinstance(args[0].t.value, str):
        return c.number(float(args[0].t.value), node)
    if not (is_int(args[0].t) or is_float(args[0].t)):
        raise c.fail(node, f"float of {args[0].t}")
    return args[0] if is_float(args[0].t) else c.converted(args[0], F64, node)


@rule(bool)
def _bool(c: Any, args: list[V], kwargs: dict[str, V], node: ast.AST) -> V:
    truth = c.truth(args[0], node)
    return V(BOOL, build("bool({0})", node, truth.code), truth.const)


@rule(complex)
def _complex(c: Any, args: list[V], kwargs: dict[str, V], node: ast.AST) -> V:
    from .types import C64, C128, F32

    t = C64 if all(one.t == F32 for one in args) else C128
    if len(args) == 1:
        return c.converted(args[0], t if not is_complex(args[0].t) else C128, node)
    parts = [c.converted(one, F64, node).code for one in args]
    made = build("complex({0}, {1})", node, *parts)
    return V(t, build("c64({0})", node, made) if t == C64 else made)


@rule(len)
def _len(c: Any, args: list[V], kwargs: dict[str, V], node: ast.AST) -> V:
    t = args[0].t
    if isinstance(t, Tup):
        return c.number(len(t.items), node)
    if isinstance(t, Known) and isinstance(t.value, (tuple, str)):
        return c.number(len(t.value), node)
    if isinstance(t, Arr):
        return V(I64, build("{0}.shape[0]", node, args[0].code), NOT_CONSTANT, 48)
    raise c.fail(node, f"len of {t}")


@rule(range)
def _range(c: Any, args: list[V], kwargs: dict[str, V], node: ast.AST) -> V:
    from .types import U64

    if not 1 <= len(args) <= 3 or not all(is_int(one.t) or one.t is UNKNOWN for one in args):
        raise c.fail(node, f"range of {', '.join(str(one.t) for one in args)}; takes one to three integers")
    small = all(one.t in (I32, Num(np.dtype("i2")), Num(np.dtype("i1"))) for one in args)
    t = I32 if small else U64 if all(one.t == U64 for one in args) else I64
    code = build(f"range({', '.join(f'{{{i}}}' for i in range(len(args)))})", node, *(one.code for one in args))
    return V(Iter(t), code, NOT_CONSTANT, max(one.bits for one in args[:2]))


def _extreme(name: str) -> Rule:
    def extreme(c: Any, args: list[V], kwargs: dict[str, V], node: ast.AST) -> V:
        if len(args) == 1 and isinstance(args[0].t, Tup):
            args = [c.tuple_item(args[0], c.number(i, node), node) for i in range(len(args[0].t.items))]
        t = args[0].t
        for one in args:
            t = unify(t, one.t)
            if t is None or not is_number(one.t):
                raise c.fail(node, f"{name} of {', '.join(str(one.t) for one in args)}")
        if is_complex(t):
            raise c.fail(node, f"{name} of complex numbers")
        codes = [c.converted(one, t, node) for one in args]
        result = codes[0]
        sign = "<" if name == "min" else ">"
        for one in codes[1:]:
            a, b = c.temporary(), c.temporary()
            if is_float(t):
                template = f"({b} if (({b} := {{1}}) {sign} ({a} := {{0}})) or {a} != {a} else {a})"
            else:
                template = f"{name}({{0}}, {{1}})"
            bits = max(result.bits, one.bits)
            result = V(t, build(template, node, result.code, one.code), NOT_CONSTANT, bits)
        return result

    return extreme


rule(min)(_extreme("min"))
rule(max)(_extreme("max"))


@rule(abs)
def _abs(c: Any, args: list[V], kwargs: dict[str, V], node: ast.AST) -> V:
    from .types import C64, F32, I8

    t = args[0].t
    if c.unit.successor and isinstance(t, Vec):
        return of_vectors(c, t, args, lambda one: _abs(c, [one], {}, node), node)
    if t == BOOL:
        return c.converted(args[0], I8, node)
    if is_complex(t):
        code = build("abs({0})", node, args[0].code)
        return V(F32, build("f32({0})", node, code)) if t == C64 else V(F64, code)
    if not is_number(t) and not (isinstance(t, Num) and t.dtype.kind == "m"):
        raise c.fail(node, f"abs of {t}")
    if is_int(t) and t.dtype.kind == "i":
        return V(t, build(f"wrap(abs({{0}}), {8 * t.dtype.itemsize}, True)", node, args[0].code))
    return V(t, build("abs({0})", node, args[0].code))


@rule(round)
def _round(c: Any, args: list[V], kwargs: dict[str, V], node: ast.AST) -> V:
    value = args[0] if is_float(args[0].t) else c.converted(args[0], F64, node)
    if len(args) == 1:
        return V(I64, build("round(float({0}))", node, value.code))
    code = build("round_to(float({0}), {1})", node, value.code, args[1].code)
    return V(value.t, build(c.conversion_to(value.t, node), node, code))


@rule(divmod)
def _divmod(c: Any, args: list[V], kwargs: dict[str, V], node: ast.AST) -> V:
    a, b = c.temporary(), c.temporary()
    first = [
        V(one.t, build(f"({name} := {{0}})", node, one.code), NOT_CONSTANT, one.bits)
        for one, name in zip(args, (a, b), strict=True)
    ]
    again = [V(one.t, build(name, node), one.const, one.bits) for one, name in zip(args, (a, b), strict=True)]
    return c.tuple_of([c.binary("FloorDiv", *first, node), c.binary("Mod", *again, node)], node)


@rule(pow)
def _pow(c: Any, args: list[V], kwargs: dict[str, V], node: ast.AST) -> V:
    need(c, args, 2, "pow", node)
    return c.binary("Pow", args[0], args[1], node)


@rule(enumerate)
def _enumerate(c: Any, args: list[V], kwargs: dict[str, V], node: ast.AST) -> V:
    inner = iterated(c, args[0], node)
    start = args[1].code if len(args) > 1 else constant(0, node)
    return V(Iter(Tup((I64, inner.t.item))), build("enumerate({0}, {1})", node, inner.code, start))


@rule(zip)
def _zip(c: Any, args: list[V], kwargs: dict[str, V], node: ast.AST) -> V:
    inner = [iterated(c, one, node) for one in args]
    holes = ", ".join(f"{{{i}}}" for i in range(len(args)))
    return V(Iter(Tup(tuple(one.t.item for one in inner))), build(f"zip({holes})", node, *(one.code for one in inner)))


def iterated(c: Any, value: V, node: ast.AST) -> V:
    if isinstance(value.t, Iter):
        return value
    t = value.t
    if isinstance(t, Arr):
        inner: Any = Num(t.dtype) if t.ndim == 1 else Arr(t.dtype, t.ndim - 1, t.layout, t.is_const)
        inner = Rec(t.dtype) if t.ndim == 1 and t.dtype.names else inner
        return V(Iter(inner), build("{0}.items(_t)", node, value.code))
    if isinstance(t, Tup) and len(set(t.items)) == 1:
        return V(Iter(t.items[0]), value.code)
    raise c.fail(node, f"a loop over {t} is not supported in kernels")


@rule(iter, reversed)
def _iter(c: Any, args: list[V], kwargs: dict[str, V], node: ast.AST) -> V:
    raise c.fail(node, "iter and reversed are not supported in kernels")


@rule(tuple)
def _tuple(c: Any, args: list[V], kwargs: dict[str, V], node: ast.AST) -> V:
    if not args:
        return c.tuple_of([], node)
    if isinstance(args[0].t, Tup):
        return args[0]
    raise c.fail(node, f"tuple of {args[0].t}")


@rule(print)
def _print(c: Any, args: list[V], kwargs: dict[str, V], node: ast.AST) -> V:
    values: list[V] = []
    for one in args:
        if isinstance(one.t, Known) and isinstance(one.t.value, stubs.Dim3):
            values.append(c.tuple_of([attribute_of(c, one.t.value, axis, node) for axis in "xyz"], node))
        elif isinstance(one.t, Known) and not isinstance(one.t.value, (str, type(None))):
            raise c.fail(node, f"print of {one.t}")
        elif isinstance(one.t, (Arr, Rec)):
            raise c.fail(node, f"print of {one.t} is not supported in kernels")
        else:
            values.append(one)
    if len(values) > MOST_PRINTED:
        formats = " ".join("%lld" if is_int(one.t) else "%f" if is_float(one.t) else "%s" for one in values)
        warnings.warn(TOO_MANY, NumbaWarning, stacklevel=2)
        values = [V(Known(formats), constant(formats, node))]
    return helper(c, Known(None), "print_line", values, node)


@rule(isinstance)
def _isinstance(c: Any, args: list[V], kwargs: dict[str, V], node: ast.AST) -> V:
    wanted = args[1].known
    t = args[0].t
    kinds = {int: is_int(t) and t != BOOL, float: is_float(t), bool: t == BOOL, complex: is_complex(t)}
    kinds[tuple] = isinstance(t, Tup)
    kinds[str] = isinstance(t, Known) and isinstance(t.value, str)
    found = any(
        kinds[one] if one in kinds else is_type(one) and t == Num(dtype_of(one))
        for one in (wanted if isinstance(wanted, tuple) else (wanted,))
    )
    return V(BOOL, constant(found, node), found)


@rule(slice)
def _slice(c: Any, args: list[V], kwargs: dict[str, V], node: ast.AST) -> V:
    holes = ", ".join(f"{{{i}}}" for i in range(len(args)))
    return V(Known(slice(None)), build(f"slice({holes})", node, *(one.code for one in args)))


@rule(sum)
def _sum(c: Any, args: list[V], kwargs: dict[str, V], node: ast.AST) -> V:
    raise c.fail(node, "sum is not supported in kernels; write a loop")
