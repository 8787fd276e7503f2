"""Data races with late stores and early loads, for `--all --weak`: each access is compared with all before it.

As `races` does it for `checked`, but with what a thread knows by `causes`. Two accesses to common bytes, one of them a
store, race if neither comes before the other in causality order, unless they are morally strong: both strong, each with
a scope that has the other thread in it, to the same bytes. Who has only read a strong store knows of it behind that
access. A load is known as `checked` has it: it is over before its thread stores anything.

An access is compared when its thread makes it, also if the store arrives late: what comes before it is known then.
A thread may know of a store and not of an earlier one of the same thread. So all stores are kept, but for those that a
weak one has overwritten whose thread knew of them: who knows of that one knows of them. Of the loads of a thread the
last of each kind is enough.

A bulk copy is compared where it starts, as weak accesses of somebody else: who has waited for it knows of them. Proxy
fences are not looked at.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from ..machine.access import writes
from ..machine.block import Block
from ..machine.bulk import MBarrier
from ..machine.kinds import KINDS
from ..machine.memory import OFFSET_BITS, OFFSET_MASK, WORD_BYTES, Allocation
from ..machine.source import Site, site_of
from ..machine.warp import Collective, Warp
from .causes import NOTHING, CausalHost, CausalThread, Known, Mind
from .history import Forgotten, Loaded, RememberingThread, Stored
from .host import HostRace
from .knowledge import CPU, CPU_CLOCK, GRANULE_BITS, MAX_WARPS, Access, Epoch, Owner, distance, is_partial, last_to
from .races import Race

if TYPE_CHECKING:
    from greenlet import greenlet

MBARRIER_BYTES = 8
Address = tuple[Allocation, int]


class BulkCopy:
    """A bulk copy, as one who loads and stores.

    reads, all: what is known to those who have waited until it has read its source, or until it is over
    waited_for: of "load" and "store", for which somebody has waited; is_load: whether it brings bytes to shared memory
    """

    span = 1
    waited_for: frozenset[str] = frozenset()

    def __init__(self, thread: Any, is_load: bool):
        self.is_load = is_load
        self.block = thread.block
        self.launch = thread.block.launch
        self.reads = Known(loads={self: self.span})
        self.all = self.reads.with_store(self)

    def finish(self, mbarrier: MBarrier, done: Callable[[], None]) -> None:
        """Its bytes are there: who waits on the mbarrier knows that."""
        mbarrier.knowledge = self.all | (mbarrier.knowledge or NOTHING)
        done()

    def note_wait(self, *verbs: str) -> None:
        self.waited_for |= set(verbs)

    @property
    def version(self) -> BulkCopy:
        """It stands for what it stores."""
        return self


class LateAccess(Access):
    """An access of a thread, of a host or of a bulk copy.

    who: which has just made it; launch: its own, None for a host
    version: of a store; span: of a load, see `Known`
    """

    def __init__(
        self, who: Any, owner: Owner, verb: str, begin: int, end: int, order: str, scope: str, site: Site | None
    ):
        super().__init__(owner, Epoch(0), verb, begin, end, order, scope, site)
        self.who = who
        self.launch: Any = who.block.launch
        self.version = None if verb == "load" else who.version
        self.span: int = who.span

    def is_known(self, known: Known, besides: frozenset[Any] = frozenset()) -> bool:
        """Whether it comes before one that knows so much. besides: stores that do not"""
        if self.launch is not None and self.launch in known.stores:
            return True
        if self.verb == "load":
            return known.loads.get(self.who, 0) >= self.span
        return self.version in known.stores and self.version not in besides

    def may_meet(self, other: Access) -> bool:
        """Whether they have no byte in common, or need no order."""
        if self.end <= other.begin or other.end <= self.begin:
            return True
        return min(self.reach, other.reach) >= distance(self.owner, other.owner) and not is_partial(self, other)


def first_unordered(
    allocation: Allocation, access: LateAccess, known: Known, besides: frozenset[Any]
) -> LateAccess | None:
    """An earlier access with which this one races."""
    for granule in access.granules:
        earlier: list[Any] = list(allocation.last_stores.get(granule, ()))
        if access.verb == "store":
            earlier += allocation.last_loads.get(granule, {}).values()
        for one in earlier:
            # Two copies of one thread have one owner.
            is_own = one.owner is access.owner and one.who is access.who
            if not (is_own or access.may_meet(one) or one.is_known(known, besides)):
                return one
    return None


def remember(allocation: Allocation, access: LateAccess) -> None:
    """Keep it for those that come later."""
    alone: list[Any] = [access]  # of all granules that have no other: no list is changed once it is there
    for granule in access.granules:
        if access.verb == "load":
            loads = allocation.last_loads.setdefault(granule, {})
            loads[access.who, access.begin, access.end, access.reach] = access
        elif stores := allocation.last_stores.get(granule):
            low, high = granule << GRANULE_BITS, (granule + 1) << GRANULE_BITS
            left = [one for one in stores if access.reach or not covers(access, one, low, high)]
            allocation.last_stores[granule] = [*left, access]
        else:
            allocation.last_stores[granule] = alone


def covers(store: LateAccess, old: LateAccess, low: int, high: int) -> bool:
    """Whether a store takes all bytes of an older one that lie between two."""
    return store.begin <= max(old.begin, low) and min(old.end, high) <= store.end


class RacingThread(RememberingThread, CausalThread):
    """A thread whose accesses are compared.

    owner, engine: what reports call it, and the engine of its copies
    started: its last bulk load; open_group, groups: its bulk stores for which it has not waited
    """

    __slots__ = ("owner", "engine", "started", "open_group", "groups")

    def __init__(self, block: Block, thread_idx: int, warp: Warp, hub: greenlet):
        super().__init__(block, thread_idx, warp, hub)
        launch = block.launch
        clock = block.serial * MAX_WARPS + self.warp
        self.owner = Owner(self.rank, launch.name, block.serial, clock, block.index, thread_idx, launch.number)
        self.engine = replace(self.owner, clock=-clock)
        self.started = BulkCopy(self, is_load=True)
        self.open_group: list[BulkCopy] = []
        self.groups: list[list[BulkCopy]] = []

    @property
    def finds_races(self) -> bool:
        """Whether its accesses are compared."""
        raise NotImplementedError

    def note_access(
        self,
        verb: str,
        allocation: Allocation,
        begin: int,
        nbytes: int,
        order: str,
        scope: str,
        is_atomic: bool = False,
    ) -> None:
        """It has made an access. Stop the run if an earlier one races with it."""
        if not self.finds_races:
            return
        site = site_of(sys._getframe(2))
        access = LateAccess(self, self.owner, verb, begin, begin + nbytes, order, scope, site)
        access.is_atomic, access.time, access.serving = is_atomic, self.world.history.now, self.serving
        self.compare(allocation, access, self.known)
        self.write_down(allocation, access)
        remember(allocation, access)

    def compare(self, allocation: Allocation, access: LateAccess, known: Known) -> None:
        earlier = first_unordered(allocation, access, known, self.observed)
        if earlier is not None:
            raise self.world.error_of(Race(self, allocation, access, earlier))

    def write_down(self, allocation: Allocation, access: LateAccess) -> None:
        """An access may be a signal: for the report of a race. A load only if it has read the last store to a cell."""
        history = self.world.history
        last: Any = last_to(allocation.last_stores.get(access.begin >> GRANULE_BITS, ()), access.begin, access.end)
        if access.verb == "store" and access.reach:
            history.add(Stored(allocation, access))
        elif access.verb == "store" and last is not None and last.reach:
            history.add(Forgotten(allocation, access.begin))
        elif access.verb == "load" and access.reach and last is not None and last.version is self.read:
            history.add(Loaded(allocation, access))

    def locate(self, address: int) -> Address:
        """What stands at a global address that has been accessed."""
        return self.segments[address >> OFFSET_BITS], address & OFFSET_MASK

    # --- accesses -------------------------------------------------------------------------------------------------

    def load(self, address: int, kind: str, order: str, scope: str) -> Any:
        self.begin_access()
        value = super().load(address, kind, order, scope)
        allocation, offset = self.locate(address)
        if allocation.may_change:
            self.note_access("load", allocation, offset, KINDS[kind].size, order, scope)
        return value

    def store(self, address: int, kind: str, value: Any, order: str, scope: str) -> None:
        super().store(address, kind, value, order, scope)
        self.begin_access()
        self.note_access("store", *self.locate(address), KINDS[kind].size, order, scope)

    def atomic(
        self, op: str, address: int, kind: str, operand: Any, order: str, scope: str, compare: Any = None
    ) -> Any:
        self.begin_access()
        old = super().atomic(op, address, kind, operand, order, scope, compare)
        verb = "store" if writes(op, old, compare) else "load"
        self.note_access(verb, *self.locate(address), KINDS[kind].size, order, scope, is_atomic=True)
        return old

    def load_shared(self, address: int, kind: str, order: str) -> Any:
        self.begin_access()
        value = super().load_shared(address, kind, order)
        self.note_access("load", self.shared, address, KINDS[kind].size, order, "cta")
        return value

    def store_shared(self, address: int, kind: str, value: Any, order: str) -> None:
        super().store_shared(address, kind, value, order)
        self.begin_access()
        self.note_access("store", self.shared, address, KINDS[kind].size, order, "cta")

    def atomic_shared(self, op: str, address: int, kind: str, operand: Any, order: str, compare: Any = None) -> Any:
        self.begin_access()
        old = super().atomic_shared(op, address, kind, operand, order, compare)
        verb = "store" if writes(op, old, compare) else "load"
        self.note_access(verb, self.shared, address, KINDS[kind].size, order, "cta", is_atomic=True)
        return old

    def converge(self, name: str, mask: int, value: Any, site: Site | None) -> Collective:
        collective = super().converge(name, mask, value, site)
        if not collective.missing:
            self.remember_collective(collective)
        return collective

    # --- mbarriers: who uses one must know that it is there, and who takes its bytes that nobody uses it any more ---

    def mbarrier_init(self, address: int, count: int) -> None:
        super().mbarrier_init(address, count)
        self.note_mbarrier(address, "store", "weak")

    def mbarrier_inval(self, address: int) -> None:
        super().mbarrier_inval(address)
        self.note_mbarrier(address, "store", "weak")

    def arrive_at(self, mbarrier: MBarrier, nbytes: int) -> None:
        self.note_mbarrier(mbarrier.address, "load", "relaxed")
        super().arrive_at(mbarrier, nbytes)

    def hear_phase(self, mbarrier: MBarrier) -> None:
        self.note_mbarrier(mbarrier.address, "load", "relaxed")
        super().hear_phase(mbarrier)
        for who in (mbarrier.phase_knowledge or NOTHING).loads:
            if isinstance(who, BulkCopy):
                who.note_wait("load", "store")

    def note_mbarrier(self, address: int, verb: str, order: str) -> None:
        self.begin_access()
        if verb == "store":
            self.new_version(self.shared, address, MBARRIER_BYTES, order, "cta")
        self.note_access(verb, self.shared, address, MBARRIER_BYTES, order, "cta")

    # --- copies ---------------------------------------------------------------------------------------------------

    def bulk_load(self, smem: int, gmem: int, nbytes: int, mbarrier: int) -> None:
        copy = self.started = BulkCopy(self, is_load=True)
        super().bulk_load(smem, gmem, nbytes, mbarrier)
        self.note_copy(copy, self.locate(gmem), (self.shared, smem), nbytes)

    def bulk_store(self, gmem: int, smem: int, nbytes: int) -> None:
        super().bulk_store(gmem, smem, nbytes)
        copy = BulkCopy(self, is_load=False)
        self.open_group.append(copy)
        self.note_copy(copy, (self.shared, smem), self.locate(gmem), nbytes)

    def note_copy(self, copy: BulkCopy, source: Address, target: Address, nbytes: int) -> None:
        """A copy starts: compare what it will do."""
        if not self.finds_races:
            return
        self.begin_access()
        site, known, made = site_of(sys._getframe(2)), self.told(), []
        for verb, (allocation, begin) in (("load", source), ("store", target)):
            access = LateAccess(copy, self.engine, verb, begin, begin + nbytes, "bulk", "cta", site)
            access.time = self.world.history.now
            self.compare(allocation, access, known)
            made.append((allocation, access))
        for allocation, access in made:
            remember(allocation, access)

    def bulk_commit_group(self) -> None:
        super().bulk_commit_group()
        self.groups.append(self.open_group)
        self.open_group = []

    def _wait_group(self, n: int, read_only: bool) -> None:
        super()._wait_group(n, read_only)
        waited = self.groups[: max(len(self.groups) - n, 0)]
        for copy in (copy for group in waited for copy in group):
            self.known |= copy.reads if read_only else copy.all
            copy.note_wait("load", *([] if read_only else ["store"]))
        if not read_only:
            del self.groups[: len(waited)]


class RacingHost(CausalHost):
    """The hosts, whose accesses are compared. A poll as one that has failed before: that acquires nothing.

    To free memory is a store to all of it, and to close a mapping of it one that concerns its own rank alone.
    """

    def __init__(self, world: Any):
        super().__init__(world)
        self.owners: dict[Mind, Owner] = {}

    @property
    def finds_races(self) -> bool:
        """Whether its accesses are compared."""
        raise NotImplementedError

    def read(self, allocation: Allocation, offset: int, nbytes: int, polls: bool) -> None:
        self.note_access("load", allocation, offset, nbytes, "acquire" if polls else "weak")
        super().read(allocation, offset, nbytes, polls)

    def looks(self, allocation: Allocation, offset: int, nbytes: int) -> None:
        if self.finds_races:
            self.compare(allocation, self.access("load", offset, nbytes, "acquire"))

    def write(self, allocation: Allocation, offset: int, nbytes: int) -> None:
        super().write(allocation, offset, nbytes)
        self.note_access("store", allocation, offset, nbytes, "release" if nbytes <= WORD_BYTES else "weak")

    def frees(self, allocation: Allocation) -> None:
        self.give_up(allocation, "frees", None)

    def unmaps(self, allocation: Allocation, rank: int) -> None:
        self.give_up(allocation, "closes", rank)

    def access(self, verb: str, begin: int, nbytes: int, order: str) -> LateAccess:
        mind, rank = self.mind, self.world.host_rank
        if mind not in self.owners:
            clock, number = (CPU_CLOCK, 0) if rank is None else (CPU_CLOCK - 1 - rank, rank)
            self.owners[mind] = Owner(CPU, "", mind.serial, clock, number, 0)
        site = site_of(sys._getframe(3))
        access = LateAccess(mind, self.owners[mind], verb, begin, begin + nbytes, order, "sys", site)
        access.time = self.world.history.now
        return access

    def note_access(self, verb: str, allocation: Allocation, begin: int, nbytes: int, order: str) -> None:
        """One is about to read or write. Stop the run if that races with another access."""
        if not self.finds_races:
            return
        access = self.access(verb, begin, nbytes, order)
        self.compare(allocation, access)
        remember(allocation, access)

    def compare(self, allocation: Allocation, access: LateAccess) -> None:
        earlier = first_unordered(allocation, access, self.mind.known, frozenset())
        if earlier is not None:
            raise self.world.error_of(HostRace(allocation, access, earlier))

    def give_up(self, allocation: Allocation, how: str, rank: int | None) -> None:
        """Stop the run if somebody may still access memory. rank: whose mapping of it is closed; None if it is freed"""
        if not self.finds_races:
            return
        access, known = self.access("store", 0, allocation.nbytes, "weak"), self.mind.known
        loads = (loads.values() for loads in allocation.last_loads.values())
        for earlier in chain(*allocation.last_stores.values(), *loads):
            if earlier.owner is not access.owner and rank in (None, earlier.owner.rank) and not earlier.is_known(known):
                raise self.world.error_of(HostRace(allocation, access, earlier, how))
