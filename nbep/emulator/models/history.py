"""The history of a run under `checked`: which thread has signalled which, for reports that say why there is a race.

Only what may order threads is written down: strong stores and loads, fences, and meetings. The oldest is forgotten.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, NamedTuple

from ..machine.memory import Allocation
from ..machine.orders import SCOPES
from ..machine.source import Site, site_of
from ..machine.thread import Thread
from ..machine.warp import Collective
from .knowledge import Access, Owner

if TYPE_CHECKING:
    from ..machine.block import NamedBarrier

MAX_EVENTS = 1 << 16  # that are kept at least


class Stored(NamedTuple):
    """A strong store to a cell."""

    allocation: Allocation
    store: Access

    @property
    def cell(self) -> str:
        return self.allocation.cell(self.store.begin)


class Loaded(NamedTuple):
    """A strong load of what another thread has stored in a cell."""

    allocation: Allocation
    load: Access


class Forgotten(NamedTuple):
    """A weak store to a cell, which then tells nothing."""

    allocation: Allocation
    offset: int


class Fenced(NamedTuple):
    owner: Owner
    reach: int
    site: Site | None


class ProxyFenced(NamedTuple):
    """A fence.proxy.async.global: the copy engine acquires what its thread knows."""

    owner: Owner


class Met(NamedTuple):
    """Lanes of a warp at a collective; owner: the last to come."""

    owner: Owner
    name: str
    mask: int
    site: Site | None


class Arrived(NamedTuple):
    """A thread that goes on behind a bar.arrive."""

    owner: Owner
    barrier: int


class Filled(NamedTuple):
    """A barrier of a block; owner: the last to come; arrived, waiting: thread indices, all and those that waited."""

    owner: Owner
    barrier: int
    arrived: list[int]
    waiting: list[int]


class Signed(NamedTuple):
    """An arrival at an mbarrier."""

    owner: Owner
    address: int


class Waited(NamedTuple):
    """A wait on an mbarrier that has ended; copies: what is there then."""

    owner: Owner
    address: int
    copies: tuple[Access, ...]


Event = Stored | Loaded | Forgotten | Fenced | ProxyFenced | Met | Arrived | Filled | Signed | Waited


class History:
    """The latest events; now: how many there have been."""

    __slots__ = ("events", "now")

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.now = 0

    def add(self, event: Event) -> None:
        self.events.append(event)
        self.now += 1
        if len(self.events) >= 2 * MAX_EVENTS:
            del self.events[:MAX_EVENTS]

    def between(self, begin: int, end: int) -> list[Event]:
        """The events from a time on, as far as they are kept, up to another one."""
        dropped = self.now - len(self.events)
        return self.events[max(begin - dropped, 0) : max(end - dropped, 0)]


class RememberingThread(Thread):
    """A thread whose fences and meetings are written down."""

    __slots__ = ()
    owner: Owner

    def remember_polled(self, allocation: Allocation, load: Access) -> None:
        """A strong load that may have met another thread's message."""
        message = allocation.messages.get(load.begin)
        if message is not None and (message.owner is not self.owner or message.passes_on):
            self.world.history.add(Loaded(allocation, load))

    def fence(self, order: str, scope: str) -> None:
        super().fence(order, scope)
        self.world.history.add(Fenced(self.owner, SCOPES[scope], site_of(sys._getframe())))

    def remember_collective(self, collective: Collective) -> None:
        """The last lane has come."""
        self.world.history.add(Met(self.owner, collective.name, collective.mask, collective.site))

    def fence_proxy_async_global(self) -> None:
        super().fence_proxy_async_global()
        self.world.history.add(ProxyFenced(self.owner))

    def arrive(self, barrier_id: int, num_threads: int, wait: bool, predicate: bool = True) -> NamedBarrier:
        barrier = super().arrive(barrier_id, num_threads, wait, predicate)
        if not wait:
            self.world.history.add(Arrived(self.owner, barrier_id))
        if barrier.is_full:
            waiting = [thread.thread_idx for thread in barrier.waiting]
            waiting += [self.thread_idx] * wait
            self.world.history.add(Filled(self.owner, barrier_id, barrier.arrived, waiting))
        return barrier

    def mbarrier_arrive_expect_tx(self, address: int, nbytes: int) -> None:
        super().mbarrier_arrive_expect_tx(address, nbytes)
        self.world.history.add(Signed(self.owner, address))
