"""The CPU as a reader and a writer, for `checked`: what it knows of the stores of kernels, and they of its own.

It may read bytes that a kernel has stored if something orders the two: it has polled a cell that the kernel released
with scope sys behind the store, or has waited for an event or a stream behind the kernel. A poll may meet a store of
scope sys that nothing orders, as two strong accesses of threads may.

A word that it writes is a release of scope sys, and kernels that run may poll it with scope sys. Longer stores of its
own are weak. Kernels that start later know of all that it has written.

All ranks' hosts are one CPU here: what one of them knows the others may know too, in ways that are not seen here.
After an event the CPU knows what a kernel would know that started in its stream then, and what it queues knows what it
knew by then: see `streams`.
"""

from __future__ import annotations

import sys
from typing import NamedTuple

from ..machine.cpu import Cpu
from ..machine.memory import WORD_BYTES, Allocation
from ..machine.orders import SCOPES
from ..machine.source import site_of
from ..machine.world import World
from .history import Forgotten, Stored
from .knowledge import (
    CPU,
    CPU_CLOCK,
    GRANULE_BITS,
    NOTHING,
    Access,
    Epoch,
    Knowledge,
    Message,
    Owner,
    Signalled,
    is_partial,
    join_two,
    last_to,
    remember_store,
    with_signals,
)

REACH = SCOPES["sys"]  # between the CPU and any thread


class HostRace(NamedTuple):
    """An access by the CPU to bytes that a thread has accessed, which nothing orders."""

    allocation: Allocation
    access: Access
    earlier: Access


class CheckedHost(Cpu):
    """The CPU, as `checked` sees it. A kernel that overwrites what it has loaded must know of the load."""

    def __init__(self, world: World):
        self.world = world
        self.owner = Owner(CPU, "", world.count_block(), CPU_CLOCK, 0, 0)
        self.knowledge: Knowledge = NOTHING  # of stores and loads
        self.last_store = 0  # its number

    def wait(self, known: Knowledge) -> None:
        self.knowledge = join_two(self.knowledge, Knowledge(known.stores, {}, known.loads, {}, {}))

    def read(self, allocation: Allocation, offset: int, nbytes: int, polls: bool) -> None:
        """Stop the run if the CPU reads bytes, and cannot know of the stores to them.

        polls: a cell with acquire order, so that it knows then what was released with the value; else plainly
        """
        site, now = site_of(sys._getframe(2)), self.world.history.now
        end, order = offset + nbytes, "acquire" if polls else "weak"
        load = Access(self.owner, Epoch(self._signal()), "load", offset, end, order, "sys", site, now)
        self._meet_stores(allocation, load)
        for granule in load.granules:
            loads = allocation.last_loads.setdefault(granule, {})
            loads[id(self.owner), offset, end, load.reach] = load
        message = allocation.messages.get(offset) if polls else None
        if message is not None and last_to(allocation.last_stores.get(offset >> GRANULE_BITS, ()), offset, end):
            self.wait(message.heard(REACH))

    def write(self, allocation: Allocation, offset: int, nbytes: int) -> None:
        """Stop the run if the CPU writes bytes that kernels may still access; else they must know of the store."""
        order = "release" if nbytes <= WORD_BYTES else "weak"
        site, history = site_of(sys._getframe(2)), self.world.history
        store = Access(self.owner, Epoch(), "store", offset, offset + nbytes, order, "sys", site, history.now)
        self._meet_stores(allocation, store)
        for granule in store.granules:
            for load in allocation.last_loads.get(granule, {}).values():
                self._meet(allocation, store, load)
        store.epoch.number = self.last_store = self._signal()
        remember_store(allocation, store, lambda load: load.is_beyond(self.knowledge.loads))
        for cell in [cell for cell in allocation.messages if store.begin <= cell < store.end]:
            del allocation.messages[cell]
            history.add(Forgotten(allocation, cell))
        if store.reach:
            allocation.messages[offset] = Message(self.owner, {REACH: self.knowledge}, passes_on=False)
            history.add(Stored(allocation, store))

    def _meet_stores(self, allocation: Allocation, access: Access) -> None:
        for granule in range(access.begin >> GRANULE_BITS, (access.end - 1 >> GRANULE_BITS) + 1):
            overwritten = allocation.overwritten.get(granule)
            gone = () if overwritten is None else overwritten.may_meet(access)
            for store in (*allocation.last_stores.get(granule, ()), *gone):
                self._meet(allocation, access, store)

    def _meet(self, allocation: Allocation, access: Access, earlier: Access) -> None:
        if earlier.end <= access.begin or access.end <= earlier.begin:
            return
        known = self.knowledge.stores if earlier.verb == "store" else self.knowledge.loads
        if earlier.is_beyond(known) and all(one.is_beyond(known) for one in earlier.observations()):
            if min(access.reach, earlier.reach) < REACH or is_partial(access, earlier):
                raise self.world.error_of(HostRace(allocation, access, earlier))
            if earlier.verb == "store" and access.verb == "load":
                self._observe(earlier)

    def _observe(self, store: Access) -> None:
        """It has read the value of a strong store, and so have those kernels that it queues from now on."""
        store.observed_by += (Signalled(self.owner, Epoch(self._signal())),)

    def _signal(self) -> int:
        """What it does now is known to all that it queues or stores from now on."""
        self.world.signals += 1
        self.wait(with_signals(NOTHING, {self.owner.clock: self.world.signals}))
        return self.world.signals
