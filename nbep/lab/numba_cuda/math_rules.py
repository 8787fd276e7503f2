"""Rules for `math`, `cmath`, NumPy's functions of numbers, `operator` and libdevice.

A function of float32 is computed with 53 bits and rounded once: it is off by no more than the device's.
"""

from __future__ import annotations

import ast
import cmath
import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from . import libdevice as device_library
from .calls import need, plain, rule
from .code import build
from .env import V
from .ops import _gamma, _lgamma, complex_quiet, ldexp, quiet
from .types import (
    AS_SCALARS,
    BF16,
    BOOL,
    C64,
    F32,
    F64,
    I32,
    I64,
    UNKNOWN,
    Num,
    Tup,
    is_complex,
    is_float,
    is_int,
)

_NUMPY: dict[str, Any] = {
    "log": np.log, "log2": np.log2, "log10": np.log10, "log1p": np.log1p, "exp": np.exp, "exp2": np.exp2,
    "expm1": np.expm1, "cosh": np.cosh, "sinh": np.sinh, "atanh": np.arctanh, "pow": np.power, "gamma": _gamma,
    "lgamma": _lgamma,
}  # fmt: skip
UNARY = (
    "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "exp", "expm1",
    "exp2", "log", "log2", "log10", "log1p", "sqrt", "fabs", "erf", "erfc", "gamma", "lgamma", "radians", "degrees",
)  # fmt: skip
OF_BF16 = ("sqrt", "log", "log10", "cos", "sin", "tanh", "exp", "exp2")  # of which numba.cuda.bf16 makes bfloat16
BINARY = ("atan2", "hypot", "fmod", "copysign", "pow", "remainder", "nextafter")


def _float_of(c: Any, value: V, node: ast.AST) -> V:
    """An argument of a function of floats."""
    if value.t is UNKNOWN or is_float(value.t):
        return value
    if not is_int(value.t):
        raise c.fail(node, f"a function of real numbers takes no {value.t}")
    return c.converted(value, F64, node)


def _rounded(c: Any, value: V, t: Num, node: ast.AST) -> V:
    """A float64 as a value of another float type."""
    return V(t, value.code if t == F64 else build(c.conversion_to(t, node), node, value.code))


def _unary(name: str, function: Callable[..., Any]) -> Any:
    def of_one(c: Any, args: list[V], kwargs: dict[str, V], node: ast.AST) -> V:
        need(c, args, 1, name, node)
        value = _float_of(c, args[0], node)
        t = F64 if value.t is UNKNOWN else F32 if value.t == BF16 and name not in OF_BF16 else value.t
        return _rounded(c, plain(c, F64, function, [value], node), t, node)

    return of_one


def _binary(name: str, function: Callable[..., Any]) -> Any:
    def of_two(c: Any, args: list[V], kwargs: dict[str, V], node: ast.AST) -> V:
        need(c, args, 2, name, node)
        a, b = (_float_of(c, one, node) for one in args)
        t = F64 if UNKNOWN in (a.t, b.t) else Num(np.promote_types(a.t.dtype, b.t.dtype))
        if name == "pow" and is_int(args[1].t) and is_float(args[0].t):
            t = args[0].t
        if name == "nextafter":
            keep = c.keep(np.nextafter)
            a, b = c.converted(a, t, node), c.converted(b, t, node)
            return _rounded(c, V(F64, build(f"{keep}({{0}}, {{1}})", node, a.code, b.code)), t, node)
        return _rounded(c, plain(c, F64, function, [a, b], node), t, node)

    return of_two


for _name in UNARY:
    _of_math = getattr(math, _name)
    if _name in ("fabs", "radians", "degrees"):
        rule(_of_math)(_unary(_name, _of_math))
    else:
        rule(_of_math)(_unary(_name, quiet(_of_math, _NUMPY.get(_name))))
for _name in BINARY:
    rule(getattr(math, _name))(_binary(_name, quiet(getattr(math, _name), _NUMPY.get(_name))))


def _whole(function: Callable[..., Any]) -> Any:
    def whole(c: Any, args: list[V], kwargs: dict[str, V], node: ast.AST) -> V:
        if is_int(args[0].t):
            return c.converted(args[0], I64, node)
        value = _float_of(c, args[0], node)
        whole = V(F64, plain(c, F64, function, [value], node).code)
        return _rounded(c, whole, BF16, node) if value.t == BF16 else c.converted(whole, I64, node)

    return whole


for _function, _of_numpy in ((math.floor, np.floor), (math.ceil, np.ceil), (math.trunc, np.trunc)):
    rule(_function)(_whole(_of_numpy))


def _test(function: Callable[..., Any], of_complex: Callable[..., Any], of_int: bool) -> Any:
    def test(c: Any, args: list[V], kwargs: dict[str, V], node: ast.AST) -> V:
        if is_int(args[0].t):
            return V(BOOL, build(f"bool(({{0}}, {of_int})[1])", node, args[0].code))
        return plain(c, BOOL, of_complex if is_complex(args[0].t) else function, args, node)

    return test


rule(math.isnan, np.isnan)(_test(math.isnan, cmath.isnan, False))
rule(math.isinf, np.isinf)(_test(math.isinf, cmath.isinf, False))
rule(math.isfinite, np.isfinite)(_test(math.isfinite, cmath.isfinite, True))


@rule(math.modf)
def _modf(c: Any, args: list[V], kwargs: dict[str, V], node: ast.AST) -> V:
    value = _float_of(c, args[0], node)
    name = c.temporary()
    keep = c.keep(math.modf)
    parts = [_rounded(c, V(F64, build(f"{name}[{i}]", node)), value.t, node) for i in (0, 1)]
    made = c.tuple_of(parts, node)
    return V(made.t, build(f"(({name} := {keep}(float({{0}}))), {{1}})[1]", node, value.code, made.code))


@rule(math.frexp)
def _frexp(c: Any, args: list[V], kwargs: dict[str, V], node: ast.AST) -> V:
    value = _float_of(c, args[0], node)
    name, keep = c.temporary(), c.keep(math.frexp)
    first = _rounded(c, V(F64, build(f"{name}[0]", node)), value.t, node)
    return V(
        Tup((value.t, I32)),
        build(f"(({name} := {keep}(float({{0}}))), ({{1}}, {name}[1]))[1]", node, value.code, first.code),
    )


@rule(math.ldexp)
def _ldexp(c: Any, args: list[V], kwargs: dict[str, V], node: ast.AST) -> V:
    value = _float_of(c, args[0], node)
    return _rounded(c, plain(c, F64, ldexp, [value, args[1]], node), value.t, node)


@rule(math.gcd)
def _gcd(c: Any, args: list[V], kwargs: dict[str, V], node: ast.AST) -> V:
    return plain(c, I64, math.gcd, args, node)


# --- complex numbers --------------------------------------------------------------------------------------------------
def _complex(name: str, function: Callable[..., Any], result: str = "same") -> Any:
    def of_complex(c: Any, args: list[V], kwargs: dict[str, V], node: ast.AST) -> V:
        t = args[0].t if is_complex(args[0].t) else Num(np.dtype("c16"))
        made = plain(c, Num(np.dtype("c16")), function, args, node)
        if result == "real":
            return _rounded(c, made, F32 if t == C64 else F64, node)
        if result == "bool":
            return V(BOOL, made.code)
        return V(t, build("c64({0})", node, made.code) if t == C64 else made.code)

    return of_complex


_OF_NUMPY = {
    "acos": "arccos", "asin": "arcsin", "atan": "arctan", "acosh": "arccosh", "asinh": "arcsinh", "atanh": "arctanh",
}  # fmt: skip
for _name in (
    "acos", "asin", "atan", "acosh", "asinh", "atanh", "cos", "sin", "tan", "cosh", "sinh", "tanh", "exp", "log",
    "log10", "sqrt",
):  # fmt: skip
    rule(getattr(cmath, _name))(
        _complex(_name, complex_quiet(getattr(cmath, _name), getattr(np, _OF_NUMPY.get(_name, _name))))
    )
rule(cmath.phase)(_complex("phase", cmath.phase, "real"))
for _name in ("isnan", "isinf", "isfinite"):
    rule(getattr(cmath, _name))(_complex(_name, getattr(cmath, _name), "bool"))


@rule(cmath.polar)
def _polar(c: Any, args: list[V], kwargs: dict[str, V], node: ast.AST) -> V:
    part = F32 if args[0].t == C64 else F64
    return V(Tup((part, part)), plain(c, part, cmath.polar, args, node).code)


@rule(cmath.rect)
def _rect(c: Any, args: list[V], kwargs: dict[str, V], node: ast.AST) -> V:
    made = plain(c, Num(np.dtype("c16")), cmath.rect, args, node)
    both = all(one.t == F32 for one in args)
    return V(C64, build("c64({0})", node, made.code)) if both else made


# --- operators --------------------------------------------------------------------------------------------------------
_OPERATORS = {
    "Add": ("add", "iadd"), "Sub": ("sub", "isub"), "Mult": ("mul", "imul"), "Div": ("truediv", "itruediv"),
    "FloorDiv": ("floordiv", "ifloordiv"), "Mod": ("mod", "imod"), "Pow": ("pow", "ipow"),
    "LShift": ("lshift", "ilshift"), "RShift": ("rshift", "irshift"), "BitAnd": ("and_", "iand"),
    "BitOr": ("or_", "ior"), "BitXor": ("xor", "ixor"),
}  # fmt: skip


def _operator(how: str, op: str, count: int) -> Any:
    def apply(c: Any, args: list[V], kwargs: dict[str, V], node: ast.AST) -> V:
        need(c, args, count, op, node)
        return getattr(c, how)(op, *args, node)

    return apply


for _op, _names in _OPERATORS.items():
    for _name in _names:
        rule(getattr(operator, _name))(_operator("binary", _op, 2))
for _op, _name in (("Eq", "eq"), ("NotEq", "ne"), ("Lt", "lt"), ("LtE", "le"), ("Gt", "gt"), ("GtE", "ge")):
    rule(getattr(operator, _name))(_operator("compare", _op, 2))
for _op, _name in (("USub", "neg"), ("UAdd", "pos"), ("Invert", "invert"), ("Not", "not_")):
    rule(getattr(operator, _name))(_operator("unary", _op, 1))


@rule(operator.getitem)
def _getitem(c: Any, args: list[V], kwargs: dict[str, V], node: ast.AST) -> V:
    return c.element(args[0], [args[1]], node)


# --- NumPy ------------------------------------------------------------------------------------------------------------
_AS_OPERATOR = {
    "add": "Add", "subtract": "Sub", "multiply": "Mult", "true_divide": "Div", "divide": "Div",
    "floor_divide": "FloorDiv", "remainder": "Mod", "mod": "Mod", "power": "Pow",
    "bitwise_and": "BitAnd", "bitwise_or": "BitOr", "bitwise_xor": "BitXor", "left_shift": "LShift",
    "right_shift": "RShift",
}  # fmt: skip


ARRAY_OPERATORS = {op: getattr(np, name) for name, op in _AS_OPERATOR.items()}


def ufunc(c: Any, function: np.ufunc, args: list[V], kwargs: dict[str, V], node: ast.AST) -> V:
    """A function of NumPy, of numbers: it has the types of NumPy's loop. With an array, element by element."""
    from .array_rules import ufunc_of_arrays
    from .types import Arr

    if any(isinstance(one.t, Arr) for one in args):
        return ufunc_of_arrays(c, function, args, node)
    if not all(isinstance(one.t, Num) for one in args) or len(args) != function.nin:
        raise c.fail(node, f"np.{function.__name__} of {', '.join(str(one.t) for one in args)}")
    try:
        dtypes = function.resolve_dtypes((*(one.t.dtype for one in args), *(None,) * function.nout))
    except TypeError:
        raise c.fail(node, f"np.{function.__name__} of {', '.join(str(one.t) for one in args)}") from None
    given = dtypes[: function.nin]
    scalars = [
        build(f"np.dtype('{to.str}').type({{0}})", node, c.converted(one, Num(to), node).code)
        for one, to in zip(args, given, strict=True)
    ]
    holes = ", ".join(f"{{{i}}}" for i in range(len(scalars)))
    code = build(f"{c.keep(function)}({holes})", node, *scalars)
    results = [Num(one) for one in dtypes[function.nin :]]
    if len(results) == 1:
        return _from_numpy(V(results[0], code), node)
    name = c.temporary()
    parts = [_from_numpy(V(t, build(f"{name}[{i}]", node)), node) for i, t in enumerate(results)]
    made = c.tuple_of(parts, node)
    return V(made.t, build(f"(({name} := {{0}}), {{1}})[1]", node, code, made.code))


def _from_numpy(value: V, node: ast.AST) -> V:
    t = value.t
    if t.dtype.str[1:] in AS_SCALARS or t.dtype.kind in "mM":
        return value
    return V(t, build("{0}.item()", node, value.code))


# --- libdevice --------------------------------------------------------------------------------------------------------
def libdevice(c: Any, function: Any, args: list[V], node: ast.AST) -> V:
    """A function of CUDA's libdevice; its types stand in the docstring of Numba's."""
    found, takes, gives = device_library.lookup(function)
    if found is None:
        raise c.fail(node, f"libdevice.{function.__name__} is not supported on the emulator")
    need(c, args, len(takes), f"libdevice.{function.__name__}", node)
    values = [c.converted(one, t, node) for one, t in zip(args, takes, strict=True)]
    made = plain(c, F64, found, values, node)
    if isinstance(gives, Tup):
        return V(gives, made.code)
    return V(gives, made.code)
