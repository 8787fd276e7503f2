"""A thread under the strategy `weak`: it stands still before each step until it is chosen. See `weak`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, NamedTuple

from ..machine.kinds import KINDS
from ..machine.memory import Allocation
from ..machine.orders import POLLED, RELEASES, SCOPES
from ..machine.stream import MAX_BLOCK
from ..machine.world import NEVER
from ..models.causes import CausalThread
from ..models.pending import PendingAtomic, PendingStore
from ..models.versions import GRANULE, Version
from .every_loops import MANY_WEAK_LOOKS, Frames, Loop, LoopingThread, frames_above, is_in_loop, is_nested
from .every_step import Access
from .weak import Arrival, granule_of

Needs = tuple[Access, list[PendingStore]]  # what a step touches, and the stores that must have arrived before
Coming = Callable[[], Needs]
NOTHING: Needs = (Access(frozenset(), frozenset()), [])


class Poll(NamedTuple):
    """A load that may be a poll: its step, the frames that led there, and what its thread was before."""

    at: int
    access: Access
    frames: list[tuple[FrameType, int]]
    after: set[int]
    known: Any
    tellings: Any


class WeakThread(LoopingThread, CausalThread):
    """A thread of a run of a tree.

    who: its name in all runs
    coming: of the step that it stands before, what it touches and which stores must have arrived; None if it runs
    after: the last steps that come before its next one
    at: its last step
    stores: its stores of which no release of scope sys has told; fresh: of which none at all
    loop: whether it has come back to where it was
    loads: those since the last turn of a loop; does_more: whether it has met others since
    turn: the last turn of a loop that polls and was steps
    before: what it knew before the step that it stands before
    """

    __slots__ = (
        "who", "coming", "after", "at", "number", "stores", "fresh", "loop", "loads", "does_more", "turn", "has_failed",
        "before",
    )  # fmt: skip

    def __init__(self, block: Any, thread_idx: int, warp: Any, hub: Any):
        super().__init__(block, thread_idx, warp, hub)
        launch = block.launch
        self.who = (self.rank, launch.name, launch.number, block.index, thread_idx)
        self.coming: Coming | None = None
        self.after: set[int] = self.strategy.before_launch(launch)
        self.at = -1
        self.number = 0
        self.stores: list[PendingStore] = []
        self.fresh: set[Any] = set()
        self.loop = Loop()
        self.loads: list[Poll] = []
        self.does_more = False
        self.turn: list[tuple[FrameType, int]] = []
        self.has_failed = False
        self.before: Any = None

    @property
    def strategy(self) -> Any:
        return self.world.strategy

    @property
    def is_standing(self) -> bool:
        return self.coming is not None

    @property
    def pending(self) -> Access | None:
        """What its next step touches; None if it must wait for stores to arrive."""
        assert self.coming is not None
        touches, waits = self.coming()
        return touches if all(store.done for store in waits) else None

    @property
    def is_alone(self) -> bool:
        return self.block_dim == 1

    def stand(self, coming: Coming) -> None:
        """Wait until it is this thread's turn, unless its step touches nothing and waits for nothing."""
        strategy = self.strategy
        if coming() == NOTHING:
            return
        tree = strategy.tree
        if tree.probing == self.who:
            tree.note_pick(self.who)
            return
        self.before = self.after, self.known, self.tellings
        self.coming = coming
        self.runnable.append(self)
        self.park()
        self.coming = None
        if tree.probing == self.who:
            return
        touches, waits = coming()
        own = {strategy.arrived[store] for store in waits if store.thread is self}
        others = {strategy.arrived[store] for store in waits if store.thread is not self}
        self.at = strategy.made(self.who, touches, self.after | own, self.block.launch, others, self.has_failed)
        self.after = {self.at}
        self.has_failed = False

    # --- what a step touches, and what has to be there first ------------------------------------------------------

    def granules(self, allocation: Allocation, offset: int, kind: str) -> list[Any]:
        nbytes = KINDS[kind].size if kind in KINDS else 1
        return [granule_of(allocation, at) for at in range(offset & -GRANULE, offset + nbytes, GRANULE)]

    def publishes(self, order: str, scope: str) -> Needs:
        """What a release shows, and which stores it waits for."""
        return self.shows(SCOPES[scope]) if order in RELEASES else NOTHING

    def shows(self, level: int) -> Needs:
        """The same of what lifts its stores to a level."""
        block, gpu = ("block", self.block.serial), ("gpu", self.rank)
        shown, lifted = self.strategy.shown, self.strategy.lifted
        if level == 3:
            waits = [*self.stores, *lifted.get(block, ()), *lifted.get(gpu, ())]
            return touch(right=[block, gpu]), waits
        late: list[PendingStore] = [store for store in self.stores if isinstance(store, PendingAtomic)]
        if level == 2:
            cells = self.fresh | shown.get(block, set())
            return touch(left=[gpu], right=[block, *queues(cells)], both=cells), late
        if self.is_alone or not self.fresh:
            return touch(), late
        return touch(left=[block], right=queues(self.fresh), both=self.fresh), late

    def publish(self, level: int) -> None:
        """All that it waited for is there; note what others see from now on."""
        super().publish(level)
        shown, block = self.strategy.shown, ("block", self.block.serial)
        if level == 1:
            shown.setdefault(block, set()).update(self.fresh)
        else:
            shown.pop(block, None)
        self.fresh = set()
        if level == 3:
            self.stores = []

    def _lift(self, stores: dict[PendingStore, None], level: int, target: dict[PendingStore, None]) -> None:
        where = ("block", self.block.serial) if level == 1 else ("gpu", self.rank)
        self.strategy.lifted.setdefault(where, []).extend(stores)
        super()._lift(stores, level, target)

    def seen_in(self, allocation: Allocation, offset: int) -> list[PendingStore]:
        """The stores to some bytes that it sees, on their way and there: an atomic comes behind them."""
        lifted = self.strategy.lifted
        stores = {*self.stores, *lifted.get(("block", self.block.serial), ()), *lifted.get(("gpu", self.rank), ())}
        return [one for one in stores if one.allocation is allocation and one.offset >> 4 == offset >> 4]

    def send_off(self, store: PendingStore) -> None:
        """Its arrival is a step of its own."""
        self.number += 1
        self.stores.append(store)
        granule = granule_of(store.allocation, store.offset)
        if store.level == 0:
            self.fresh.add(granule)
        elif store.level == 1:
            self.strategy.shown.setdefault(("block", self.block.serial), set()).add(granule)
        self.runnable.append(
            Arrival(self.strategy, store, (*self.who[:4], -self.number * MAX_BLOCK - self.thread_idx), self.at)
        )

    def pick_place(self, least: int, most: int) -> int:
        return most - self.strategy.tree.decide(most - least + 1)

    def pick_version(self, versions: list[Version], least: int) -> int:
        """It may miss a version that comes before it for another reason than this load."""
        tree, visible = self.strategy.tree, self.strategy.visible
        count = len(versions)
        allowed = [count]
        if not (self.turn and is_in_loop(frames_above(sys._getframe(1)), self.turn)):
            for number in range(count - 1, least - 1, -1):
                at = visible.get(versions[number])
                if at is None or tree.is_plain or tree.comes_before(at):
                    allowed.append(number)
        return allowed[tree.decide(len(allowed))]

    # --- accesses -------------------------------------------------------------------------------------------------

    def load(self, address: int, kind: str, order: str, scope: str) -> Any:
        allocation = self.segments.get(address >> 32)
        if allocation is None or not allocation.writable:  # nobody stores there
            return super().load(address, kind, order, scope)
        offset = address & 0xFFFFFFFF
        cells = self.granules(allocation, offset, kind)
        right = [("nc", *cell) for cell in cells] if order == "nc" else []
        here = [one for one in self.stores if one.allocation is allocation]
        late: list[PendingStore] = [one for one in here if isinstance(one, PendingAtomic)]
        self.stand_to_load((touch(left=cells, right=right), late), order)
        value = super().load(address, kind, order, scope)
        self.note_weak(allocation, offset, kind, order, value)
        return value

    def note_weak(self, allocation: Allocation, offset: int, kind: str, order: str, value: Any) -> None:
        """In a loop, a weak load may be a poll, too."""
        if order not in POLLED and self.loop.mark is not None:
            self.note_polled(allocation, offset, kind, value)

    def stand_to_load(self, needs: Needs, order: str) -> None:
        self.wait_if_it_comes_back()
        before = self.after
        self.stand(lambda: needs)
        if needs != NOTHING and self.strategy.tree.probing != self.who:
            self.loop.count(self, needs[0], self.strategy.tree.stores, MANY_WEAK_LOOKS)
        if order in POLLED:
            frames = frames_above(sys._getframe(2))
            self.loads.append(Poll(self.at, needs[0], frames, before, self.known, self.tellings))

    def wait_if_it_comes_back(self) -> None:
        """A loop that does nothing but look at cells is a wait, without `wait_expired`, too."""
        begun = self.loop.comes_back(sys._getframe(2), len(self.strategy.tree.steps))
        if begun is not None:
            here = frames_above(sys._getframe(2))
            self.end_turn([poll for poll in self.loads if poll.at >= begun], here, False, NEVER)

    def store(self, address: int, kind: str, value: Any, order: str, scope: str) -> None:
        self.loop.forget()
        allocation = self.segments.get(address >> 32)
        if allocation is not None:
            cells = self.granules(allocation, address & 0xFFFFFFFF, kind)
            here = touch(left=places_of(cells))
            if order in RELEASES:  # others see it at once
                where = [("block", self.block.serial), ("gpu", self.rank)]
                here = touch(left=[*here.left, *where], right=queues(cells), both=cells)
            self.stand(lambda: united(self.publishes(order, scope), (here, [])))
        super().store(address, kind, value, order, scope)
        if order == "release" and self.latest is not None:
            self.strategy.visible.setdefault(self.latest, self.at)

    def atomic(
        self, op: str, address: int, kind: str, operand: Any, order: str, scope: str, compare: Any = None
    ) -> Any:
        allocation = self.segments.get(address >> 32)
        if allocation is not None:
            offset = address & 0xFFFFFFFF
            cells = self.granules(allocation, offset, kind)
            here = touch(both=cells, left=places_of(cells))
            self.wait_if_it_comes_back()
            self.stand(lambda: united(self.publishes(order, scope), (here, self.seen_in(allocation, offset))))
        before = self.number
        old = super().atomic(op, address, kind, operand, order, scope, compare)
        if self.number == before and self.latest is not None:
            self.strategy.visible.setdefault(self.latest, self.at)
        return old

    def fence(self, order: str, scope: str) -> None:
        self.stand(lambda: self.publishes(order, scope))
        super().fence(order, scope)

    def load_shared(self, address: int, kind: str, order: str) -> Any:
        if not self.is_alone:
            self.stand_to_load((touch(left=[self.shared_granule(address)]), []), order)
        value = super().load_shared(address, kind, order)
        self.note_weak(self.shared, address, kind, order, value)
        return value

    def store_shared(self, address: int, kind: str, value: Any, order: str) -> None:
        self.loop.forget()
        self.stand_shared(address, order)
        super().store_shared(address, kind, value, order)

    def atomic_shared(self, op: str, address: int, kind: str, operand: Any, order: str, compare: Any = None) -> Any:
        self.wait_if_it_comes_back()
        self.stand_shared(address, order)
        return super().atomic_shared(op, address, kind, operand, order, compare)

    def stand_shared(self, address: int, order: str) -> None:
        here = touch(both=[] if self.is_alone else [self.shared_granule(address)])
        self.stand(lambda: united(self.publishes(order, "cta"), (here, [])))

    def shared_granule(self, address: int) -> Any:
        return ("shared", *self.who[:4], address >> 4)

    # --- loops that poll ------------------------------------------------------------------------------------------

    def spin(self, deadline_ns: int) -> bool:
        here = frames_above(sys._getframe(1))
        polls = [poll for poll in self.loads if is_in_loop(poll.frames, here)]
        return self.end_turn(polls, here, is_nested(here), deadline_ns)

    def end_turn(self, polls: list[Poll], here: Frames, is_nested: bool, deadline_ns: int) -> bool:
        """A turn of a loop that polls is over. If it looks at one cell, its loads are no steps."""
        is_one = not self.does_more and len({poll.access for poll in polls}) == 1
        self.loads, self.does_more = [], False
        self.loop.forget()
        has_failed = False
        if self.strategy.tree.probing == self.who:
            self.strategy.tree.probing = None
            has_failed = True
            self.after, self.known, self.tellings = self.before
        elif is_one and not (is_nested and len(polls) > 1):
            for poll in reversed(polls):
                if not self.strategy.tree.fail(self.who, poll.at):
                    break
                has_failed = True
                self.after, self.known, self.tellings = poll.after, poll.known, poll.tellings
        if not has_failed:
            self.turn = here
            return super().spin(deadline_ns)
        self.turn = []
        self.has_failed = True
        self.left -= 1
        self.waited_once, self.has_news = False, True
        cells = [
            (place, offset, kind, self.peek(place, offset, kind)) for place, offset, kind, _ in self.polled.values()
        ]
        self.polled.clear()
        return self.watch(cells, deadline_ns)

    # --- whoever leaves a meeting comes behind all that came there -------------------------------------------------

    def stand_to_meet(self) -> None:
        self.does_more = True
        self.loop.forget()
        self.stand(lambda: self.shows(1))

    def came_to(self, meeting: Any) -> None:
        self.strategy.meetings.setdefault(meeting, set()).update(self.after)

    def left_from(self, meeting: Any) -> None:
        self.after = self.after | self.strategy.meetings.get(meeting, set())

    def arrive(self, barrier_id: int, num_threads: int, wait: bool, predicate: bool = True) -> Any:
        self.stand_to_meet()
        barrier = super().arrive(barrier_id, num_threads, wait, predicate)
        self.came_to(barrier)
        return barrier

    def meet(self, barrier_id: int, num_threads: int, predicate: bool) -> Any:
        barrier = super().meet(barrier_id, num_threads, predicate)
        self.left_from(barrier)
        return barrier

    def converge(self, name: str, mask: int, value: Any, site: Any) -> Any:
        if name == "syncwarp":
            self.stand_to_meet()
        self.does_more = True
        self.loop.forget()
        collective = super().converge(name, mask, value, site)
        self.came_to(collective)
        return collective

    def collect(self, name: str, mask: int, value: Any, site: Any) -> Any:
        collective = super().collect(name, mask, value, site)
        self.left_from(collective)
        return collective

    def mbarrier_arrive(self, address: int) -> None:
        self.stand_to_meet()
        self.came_to(self.block.mbarriers.get(address))
        super().mbarrier_arrive(address)

    def mbarrier_arrive_expect_tx(self, address: int, nbytes: int) -> None:
        self.stand_to_meet()
        self.came_to(self.block.mbarriers.get(address))
        super().mbarrier_arrive_expect_tx(address, nbytes)

    def mbarrier_try_wait(self, address: int, parity: int) -> bool:
        self.loop.forget()
        done = super().mbarrier_try_wait(address, parity)
        if done:
            self.left_from(self.block.mbarriers.get(address))
        return done


def touch(left: Iterable[Any] = (), right: Iterable[Any] = (), both: Iterable[Any] = ()) -> Access:
    both = frozenset(both)
    return Access(both.union(left), both.union(right))


def united(one: Needs, other: Needs) -> Needs:
    (touches, waits), (others, more) = one, other
    return Access(touches.left | others.left, touches.right | others.right), [*waits, *more]


def queues(cells: Iterable[Any]) -> list[Any]:
    """The orders of the stores on their way to some bytes."""
    return [("queue", *cell) for cell in cells]


def places_of(cells: list[Any]) -> list[Any]:
    """What a store touches that may be late: those orders, and that nobody takes the bytes for constant."""
    return [*queues(cells), *(("nc", *cell) for cell in cells)]
