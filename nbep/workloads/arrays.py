"""Whose arrays a workload passes in: NumPy's, as on the emulator, until somebody brings those of another library."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np


class Arrays(Protocol):
    """A library: its arrays from NumPy's and back, alone or in tuples and lists; all else stays as it is.

    is_exact: whether its target computes logarithms as the reference does
    """

    is_exact: bool

    def to_target(self, value: Any) -> Any: ...

    def to_numpy(self, value: Any) -> Any: ...

    def assign(self, array: Any, values: np.ndarray) -> None:
        """Write into a contiguous array of the library."""

    def assert_kind(self, *values: Any) -> None:
        """Raises: AssertionError if an array among the values is another library's"""


class NumpyArrays:
    """On the emulator."""

    is_exact = True

    def to_target(self, value: Any) -> Any:
        return value

    to_numpy = to_target

    def assign(self, array: Any, values: np.ndarray) -> None:
        array[...] = values

    def assert_kind(self, *values: Any) -> None:
        for value in values:
            if isinstance(value, tuple):
                self.assert_kind(*value)
            elif hasattr(value, "dtype"):
                assert isinstance(value, np.ndarray), f"{type(value)} came out where NumPy's arrays went in"


_used: Arrays = NumpyArrays()


def use(arrays: Arrays) -> None:
    """From now on, in this process."""
    global _used
    _used = arrays


def used() -> Arrays:
    return _used


def to_target(value: Any) -> Any:
    return _used.to_target(value)


def to_numpy(value: Any) -> Any:
    return _used.to_numpy(value)


def assign(array: Any, values: np.ndarray) -> None:
    _used.assign(array, values)


def assert_kind(*values: Any) -> None:
    _used.assert_kind(*values)


# --- Compares arrays bit for bit with what they must be ---------------------------------------------------------------


@dataclass
class Report:
    """Compares arrays bit for bit and says where they differ.

    where: which run it is, and which rank; it begins each message
    """

    where: str

    def same(self, name: str, got: np.ndarray, want: np.ndarray, rows: list[str] | None = None) -> None:
        """Raises: AssertionError if the arrays differ. rows: what to call each row"""
        where = f"{self.where}, {name}"
        assert (got.shape, got.dtype) == (want.shape, want.dtype), where
        if got.tobytes() == want.tobytes():
            return
        wrong = [i for i in range(len(want)) if got[i].tobytes() != want[i].tobytes()]
        lines = [f"{where}: {len(wrong)} of {len(want)} rows differ"]
        for i in wrong[:4]:
            token = f" ({rows[i]})" if rows is not None and i < len(rows) else ""
            lines.append(f"  row {i}{token}: got {got[i].ravel()[:8]}, expected {want[i].ravel()[:8]}")
        raise AssertionError("\n".join(lines))
