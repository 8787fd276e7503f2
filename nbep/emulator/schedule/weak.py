"""Weak memory as choices of a tree: stores that arrive late, and what hosts and streams know of them.

Who acts is a thread, a copy, a host, or a store on its way. A thread stands before each access to memory that others
see, and before what publishes its stores. A store arrives when it is chosen; a thread that is to publish waits for
that. What a step decides besides: how old a version a load takes, and before which others a store comes. What a step
touches:

    a load           its 16 bytes: left
    an arrival       its 16 bytes, and the order of what is on its way to them: left and right
    a late store     that order: left. Two of them commute, as each picks its place among those that are there
    a release        less than sys: the bytes of what it shows to its block or its GPU: left and right
    a bulk load      its source: left; shared memory: left and right. Then it arrives at its mbarrier
    a bulk store     shared memory, and the order of its bytes: left. Then it is a late store

A load takes an older version only if what it misses comes before it for another reason. Else the same load, put before
the arrival, is another run. Arrivals at barriers, hosts, SMs and streams are as in other runs.
"""

from __future__ import annotations

from typing import Any

from ..machine.memory import Allocation
from ..models.causes import CausalOrder
from ..models.late_races import RacingHost
from ..models.pending import GRANULE
from .every_hosts import HostChoices, OrderChoices
from .every_order import joined
from .every_step import Access, Clock, Step, Who, Words, store_of


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


class WeakHost(HostChoices, RacingHost):
    """The hosts: what they store is there at once."""

    meet_all = RacingHost.meet_all

    @property
    def finds_races(self) -> bool:
        world = self.world
        return world.strategy.tree.finds_races and not (world.has_failed or world.is_over)

    def words_of(self, allocation: Allocation, offset: int, nbytes: int) -> Words:
        return frozenset(granules_of(allocation, offset, nbytes))

    def note_stored(self, step: Step, at: int, allocation: Allocation, offset: int, nbytes: int) -> None:
        self.world.strategy.late.visible[allocation.versions[offset // GRANULE][-1]] = at


class WeakOrder(OrderChoices, CausalOrder):
    """The order of launches."""
