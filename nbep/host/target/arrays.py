"""Arrays that a call was given, looked at once; and those that it makes, one by one or several in one piece."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np


class View(NamedTuple):
    """An array as its library tells of it, or what is none.

    array       what the caller gave
    flaw        why an array of that library is none here: text behind the name of its class
    is_array    whether this target takes it as an array; if not, nothing is said of it below
    dtype_name  NumPy's: "bfloat16", "float8_e4m3fn", "int64", "bool" ...
    num_bytes   of its elements
    strides     in elements
    is_contiguous, is_writeable  row-major without gaps; not read-only, as far as its library says: torch does not
    address     where it starts in its memory: of the device, or of the host for arrays that the host reads
    """

    array: Any
    flaw: str = ""
    is_array: bool = False
    shape: tuple[int, ...] = ()
    dtype_name: str = ""
    itemsize: int = 0
    num_bytes: int = 0
    strides: tuple[int, ...] = ()
    is_contiguous: bool = True
    is_writeable: bool = True
    address: int = 0


def view_of(array: Any, library: Any) -> View:
    """An array without a flaw. library: the adapter of the library that made it"""
    shape, itemsize = tuple(array.shape), array.dtype.itemsize
    told = (each(array) for each in (library.strides, library.is_contiguous, library.is_writeable, library.pointer))
    return View(array, "", True, shape, library.dtype_name(array), itemsize, math.prod(shape) * itemsize, *told)


new_tuple: Any = tuple.__new__  # makes a NamedTuple at half the cost
NO_ARRAY = View(None)  # for an argument that is not given


Array = Any


class PartsLayout(NamedTuple):
    """Several arrays in one piece of memory: for each its first word of 4 bytes, its shape and its dtype.

    offsets: the first byte of each
    """

    num_words: int
    parts: tuple[tuple[int, tuple[int, ...], str], ...]
    offsets: tuple[int, ...]

    @classmethod
    def of(cls, *parts: tuple[tuple[int, ...], str]) -> PartsLayout:
        """The layout of arrays of these shapes and dtypes, each at a multiple of 16 bytes."""
        placed = []
        word = 0
        for shape, dtype in parts:
            placed.append((word, shape, dtype))
            word += -(-math.prod(shape) * np.dtype(dtype).itemsize // 16) * 4
        return cls(word, tuple(placed), tuple(4 * first for first, *_ in placed))


class Parts(ABC):
    """New arrays that are made as one piece of memory. What a launch takes costs less than the arrays."""

    @property
    @abstractmethod
    def arguments(self) -> tuple[Any, ...]:
        """What a launch takes for the arrays."""

    @abstractmethod
    def array(self, index: int) -> Array:
        """The array."""


class ByColumns(NamedTuple):
    """An array whose neighbours in the second dimension lie side by side in memory, not those in the last."""

    shape: tuple[int, int, int]
    dtype: str


ROWS, PASSED = -1, -2  # as the first size of a shape: the first and the second of the numbers that `Make` gets
Wanted = tuple[tuple[int, ...], str]  # an array: its shape and its dtype
# New arrays, and Parts for a PartsLayout; and what a launch takes for each, a tuple for Parts.
# It takes the numbers for those whose first size is ROWS or PASSED.
Make = Callable[..., tuple[list[Any], list[Any]]]
