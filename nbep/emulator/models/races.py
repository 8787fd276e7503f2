"""The check of `checked`: each access is noted, and compared with those that its thread cannot know of."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

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

MANY_LOADS = 127  # of a granule; then those that a later one knows of are forgotten


class Race(NamedTuple):
    """Two accesses to the same bytes, by threads of which the second cannot know of the first."""

    thread: Any  # a CheckingThread; with weak memory as choices a WeakThread
    allocation: Allocation
    access: Access
    earlier: Access


class CheckingThread(SignallingThread):
    """A thread whose accesses are compared with those of others."""

    __slots__ = ()

    def note_load(self, allocation: Allocation, offset: int, nbytes: int, order: str, scope: str) -> Access:
        """A load of at most 16 aligned bytes: check it, and remember it."""
        site, now = site_of(sys._getframe(2)), self.world.history.now
        load = Access(self.owner, self.loading, "load", offset, offset + nbytes, order, scope, site, now)
        if self.serving is not None:
            load.serving = self.serving
        if allocation is self.shared:
            load.proxy_fences = self.shared_fences
        self.check(allocation, load)
        if order == "nc":
            self.check_constant(allocation, load)
        self.remember_load(allocation, load, offset >> GRANULE_BITS)
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
        store = Access(self.owner, self.storing, "store", offset, offset + nbytes, order, scope, site, now)
        if self.serving is not None:
            store.serving = self.serving
        store.is_atomic = is_atomic
        store.proxy_fences = self.proxy_fences_of(allocation)
        self.check(allocation, store)
        if is_atomic:
            old = last_to(allocation.last_stores.get(offset >> GRANULE_BITS, ()), offset, store.end)
            if old is not None and not self.may_not_meet(store, old):
                old.successor = store
        remember_store(allocation, store, self.is_new)
        return store

    def remember_load(self, allocation: Allocation, load: Access, granule: int) -> None:
        loads = allocation.last_loads.get(granule)
        if loads is None:
            loads = allocation.last_loads[granule] = {}
        key = id(load.owner), load.begin, load.end, load.reach
        if (before := loads.get(key)) is not None:
            load.before = before.before or (before,)
        loads[key] = load
        if before is None and len(loads) > allocation.most_loads.get(granule, MANY_LOADS):
            left = {key: one for key, one in loads.items() if not is_covered(one, load) or self.is_new(one)}
            allocation.last_loads[granule] = left
            allocation.most_loads[granule] = max(MANY_LOADS, 2 * len(left))  # so not every time

    def check(self, allocation: Allocation, access: Access) -> None:
        """Stop the run if this access meets one that the thread cannot know of."""
        if self.world.has_failed:
            return
        begin, end, owner, met = access.begin, access.end, self.owner, self.met
        granule = begin >> GRANULE_BITS
        # `may_not_meet` and `is_new` have these conditions, too: here they spare two calls for nearly every access.
        for store in allocation.last_stores.get(granule, ()):
            if store.begin < end and begin < store.end and store.owner is not owner and store.epoch not in met:
                self.confront(allocation, access, store)
        if allocation.overwritten and granule in allocation.overwritten:
            for store in allocation.overwritten[granule].may_meet(access):
                if store.begin < end and begin < store.end and store.owner is not owner and store.epoch not in met:
                    self.confront(allocation, access, store)
        if access.verb == "store" and granule in allocation.last_loads:
            for load in allocation.last_loads[granule].values():
                if load.begin < end and begin < load.end and load.owner is not owner and load.epoch not in met:
                    self.confront(allocation, access, load)

    def confront(self, allocation: Allocation, access: Access, earlier: Access) -> None:
        """Stop the run if an access may not meet one that the thread cannot know of."""
        if self.may_not_meet(access, earlier) and self.is_new(earlier):
            raise self.world.error_of(Race(self, allocation, access, earlier))

    def check_copy(self, allocation: Allocation, access: Access) -> None:
        """The same of a bulk copy, which may take many granules.

        The copy engine reads what was stored, or overwrites shared memory that was read or stored to.
        """
        if self.world.has_failed:
            return
        is_store = access.verb == "store"
        is_proxys = not is_store or allocation is self.shared
        last: Any = None
        for granule in access.granules:
            stores = allocation.last_stores.get(granule, ())
            if stores is not last:  # else a copy has stored all of it, and the last granule was one of its, too
                last = stores
                for store in stores:
                    self.confront_copy(allocation, access, store, is_proxys)
            if granule in allocation.overwritten:
                for store in allocation.overwritten[granule].may_meet(access):
                    self.confront_copy(allocation, access, store, False)
            if is_store and granule in allocation.last_loads:
                for load in allocation.last_loads[granule].values():
                    self.confront_copy(allocation, access, load, is_proxys)

    def confront_copy(self, allocation: Allocation, copy: Access, earlier: Access, is_proxys: bool) -> None:
        if not self.may_not_meet(copy, earlier):
            return
        is_new = self.is_new(earlier)
        if is_new or (is_proxys and self.is_hidden(allocation, earlier)):
            if is_new or (earlier.verb == "store" and allocation is not self.shared):
                raise self.world.error_of(Race(self, allocation, copy, earlier))
            raise self.no_proxy_fence(copy, earlier)

    def may_not_meet(self, access: Access, earlier: Access) -> bool:
        return (
            earlier.begin < access.end
            and access.begin < earlier.end
            and (
                min(access.reach, earlier.reach) < distance(access.owner, earlier.owner) or is_partial(access, earlier)
            )
        )
