"""Rules for methods of arrays, and for NumPy's functions of arrays."""

from __future__ import annotations

import ast
import warnings
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
        result, function = _reduction(name, t.dtype)
        return V(Num(result), build(f"{c.keep(function)}({{0}}, _t)", node, base.code))
    raise c.fail(node, f"an array has no method {name!r} in kernels")


def _result(name: str, dtype: np.dtype) -> np.dtype:
    """The type in which Numba has a reduction."""
    if name in ("argmin", "argmax", "count_nonzero"):
        return np.dtype("i8")
    if name in ("all", "any"):
        return np.dtype("?")
    if name in ("sum", "prod", "nansum", "nanprod"):
        return np.dtype({"i": "i8", "b": "i8", "u": "u8"}.get(dtype.kind, dtype))
    if name in ("mean", "nanmean", "var", "std") and dtype.kind in "iub":
        return np.dtype("f8")
    is_real = name in ("var", "std") and dtype.kind == "c"
    return np.dtype(f"f{dtype.itemsize // 2}") if is_real else dtype


def _reduction(name: str, dtype: np.dtype) -> Any:
    """Its type, and what computes it: one element after the other, as kernels do."""
    result = _result(name, dtype)

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
