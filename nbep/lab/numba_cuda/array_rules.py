"""Rules for methods of arrays, and for NumPy's functions of arrays."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from . import ops
from .arrays import local_array
from .code import build
from .env import V
from .types import Arr, Num, Tup, dtype_of


def array_method(c: Any, base: V, name: str, args: list[V], kwargs: dict[str, V], node: ast.AST) -> V:
    t = base.t
    holes = ", ".join(f"{{{i + 1}}}" for i in range(len(args)))
    codes = [one.code for one in args]
    if name == "reshape":
        ndim = len(args)
        if ndim == 1 and isinstance(args[0].t, Tup):
            ndim = len(args[0].t.items)
        if t.layout != "C":
            raise c.fail(node, f"reshape of an array that is not contiguous: {t}")
        return V(Arr(t.dtype, ndim, "C", t.is_const), build(f"{{0}}.reshape({holes})", node, base.code, *codes))
    if name in ("ravel", "flatten"):
        return V(Arr(t.dtype, 1, "C", t.is_const), build("{0}.ravel()", node, base.code))
    if name == "transpose":
        return V(Arr(t.dtype, t.ndim, "A", t.is_const), build(f"{{0}}.transpose({holes})", node, base.code, *codes))
    if name == "view" and len(args) == 1:
        return V(
            Arr(dtype_of(args[0].known), t.ndim, t.layout, t.is_const),
            build(f"{{0}}.view({c.keep(dtype_of(args[0].known))})", node, base.code),
        )
    if name == "item" and not args:
        return V(Num(t.dtype), build("next({0}.every(_t))", node, base.code))
    if name in REDUCTIONS and not args and not kwargs:
        result, function = REDUCTIONS[name](t.dtype)
        return V(Num(result), build(f"{c.keep(function)}({{0}}, _t)", node, base.code))
    raise c.fail(node, f"an array has no method {name!r} in kernels")


def _wide(dtype: np.dtype) -> np.dtype:
    """The type in which Numba sums up."""
    if dtype.kind in "ib":
        return np.dtype("i8")
    return np.dtype("u8") if dtype.kind == "u" else dtype


def _folded(start: Any, step: Any, result: np.dtype) -> Any:
    def fold(array: Any, thread: Any) -> Any:
        total = ops.from_numpy(result.type(start), result)
        for value in array.every(thread):
            total = step(total, value)
        if result.kind in "iu":
            total = ops.wrap(total, 64, result.kind == "i")
        return total

    return result, fold


def _chosen(better: Any) -> Any:
    def reduction(dtype: np.dtype) -> Any:
        def choose(array: Any, thread: Any) -> Any:
            best = None
            for value in array.every(thread):
                if best is None or better(value, best) or value != value:
                    best = value
                if value != value:
                    break
            return best

        return dtype, choose

    return reduction


def _place(better: Any) -> Any:
    def reduction(dtype: np.dtype) -> Any:
        def place(array: Any, thread: Any) -> int:
            best, where = None, 0
            for i, value in enumerate(array.every(thread)):
                if best is None or better(value, best):
                    best, where = value, i
            return where

        return np.dtype("i8"), place

    return reduction


def _mean(dtype: np.dtype) -> Any:
    result = dtype if dtype.kind in "fc" else np.dtype("f8")

    def mean(array: Any, thread: Any) -> Any:
        total = sum(array.every(thread), start=0.0)
        return ops.from_numpy(result.type(total / max(array.size, 1)), result)

    return result, mean


def _spread(root: bool) -> Any:
    def reduction(dtype: np.dtype) -> Any:
        result = (
            np.dtype("f8") if dtype.kind in "iub" else np.dtype(f"f{dtype.itemsize // (2 if dtype.kind == 'c' else 1)}")
        )

        def spread(array: Any, thread: Any) -> Any:
            values = list(array.every(thread))
            mean = sum(values, start=0.0) / len(values)
            square = sum(abs(value - mean) ** 2 for value in values) / len(values)
            return ops.from_numpy(result.type(math.sqrt(square) if root else square), result)

        return result, spread

    return reduction


class _Some:
    """Some of the elements of an array."""

    def __init__(self, values: list[Any]):
        self.values, self.size = values, len(values)

    def every(self, thread: Any) -> Iterator[Any]:
        return iter(self.values)


def _without_nan(name: str, of_none: float) -> Any:
    """A reduction of the elements that are numbers; of_none: what it is if none is"""

    def reduction(dtype: np.dtype) -> Any:
        result, function = REDUCTIONS[name](dtype)

        def reduce(array: Any, thread: Any) -> Any:
            values = [value for value in array.every(thread) if value == value]
            return function(_Some(values), thread) if values else ops.from_numpy(result.type(of_none), result)

        return result, reduce

    return reduction


REDUCTIONS: dict[str, Any] = {
    "sum": lambda dtype: _folded(0, lambda total, value: total + value, _wide(dtype)),
    "prod": lambda dtype: _folded(1, lambda total, value: total * value, _wide(dtype)),
    "min": _chosen(lambda a, b: a < b),
    "max": _chosen(lambda a, b: a > b),
    "argmin": _place(lambda a, b: a < b),
    "argmax": _place(lambda a, b: a > b),
    "mean": _mean,
    "var": _spread(False),
    "std": _spread(True),
    "nansum": _without_nan("sum", 0),
    "nanprod": _without_nan("prod", 1),
    "nanmin": _without_nan("min", math.nan),
    "nanmax": _without_nan("max", math.nan),
    "nanmean": _without_nan("mean", math.nan),
    "count_nonzero": lambda dtype: (np.dtype("i8"), lambda array, thread: sum(map(bool, array.every(thread)))),
    "all": lambda dtype: (np.dtype("?"), lambda array, thread: all(array.every(thread))),
    "any": lambda dtype: (np.dtype("?"), lambda array, thread: any(array.every(thread))),
}


def ufunc_of_arrays(c: Any, function: np.ufunc, args: list[V], node: ast.AST) -> V:
    """`np.add(a, b, out)`: element by element, into the last argument; or, with the successor, into a new array."""
    is_new = c.unit.successor and len(args) == function.nin
    if not is_new and (len(args) != function.nin + 1 or not isinstance(args[-1].t, Arr)):
        raise c.fail(node, f"np.{function.__name__} of arrays: takes an array for the result as its last argument")
    kinds = [getattr(one.t, "dtype", None) for one in args[: function.nin]]
    try:
        dtypes = function.resolve_dtypes((*kinds, None))
    except TypeError:
        raise c.fail(node, f"np.{function.__name__} of {', '.join(str(one.t) for one in args)}") from None
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

    holes = "".join(f", {{{i}}}" for i in range(len(args)))
    return V(out, build(f"{c.keep(apply)}(_t{holes})", node, *(one.code for one in args)))
