"""Signatures of Numba, and arguments that are made to fit them."""

from __future__ import annotations

from typing import Any

from . import ops
from .types import Arr, Known, Num, Rec, Tup


def parsed(signature: Any) -> tuple[Any, list[Any]]:
    """What a signature returns, None if that is nothing or open, and what it takes."""
    if isinstance(signature, str):
        import numba

        signature = eval(signature, {}, _type_names(numba))
    if isinstance(signature, tuple):
        return None, [type_from_numba(one) for one in signature]
    returns = getattr(signature, "return_type", None)
    gives = None if returns is None or str(returns) in ("none", "void") else type_from_numba(returns)
    return gives, [type_from_numba(one) for one in signature.args]


def _type_names(numba: Any) -> dict[str, Any]:
    names = dict(vars(numba.types))
    names["void"] = numba.types.void
    return names


def type_from_numba(t: Any) -> Any:
    """A type of Numba as one of these."""
    from .types import dtype_of

    if hasattr(t, "layout") and hasattr(t, "ndim"):
        return Arr(dtype_of(t.dtype), t.ndim, t.layout)
    if hasattr(t, "types") and not hasattr(t, "bitwidth"):
        return Tup(tuple(type_from_numba(one) for one in t.types))
    if getattr(t, "fields", None) is not None and hasattr(t, "aligned"):
        return Rec(dtype_of(t))
    if str(t) == "none":
        return Known(None)
    return Num(dtype_of(t))


def numba_type(t: Any) -> Any:
    """One of these types as Numba has it."""
    from numba import types
    from numba.np.numpy_support import from_dtype

    if isinstance(t, Arr):
        return types.Array(from_dtype(t.dtype), t.ndim, t.layout, readonly=t.is_const)
    if isinstance(t, Tup):
        return types.Tuple(tuple(map(numba_type, t.items)))
    if isinstance(t, (Num, Rec)):
        return from_dtype(t.dtype)
    return types.none if t == Known(None) else types.Omitted(t)


def _kept(of: Any, to: Any) -> Any:
    return Arr(to.dtype, of.ndim, of.layout, of.is_const) if isinstance(of, Arr) else to


def fitted(value: Any, of: Any, to: Any) -> Any:
    """An argument as one of a declared type."""
    if isinstance(to, Num) and isinstance(of, Num):
        if to.dtype.kind in "iub" and of.dtype.kind in "fc":
            raise TypeError(f"{of} cannot be passed as {to}")
        return ops.convert(
            ops.from_numpy(of.dtype.type(value) if of.dtype.kind not in "mM" else value, of.dtype), of, to
        )
    if isinstance(to, Arr) and isinstance(of, Arr):
        if to.dtype != of.dtype or to.ndim != of.ndim or (to.layout != "A" and to.layout != of.layout and of.ndim):
            same_size = to.dtype.itemsize == of.dtype.itemsize and to.ndim == of.ndim and not of.dtype.names
            if not same_size or (to.dtype == of.dtype and not (of.layout == "C" and to.layout == "F" and of.ndim == 1)):
                raise TypeError(f"{of} cannot be passed as {to}")
        if to.dtype != of.dtype:  # as Numba does it for a kernel with one signature: the same bytes
            return value.view(to.dtype)
        return value
    if type(of) is type(to):
        return value
    raise TypeError(f"{of} cannot be passed as {to}")
