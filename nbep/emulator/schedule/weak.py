"""The strategy `weak`: of a run of a `weak_tree`. Who acts is a thread, or a store on its way."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from .strategies import Alone, Ready
from .weak_tree import Clock, Touch, WeakTree, Who, touch


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
        self.touch = touch(both=[self.granule, ("queue", *self.granule)])

    def next_step(self) -> Touch | None:
        """What it touches; None if others to its 16 bytes come first."""
        is_first = self.store.allocation.pending[self.store.offset >> 4][0] is self.store
        return self.touch if is_first else None

    def switch(self) -> None:
        """It arrives."""
        strategy = self.strategy
        after = [self.submitted]
        if self.granule in strategy.last_arrival:  # one of those that were to come before it
            after.append(strategy.last_arrival[self.granule])
        at = strategy.made(self.who, self.touch, after, self.store.thread.block.launch)
        strategy.last_arrival[self.granule] = strategy.arrived[self.store] = at
        strategy.visible[self.store.version] = at
        self.store()


def granule_of(allocation: Any, offset: int) -> tuple[int, int, int]:
    """The 16 bytes of an access, under the same name in each run."""
    return allocation.rank, allocation.number, offset >> 4


class Standing(Ready):
    """Threads and hosts that can go on, and stores on their way: those before a step wait until no other can."""

    def __init__(self, strategy: Weak):
        self.strategy: Any = strategy
        self.free: list[Any] = []
        self.before_step: dict[Who, Any] = {}

    def append(self, thread: Any) -> None:
        if getattr(thread, "is_standing", False):
            self.before_step[thread.who] = thread
        else:
            self.free.append(thread)

    def __len__(self) -> int:
        return len(self.free) + len(self.before_step)

    def __iter__(self) -> Iterator[Any]:
        return iter([*self.free, *(one for one in self.before_step.values() if not isinstance(one, Arrival))])

    def clear(self) -> None:
        self.free.clear()
        self.before_step.clear()

    def take(self) -> Any:
        while not self.free and self.strategy.turn():
            pass
        if self.free:
            return self.free.pop()
        steps = {who: one.next_step() for who, one in sorted(self.before_step.items())}
        waiting = {who: touches for who, touches in steps.items() if touches is not None}
        return self.before_step.pop(self.strategy.tree.choose(waiting))


class Weak(Alone):
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

    def __init__(self, tree: WeakTree):
        super().__init__()
        self.tree = tree
        self.meetings: dict[Any, set[int]] = {}
        self.arrived: dict[Any, int] = {}
        self.visible: dict[Any, int] = {}
        self.last_arrival: dict[Any, int] = {}
        self.launches: dict[Any, dict[Any, Clock]] = {}
        self.shown: dict[Any, set[Any]] = {}
        self.lifted: dict[Any, list[Any]] = {}

    def ready_list(self) -> Standing:
        return Standing(self)

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
        touch: Touch,
        after: Iterable[int],
        launch: Any,
        behind: Iterable[int] = (),
        has_failed: bool = False,
    ) -> int:
        """A step is being made."""
        at = self.tree.step(who, touch, after, behind, has_failed)
        self.launches.setdefault(launch.stream, {}).setdefault(launch, {})[who] = at
        return at

    def before_launch(self, launch: Any) -> set[int]:
        """The steps of the kernels before one in its stream."""
        others = self.launches.get(launch.stream, {})
        return {at for other, clock in others.items() if other is not launch for at in clock.values()}
