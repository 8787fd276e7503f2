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
    return None if compute is None or gives is None else _typed(compute, gives), takes, gives


def _type(name: str) -> Any:
    found = [num(one) for one in re.findall(r"u?int\d+|float\d+|double", name)]
    many = re.match(r"UniTuple\(.* x (\d+)\)", name)
    return Tup(tuple(found * int(many.group(1) if many else 1))) if "(" in name else num(name)


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
def _to_float(exact: Fraction, how: str, make: Any) -> Any:
    """The float next to a fraction, in a direction. make: float32 or float64"""
    try:
        near = make(float(exact))
    except OverflowError:
        near = make(INF if exact > 0 else -INF)
    around = [near, np.nextafter(near, make(-INF)), np.nextafter(near, make(INF))]
    if how == "rn":
        finite = [one for one in around if np.isfinite(near) and np.isfinite(one)]
        return min(finite, key=lambda one: abs(Fraction(float(one)) - exact), default=near)
    if how == "rd" or (how == "rz" and exact > 0):
        return max(one for one in around if float(one) <= exact)
    return min(one for one in around if float(one) >= exact)


_ARITHMETIC: dict[str, Callable[..., Any]] = {  # of floats and of fractions
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b, "div": lambda a, b: a / b,
    "rcp": lambda a: type(a)(1) / a, "fma": lambda a, b, c: a * b + c,
}  # fmt: skip


def _rounded(base: str, how: str) -> Callable[..., Any] | None:
    """Arithmetic and conversions that name how they round."""
    if base in ("fma", "fmaf"):
        base = "ffma" if base == "fmaf" else "dfma"
    make: Any = f32 if base[0] == "f" else np.float64
    if base[0] in "fd" and base[1:] in _ARITHMETIC:
        return _arithmetic(base[1:], how, make)
    if base[1:] == "sqrt" or base == "frsqrt":
        return _root(how, make, base == "frsqrt")
    found = re.fullmatch(r"(double|float|int|uint|ll|ull)2(double|float|int|uint|ll|ull)", base)
    if found is None:
        return None
    of, to = found.groups()
    if to not in ("float", "double"):
        towards: Any = {"rn": round, "rd": math.floor, "ru": math.ceil, "rz": math.trunc}[how]
        bits, signed = (32 if to.endswith("int") else 64), not to.startswith("u")
        return lambda x: ops.to_int(towards(float(x)) if math.isfinite(x) else float(x), bits, signed)
    unsigned = 64 if of == "ull" else 32 if of == "uint" else 0

    def convert(x: Any) -> Any:
        if not math.isfinite(x):
            return float(x)
        return _to_float(
            Fraction(_u(x, unsigned) if unsigned else float(x) if of in ("double", "float") else x),
            how,
            f32 if to == "float" else np.float64,
        )

    return convert


def _arithmetic(op: str, how: str, make: Any) -> Callable[..., Any]:
    def compute(*args: Any) -> Any:
        plain = _ARITHMETIC[op](*map(make, args))
        if not all(map(math.isfinite, args)) or (op in ("div", "rcp") and args[-1] == 0):
            return plain
        exact = _ARITHMETIC[op](*(Fraction(float(one)) for one in args))
        return plain if exact == 0 else _to_float(exact, how, make)

    return compute


def _root(how: str, make: Any, reciprocal: bool) -> Callable[..., Any]:
    def compute(x: Any) -> Any:
        x = float(x)
        if x <= 0 or not math.isfinite(x):
            return 1 / np.sqrt(make(x)) if reciprocal else np.sqrt(make(x))
        scale = 1 << 400
        root = Fraction(math.isqrt(int(Fraction(x) * scale * scale)), scale)
        if not reciprocal and root * root == Fraction(x):
            return _to_float(root, how, make)
        root += Fraction(1, scale * 4)
        return _to_float(1 / root if reciprocal else root, how, make)

    return compute


# --- bits -------------------------------------------------------------------------------------------------------------
def _as(code: str, to: str) -> Callable[[Any], Any]:
    return lambda x: struct.unpack(to, struct.pack(code, x))[0]


def _u(x: int, bits: int = 32) -> int:
    return x & ((1 << bits) - 1)


def _byte_perm(x: int, y: int, z: int) -> int:
    eight = _u(x) | _u(y) << 32
    return sum((eight >> 8 * (z >> 4 * i & 7) & 0xFF) << 8 * i for i in range(4))


def _s24(x: int) -> int:
    return ops.wrap(x, 24, True)


def _remquo(x: Any, y: Any) -> tuple[float, int]:
    x, y = float(x), float(y)
    rest = math.remainder(x, y)
    return rest, round((x - rest) / y) & 7


def _round(x: Any) -> float:
    x = float(x)
    return math.copysign(math.floor(abs(x) + 0.5), x) if math.isfinite(x) and abs(x) < 1 << 52 else x


def _of_pi(function: Callable[[float], float]) -> Callable[[Any], float]:
    return lambda x: function(math.pi * math.fmod(float(x), 2.0))


_sinpi, _cospi = _of_pi(math.sin), _of_pi(math.cos)


def _normcdf(x: Any) -> float:
    return 0.5 * math.erfc(-float(x) / math.sqrt(2))


def _inverse(function: Callable[[float], float], low: float, high: float, rising: bool) -> Callable[[Any], float]:
    """The inverse of a monotonic function, by bisection."""

    def invert(y: Any) -> float:
        a, b, y = low, high, float(y)
        for _ in range(200):
            middle = (a + b) / 2
            a, b = (middle, b) if (function(middle) < y) == rising else (a, middle)
        return (a + b) / 2

    return invert


def _logb(x: Any) -> float:
    x = float(x)
    return -INF if x == 0 else INF if math.isinf(x) else x if x != x else float(math.frexp(x)[1] - 1)


def _numpy(function: Any) -> Callable[..., Any]:
    return lambda *args: function(*map(np.float64, args))


def _math(name: str, of_numpy: Any = None) -> Callable[..., Any]:
    return quiet(getattr(math, name), of_numpy)


def _middles(end: float, count: int) -> np.ndarray:
    """The points at which an integral from 0 is summed up."""
    return end * (np.arange(count) + 0.5) / count


def _jn(n: int, x: Any) -> Any:
    """The Bessel function of the first kind and of integer order, by its integral."""
    t = _middles(math.pi, 2000)
    return np.cos(n * t - x * np.sin(t)).mean()


def _yn(n: int, x: Any) -> Any:
    """The Bessel function of the second kind and of integer order, by its integrals."""
    if x <= 0:
        return -INF if x == 0 else NAN
    t, u = _middles(math.pi, 2000), _middles(12.0, 4000)
    rest = (np.exp(n * u) + (-1) ** n * np.exp(-n * u)) * np.exp(-x * np.sinh(u))
    return np.sin(x * np.sin(t) - n * t).mean() - rest.mean() * 12.0 / math.pi


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
    **{name: _numpy(getattr(np, name)) for name in ("ceil", "floor", "trunc", "rint", "fmod", "fmax", "fmin")},
    "nearbyint": _numpy(np.rint),
    "round": _round, "llrint": lambda x: round(float(x)), "llround": lambda x: int(_round(x)),
    "pow": _numpy(np.power),
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
    "double2hiint": lambda x: _as("d", "q")(x) >> 32, "double2loint": _as("d", "q"),
    "hiloint2double": lambda high, low: _as("Q", "d")(_u(high) << 32 | _u(low)),
    "double_as_longlong": _as("d", "q"), "longlong_as_double": _as("q", "d"), "float_as_int": _as("f", "i"),
    "int_as_float": _as("i", "f"), "float2half_rn": lambda x: np.float16(x).view(np.int16),
    "half2float": lambda x: np.int16(ops.wrap(x, 16, True)).view(np.float16),
    "finitef": math.isfinite, "isfinited": math.isfinite, "isinfd": math.isinf, "isinff": math.isinf,
    "isnand": math.isnan, "isnanf": math.isnan, "signbitd": lambda x: math.copysign(1, x) < 0,
    "signbitf": lambda x: math.copysign(1, x) < 0, "frexp": math.frexp, "frexpf": math.frexp,
    "ldexp": lambda x, n: ops.ldexp(float(x), n), "scalbn": lambda x, n: ops.ldexp(float(x), n), "logb": _logb,
    "ilogb": lambda x: int(_logb(x)) if math.isfinite(_logb(x)) else -(1 << 31), "modf": math.modf,
    "nan": lambda x: NAN,
    "nextafter": _numpy(np.nextafter), "nextafterf": lambda x, y: np.nextafter(f32(x), f32(y)),
    "remquo": _remquo, "saturatef": lambda x: 0.0 if x != x else min(max(x, f32(0)), f32(1)),
    "sincos": lambda x: (math.sin(x), math.cos(x)), "sinpi": _sinpi, "cospi": _cospi,
    "sincospi": lambda x: (_sinpi(x), _cospi(x)), "tgamma": quiet(math.gamma, ops._gamma),
    "lgamma": quiet(math.lgamma, ops._lgamma), "normcdf": _normcdf,
    "normcdfinv": _inverse(_normcdf, -40.0, 40.0, True), "erfinv": _inverse(math.erf, -7.0, 7.0, True),
    "erfcinv": _inverse(math.erfc, -7.0, 30.0, False), "erfcx": lambda x: math.exp(x * x) * math.erfc(x),
    "j0": lambda x: _jn(0, float(x)), "j1": lambda x: _jn(1, float(x)), "jn": lambda n, x: _jn(n, float(x)),
    "y0": lambda x: _yn(0, float(x)), "y1": lambda x: _yn(1, float(x)), "yn": lambda n, x: _yn(n, float(x)),
}  # fmt: skip
