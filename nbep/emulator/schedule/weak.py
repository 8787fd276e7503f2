"""The strategy `weak`: every run of a small program under `delayed`, late stores and early loads included.

Who acts is a thread, or a store on its way. A thread stands before each access to memory that others see, and before
what publishes its stores. A store arrives when it is chosen; a thread that is to publish waits for that. What a step
decides besides: how old a version a load takes, and before which others a store comes. What a step touches:

    a load           its 16 bytes: left
    an arrival       its 16 bytes, and the order of what is on its way to them: left and right
    a late store     that order: left. Two of them commute, as each picks its place among those that are there
    a release        less than sys: the bytes of what it shows to its block or its GPU: left and right

A load takes an older version only if what it misses comes before it for another reason. Else the same load, put before
the arrival, is another run.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .every import Every, Tree
from .every_step import Access, Clock, Step, Who, store_of


class Arrival:
    """A store on its way, as one who can be chosen. left: as a thread has it"""

    reluctance = 0.0
    is_standing = True

    def __init__(self, strategy: Weak, store: Any, who: Who, submitted: int):
        self.strategy = strategy
        self.store = store
        self.who = who
        self.submitted = submitted
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
        strategy = self.strategy
        after = [self.submitted]
        if self.granule in strategy.last_arrival:  # one of those that were to come before it
            after.append(strategy.last_arrival[self.granule])
        at = strategy.made(self.who, self.access, after, self.store.thread.block.launch)
        strategy.last_arrival[self.granule] = strategy.arrived[self.store] = at
        strategy.visible[self.store.version] = at
        self.store()


def granule_of(allocation: Any, offset: int) -> tuple[int, int, int]:
    """The 16 bytes of an access, under the same name in each run."""
    return allocation.rank, allocation.number, offset >> 4


class Weak(Every):
    """The strategy of a run of a tree: what is under way happens at once, but for stores, and a thread runs alone up to
    its next step.

    Attributes:
        meetings: of each barrier or the like, the last steps of those that came there
        arrived, visible: of a store, and of a version, when it arrived
        last_arrival: by 16 bytes
        launches: of each stream and launch, the last steps of its threads and of its stores
        shown, lifted: by block and rank, which bytes were shown to it and not beyond; which stores
    """

    name = "weak"
    chooses_hosts = False

    def __init__(self, tree: Tree):
        super().__init__(tree)
        self.arrived: dict[Any, int] = {}
        self.visible: dict[Any, int] = {}
        self.last_arrival: dict[Any, int] = {}
        self.launches: dict[Any, dict[Any, Clock]] = {}
        self.shown: dict[Any, set[Any]] = {}
        self.lifted: dict[Any, list[Any]] = {}

    def wait_of(self, predicate):
        return predicate

    def turn(self) -> bool:
        """Let something happen that nobody chooses: what is under way, or a host that need not wait any more."""
        world = self.world
        if world.operations:
            world._operate()
            return True
        before = len(world.waiting_hosts)
        world._poll_hosts()
        return len(world.waiting_hosts) < before

    def made(
        self,
        who: Who,
        access: Access,
        after: Iterable[int],
        launch: Any,
        behind: Iterable[int] = (),
        has_failed: bool = False,
    ) -> int:
        """A step is being made."""
        steps, clock = self.tree.steps, Clock()
        for before in after:
            clock[steps[before].who] = max(before, clock.get(steps[before].who, -1))
        step = Step(who, access, clock, None, [{}] if has_failed else [])
        step.behind = frozenset(behind)
        at = self.tree.step(step)
        self.launches.setdefault(launch.stream, {}).setdefault(launch, {})[who] = at
        return at

    def before_launch(self, launch: Any) -> set[int]:
        """The steps of the kernels before one in its stream."""
        others = self.launches.get(launch.stream, {})
        return {at for other, clock in others.items() if other is not launch for at in clock.values()}
