"""Arrays that a call makes: one by one, or several as one piece of memory."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

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
