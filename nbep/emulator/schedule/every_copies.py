"""Bulk loads, mbarriers and barriers under `every`: when a load is there is a choice, if somebody can see it.

A load that is there stores to its mbarrier, as the arrivals of threads do. Who asks whether a phase is over loads from
it. Arrivals and loads of one phase commute: no thread can see which of them ends it. Bulk stores are seen by those
alone who wait for their groups: they happen at once, since whoever does not wait races with them.

Of named barriers, the order in which warps arrive is a choice if more may come than count. It makes no difference as
long as those who come to a barrier are as many as it counts and all of them wait: then each phase needs all. A run
finds out whether that is so. If it is not, because others come, too, or because one goes on without waiting
(`bar.arrive`), the tree begins again, and arrivals at barriers of this number are steps from then on. As on a GPU it is
a warp that arrives: its lanes come together first. Arrivals in one phase commute.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from ..machine.bulk import Copy, MBarrier
from ..machine.stream import MAX_BLOCK
from ..machine.world import NEVER
from .every_loops import LoopingThread, frames_above, is_same_turn
from .every_seen import Cell, Entry, Reading, settled
from .every_step import Access, Step, Underway, joined, load_of, store_of, words_of
from .every_thread import EveryThread

if TYPE_CHECKING:

    class Base(LoopingThread):
        """What `CopyChoices` is mixed with: an `EveryThread` or a `WeakThread`."""

        def stand(self, access: Access, look: Callable[[], Cell]) -> None: ...

        def note_looked(self) -> None: ...

        def hear_phase(self, mbarrier: MBarrier) -> None: ...
else:
    Base = LoopingThread

# What a phase lacks: arrivals and bytes; or how many of them come.
Arrival = tuple[int, int]


class Barriers:
    """The named barriers of a run. Each is named by its block and its number.

    comers: which threads have come there; expected: how many it counts, in any phase
    gathering: by warp and number, the lanes that wait for others of their warp, to arrive together
    """

    def __init__(self) -> None:
        self.comers: dict[Any, set[int]] = {}
        self.expected: dict[Any, set[int]] = {}
        self.phases: dict[Any, int] = {}
        self.gathering: dict[Any, list[Any]] = {}

    def is_contested(self, name: Any, thread_idx: int, expected: int) -> bool:
        """A thread comes and waits. Whether it may have to wait for the next phase, or others may, for its sake."""
        comers, counts = self.comers.setdefault(name, set()), self.expected.setdefault(name, set())
        comers.add(thread_idx)
        counts.add(expected)
        return len(comers) > min(counts) or len(counts) > 1

    def gather(self, thread: Any, number: int) -> None:
        """Wait until all lanes of a warp are there. The first one goes on, to arrive for all of them."""
        lanes = self.gathering.setdefault((thread.warp_state, number), [])
        lanes.append(thread)
        if len(lanes) == sum(not lane.exited for lane in thread.warp_state.lanes):
            self.let_go(thread.warp_state, number)
        thread.waits_for = f"the other lanes of its warp, which come to barrier {number} with it"
        thread.park()

    def let_go(self, warp: Any, number: int) -> None:
        lanes = self.gathering.pop((warp, number))
        lanes.sort(key=lambda lane: lane.thread_idx)
        lanes[0].mates = lanes
        lanes[0].runnable.append(lanes[0])

    def let_one_go(self) -> bool:
        """No thread can go on: let some lanes arrive without the rest of their warp. Whether there are any."""
        for warp, number in self.gathering:
            self.let_go(warp, number)
            return True
        return False


class CopyChoices(Base):
    """A thread whose arrivals at barriers and mbarriers, and bulk loads, are choices, under each memory model."""

    __slots__ = ()

    def arrive(self, barrier_id: int, num_threads: int, wait: bool, predicate: bool = True) -> Any:
        self.before_meeting()
        tree, barriers = self.world.strategy.tree, self.world.strategy.barriers
        name = self.block, barrier_id
        choice = ("barrier", 0, barrier_id, 0)
        if choice in tree.looked_at:
            self.stand_to_arrive(barrier_id, num_threads)
        elif not wait or barriers.is_contested(name, self.thread_idx, num_threads):
            tree.begin_again(choice)
        barrier = super().arrive(barrier_id, num_threads, wait, predicate)
        if barrier.is_full:
            barriers.phases[name] = barriers.phases.get(name, 0) + 1
        return barrier

    def stand_to_arrive(self, number: int, expected: int) -> None:
        """The step of a warp that arrives. Its lanes are counted in behind it, one after the other, with no choice."""
        barriers = self.world.strategy.barriers
        barriers.gather(self, number)
        mates, self.mates = self.mates, []
        if not mates:
            return
        for mate in mates:
            self.clock = joined(self.clock, mate.clock)
        cell = self.world.strategy.cells.of_phases((self.block, number), 0)
        self.stand(store_of(words_of(("barrier", *self.who[:4]), 4 * number, 4)), lambda: cell)
        assert self.at is not None
        there = self.block.barriers.get(number)
        phase = barriers.phases.get((self.block, number), 0)
        left = expected if there is None else there.expected - len(there.arrived)
        self.note_arrival(self.at, cell, phase, phase + (left <= len(mates)), (left, 0), (len(mates), 0))
        if len(mates) > left:
            cell.is_mixed = True
        self.at = None
        for mate in mates:
            mate.clock = dict(self.clock)
        self.runnable.extend(mates[1:])

    def note_arrival(self, at: int, cell: Cell, phase: int, after: int, lacks: Arrival, arrival: Arrival) -> None:
        """A step is an arrival in a phase, which lacked so much before it. after: how many phases are over behind it"""
        step = self.world.strategy.tree.steps[at]
        step.arrival = arrival
        step.is_add = True
        step.reading = Reading(self, cell, 0, "relaxed", "cta", is_old=True)
        entry = Entry(after, None, ())
        entry.step, entry.who, entry.is_add = at, step.who, True
        entry.phase, entry.lacks = phase, lacks
        step.entry = cell.add(entry)

    # --- mbarriers and bulk loads ---------------------------------------------------------------------------------

    def cell_at(self, mbarrier: MBarrier) -> Cell:
        return self.world.strategy.cells.of_phases(mbarrier, mbarrier.phases)

    def access_to(self, mbarrier: MBarrier, is_store: bool) -> Access:
        words = words_of(("mbarrier", *self.who[:4]), mbarrier.address, 8)
        return store_of(words) if is_store else load_of(words)

    def arrive_at(self, mbarrier: MBarrier, nbytes: int) -> None:
        nbytes = settled(nbytes)
        self.before_meeting()
        self.stand(self.access_to(mbarrier, True), lambda: self.cell_at(mbarrier))
        at = self.at
        assert at is not None
        self.loop.forget()
        self.make_arrival(at, mbarrier, (1, -nbytes), lambda: super(CopyChoices, self).arrive_at(mbarrier, nbytes))
        self.at = None

    def make_arrival(self, at: int, mbarrier: MBarrier, arrival: Arrival, make: Callable[[], None]) -> None:
        """A step is an arrival of threads, and of bytes."""
        cell = self.cell_at(mbarrier)
        phase, lacks = mbarrier.phases, (mbarrier.arrivals_left, mbarrier.tx_bytes)
        make()
        self.note_arrival(at, cell, phase, mbarrier.phases, lacks, arrival)
        if mbarrier.arrivals_left < 0 or (mbarrier.arrivals_left == 0 and mbarrier.tx_bytes < 0):
            cell.is_mixed = True  # more than the phase can take: in another order the next one may get it

    def await_load(self, load: Copy, mbarrier: MBarrier) -> None:
        self.set_off(self.access_to(mbarrier, True), partial(self.finish_load, load.nbytes, mbarrier, load.happen))

    def set_off(self, access: Access, happen: Callable[[Underway], None]) -> None:
        """A copy is under way: its first step."""
        self.copies += 1
        who = (*self.who[:4], self.copies * MAX_BLOCK + self.thread_idx)  # behind all threads
        copy = Underway(who, access, self.clock, happen)
        self.world.order.add(self.block.launch, copy)
        self.runnable.append(copy)

    def finish_load(self, nbytes: int, mbarrier: MBarrier, arrive: Callable[[], None], load: Underway) -> None:
        """The step at which a load arrives at its mbarrier."""
        at = self.world.strategy.tree.step(Step(load.who, load.pending, load.clock, self.cell_at(mbarrier)))
        load.clock = {load.who: at}
        self.make_arrival(at, mbarrier, (0, nbytes), arrive)

    def mbarrier_try_wait(self, address: int, parity: int) -> bool:
        """It looks once. A loop that does nothing else waits, as one that polls a cell does."""
        mbarrier, parity = self._mbarrier(settled(address)), settled(parity) & 1
        here = frames_above(sys._getframe(1))
        self.loop.forget()
        if self.asked is not None and self.asked[:2] == (mbarrier, parity) and is_same_turn(self.asked[2], here):
            self.spin(NEVER)
        self.stand(self.access_to(mbarrier, False), lambda: self.cell_at(mbarrier))
        self.reading = reading = Reading(self, self.cell_at(mbarrier), 0, "acquire", "cta", is_old=False)
        self.note_looked()
        if self.made is not None:
            self.made.reading = reading
        reading.ask(((("and", 1),), "ne", parity))
        self.at = None
        if mbarrier.phase != parity:
            self.asked = None
            self.hear_phase(mbarrier)
            return True
        self.asked = mbarrier, parity, here
        cell: Any = (mbarrier, 0, "phase", mbarrier.phase)
        self.polled[cell[0], 0] = cell
        return False

    def spin(self, deadline_ns: int) -> bool:
        self.asked = None
        return super().spin(deadline_ns)


class EveryCopyThread(CopyChoices, EveryThread):
    """A thread of a run of a tree."""

    __slots__ = ()

    def hear_entry(self, reading: Reading) -> None:
        if not reading.cell.has_phases:  # else see `hear_phase`
            super().hear_entry(reading)
