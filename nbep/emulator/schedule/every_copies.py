"""Bulk loads and mbarriers under the strategy `every`: when a load is there is a choice, if somebody can see it.

A load that is there stores to its mbarrier, as the arrivals of threads do. Who asks whether a phase is over loads from
it. Arrivals and loads of one phase commute: no thread can see which of them ends it. Bulk stores are seen by those
alone who wait for their groups: they happen at once, since whoever does not wait races with them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from ..machine.bulk import Copy, MBarrier
from ..machine.stream import MAX_BLOCK
from ..machine.world import NEVER
from .every_barriers import Arrival, BarrierChoices
from .every_loops import frames_above, is_same_turn
from .every_seen import Cell, Reading, settled
from .every_step import Access, Step, Underway, load_of, store_of, words_of
from .every_thread import EveryThread


class CopyChoices(BarrierChoices):
    """A thread whose bulk loads, and arrivals at mbarriers, are choices, under each memory model.

    copies: those that it has started and that are choices
    asked: the mbarrier and the phase that it has asked for last, and where; it was not over
    """

    __slots__ = ()

    def __init__(self, block: Any, thread_idx: int, warp: Any, hub: Any):
        super().__init__(block, thread_idx, warp, hub)
        self.copies = 0
        self.asked = None

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
