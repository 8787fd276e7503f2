"""A step of a run, for the tree of all schedules: an access that a thread makes, and what is known of it afterwards."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import Any, NamedTuple

from ..machine.memory import Allocation
from ..models.pending import GRANULE
from .every_seen import Cell, Question, Reading, agree

# Rank, kernel, number of the launch, block, thread; or whatever else names one who is to make an access in all runs.
Who = tuple[int, str, int, int, int]
Clock = dict[Who, int]  # the last step of each thread that comes before


def join(clock: Clock, other: Clock) -> None:
    for who, at in other.items():
        if clock.get(who, -1) < at:
            clock[who] = at


def joined(clock: Clock, other: Clock) -> Clock:
    """Both, none of them changed: one of the two objects if that has all, so that those who have met share one."""
    if clock is other or not other:
        return clock
    if len(clock) <= len(other) and all(other.get(who, -1) >= at for who, at in clock.items()):
        return other
    new = {who: at for who, at in other.items() if clock.get(who, -1) < at}
    return {**clock, **new} if new else clock


# Words, and accesses to them, that are kept. Each run makes the same ones again, and equal objects are compared faster
# if they are one: a set then has its hash, too.
MOST_KEPT = 4096
Words = frozenset[Any]  # words of allocations, and what else two steps may have in common, each of them by its name


class Access(NamedTuple):
    """What a step touches, and from which side: it meets whoever touches the same from the other one.

    A load touches its words from the left, a store from both sides. So two loads do not meet.
    """

    left: Words
    right: Words

    @property
    def words(self) -> Words:
        return self.left if self.left is self.right or not self.right else self.left | self.right

    @property
    def is_store(self) -> bool:
        return bool(self.right)

    def meets(self, other: Access) -> bool:
        return not (self.left.isdisjoint(other.right) and self.right.isdisjoint(other.left))


@lru_cache(MOST_KEPT)
def load_of(words: Words) -> Access:
    return Access(words, frozenset())


@lru_cache(MOST_KEPT)
def store_of(words: Words) -> Access:
    return Access(words, words)


class Waiting(NamedTuple):
    """A host that would not go on: the words that it has read to find out, and what comes before."""

    words: Words
    clock: Clock


@lru_cache(MOST_KEPT)
def words_of(name: Any, offset: int, nbytes: int) -> Words:
    """The words of some bytes. name: of the allocation"""
    return frozenset((name, word) for word in range(offset >> 2, (offset + nbytes + 3) >> 2))


def name_of(allocation: Any) -> tuple[int, str, int]:
    """The same for all views of an array, by whichever parameters kernels get them."""
    return allocation.rank, allocation.first_name, allocation.lineage


class Underway:
    """What will happen without a thread: it stands before an access as threads do, and happens when it is chosen.

    clock: the last steps that come before it
    """

    __slots__ = ("who", "pending", "clock", "happen", "left")
    dead = True  # once the run has ended nobody lets it happen
    is_standing = True

    def __init__(self, who: Who, pending: Access, clock: Clock, happen: Callable[[Underway], object]):
        self.who = who
        self.pending = pending
        self.clock = clock
        self.happen = happen
        self.left = 0

    def switch(self) -> None:
        self.happen(self)


class Replay(NamedTuple):
    """What makes a run again.

    picks: who went on at each choice
    events: those that a host has asked about
    decided: what else the step of each pick has decided
    """

    picks: tuple[Who, ...]
    events: tuple[tuple[str, int, int, int], ...] = ()
    decided: tuple[tuple[int, ...], ...] = ()


class Step:
    """An access that has been made.

    after: the last steps that come before it in its thread, and in those that it has met
    cell, reading, entry: what it has met, what it has read, the number of what it has stored there
    is_add, number: whether it is an add that may commute with others; what it adds or, if it is a plain store, stores
    clock: the last step of each thread that comes before it, and itself
    is_cut: of a load, whether all later stores come behind it
    arrival: at an mbarrier, how many arrivals and bytes have come
    is_wait: whether a host goes on whose wait is over
    behind: steps that it had to wait for, and that it need not have waited for if it had come earlier
    begins: of a look, whether its turn is to go on only once somebody has stored
    state: of a look in a loop, what decides what its thread does if it fails; None if that is not known
    refused: what the same look had been told, in whichever run, where it failed
    """

    __slots__ = (
        "who", "access", "after", "cell", "reading", "entry", "is_add", "number", "clock",
        "is_cut", "is_wait", "arrival", "behind", "begins", "state", "refused",
    )  # fmt: skip

    def __init__(self, who: Who, access: Access, after: Clock, cell: Cell | None):
        self.who = who
        self.access = access
        self.after = after
        self.cell: Cell | None = cell
        self.reading: Reading | None = None
        self.entry = 0
        self.is_add = False
        self.number: int | None = None
        self.clock: Clock = {}
        self.is_cut = False
        self.is_wait = False
        self.arrival = (0, 0)
        self.behind: frozenset[int] = frozenset()
        self.begins = False
        self.state: Hashable = None
        self.refused: list[dict[Question, bool]] = []

    @property
    def commutes(self) -> bool:
        """Whether it is an add, and nobody has asked for more of its old value than adds may that commute."""
        return self.is_add and self.reading is not None and not self.reading.is_exact

    @property
    def asks_of_old(self) -> bool:
        """Whether it is an add that has asked for less than its old value."""
        return self.is_add and self.reading is not None and bool(self.reading.asked) and not self.reading.is_exact

    @property
    def may_ask(self) -> bool:
        """Whether its thread may still ask for more of what it has read."""
        return self.reading is not None and self.reading.is_open

    def fails(self, values: set[int]) -> bool:
        """Whether a look would fail with each of these values, as far as is known."""
        return all(any(agree(told, value) for told in self.refused) for value in values)


# Stores on their way, with weak memory: see `weak_thread`


class Late:
    """What a run knows of stores on their way.

    arrived: the step at which a store arrived; visible: of a version, its number; last_arrival: by 16 bytes
    shown, lifted: by block and rank, which bytes were shown to it and not beyond; which stores
    """

    def __init__(self) -> None:
        self.arrived: dict[Any, Clock] = {}
        self.visible: dict[Any, int] = {}
        self.last_arrival: dict[Any, Clock] = {}
        self.shown: dict[Any, set[Any]] = {}
        self.lifted: dict[Any, list[Any]] = {}


class Arrival:
    """A store on its way, as one who can be chosen. left: as a thread has it"""

    reluctance = 0.0
    is_standing = True

    def __init__(self, strategy: Any, store: Any, who: Who, clock: Clock):
        self.strategy = strategy
        self.store = store
        self.who = who
        self.clock = clock
        self.left = 0
        self.granule = granule_of(store.allocation, store.offset)
        self.access = store_of(frozenset({self.granule, ("queue", *self.granule)}))

    @property
    def pending(self) -> Access | None:
        """What it touches; None if others to its 16 bytes come first."""
        is_first = self.store.allocation.pending[self.store.offset >> 4][0] is self.store
        return self.access if is_first else None

    def switch(self) -> None:
        """It arrives."""
        late = self.strategy.late
        after = joined(self.clock, late.last_arrival.get(self.granule, {}))  # of one that was to come before it
        at = self.strategy.tree.step(Step(self.who, self.access, after, None))
        self.clock = late.last_arrival[self.granule] = late.arrived[self.store] = {self.who: at}
        late.visible[self.store.version] = at
        self.store()


def granule_of(allocation: Any, offset: int) -> tuple[int, int, int]:
    """The 16 bytes of an access, under the same name in each run."""
    return allocation.rank, allocation.lineage, offset >> 4


def granules_of(allocation: Allocation, offset: int, nbytes: int) -> list[Any]:
    return [granule_of(allocation, at) for at in range(offset & -GRANULE, offset + nbytes, GRANULE)]
