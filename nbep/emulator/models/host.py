"""Hosts as readers and writers, for `checked`: what each knows of the stores of kernels, and they of its own.

A host may read bytes that a kernel has stored if something orders the two: it has polled a cell that the kernel
released with scope sys behind the store, or has waited for an event or a stream behind the kernel. A poll may meet a
store of scope sys that nothing orders, as two strong accesses of threads may.

A word that it writes is a release of scope sys, and kernels that run may poll it with scope sys. Longer stores of its
own are weak. Kernels that start later know of all that it has written.

Each host knows for itself. Those who meet in a communicator know then what each of them knew when it came. One that
has waited for others in another way, in a wait that looks at no memory and at no event, knows what all of them know by
then: whom it has waited for is not seen here. After an event a host knows what a kernel would
know that started in its stream then, and what it queues knows what it knew by then.

Who frees memory must know of all accesses to it, and who closes a mapping of those by its own rank: what comes after
that is no access any more, but an error.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from ..machine.cpu import Cpu
from ..machine.memory import WORD_BYTES, Allocation
from ..machine.orders import SCOPES
from ..machine.source import site_of
from ..machine.stream import Order
from .history import Forgotten, Stored
from .knowledge import (
    ALL_CLOCKS,
    CPU,
    CPU_CLOCK,
    GRANULE_BITS,
    NOTHING,
    Access,
    Epoch,
    Knowledge,
    Message,
    Owner,
    Place,
    Signalled,
    is_partial,
    join,
    join_two,
    last_to,
    later,
    remember_store,
    stream_clock,
    with_signals,
    without_parts,
)

if TYPE_CHECKING:
    from ..machine.stream import Launch, Mark, Stream


REACH = SCOPES["sys"]  # between the CPU and any thread


class HostRace(NamedTuple):
    """An access by a host to bytes that a thread or another host has accessed, which nothing orders.

    gives_up: it is no access: "frees" or "closes"
    """

    allocation: Allocation
    access: Access
    earlier: Access
    gives_up: str = ""


class CheckedHost(Cpu):
    """The hosts, as `checked` sees them. A kernel that overwrites what one has loaded must know of the load.

    known: by rank what its host knows of stores and loads; None: the caller of the world, and what hosts begin with
    """

    def __init__(self, world: Any):
        self.world = world
        self.known: dict[int | None, Knowledge] = {None: NOTHING}
        self.owners: dict[int | None, Owner] = {}

    @property
    def owner(self) -> Owner:
        """Of what the host that runs now does."""
        rank = self.world.host_rank
        if rank not in self.owners:
            clock, number = (CPU_CLOCK, 0) if rank is None else (CPU_CLOCK - 1 - rank, rank)
            self.owners[rank] = Owner(CPU, "", self.world.count_block(), clock, number, 0)
        return self.owners[rank]

    @property
    def knowledge(self) -> Knowledge:
        """What the host that runs now knows."""
        return self.known.get(self.world.host_rank, self.known[None])

    @knowledge.setter
    def knowledge(self, known: Knowledge) -> None:
        self.known[self.world.host_rank] = known

    def tells(self) -> Knowledge:
        return self.knowledge

    def hears(self, told: Iterable[Knowledge]) -> None:
        self.knowledge = join((self.knowledge, *told))

    def meets(self) -> None:
        self.hears(self.known.values())

    def run_over(self) -> None:
        """All launches are done, and who has called the world knows it."""
        everything = {ALL_CLOCKS: self.world.signals}
        self.known = {None: Knowledge(everything, {}, everything, {}, {})}

    def wait(self, known: Knowledge) -> None:
        self.knowledge = join_two(self.knowledge, Knowledge(known.stores, {}, known.loads, {}, {}))

    def read(self, allocation: Allocation, offset: int, nbytes: int, polls: bool) -> None:
        """Stop the run if the CPU reads bytes, and cannot know of the stores to them.

        polls: a cell with acquire order, so that it knows then what was released with the value; else plainly
        """
        self.has_looked = True
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

    def looks(self, allocation: Allocation, offset: int, nbytes: int) -> None:
        """Stop the run if a look that tells it nothing were a race."""
        site, end = site_of(sys._getframe(2)), offset + nbytes
        load = Access(self.owner, Epoch(), "load", offset, end, "acquire", "sys", site, self.world.history.now)
        self._meet_stores(allocation, load, observes=False)

    def write(self, allocation: Allocation, offset: int, nbytes: int) -> None:
        """Stop the run if the CPU writes bytes that kernels may still access; else they must know of the store."""
        order = "release" if nbytes <= WORD_BYTES else "weak"
        site, history = site_of(sys._getframe(2)), self.world.history
        store = Access(self.owner, Epoch(), "store", offset, offset + nbytes, order, "sys", site, history.now)
        self._meet_stores(allocation, store)
        for granule in store.granules:
            for load in allocation.last_loads.get(granule, {}).values():
                self._meet(allocation, store, load)
        store.epoch.number = self._signal()
        known = self.knowledge.loads
        remember_store(allocation, store, lambda load: load.is_beyond(known))
        for cell in [cell for cell in allocation.messages if store.begin <= cell < store.end]:
            del allocation.messages[cell]
            history.add(Forgotten(allocation, cell))
        if store.reach:
            allocation.messages[offset] = Message(self.owner, {REACH: self.knowledge}, passes_on=False)
            history.add(Stored(allocation, store))

    def frees(self, allocation: Allocation) -> None:
        self._give_up(allocation, "frees", lambda _: True)

    def unmaps(self, allocation: Allocation, rank: int) -> None:
        self._give_up(allocation, "closes", lambda earlier: earlier.owner.rank == rank)

    def _give_up(self, allocation: Allocation, how: str, concerns: Callable[[Access], bool]) -> None:
        """Stop the run if threads may still access memory."""
        if self.world.has_failed:
            return
        site, now = site_of(sys._getframe(3)), self.world.history.now
        end = Access(self.owner, Epoch(), "store", 0, allocation.nbytes, "weak", "sys", site, now)
        overwritten = [allocation.overwritten[granule].may_meet(end) for granule in allocation.overwritten]
        loads = [loads.values() for loads in allocation.last_loads.values()]
        for earlier in chain(*allocation.last_stores.values(), *overwritten, *loads):
            if concerns(earlier) and self._cannot_know(earlier):
                raise self.world.error_of(HostRace(allocation, end, earlier, how))

    def _meet_stores(self, allocation: Allocation, access: Access, observes: bool = True) -> None:
        for granule in range(access.begin >> GRANULE_BITS, (access.end - 1 >> GRANULE_BITS) + 1):
            overwritten = allocation.overwritten.get(granule)
            gone = () if overwritten is None else overwritten.may_meet(access)
            for store in (*allocation.last_stores.get(granule, ()), *gone):
                self._meet(allocation, access, store, observes)

    def _meet(self, allocation: Allocation, access: Access, earlier: Access, observes: bool = True) -> None:
        if earlier.end <= access.begin or access.end <= earlier.begin:
            return
        if self._cannot_know(earlier):
            if min(access.reach, earlier.reach) < REACH or is_partial(access, earlier):
                raise self.world.error_of(HostRace(allocation, access, earlier))
            if earlier.verb == "store" and access.verb == "load" and observes:
                # So have those kernels that it queues from now on.
                earlier.observed_by += (Signalled(self.owner, Epoch(self._signal())),)

    def _cannot_know(self, earlier: Access) -> bool:
        known = self.knowledge.stores if earlier.verb == "store" else self.knowledge.loads
        return earlier.is_beyond(known) and all(one.is_beyond(known) for one in earlier.observations())

    def _signal(self) -> int:
        """What it does now is known to all that it queues or stores from now on."""
        self.world.signals += 1
        self.wait(with_signals(NOTHING, {self.owner.clock: self.world.signals}))
        return self.world.signals


# What a kernel knows when it starts: of launches before it in its stream, by events, and from the host
#
#     what stands in a stream is over     before what follows there starts
#     an event is recorded                before the streams that wait for it go on, and before a host that has waited
#     a host queues something             before that starts: it knows what its host had waited for or polled by then
#     a thread leaves its kernel          before that is over: what comes next knows what the thread has acquired
#
# A kernel knows of nothing else, whatever has happened before it starts. Of other ranks it knows what its host, or a
# kernel before it, has acquired. Each rank has a host of its own: see `host`.
#
# The end of a kernel is no fence. What its threads have read with relaxed loads they have observed, and the next kernel
# knows of those stores; but not of what came before these, for which it takes an acquire or a fence in the kernel.
#
# Source: PTX ISA, Memory Consistency Model, Memory synchronization, "API synchronization": these pairs synchronize, and
# so are of base causality order; Release and Acquire Patterns: a strong read acquires by an instruction behind it


class CheckedOrder(Order):
    """The order of launches, as `checked` sees it.

    points: of each stream, what comes before whatever stands there next
    numbered: the clock of each stream
    waits: the last event of another stream that a stream has waited for, by their clocks
    """

    def __init__(self, world: Any):
        self.world = world
        self.points: dict[Stream, Knowledge] = {}
        self.numbered: dict[Stream, int] = {}
        self.waits: dict[tuple[int, int], Mark] = {}

    def queued(self, stream: Stream) -> Knowledge:
        return with_signals(self.world.cpu.knowledge, {self.world.cpu.owner.clock: self.world.signals})

    def point(self, stream: Stream, queued: Knowledge) -> Knowledge:
        """What comes before something that was queued, when the stream comes to it."""
        self.points[stream] = join_two(self.points.get(stream, NOTHING), queued)
        return self.points[stream]

    def start(self, launch: Launch, queued: Knowledge) -> None:
        stream = launch.stream
        point = self.point(stream, queued)
        stores, loads = without_parts(point.stores), without_parts(later(point.loads, point.stores))
        launch.known = Knowledge(stores, stores, loads, stores, loads)  # the start of a kernel is a proxy fence as well
        launch.learned = launch.known
        launch.place = Place(stream.name, self.clock_of(stream), launch.title, launch.queued_as, launch.known)

    def clock_of(self, stream: Stream) -> int:
        return self.numbered.setdefault(stream, stream_clock(len(self.numbered) + 1))

    def end(self, launch: Launch) -> None:
        place = launch.place
        place.end = self.world.signals
        self.points[launch.stream] = with_signals(
            Knowledge(launch.learned.stores, {}, launch.learned.loads, {}, {}), {place.clock: place.end}
        )

    def record(self, mark: Mark, queued: Knowledge) -> None:
        mark.point = self.point(mark.stream, queued)

    def wait(self, stream: Stream, mark: Mark, queued: Knowledge) -> None:
        self.points[stream] = join_two(self.point(stream, queued), mark.point)
        self.waits[self.clock_of(stream), self.clock_of(mark.stream)] = mark

    def seen(self, mark: Mark) -> None:
        self.world.cpu.wait(mark.point)

    def run_over(self) -> None:
        self.world.cpu.run_over()
