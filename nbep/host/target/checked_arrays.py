"""What the emulator checks of callers' arrays: outputs that are lent, outputs that are unwritten, inputs that change.

Lent arrays are the caller's for a while: later calls take their memory again, and then a use is an error.
An operation of NumPy on such an array asks first whether it is still the caller's. Views are lent, too; copies and
results are plain arrays. What is stored to one by an index, or by a ufunc, is a store of the host: `checked` finds a
race with kernels. What takes an array's memory without asking it, as np.asarray does, is not seen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

import numpy as np

from nbep.emulator import DataRace, Uninitialized, UseAfterFree
from nbep.emulator.machine.arrays import extent
from nbep.emulator.machine.memory import Allocation

# What may be asked of an array that is not the caller's any more: nothing about its elements.
ABOUT = {"base", "ctypes", "dtype", "flags", "itemsize", "nbytes", "ndim", "shape", "size", "strides"}


class Lease:
    """How long some arrays are the caller's: until `end`.

    writes: is passed what the caller is about to store to; begin: what they begin with, for reports
    """

    def __init__(
        self,
        what: str,
        writes: Callable[[np.ndarray], None] = lambda array: None,
        begin: str = "the event that its call returned",
    ):
        self.what, self.writes, self._begin = what, writes, begin
        self.ended_by = ""
        self.begins_with: Any = None  # the event behind which it is there; None: it is there

    def end(self, by: str) -> None:
        self.ended_by = by

    def check(self, use: str = "a use") -> None:
        """Raises: UseAfterFree if the lease has ended"""
        if self.ended_by:
            raise UseAfterFree(f"{use} of {self.what} after {self.ended_by}, whose rows take its place")

    def check_read(self, use: str = "a use") -> None:
        """Raises: as `check`; Uninitialized if it is not there yet: a later call may take it, but not read it"""
        self.check(use)
        if self.begins_with is not None:
            if not self.begins_with.is_past:
                raise Uninitialized(f"{use} of {self.what} before {self._begin}")
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
        array, index = plain(self), plain(index)
        if self._lease is not None:
            part = array[index]
            self._lease.writes(part if np.may_share_memory(part, array) else array)
        array[index] = plain(values)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        for out in options.get("out", ()):
            if isinstance(out, LentArray) and out._lease is not None:
                out._lease.writes(plain(out))
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


# --- Unwritten: rows past those that came, and all of them before a hook ----------------------------------------------
# The emulator fills new arrays with bytes of no meaning, the same in every run: what a kernel leaves unwritten must not
# look right by chance. Under `checked` a kernel that reads such bytes stops the run; the host asks `unwritten_rows`.


UNWRITTEN = 0xCC  # every byte of a new array; -1.07e8 in bf16 and in float32
GRANULE = 16  # so many bytes in a row are no accident: 0xCC alone is -6 in e4m3


class Outputs:
    """The arrays that a rank's calls have made, as long as they are there."""

    def __init__(self) -> None:
        self._arrays: dict[int, Any] = {}

    def add(self, array: np.ndarray) -> None:
        array.reshape(-1).view(np.uint8)[:] = UNWRITTEN
        key = id(array)
        self._arrays[key] = ref(array, lambda _: self._arrays.pop(key, None))

    def hide_unwritten(self, array: np.ndarray, allocation: Allocation) -> None:
        """Let a kernel that reads bytes that were never written stop the run, if a call has made the array.

        allocation: the bytes of the array as a launch sees them
        """
        begin, end = extent(array)
        made = (found for each in list(self._arrays.values()) if (found := each()) is not None and found.size)
        if not any(low <= begin and end <= high for low, high in map(extent, made)):
            return
        data = np.frombuffer(allocation.memory, np.uint8, allocation.nbytes)
        first = allocation.lowest & -GRANULE
        written = np.add.reduceat(data[first:] != UNWRITTEN, np.arange(0, data.size - first, GRANULE)) != 0
        if not written.all():
            flags = np.ones(first + written.size * GRANULE, np.uint8)
            flags[first:] = written.repeat(GRANULE)
            allocation.hide(bytearray(flags[: data.size].tobytes()))
            row_bytes = array.itemsize * (array.shape[-1] if array.ndim > 1 else 1)
            allocation.describe = lambda offset: (
                f"row {max(0, offset - allocation.base) // row_bytes}, which no call has written: it is past the rows "
                f"that came, or is read before the event or the hook of its call"
            )


def unwritten_rows(array: np.ndarray) -> np.ndarray:
    """See nbep.debug.unwritten."""
    if array.ndim == 0 or array.size == 0:
        return np.zeros(array.shape[:-1], bool)
    elements = np.ascontiguousarray(array).view(np.uint8).reshape(*array.shape, array.itemsize) == UNWRITTEN
    return elements.all(axis=-1) if array.ndim == 1 else elements.all(axis=(-1, -2))


# --- Watched: inputs must not change while a kernel reads them; `checked` compares each at the launch and at its end --


Span = tuple[int, int]  # see `extent`


def is_over(array: np.ndarray, spans: list[Span]) -> bool:
    begin, end = extent(array)
    return any(begin < its_end and its_begin < end for its_begin, its_end in spans)


class Watched:
    """An array, and what was in it. until: by when it may change, for the report"""

    def __init__(self, name: str, array: np.ndarray, rank: int, reader: str, until: str):
        self._name, self._array, self._rank, self._reader, self._until = name, array, rank, reader, until
        self._before = array.copy()

    def check(self) -> None:
        """Raises: DataRace if something else is there now"""
        before, now = (np.ascontiguousarray(each).view(np.uint8).reshape(-1) for each in (self._before, self._array))
        changed = (before != now).nonzero()[0]
        if changed.size == 0:
            return
        at = np.unravel_index(int(changed[0]) // self._array.itemsize, self._array.shape)
        where = f"{self._name}[{', '.join(map(str, at))}]"
        raise DataRace(
            f"{self._name} of rank {self._rank} has changed while {self._reader} reads it: {where} was "
            f"{self._before[at]} when the host launched that, and is {self._array[at]} now; change it {self._until}"
        )
