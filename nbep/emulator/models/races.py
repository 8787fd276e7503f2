"""The check of `checked`: each access is noted, and compared with those that its thread cannot know of."""

from __future__ import annotations

import sys
from typing import NamedTuple

from ..machine.memory import Allocation
from ..machine.source import site_of
from .knowledge import (
    GRANULE_BITS,
    Access,
    distance,
    is_covered,
    is_partial,
    last_to,
    remember_store,
)
from .signals import SignallingThread

MANY_LOADS = 64  # of a granule; then those that a later one knows of are forgotten


class Race(NamedTuple):
    """Two accesses to the same bytes, by threads of which the second cannot know of the first."""

    thread: CheckingThread
    allocation: Allocation
    access: Access
    earlier: Access


class CheckingThread(SignallingThread):
    """A thread whose accesses are compared with those of others."""

    __slots__ = ()

    def note_load(self, allocation: Allocation, offset: int, nbytes: int, order: str, scope: str) -> Access:
        """A load of at most 16 aligned bytes: check it, and remember it."""
        site, now = site_of(sys._getframe(2)), self.world.history.now
        load = Access(self.owner, "load", offset, offset + nbytes, order, scope, site, time=now)
        load.serving = self.serving
        if allocation is self.shared:
            load.proxy_fences = self.shared_fences
        self.check(allocation, load)
        if order == "nc":
            self.check_constant(allocation, load)
        self.loads.append(load)
        self.remember_load(allocation, load)
        return load

    def check_constant(self, allocation: Allocation, load: Access) -> None:
        """Stop the run when bytes are read as constant that may have changed since this kernel began."""
        if self.world.has_failed:
            return
        at_start = self.block.launch.known.stores
        for store in allocation.last_stores.get(load.begin >> GRANULE_BITS, ()):
            if store.begin < load.end and load.begin < store.end and store.is_beyond(at_start):
                raise self.not_constant(allocation, load.begin)

    def note_store(
        self, allocation: Allocation, offset: int, nbytes: int, order: str, scope: str, is_atomic: bool = False
    ) -> Access:
        """A store of at most 16 aligned bytes: check it, and remember it."""
        site, now = site_of(sys._getframe(2)), self.world.history.now
        store = Access(self.owner, "store", offset, offset + nbytes, order, scope, site, time=now)
        store.serving = self.serving
        store.is_atomic = is_atomic
        store.proxy_fences = self.proxy_fences_of(allocation)
        self.check(allocation, store)
        if is_atomic:
            old = last_to(allocation.last_stores.get(offset >> GRANULE_BITS, ()), offset, store.end)
            if old is not None and not self.may_not_meet(store, old):
                old.successor = store
        self.stores.append(store)
        remember_store(allocation, store, self.is_new)
        return store

    def remember_load(self, allocation: Allocation, load: Access) -> None:
        for granule in load.granules:
            loads = allocation.last_loads.get(granule)
            if loads is None:
                loads = allocation.last_loads[granule] = {}
            key = id(load.owner), load.begin, load.end, load.reach
            if (before := loads.get(key)) is not None:
                load.before = before.before or (before,)
            loads[key] = load
            if len(loads) > MANY_LOADS and len(loads).bit_count() == 1:  # not every time
                left = {key: one for key, one in loads.items() if self.is_new(one) or not is_covered(one, load)}
                allocation.last_loads[granule] = left

    def check(self, allocation: Allocation, access: Access) -> None:
        """Stop the run if this access meets one that the thread cannot know of."""
        if self.world.has_failed:
            return
        stores, loads = allocation.last_stores, allocation.last_loads
        is_store = access.verb == "store"
        # The copy engine reads what was stored, or overwrites shared memory that was read or stored to.
        is_proxys = access.order == "bulk" and (not is_store or allocation is self.shared)
        for granule in access.granules:
            for store in stores.get(granule, ()):
                if not self.may_not_meet(access, store):
                    continue
                is_new = self.is_new(store)
                if is_new or (is_proxys and self.is_hidden(allocation, store)):
                    if is_new or allocation is not self.shared:
                        raise self.world.error_of(Race(self, allocation, access, store))
                    raise self.no_proxy_fence(access, store)
            if granule in allocation.overwritten:
                for store in allocation.overwritten[granule].may_meet(access):
                    if self.may_not_meet(access, store) and self.is_new(store):
                        raise self.world.error_of(Race(self, allocation, access, store))
            if is_store and granule in loads:
                for load in loads[granule].values():
                    if not self.may_not_meet(access, load):
                        continue
                    is_new = self.is_new(load)
                    if is_new or (is_proxys and self.is_hidden(allocation, load)):
                        if is_new:
                            raise self.world.error_of(Race(self, allocation, access, load))
                        raise self.no_proxy_fence(access, load)

    def may_not_meet(self, access: Access, earlier: Access) -> bool:
        return (
            earlier.begin < access.end
            and access.begin < earlier.end
            and (
                min(access.reach, earlier.reach) < distance(access.owner, earlier.owner) or is_partial(access, earlier)
            )
        )
