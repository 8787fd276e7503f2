"""Arrays of the host as memory of a rank: views of one array are one memory, wherever they begin.

a        |0 ........ 256 ........ 512|    its segment: offsets 0 to 512
a[64:]            256 |.......... 512|    another one, with the same offsets and History; 256 is the lowest allowed
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import numpy as np

OFFSET_BITS = 32
OFFSET_MASK = (1 << OFFSET_BITS) - 1
LASTING = "last_stores", "last_loads", "most_loads", "overwritten", "messages"
WHILE_MAPPED = "watchers", "writers", "lost", "wrapped", "nc_reads", "pending", "versions"


class History:
    """What all mappings of an array have in common: these attributes of an allocation.

    name: under which the array was mapped first; number: a negative one, of no other array of the space
    lasting: who accessed it; ends with the array, which `dies` tells
    passing: what nobody needs any more once no mapping is left
    mapped: the allocation of each mapping that is left
    """

    __slots__ = ("name", "number", "lasting", "passing", "mapped", "dies", "__weakref__")

    def __init__(self, name: str, number: int, dies: Any):
        self.name = name
        self.number = number
        self.lasting: dict[str, Any] = {attribute: {} for attribute in LASTING}
        self.passing: dict[str, Any] = {}
        self.mapped: list[Any] = []
        self.dies = dies

    def enter(self, allocation: Any) -> None:
        """Let the allocation of a new mapping have part in it."""
        if not self.mapped:
            self.passing = {attribute: {} for attribute in WHILE_MAPPED}
        self.mapped.append(allocation)
        if any(one.writable for one in self.mapped):
            for one in self.mapped:
                one.may_change = True
        allocation.identity, allocation.first_name, allocation.lineage = self, self.name, self.number
        for attribute, value in (*self.lasting.items(), *self.passing.items()):
            setattr(allocation, attribute, value)


def address_of(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def extent(array: np.ndarray) -> tuple[int, int]:
    """Machine addresses of the lowest byte of an array and of the end of its highest element."""
    start = address_of(array)
    reach = [(n - 1) * s for n, s in zip(array.shape, array.strides, strict=True)]
    return start + sum(r for r in reach if r < 0), start + sum(r for r in reach if r > 0) + array.itemsize


def owner_of(array: np.ndarray) -> np.ndarray:
    """The array that an array is a view of, in however many steps."""
    owner = array
    while owner.base is not None and (base := _base(owner)) is not None:
        owner = base
    if owner is array or not array.size:
        return owner
    (low, high), (first, end) = extent(array), extent(owner)
    return owner if first <= low and high <= end else array  # as_strided can leave it


def _base(array: np.ndarray) -> np.ndarray | None:
    base: Any = array.base
    if isinstance(base, memoryview):
        base = base.obj
    if not isinstance(base, np.ndarray):  # as_strided puts an object of its own in between
        base = getattr(base, "base", None)
    return base if isinstance(base, np.ndarray) else None


class Span(NamedTuple):
    """memory: from where the segment begins to the end of what owns the array; in it: element 0, the lowest byte of an
    element, and the end of the highest one.
    """

    memory: memoryview
    base: int
    lowest: int
    end: int


def span_of(array: np.ndarray, owner: np.ndarray) -> Span:
    if array.size == 0:
        return Span(memoryview(bytearray()), 0, 0, 0)
    low, high = extent(array)
    begin, end = (low, high) if owner is array else extent(owner)
    if high - begin > OFFSET_MASK:  # too far for an offset: this view is memory by itself, at its true alignment
        begin = low - (low - begin) % 256
    bytes_there = (ctypes.c_uint8 * (end - begin)).from_address(begin)
    return Span(memoryview(bytes_there).cast("B"), address_of(array) - begin, low - begin, high - begin)
