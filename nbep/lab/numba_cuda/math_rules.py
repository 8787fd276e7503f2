"""Rules for `math`, `cmath`, NumPy's functions and methods of arrays, `operator`, libdevice, and 16-bit floats.

A function of float32 is computed with 53 bits and rounded once: it is off by no more than the device's.
"""

from __future__ import annotations

import ast
import cmath
import math
import operator
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from . import libdevice as device_library
from . import ops, stubs
from .arrays import local_array
from .calls import Rule, plain, rule
from .code import build
from .env import V, called, invoked
from .operators import COMPARISONS, FOLDED
from .ops import _gamma, _lgamma, ldexp, quiet
from .types import (
    AS_SCALARS,
    BF16,
    BOOL,
    C64,
    C128,
    F16,
    F32,
    F64,
    I32,
    I64,
    UNKNOWN,
    Arr,
    Num,
    Tup,
    dtype_of,
    is_complex,
    is_float,
    is_int,
    num,
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


def _float_of(c: Any, value: V) -> V:
    """An argument of a function of floats."""
    if value.t is UNKNOWN or is_float(value.t):
        return value
    if not is_int(value.t):
        raise c.fail(f"a function of real numbers takes no {value.t}")
    return c.converted(value, F64)


def _rounded(c: Any, value: V, t: Num) -> V:
    """A float64 as a value of another float type."""
    return V(t, value.code if t == F64 else build(c.conversion_to(t), value.code))


def _unary(name: str, function: Callable[..., Any]) -> Rule:
    def of_one(c: Any, x: V) -> V:
        value = _float_of(c, x)
        t = F64 if value.t is UNKNOWN else F32 if value.t == BF16 and name not in OF_BF16 else value.t
        return _rounded(c, plain(c, F64, function, value), t)

    return of_one


def _binary(name: str, function: Callable[..., Any]) -> Rule:
    def of_two(c: Any, x: V, y: V) -> V:
        a, b = _float_of(c, x), _float_of(c, y)
        t = F64 if UNKNOWN in (a.t, b.t) else Num(np.promote_types(a.t.dtype, b.t.dtype))
        if name == "pow" and is_int(y.t) and is_float(x.t):
            t = x.t
        if name == "nextafter":
            return _rounded(c, plain(c, F64, np.nextafter, c.converted(a, t), c.converted(b, t)), t)
        return _rounded(c, plain(c, F64, function, a, b), t)

    return of_two


for _names, _made in ((UNARY, _unary), (BINARY, _binary)):
    for _name in _names:
        rule(getattr(math, _name))(_made(_name, quiet(getattr(math, _name), _NUMPY.get(_name))))


def _whole(function: Callable[..., Any]) -> Rule:
    def whole(c: Any, x: V) -> V:
        if is_int(x.t):
            return c.converted(x, I64)
        value = _float_of(c, x)
        whole = plain(c, F64, function, value)
        return _rounded(c, whole, BF16) if value.t == BF16 else c.converted(whole, I64)

    return whole


_function: Any
for _function, _of_numpy in ((math.floor, np.floor), (math.ceil, np.ceil), (math.trunc, np.trunc)):
    rule(_function)(_whole(_of_numpy))


def _test(name: str) -> Rule:
    def test(c: Any, x: V) -> V:
        if is_int(x.t):
            return V(BOOL, build(f"bool(({{0}}, {name == 'isfinite'})[1])", x.code))
        return plain(c, BOOL, getattr(cmath if is_complex(x.t) else math, name), x)

    return test


for _name in ("isnan", "isinf", "isfinite"):
    rule(getattr(math, _name), getattr(np, _name))(_test(_name))


def _two(function: Callable[..., Any], second: Num) -> Rule:
    def two(c: Any, x: V) -> V:
        value = _float_of(c, x)
        code = called(c.keep(function), build("float({0})", value.code))
        return c.apart(code, (F64, second), lambda one: one if is_int(one.t) else _rounded(c, one, value.t))

    return two


rule(math.modf)(_two(math.modf, F64))
rule(math.frexp)(_two(math.frexp, I32))
rule(math.gcd)(lambda c, *args: plain(c, I64, math.gcd, *args))


@rule(math.ldexp)
def _ldexp(c: Any, x: V, exponent: V) -> V:
    value = _float_of(c, x)
    return _rounded(c, plain(c, F64, ldexp, value, exponent), value.t)


# --- complex numbers --------------------------------------------------------------------------------------------------
def _complex(function: Callable[..., Any]) -> Rule:
    def of_complex(c: Any, z: V, *base: V) -> V:
        made = plain(c, C128, function, z, *base)
        return V(C64, build("c64({0})", made.code)) if z.t == C64 else made

    return of_complex


_OF_NUMPY = {
    "acos": "arccos", "asin": "arcsin", "atan": "arctan", "acosh": "arccosh", "asinh": "arcsinh", "atanh": "arctanh",
}  # fmt: skip
for _name in (*_OF_NUMPY, "cos", "sin", "tan", "cosh", "sinh", "tanh", "exp", "log", "log10", "sqrt"):
    _function = getattr(cmath, _name)
    rule(_function)(_complex(quiet(_function, getattr(np, _OF_NUMPY.get(_name, _name)), complex)))
for _name in ("isnan", "isinf", "isfinite"):
    rule(getattr(cmath, _name))(lambda c, z, *, name=_name: plain(c, BOOL, getattr(cmath, name), z))
rule(cmath.phase)(lambda c, z: _rounded(c, plain(c, F64, cmath.phase, z), F32 if z.t == C64 else F64))


@rule(cmath.polar)
def _polar(c: Any, z: V) -> V:
    part = F32 if z.t == C64 else F64
    return plain(c, Tup((part, part)), cmath.polar, z)


@rule(cmath.rect)
def _rect(c: Any, r: V, phi: V) -> V:
    made = plain(c, C128, cmath.rect, r, phi)
    return V(C64, build("c64({0})", made.code)) if r.t == phi.t == F32 else made


# --- operators --------------------------------------------------------------------------------------------------------
for _op, _function in FOLDED.items():
    _in_place = getattr(operator, f"i{_function.__name__.strip('_')}")
    rule(_function, _in_place)(lambda c, a, b, *, op=_op: c.binary(op, a, b))
for _op, _function in COMPARISONS.items():
    rule(_function)(lambda c, a, b, *, op=_op: c.compare(op, a, b))
for _op, _function in (
    ("USub", operator.neg), ("UAdd", operator.pos), ("Invert", operator.invert), ("Not", operator.not_),
):  # fmt: skip
    rule(_function)(lambda c, a, *, op=_op: c.unary(op, a))
rule(operator.getitem)(lambda c, array, index: c.element(array, [index]))


# --- NumPy ------------------------------------------------------------------------------------------------------------
ARRAY_OPERATORS = {
    "Add": np.add, "Sub": np.subtract, "Mult": np.multiply, "Div": np.divide, "FloorDiv": np.floor_divide,
    "Mod": np.mod, "Pow": np.power, "BitAnd": np.bitwise_and, "BitOr": np.bitwise_or, "BitXor": np.bitwise_xor,
    "LShift": np.left_shift, "RShift": np.right_shift,
}  # fmt: skip


def ufunc(c: Any, function: np.ufunc, args: list[V]) -> V:
    """A function of NumPy, of numbers: it has the types of NumPy's loop. With an array, element by element."""
    if any(isinstance(one.t, Arr) for one in args):
        return ufunc_of_arrays(c, function, args)
    what = f"np.{function.__name__} of {', '.join(str(one.t) for one in args)}"
    if not all(isinstance(one.t, Num) for one in args) or len(args) != function.nin:
        raise c.fail(what)
    try:
        dtypes = function.resolve_dtypes((*(one.t.dtype for one in args), *(None,) * function.nout))
    except TypeError:
        raise c.fail(what) from None
    scalars = [
        build(f"np.dtype('{to.str}').type({{0}})", c.converted(one, Num(to)).code)
        for one, to in zip(args, dtypes, strict=False)
    ]
    code = called(c.keep(function), *scalars)
    first, *more = results = [Num(one) for one in dtypes[function.nin :]]
    return c.apart(code, results, _from_numpy) if more else _from_numpy(V(first, code))


def _from_numpy(value: V) -> V:
    is_scalar = value.t.dtype.str[1:] in AS_SCALARS or value.t.dtype.kind in "mM"
    return value if is_scalar else V(value.t, build("{0}.item()", value.code))


def array_method(c: Any, base: V, name: str, args: list[V], kwargs: dict[str, V]) -> V:
    t = base.t

    def made(dtype: np.dtype, ndim: int, layout: str, *given: str | V) -> V:
        return V(Arr(dtype, ndim, layout, t.is_const), called(ast.Attribute(base.code, name, ast.Load()), *given))

    if name == "reshape":
        ndim = len(args)
        if ndim == 1 and isinstance(args[0].t, Tup):
            ndim = len(args[0].t.items)
        if t.layout != "C":
            raise c.fail(f"reshape of an array that is not contiguous: {t}")
        return made(t.dtype, ndim, "C", *args)
    if name in ("ravel", "flatten"):
        return made(t.dtype, 1, "C")
    if name == "transpose":
        return made(t.dtype, t.ndim, "A", *args)
    if name == "view" and len(args) == 1:
        dtype = dtype_of(args[0].known)
        return made(dtype, t.ndim, t.layout, c.keep(dtype))
    if name == "item" and not args:
        return V(Num(t.dtype), called("next", invoked(base.code, "every")))
    if name in REDUCTIONS and not args and not kwargs:
        result, function = _reduction(name, t.dtype)
        return V(Num(result), called(c.keep(function), base, "_t"))
    raise c.fail(f"an array has no method {name!r} in kernels")


def _reduction(name: str, dtype: np.dtype) -> Any:
    """Its type, and what computes it: one element after the other, as kernels do."""
    result = np.asarray(getattr(np, name)(np.ones(1, dtype))).dtype

    def reduce(array: Any, thread: Any) -> Any:
        values = np.array(list(array.every(thread)), dtype)
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if name in ("sum", "nansum") and values.size:
                value = np.add.accumulate(
                    values if name == "sum" else np.where(np.isnan(values), 0, values), dtype=result
                )[-1]
            else:
                value = getattr(np, name)(values, **({"dtype": result} if "prod" in name else {}))
        return ops.from_numpy(result.type(value), result)

    return result, reduce


REDUCTIONS = (
    "sum", "prod", "min", "max", "argmin", "argmax", "mean", "var", "std", "nansum", "nanprod", "nanmin", "nanmax",
    "nanmean", "count_nonzero", "all", "any",
)  # fmt: skip


def ufunc_of_arrays(c: Any, function: np.ufunc, args: list[V]) -> V:
    """`np.add(a, b, out)`: element by element, into the last argument; or, with the successor, into a new array."""
    is_new = c.unit.successor and len(args) == function.nin
    if not is_new and (len(args) != function.nin + 1 or not isinstance(args[-1].t, Arr)):
        raise c.fail(f"np.{function.__name__} of arrays: takes an array for the result as its last argument")
    kinds = [getattr(one.t, "dtype", None) for one in args[: function.nin]]
    try:
        dtypes = function.resolve_dtypes((*kinds, None))
    except TypeError:
        raise c.fail(f"np.{function.__name__} of {', '.join(str(one.t) for one in args)}") from None
    out = args[-1].t
    if is_new:
        out = Arr(dtypes[-1], max(one.t.ndim for one in args if isinstance(one.t, Arr)), "C")

    def apply(thread: Any, *values: Any) -> Any:
        there = values[-1]
        if is_new:
            shape = np.broadcast_shapes(*(one.shape for one in values if hasattr(one, "nd")))
            there, values = local_array(thread.world, shape, out.dtype, "an array"), (*values, None)
        given = [
            one.like(np.broadcast_to(one.nd, there.nd.shape), None) if hasattr(one, "nd") else one
            for one in values[:-1]
        ]
        for index in np.ndindex(*there.nd.shape):
            numbers = [
                dtype.type(one.ld(thread, *index) if hasattr(one, "nd") else one)
                for one, dtype in zip(given, dtypes, strict=False)
            ]
            result = np.asarray(function(*numbers)).astype(out.dtype)[()]
            there.st(thread, ops.from_numpy(result, out.dtype), *index)
        return there

    return V(out, called(c.keep(apply), "_t", *args))


# --- libdevice, and cuda.fp16 and numba.cuda.bf16: computed with 53 bits, and rounded once ----------------------------
def libdevice(c: Any, function: Any, args: list[V]) -> V:
    """A function of CUDA's libdevice; its types stand in the docstring of Numba's."""
    found, takes, gives = device_library.lookup(function)
    if found is None:
        raise c.fail(f"libdevice.{function.__name__} is not supported on the emulator")
    if len(args) != len(takes):
        raise c.fail(f"libdevice.{function.__name__}: takes {len(takes)} arguments, {len(args)} given")
    return plain(c, gives, found, *(c.converted(one, t) for one, t in zip(args, takes, strict=True)))


_HALF: dict[str, Callable[..., Any]] = {
    "hneg": lambda x: -x, "habs": np.abs, "hsin": np.sin, "hcos": np.cos, "hlog": np.log, "hlog10": np.log10,
    "hlog2": np.log2, "hexp": np.exp, "hexp10": lambda x: 10.0**x, "hexp2": np.exp2, "hsqrt": np.sqrt,
    "hrsqrt": lambda x: 1 / np.sqrt(x), "hfloor": np.floor, "hceil": np.ceil, "hrcp": lambda x: 1 / x, "hrint": np.rint,
    "htrunc": np.trunc, "htanh": np.tanh, "htanh_approx": np.tanh, "hadd": lambda x, y: x + y,
    "hsub": lambda x, y: x - y, "hmul": lambda x, y: x * y, "hdiv": lambda x, y: x / y, "hmax": np.fmax,
    "hmin": np.fmin, "hfma": lambda x, y, z: x * y + z, "hmax_nan": np.maximum, "hmin_nan": np.minimum,
    "hfma_relu": lambda x, y, z: np.fmax(x * y + z, 0.0),
    "heq": lambda x, y: x == y, "hne": lambda x, y: x < y or x > y, "hge": lambda x, y: x >= y,
    "hgt": lambda x, y: x > y, "hle": lambda x, y: x <= y, "hlt": lambda x, y: x < y, "hisnan": np.isnan,
    "hisinf": lambda x: np.isinf(x) * np.sign(x),
}  # fmt: skip
_GIVES = {
    **dict.fromkeys([f"h{how}{u}" for how in ("eq", "ne", "ge", "gt", "le", "lt") for u in ("", "u")], BOOL),
    "hisnan": BOOL, "hisinf": I32,
}  # fmt: skip


def _function_of_halves(name: str) -> Callable[..., Any]:
    """What one of them computes of float64. u: true of what is no number; sat: between 0 and 1; rn: as the plain one"""
    if name in _HALF:
        return _HALF[name]
    plain_one = _HALF[name.removesuffix("_rn").removesuffix("_sat").removesuffix("u")]
    if name.endswith("_sat"):
        return lambda *given: np.fmin(np.fmax(plain_one(*given), 0.0), 1.0)
    return plain_one if name.endswith("_rn") else lambda x, y: x != x or y != y or plain_one(x, y)


def _half(name: str, t: Num) -> Any:
    compute, gives = _function_of_halves(name), _GIVES.get(name, t)

    def of_halves(*values: Any) -> Any:
        with np.errstate(all="ignore"):
            result = compute(*(np.float64(one) for one in values))
        return bool(result) if gives == BOOL else int(result) if gives == I32 else t.dtype.type(result)

    return lambda c, *args: plain(c, gives, of_halves, *(c.converted(one, t) for one in args))


for _kind, _type in ((stubs.fp16, F16), (stubs.bf16, BF16)):
    for _name in (name for name in vars(_kind) if name.startswith("h")):
        rule(getattr(_kind, _name))(_half(_name, _type))


# --- conversions of bfloat16, by how they round -----------------------------------------------------------------------
_ROUND: dict[str, Callable[[Any], Any]] = {"rz": math.trunc, "rd": math.floor, "ru": math.ceil, "rn": round}


def to_bf16(value: Any, how: str) -> Any:
    """The bfloat16 nearest to a number, or the nearest one towards zero, below or above."""
    near = ops.bf16(value)
    if how == "rz":
        how = "rd" if value > 0 else "ru"
    if (how == "rd" and float(near) > value) or (how == "ru" and float(near) < value):
        near = np.nextafter(near, ops.bf16(-math.inf if how == "rd" else math.inf))
    return near


def _converts(of: Num, to: Num, how: str, as_bits: bool) -> Any:
    def converted(value: Any) -> Any:
        if as_bits:
            return ops.from_numpy(ops.to_numpy(value, of).view(to.dtype), to.dtype)
        if to == BF16:
            return to_bf16(value, how)
        rounded = float(value)
        if is_int(to) and math.isfinite(rounded):
            rounded = _ROUND[how](rounded)
        return ops.to_int(rounded, 8 * to.dtype.itemsize, to.dtype.kind == "i") if is_int(to) else ops.f32(rounded)

    return lambda c, value: plain(c, to, converted, c.converted(value, of))


for _name, (_of, _to, _how) in stubs.BF16_CONVERSIONS.items():
    _a, _b = (BF16 if one == "bf16" else num(one) for one in (_of, _to))
    rule(getattr(stubs.bf16, _name))(_converts(_a, _b, _how, _how == "as"))
