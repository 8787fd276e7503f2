"""A step of a run, for the tree of all schedules: an access that a thread makes, and what is known of it afterwards."""

from __future__ import annotations

from typing import Any, NamedTuple

from .every_seen import Cell, Question, Reading, agree

Who = tuple[int, str, int, int, int]  # rank, kernel, number of the launch, block, thread
Clock = dict[Who, int]  # the last step of each thread that comes before


class Access(NamedTuple):
    """What a thread is about to do. words: the 4-byte words of an allocation"""

    words: frozenset[tuple[Any, int]]
    is_store: bool

    def meets(self, other: Access) -> bool:
        return (self.is_store or other.is_store) and not self.words.isdisjoint(other.words)


class Step:
    """An access that has been made.

    after: the last steps that come before it in its thread, and in those that it has met
    refused: what its thread had asked of the cell when its poll failed before, each time, and what the answers were
    cell, reading, entry: what it has met, what it has read, the number of what it has stored there
    is_add, number: whether it is an add that may commute with others; what it adds or, if it is a plain store, stores
    clock: the last step of each thread that comes before it, and itself
    is_cut: of a load, whether all later stores come behind it
    """

    __slots__ = (
        "who", "access", "after", "refused", "cell", "reading", "entry", "is_add", "number", "clock",
        "is_cut",
    )  # fmt: skip

    def __init__(self, who: Who, access: Access, after: Clock, cell: Cell, refused: list[dict[Question, bool]]):
        self.who = who
        self.access = access
        self.after = after
        self.refused = refused
        self.cell: Cell | None = cell
        self.reading: Reading | None = None
        self.entry = 0
        self.is_add = False
        self.number: int | None = None
        self.clock: Clock = {}
        self.is_cut = False

    @property
    def commutes(self) -> bool:
        """Whether it is an add whose old value nobody has asked for."""
        return self.is_add and self.reading is not None and not self.reading.is_exact

    def fails(self, values: set[int]) -> bool:
        """Whether the poll would fail with each of these values, as far as is known."""
        return all(any(agree(asked, value) for asked in self.refused) for value in values)
