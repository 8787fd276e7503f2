"""Rules for the functions of cuda.fp16 and of numba.cuda.bf16: computed with 53 bits, and rounded once."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from . import ops, stubs
from .calls import need, plain, rule
from .env import V
from .types import BF16, BOOL, F16, I32, Num, is_int, num

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


def _function(name: str) -> Callable[..., Any]:
    """What one of them computes of float64. u: true of what is no number; sat: between 0 and 1; rn: as the plain one"""
    if name in _HALF:
        return _HALF[name]
    plain_one = _HALF[name.removesuffix("_rn").removesuffix("_sat").removesuffix("u")]
    if name.endswith("_sat"):
        return lambda *given: np.fmin(np.fmax(plain_one(*given), 0.0), 1.0)
    return plain_one if name.endswith("_rn") else lambda x, y: x != x or y != y or plain_one(x, y)


def _half(name: str, t: Num) -> Any:
    compute, gives = _function(name), _GIVES.get(name, t)

    def of_halves(*values: Any) -> Any:
        with np.errstate(all="ignore"):
            result = compute(*(np.float64(one) for one in values))
        return bool(result) if gives == BOOL else int(result) if gives == I32 else t.dtype.type(result)

    def made(c: Any, args: list[V], kwargs: dict[str, V], node: ast.AST) -> V:
        need(c, args, compute.__code__.co_argcount if name in ("hfma", "hfma_relu") else len(args), name, node)
        return plain(c, gives, of_halves, [c.converted(one, t, node) for one in args], node)

    return made


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

    def made(c: Any, args: list[V], kwargs: dict[str, V], node: ast.AST) -> V:
        need(c, args, 1, "a conversion of bfloat16", node)
        return plain(c, to, converted, [c.converted(args[0], of, node)], node)

    return made


for _name, (_of, _to, _how) in stubs.BF16_CONVERSIONS.items():
    _a, _b = (BF16 if one == "bf16" else num(one) for one in (_of, _to))
    rule(getattr(stubs.bf16, _name))(_converts(_a, _b, _how, _how == "as"))
