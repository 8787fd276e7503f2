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

import sys
from collections.abc import Callable, Iterable
from functools import partial
from types import FrameType
from typing import Any, NamedTuple

from ..machine.access import writes
from ..machine.bulk import BulkGroup, Copy, MBarrier
from ..machine.kinds import KINDS
from ..machine.memory import Allocation
from ..machine.orders import POLLED, RELEASES, SCOPES
from ..machine.stream import MAX_BLOCK
from ..machine.world import NEVER
from ..models.late_races import RacingThread
from ..models.pending import PendingAtomic, PendingStore, Version
from .every_copies import CopyChoices
from .every_loops import (
    MANY_WEAK_LOOKS,
    OF_CHOICES,
    Frames,
    LoopingThread,
    frames_above,
    is_in_loop,
    is_nested,
    is_same_place,
    place_of,
)  # fmt: skip
from .every_seen import Cell, Reading
from .every_step import Access, Arrival, Late, Step, Underway, granules_of, joined

Needs = tuple[Access, list[PendingStore]]  # what a step touches, and the stores that must have arrived before
Coming = Callable[[], Needs]
NOTHING: Needs = (Access(frozenset(), frozenset()), [])


class Poll(NamedTuple):
    """A load that may be a poll: its step, the frames that led there, and what its thread was before."""

    at: int
    access: Access
    frames: list[tuple[FrameType, int]]
    before: Any


class WeakThread(LoopingThread, RacingThread):
    """A thread of a run of a tree.

    coming: of the step that it stands before, what it touches and which stores must have arrived; None if it runs
    number: of its last store
    stores: its stores that no release of scope sys has published; fresh: those that no release has
    turn: the last turn of a loop that polls and was steps
    before: its clock, and what it knew, before the step that it stands before
    """

    __slots__ = (
        "coming", "number", "stores", "fresh", "turn", "before", *OF_CHOICES,
    )  # fmt: skip

    def __init__(self, block: Any, thread_idx: int, warp: Any, hub: Any):
        super().__init__(block, thread_idx, warp, hub)
        self.coming: Coming | None = None
        self.number = 0
        self.stores: list[PendingStore] = []
        self.fresh: set[Any] = set()
        self.turn: list[tuple[FrameType, int]] = []
        self.before: Any = None

    @property
    def strategy(self) -> Any:
        return self.world.strategy

    @property
    def late(self) -> Late:
        return self.world.strategy.late

    @property
    def finds_races(self) -> bool:
        return self.strategy.tree.finds_races and not self.world.has_failed

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
        """Whether no other thread sees its shared memory."""
        return self.block_dim == 1 and not self.copies

    def stand(self, access: Access, look: Callable[[], Cell]) -> None:
        """Wait until it is this thread's turn to access a barrier. look: gives it as it is then"""
        self.stand_before(lambda: (access, []), look, is_poll=not access.is_store)

    def stand_before(
        self, coming: Coming, look: Callable[[], Cell | None] = lambda: None, *, is_poll: bool = False
    ) -> None:
        """Wait until it is this thread's turn, unless its step touches nothing and waits for nothing."""
        tree = self.strategy.tree
        if coming() == NOTHING:
            return
        self.at = None
        self.wake_for(coming()[0])
        self.does_more = False
        self.before = self.clock, self.known, self.tellings, dict(self.polled)
        self.coming = coming
        self.runnable.append(self)
        self.park()
        self.coming = None
        access, waits = coming()
        cell, clock, behind = look(), self.clock, set[int]()
        for store in waits:
            if store.thread is self:
                clock = joined(clock, self.late.arrived[store])
            else:  # unless it had come before they were shown to it
                behind.update(self.late.arrived[store].values())
        step = Step(self.who, access, clock, cell)
        step.behind = frozenset(behind)
        self.at = tree.step(step)
        self.clock = {self.who: self.at}
        if is_poll:
            self.polled_here.append(Poll(self.at, access, frames_above(sys._getframe(2)), self.before))

    # --- what a step touches, and what has to be there first ------------------------------------------------------

    def granules(self, allocation: Allocation, offset: int, kind: str) -> list[Any]:
        return granules_of(allocation, offset, KINDS[kind].size if kind in KINDS else 1)

    def shared_granules(self, address: int, nbytes: int = 1) -> list[Any]:
        return [("shared", *self.who[:4], granule) for granule in range(address >> 4, (address + nbytes + 15) >> 4)]

    def publishes(self, order: str, scope: str) -> Needs:
        """What a release shows, and which stores it waits for."""
        return self.shows(SCOPES[scope]) if order in RELEASES else NOTHING

    def shows(self, level: int) -> Needs:
        """The same of what lifts its stores to a level."""
        block, gpu = ("block", self.block.serial), ("gpu", self.rank)
        shown, lifted = self.late.shown, self.late.lifted
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
        shown, block = self.late.shown, ("block", self.block.serial)
        if level == 1:
            shown.setdefault(block, set()).update(self.fresh)
        else:
            shown.pop(block, None)
        self.fresh = set()
        if level == 3:
            self.stores = []

    def _lift(self, stores: dict[PendingStore, None], level: int, target: dict[PendingStore, None]) -> None:
        where = ("block", self.block.serial) if level == 1 else ("gpu", self.rank)
        self.late.lifted.setdefault(where, []).extend(stores)
        super()._lift(stores, level, target)

    def seen_in(self, allocation: Allocation, offset: int) -> list[PendingStore]:
        """The stores to some bytes that it sees, on their way and there: an atomic comes behind them."""
        lifted = self.late.lifted
        stores = {*self.stores, *lifted.get(("block", self.block.serial), ()), *lifted.get(("gpu", self.rank), ())}
        here = allocation.identity, offset >> 4
        return [one for one in stores if (one.allocation.identity, one.offset >> 4) == here]

    def send_off(self, store: PendingStore) -> None:
        """Its arrival is a step of its own."""
        self.number += 1
        self.stores.append(store)
        granule = granules_of(store.allocation, store.offset, 1)[0]
        if store.level == 0:
            self.fresh.add(granule)
        elif store.level == 1:
            self.late.shown.setdefault(("block", self.block.serial), set()).add(granule)
        who = (*self.who[:4], -self.number * MAX_BLOCK - self.thread_idx)
        arrival = Arrival(self.strategy, store, who, self.clock)
        self.world.order.add(self.block.launch, arrival)
        self.runnable.append(arrival)

    def pick_place(self, least: int, most: int) -> int:
        return most - self.strategy.tree.decide(most - least + 1)

    def pick_version(self, versions: list[Version], least: int) -> int:
        """It may miss a version that comes before it for another reason than this load."""
        tree, visible = self.strategy.tree, self.late.visible
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
        if allocation is None or not allocation.may_change:  # no thread stores there
            return super().load(address, kind, order, scope)
        offset = address & 0xFFFFFFFF
        cells = self.granules(allocation, offset, kind)
        right = [("nc", *cell) for cell in cells] if order == "nc" else []
        self.stand_to_load((touch(left=cells, right=right), self.late_atomics(allocation)), order)
        value = super().load(address, kind, order, scope)
        self.note_weak(allocation, offset, kind, order, value)
        return value

    def late_atomics(self, allocation: Allocation) -> list[PendingStore]:
        """Those of its own that come before it looks at an allocation."""
        here = [one for one in self.stores if one.allocation.identity is allocation.identity]
        return [one for one in here if isinstance(one, PendingAtomic)]

    def note_weak(self, allocation: Allocation, offset: int, kind: str, order: str, value: Any) -> None:
        """In a loop, a weak load may be a poll, too."""
        if order not in POLLED and self.loop.mark is not None:
            self.note_polled(allocation, offset, kind, value)

    def stand_to_load(self, needs: Needs, order: str) -> None:
        self.wait_if_it_comes_back()
        tree, access, is_plain = self.strategy.tree, needs[0], not (needs[1] or needs[0].is_store)
        if is_plain and tree.skips(self.who, access.words):
            self.loop.count(self, access, tree.stores, MANY_WEAK_LOOKS)
            return
        self.stand_before(lambda: needs, is_poll=order in POLLED)
        if self.at is not None:
            self.loop.count(self, access, tree.stores, MANY_WEAK_LOOKS)

    def wait_if_it_comes_back(self) -> None:
        """A loop that does nothing but look at cells is a wait, without `wait_expired`, too."""
        begun = self.loop.comes_back(sys._getframe(2), len(self.strategy.tree.steps))
        if begun is not None:
            here = frames_above(sys._getframe(2))
            self.end_turn([poll for poll in self.polled_here if poll.at >= begun[0]], here, False, NEVER)

    def store(self, address: int, kind: str, value: Any, order: str, scope: str) -> None:
        self.loop.forget()
        allocation = self.segments.get(address >> 32)
        if allocation is not None:
            cells = self.granules(allocation, address & 0xFFFFFFFF, kind)
            here = touch(left=places_of(cells))
            if order in RELEASES:  # others see it at once
                where = [("block", self.block.serial), ("gpu", self.rank)]
                here = touch(left=[*here.left, *where], right=queues(cells), both=cells)
            self.stand_before(lambda: united(self.publishes(order, scope), (here, [])))
        super().store(address, kind, value, order, scope)
        if order == "release" and self.at is not None:
            self.late.visible.setdefault(self.version, self.at)

    def atomic(
        self, op: str, address: int, kind: str, operand: Any, order: str, scope: str, compare: Any = None
    ) -> Any:
        allocation = self.segments.get(address >> 32)
        if allocation is not None:
            offset = address & 0xFFFFFFFF
            cells = self.granules(allocation, offset, kind)
            here = touch(both=cells, left=places_of(cells))
            late = self.late_atomics(allocation) if op == "cas" else []

            def coming() -> Needs:
                if op == "cas" and self.is_there(allocation, offset, kind):
                    if not all(one.done for one in late) or self.peek(allocation, offset, kind) != compare:
                        return touch(left=cells), late
                return united(self.publishes(order, scope), (here, self.seen_in(allocation, offset)))

            self.wait_if_it_comes_back()
            self.stand_before(coming)
        before = self.number
        old = super().atomic(op, address, kind, operand, order, scope, compare)
        has_stored = self.number == before and writes(op, old, compare)
        if has_stored and self.version is not None and self.at is not None:
            self.late.visible.setdefault(self.version, self.at)
        return old

    def fence(self, order: str, scope: str) -> None:
        self.stand_before(lambda: self.publishes(order, scope))
        super().fence(order, scope)

    def load_shared(self, address: int, kind: str, order: str) -> Any:
        if not self.is_alone:
            self.stand_to_load((touch(left=self.shared_granules(address)), []), order)
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
        here = touch(both=[] if self.is_alone else self.shared_granules(address))
        self.stand_before(lambda: united(self.publishes(order, "cta"), (here, [])))

    # --- loops that poll ------------------------------------------------------------------------------------------

    def spin(self, deadline_ns: int) -> bool:
        here = frames_above(sys._getframe(1))
        polls = [poll for poll in self.polled_here if is_in_loop(poll.frames, here)]
        return self.end_turn(polls, here, is_nested(here), deadline_ns)

    def end_turn(self, polls: list[Poll], here: Frames, is_nested: bool, deadline_ns: int) -> bool:
        """A turn of a loop that polls is over. If it looks at one cell, its loads are no steps."""
        tree = self.strategy.tree
        looks = [poll.at for poll in polls]
        tree.idle.add(self.who)
        is_one = len({poll.access.words for poll in polls}) == 1 and not (is_nested and len(polls) > 1)
        # The cell may change between two looks of a turn.
        is_one = is_one and all(is_same_place(poll.frames, polls[0].frames) for poll in polls) and not self.does_more
        may_sleep = is_one and place_of(here) not in tree.looked_at and not self.world.overdue(self, deadline_ns)
        has_failed = may_sleep and tree.turn_of(self.who, looks) == looks
        self.polled_here = []
        self.loop.forget()
        if not has_failed:
            self.turn = here
            return not (tree.is_replay and not tree.stops) and super().spin(deadline_ns)
        self.turn = []
        self.clock, self.known, self.tellings, before = polls[0].before
        tree.fail(self.who, looks, 1)
        self.sleeping = place_of(here), lambda access: access == polls[0].access
        self.left -= 1
        self.waited_once, self.has_news = False, True
        if not tree.stops:
            self.polled = before
            return False
        cells = [
            (place, offset, kind, self.peek(place, offset, kind)) for place, offset, kind, _ in self.polled.values()
        ]
        self.polled.clear()
        return self.watch(cells, deadline_ns)

    def note_looked(self) -> None:
        """It has read an mbarrier, which its step says itself."""

    def hear_entry(self, reading: Reading) -> None:
        """An mbarrier tells nothing itself: see `hear_phase`."""

    # --- copies ---------------------------------------------------------------------------------------------------

    def await_load(self, load: Copy, mbarrier: MBarrier) -> None:
        """Its bytes come first, in a step of their own, as they are for who knows what its thread knows now."""
        known, done = self.known, partial(self.started.finish, mbarrier, load.done)

        def come(underway: Underway) -> None:
            self.make_copy(underway)
            now, self.known = self.known, known
            load.put(load.take())
            self.known = now
            underway.pending = self.access_to(mbarrier, True)
            underway.happen = partial(self.finish_load, load.nbytes, mbarrier, done)
            self.runnable.append(underway)

        source = granules_of(load.source, load.begin, load.nbytes)
        self.set_off(touch(left=source, both=self.shared_granules(load.to, load.nbytes)), come)

    def await_store(self, store: Copy, group: BulkGroup) -> None:
        def come(copy: Underway) -> None:
            self.make_copy(copy)
            now, self.clock = self.clock, copy.clock
            store.happen()
            self.clock = now
            group.clock = joined(group.clock, copy.clock)

        target = places_of(granules_of(store.target, store.to, store.nbytes))
        self.set_off(touch(left=[*self.shared_granules(store.begin, store.nbytes), *target]), come)

    def make_copy(self, copy: Underway) -> None:
        at = self.strategy.tree.step(Step(copy.who, copy.pending, copy.clock, None))
        copy.clock = {copy.who: at}

    def _wait_group(self, n: int, read_only: bool) -> None:
        committed = list(self._bulk_state().committed)
        super()._wait_group(n, read_only)
        for group in committed[: max(len(committed) - n, 0)]:
            self.clock = joined(self.clock, group.clock)

    # --- whoever leaves a meeting comes behind all that came there, itself included --------------------------------

    def before_meeting(self) -> None:
        """It shows its stores to its block."""
        self.wake_for(None)
        self.does_more = True
        self.loop.forget()
        self.stand_before(lambda: self.shows(1))

    def came_to(self, meeting: Any) -> None:
        self.wake_for(None)
        self.does_more = True
        self.loop.forget()
        meeting.clock = joined(meeting.clock, self.clock)

    def arrive(self, barrier_id: int, num_threads: int, wait: bool, predicate: bool = True) -> Any:
        barrier = super().arrive(barrier_id, num_threads, wait, predicate)
        self.came_to(barrier)
        return barrier

    def converge(self, name: str, mask: int, value: Any, site: Any) -> Any:
        if name == "syncwarp":
            self.before_meeting()
        collective = super().converge(name, mask, value, site)
        self.came_to(collective)
        return collective


class WeakCopyThread(CopyChoices, WeakThread):
    """A thread of a run of a tree, whose arrivals and copies are choices, too."""

    __slots__ = ()

    await_load = WeakThread.await_load  # in two steps: it reads memory, too, before it arrives


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
    """What a store touches that may be late: those orders, and that no thread takes the bytes for constant."""
    return [*queues(cells), *(("nc", *cell) for cell in cells)]
