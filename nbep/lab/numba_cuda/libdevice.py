"""What the functions of CUDA's libdevice compute."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np

from . import ops
from .ops import INF, NAN, quiet
from .types import Num, Tup, num

f32 = np.float32


@cache
def lookup(function: Any) -> tuple[Callable[..., Any] | None, list[Any], Any]:
    """What computes it, and the types of its arguments and of its result: a tuple if it has several."""
    text = function.__doc__ or ""
    takes = [_type(name) for name in re.findall(r":type \w+: (\w+)", text)]
    found = re.search(r":rtype: (.*)", text)
    gives = _type(found.group(1).strip()) if found else None
    name = function.__name__
    compute = _find(name)
    if compute is None or gives is None:
        return None, takes, gives
    return _typed(compute, gives), takes, gives


def _type(name: str) -> Any:
    if "(" in name:
        many = re.match(r"UniTuple\((\w+) x (\d+)\)", name)
        if many:
            return Tup((num(many.group(1)),) * int(many.group(2)))
        return Tup(tuple(num(one) for one in re.findall(r"u?int\d+|float\d+", name)))
    return num(name)


def _typed(compute: Callable[..., Any], gives: Any) -> Callable[..., Any]:
    def one(value: Any, t: Num) -> Any:
        if t.dtype.kind in "iu":
            return ops.wrap(int(value), 8 * t.dtype.itemsize, t.dtype.kind == "i")
        return f32(value) if t.dtype.itemsize == 4 else float(value)

    def call(*args: Any) -> Any:
        with np.errstate(all="ignore"):
            result = compute(*args)
        if isinstance(gives, Tup):
            return tuple(one(value, t) for value, t in zip(result, gives.items, strict=True))
        return one(result, gives)

    return call


def _find(name: str) -> Callable[..., Any] | None:
    if name in FUNCTIONS:
        return FUNCTIONS[name]
    rounded = re.fullmatch(r"(\w+)_(rn|rd|ru|rz)", name)
    if rounded:
        return _rounded(rounded.group(1), rounded.group(2))
    if name.startswith("fast_") and name.endswith("f"):
        return _find(name[5:-1])
    if name.endswith("f") and name[:-1] in FUNCTIONS:
        return FUNCTIONS[name[:-1]]
    if name.endswith("ll") and name[:-2] in FUNCTIONS:
        return FUNCTIONS[name[:-2]]
    return None


# --- rounding: results are exact fractions first ----------------------------------------------------------------------
def _to_float(exact: Fraction, how: str, single: bool) -> Any:
    """The float next to a fraction, in a direction."""
    make: Any = f32 if single else np.float64
    try:
        near = make(float(exact)) if not single else _nearest_single(exact)
    except OverflowError:
        near = make(INF if exact > 0 else -INF)
    if how == "rn" or (np.isfinite(near) and Fraction(float(near)) == exact):
        return near
    if how == "rz":
        how = "rd" if exact > 0 else "ru"
    below = make(np.nextafter(near, make(-INF))) if not np.isfinite(near) or Fraction(float(near)) > exact else near
    above = make(np.nextafter(near, make(INF))) if not np.isfinite(near) or Fraction(float(near)) < exact else near
    if np.isinf(near):
        below, above = (
            (make(np.nextafter(near, make(0))), near) if near > 0 else (near, make(np.nextafter(near, make(0))))
        )
    return below if how == "rd" else above


def _nearest_single(exact: Fraction) -> Any:
    near = f32(float(exact))
    for other in (np.nextafter(near, f32(-INF)), np.nextafter(near, f32(INF))):
        if np.isfinite(other) and abs(Fraction(float(other)) - exact) < abs(Fraction(float(near)) - exact):
            near = other
    return near


_EXACT: dict[str, Callable[..., Fraction]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "rcp": lambda a: 1 / a,
    "fma": lambda a, b, c: a * b + c,
}
_PLAIN: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: np.divide(a, b),
    "rcp": lambda a: np.divide(type(a)(1), a),
    "fma": lambda a, b, c: a * b + c,
}


def _rounded(base: str, how: str) -> Callable[..., Any] | None:
    """Arithmetic and conversions that name how they round."""
    if base in ("fma", "fmaf"):
        return _arithmetic("fma", how, base == "fmaf")
    if base[0] in "fd" and base[1:] in _EXACT:
        return _arithmetic(base[1:], how, base[0] == "f")
    if base[1:] == "sqrt" or base == "frsqrt":
        return _root(how, base[0] == "f", base == "frsqrt")
    found = re.fullmatch(r"(double|float|int|uint|ll|ull)2(double|float|int|uint|ll|ull)", base)
    if found is None:
        return None
    of, to = found.groups()
    if to in ("int", "uint", "ll", "ull"):
        towards: Any = {"rn": _even, "rd": math.floor, "ru": math.ceil, "rz": math.trunc}[how]
        bits, signed = (32 if to.endswith("int") else 64), not to.startswith("u")

        def whole(x: Any) -> int:
            x = float(x)
            return ops.to_int(x, bits, signed) if not math.isfinite(x) else ops.to_int(towards(x), bits, signed)

        return whole
    unsigned = 64 if of == "ull" else 32 if of == "uint" else 0

    def convert(x: Any) -> Any:
        if of in ("double", "float"):
            x = float(x)
            return x if not math.isfinite(x) else _to_float(Fraction(x), how, to == "float")
        return _to_float(Fraction(x & ((1 << unsigned) - 1) if unsigned else x), how, to == "float")

    return convert


def _even(x: float) -> int:
    return round(x)


def _arithmetic(op: str, how: str, single: bool) -> Callable[..., Any]:
    make: Any = f32 if single else np.float64

    def compute(*args: Any) -> Any:
        values = [float(one) for one in args]
        plain = _PLAIN[op](*map(make, values))
        if not all(map(math.isfinite, values)) or (op in ("div", "rcp") and values[-1] == 0):
            return plain
        exact = _EXACT[op](*map(Fraction, values))
        return plain if exact == 0 else _to_float(exact, how, single)

    return compute


def _root(how: str, single: bool, reciprocal: bool) -> Callable[..., Any]:
    make: Any = f32 if single else np.float64

    def compute(x: Any) -> Any:
        x = float(x)
        if x <= 0 or not math.isfinite(x):
            return 1 / np.sqrt(make(x)) if reciprocal else np.sqrt(make(x))
        scale = 1 << 400
        root = Fraction(math.isqrt(int(Fraction(x) * scale * scale)), scale)
        if not reciprocal and root * root == Fraction(x):
            return _to_float(root, how, single)
        root += Fraction(1, scale * 4)
        return _to_float(1 / root if reciprocal else root, how, single)

    return compute


# --- bits -------------------------------------------------------------------------------------------------------------
def _as(code: str, to: str) -> Callable[[Any], Any]:
    return lambda x: struct.unpack(to, struct.pack(code, x))[0]


def _u(x: int, bits: int = 32) -> int:
    return x & ((1 << bits) - 1)


def _byte_perm(x: int, y: int, z: int) -> int:
    eight = _u(x) | _u(y) << 32
    return sum((eight >> 8 * (z >> 4 * i & 7) & 0xFF) << 8 * i for i in range(4))


def _hiloint(high: int, low: int) -> float:
    return struct.unpack("d", struct.pack("q", ops.wrap(high << 32 | _u(low), 64, True)))[0]


def _bits(x: float) -> int:
    return struct.unpack("q", struct.pack("d", x))[0]


def _s24(x: int) -> int:
    return ops.wrap(x, 24, True)


def _frexp(x: Any) -> tuple[float, int]:
    return math.frexp(float(x))


def _remquo(x: Any, y: Any) -> tuple[float, int]:
    x, y = float(x), float(y)
    rest = math.remainder(x, y)
    return rest, round((x - rest) / y) & 7


def _round(x: Any) -> float:
    x = float(x)
    return math.copysign(math.floor(abs(x) + 0.5), x) if math.isfinite(x) and abs(x) < 1 << 52 else x


def _rint(x: Any) -> float:
    return float(np.rint(float(x)))


def _sinpi(x: Any) -> float:
    return math.sin(math.pi * math.fmod(float(x), 2.0))


def _cospi(x: Any) -> float:
    return math.cos(math.pi * math.fmod(float(x), 2.0))


def _normcdf(x: Any) -> float:
    return 0.5 * math.erfc(-float(x) / math.sqrt(2))


def _inverse(function: Callable[[float], float], low: float, high: float, rising: bool) -> Callable[[Any], float]:
    """The inverse of a monotonic function, by bisection."""

    def invert(y: Any) -> float:
        a, b, y = low, high, float(y)
        for _ in range(200):
            middle = (a + b) / 2
            if (function(middle) < y) == rising:
                a = middle
            else:
                b = middle
        return (a + b) / 2

    return invert


def _logb(x: Any) -> float:
    x = float(x)
    return -INF if x == 0 else INF if math.isinf(x) else x if x != x else float(math.frexp(x)[1] - 1)


def _ilogb(x: Any) -> int:
    value = _logb(x)
    return int(value) if math.isfinite(value) else -(1 << 31)


def _numpy(function: Any) -> Callable[..., Any]:
    return lambda *args: function(*map(np.float64, args))


def _math(name: str, of_numpy: Any = None) -> Callable[..., Any]:
    return quiet(getattr(math, name), of_numpy)


def _bessel(kind: str) -> Callable[..., Any]:
    """Bessel functions of integer order, by their integrals."""

    def j(n: int, x: float) -> float:
        steps = 2000
        return (
            sum(math.cos(n * t - x * math.sin(t)) for t in (math.pi * (i + 0.5) / steps for i in range(steps))) / steps
        )

    def y(n: int, x: float) -> float:
        if x <= 0:
            return -INF if x == 0 else NAN
        steps, end = 4000, 12.0
        first = (
            sum(math.sin(x * math.sin(t) - n * t) for t in (math.pi * (i + 0.5) / steps for i in range(steps))) / steps
        )
        second = 0.0
        for i in range(steps):
            t = end * (i + 0.5) / steps
            second += (math.exp(n * t) + (-1) ** n * math.exp(-n * t)) * math.exp(-x * math.sinh(t))
        return first - second * end / steps / math.pi

    return j if kind == "j" else y


FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: _math(name) for name in (
        "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "copysign", "cos", "erf", "erfc", "expm1", "fabs",
        "hypot", "sin", "sqrt", "tan", "tanh", "remainder",
    )},
    **{name: _math(name, getattr(np, name)) for name in (
        "cosh", "sinh", "exp", "exp2", "log", "log2", "log10", "log1p",
    )},
    "abs": abs, "llabs": abs, "exp10": _numpy(lambda x: np.power(10.0, x)), "cbrt": _numpy(np.cbrt),
    "rcbrt": _numpy(lambda x: 1 / np.cbrt(x)), "rsqrt": _numpy(lambda x: 1 / np.sqrt(x)),
    "ceil": _numpy(np.ceil), "floor": _numpy(np.floor), "trunc": _numpy(np.trunc), "rint": _rint, "nearbyint": _rint,
    "round": _round, "llrint": lambda x: int(_rint(x)), "llround": lambda x: int(_round(x)),
    "fmod": _numpy(np.fmod), "fmax": _numpy(np.fmax), "fmin": _numpy(np.fmin), "pow": _numpy(np.power),
    "powi": _numpy(np.power), "fdim": lambda x, y: max(x - y, type(x)(0)),
    "fast_fdividef": lambda x, y: np.divide(x, y),
    "fma": ops.fma, "max": max, "min": min, "llmax": max, "llmin": min, "umax": lambda x, y: max(_u(x), _u(y)),
    "umin": lambda x, y: min(_u(x), _u(y)), "ullmax": lambda x, y: max(_u(x, 64), _u(y, 64)),
    "ullmin": lambda x, y: min(_u(x, 64), _u(y, 64)),
    "brev": lambda x: ops.brev(x, 32), "brevll": lambda x: ops.brev(x, 64), "clz": lambda x: ops.clz(x, 32),
    "clzll": lambda x: ops.clz(x, 64), "ffs": lambda x: ops.ffs(x, 32), "ffsll": lambda x: ops.ffs(x, 64),
    "popc": lambda x: ops.popc(x, 32), "popcll": lambda x: ops.popc(x, 64), "byte_perm": _byte_perm,
    "mul24": lambda x, y: _s24(x) * _s24(y), "umul24": lambda x, y: _u(x, 24) * _u(y, 24),
    "mulhi": lambda x, y: x * y >> 32, "mul64hi": lambda x, y: x * y >> 64,
    "umulhi": lambda x, y: _u(x) * _u(y) >> 32, "umul64hi": lambda x, y: _u(x, 64) * _u(y, 64) >> 64,
    "hadd": lambda x, y: x + y >> 1, "rhadd": lambda x, y: x + y + 1 >> 1,
    "uhadd": lambda x, y: _u(x) + _u(y) >> 1, "urhadd": lambda x, y: _u(x) + _u(y) + 1 >> 1,
    "sad": lambda x, y, z: abs(x - y) + z, "usad": lambda x, y, z: abs(_u(x) - _u(y)) + z,
    "double2hiint": lambda x: _bits(x) >> 32, "double2loint": lambda x: _bits(x), "hiloint2double": _hiloint,
    "double_as_longlong": _as("d", "q"), "longlong_as_double": _as("q", "d"), "float_as_int": _as("f", "i"),
    "int_as_float": _as("i", "f"), "float2half_rn": lambda x: np.float16(x).view(np.int16),
    "half2float": lambda x: np.int16(ops.wrap(x, 16, True)).view(np.float16),
    "finitef": math.isfinite, "isfinited": math.isfinite, "isinfd": math.isinf, "isinff": math.isinf,
    "isnand": math.isnan, "isnanf": math.isnan, "signbitd": lambda x: math.copysign(1, x) < 0,
    "signbitf": lambda x: math.copysign(1, x) < 0, "frexp": _frexp, "frexpf": _frexp,
    "ldexp": lambda x, n: ops.ldexp(float(x), n), "scalbn": lambda x, n: ops.ldexp(float(x), n), "logb": _logb,
    "ilogb": _ilogb, "modf": lambda x: math.modf(float(x)), "nan": lambda x: NAN,
    "nextafter": _numpy(np.nextafter), "nextafterf": lambda x, y: np.nextafter(f32(x), f32(y)),
    "remquo": _remquo, "saturatef": lambda x: 0.0 if x != x else min(max(x, f32(0)), f32(1)),
    "sincos": lambda x: (math.sin(x), math.cos(x)), "sinpi": _sinpi, "cospi": _cospi,
    "sincospi": lambda x: (_sinpi(x), _cospi(x)), "tgamma": quiet(math.gamma, ops._gamma),
    "lgamma": quiet(math.lgamma, ops._lgamma), "normcdf": _normcdf,
    "normcdfinv": _inverse(_normcdf, -40.0, 40.0, True), "erfinv": _inverse(math.erf, -7.0, 7.0, True),
    "erfcinv": _inverse(math.erfc, -7.0, 30.0, False), "erfcx": lambda x: math.exp(x * x) * math.erfc(x),
    "j0": lambda x: _bessel("j")(0, x), "j1": lambda x: _bessel("j")(1, x), "jn": _bessel("j"),
    "y0": lambda x: _bessel("y")(0, x), "y1": lambda x: _bessel("y")(1, x), "yn": _bessel("y"),
}  # fmt: skip
