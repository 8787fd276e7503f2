"""Arrays of the emulator that are the caller's for a while: later calls take their memory again, and a use is an error.

An operation of NumPy on such an array asks first whether it is still the caller's. Views are lent, too; copies and
results are plain arrays. What takes an array's memory without asking it, as np.asarray does, is not seen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from nbep.emulator import Uninitialized, UseAfterFree

# What may be asked of an array that is not the caller's any more: nothing about its elements.
ABOUT = {"base", "ctypes", "dtype", "flags", "itemsize", "nbytes", "ndim", "shape", "size", "strides"}


class Lease:
    """How long some arrays are the caller's: until `end`."""

    def __init__(self, what: str):
        self.what = what
        self.ended_by = ""
        self.begins_with: Any = None  # the event behind which it is there; None: it is there

    def end(self, by: str) -> None:
        self.ended_by = by

    def check(self) -> None:
        """Raises: UseAfterFree if the lease has ended"""
        if self.ended_by:
            raise UseAfterFree(f"a use of {self.what} after {self.ended_by}, whose rows take its place")

    def check_read(self) -> None:
        """Raises: as `check`; Uninitialized if it is not there yet: a later call may take it, but not read it"""
        self.check()
        if self.begins_with is not None:
            if not self.begins_with.is_past:
                raise Uninitialized(f"a use of {self.what} before the event that its call returned")
            self.begins_with = None


class LentArray(np.ndarray):
    """A view of memory under a lease."""

    _lease: Lease | None = None

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("_") or name in ABOUT:
            return super().__getattribute__(name)
        found = getattr(plain(self), name)
        if not callable(found):
            return lend(found, self._lease)

        def call(*args: Any, **options: Any) -> Any:
            return lend(found(*args, **options), self._lease)

        return call

    def __getitem__(self, index: Any) -> Any:
        return lend(plain(self)[plain(index)], self._lease)

    def __setitem__(self, index: Any, values: Any) -> None:
        plain(self)[plain(index)] = plain(values)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        return getattr(ufunc, method)(*map(plain, inputs), **{name: plain(value) for name, value in options.items()})

    def __array_function__(self, func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
        return func(*(plain(arg) for arg in args), **{name: plain(value) for name, value in kwargs.items()})

    def __repr__(self) -> str:
        return repr(plain(self)) if self._lease is None or not self._lease.ended_by else "<rows that are taken>"


def lend(value: Any, lease: Lease | None) -> Any:
    """A value, under the lease if it is a view of memory that is."""
    if lease is None or not isinstance(value, np.ndarray) or value.base is None:
        return value
    lent = value.view(LentArray)
    lent._lease = lease
    return lent


def plain(value: Any) -> Any:
    """A value, and those of a tuple or list, without a lease.

    Raises: as Lease.check_read
    """
    if isinstance(value, LentArray):
        if value._lease is not None:
            value._lease.check_read()
        return np.ndarray.view(value, np.ndarray)
    if type(value) in (tuple, list):
        return type(value)(plain(item) for item in value)
    return value


def check(value: Any) -> None:
    """Raises: UseAfterFree if the value is an array whose lease has ended"""
    if isinstance(value, LentArray) and value._lease is not None:
        value._lease.check()
