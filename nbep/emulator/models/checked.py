"""The memory model "checked": two accesses to the same bytes, one of them a store, that nothing orders are an error.

A store is seen by all at once, as with "sc".  But a thread may only meet the bytes that another one has stored if it
can know of the store: after a release, a barrier or a syncwarp of the one who stored, and whatever takes that on to
this thread: an acquire of the released value, the same barrier, any chain of them, or the start of a kernel.  And it
may only store to bytes that another one has loaded if it can know that the load is over.  For that relaxed stores and
loads will do, as for the head of a ring: a load has returned before its thread stores anything that comes after it.  A
vote or a shuffle orders nothing, as CUDA's programming guide says.  Two accesses of which neither is weak may meet
without all that, if their scopes reach each other.

What a thread knows is a `Knowledge`: how far it knows the signals of each warp.  Signals are numbered in the order in
which they happen.  A store is known to whoever knows its warp up to its thread's first release after it, a load to
whoever knows it up to the first signal of any kind.  That is not exact, so some races are not found: who hears of one
thread knows what all of its warp have signalled before, a kernel that starts knows what all have, and what an atomic
passes on counts as told by its thread.

The copy engine loads with what its thread knows to be behind a proxy fence: of one who stored, which its thread knows
of, or of a thread of the block that knew of the store.  A copy is checked where it starts; it is over for those who
know of a wait for it, or of its kernel's end.  A thread that leaves without a wait for what its copies read is an
error, also if they happen to have read it.

Once a wait was over time, or a kernel has reported a fault, nothing is checked any more.
"""

from __future__ import annotations

import sys
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from ..machine.bulk import MBarrier
from ..machine.errors import EmulatorError
from ..machine.faults import error_at
from ..machine.kinds import KINDS
from ..machine.memory import OFFSET_BITS, OFFSET_MASK, Allocation
from ..machine.orders import ACQUIRES, POLLED, RELEASES, SCOPES
from ..machine.source import Site, site_of
from ..machine.warp import Collective, Warp
from .history import Forgotten, Stored, Waited
from .knowledge import (
    ALL_CLOCKS,
    GRANULE_BITS,
    NOT_WAITED,
    NOT_YET,
    NOTHING,
    Access,
    Knowledge,
    Message,
    Owner,
    distance,
    join,
    join_two,
    later,
    remember_store,
    with_signals,
)
from .proxies import ProxyThread

if TYPE_CHECKING:
    from greenlet import greenlet

    from ..machine.block import Block, NamedBarrier

MAX_WARPS = 32  # of a block
MBARRIER_BYTES = 8
MANY_LOADS = 64  # of a granule; then those that everybody knows of are forgotten

Cell = tuple[Allocation, int]


class Race(NamedTuple):
    """Two accesses to the same bytes, by threads of which the second cannot know of the first."""

    thread: CheckedThread
    allocation: Allocation
    access: Access
    earlier: Access


class CheckedThread(ProxyThread):
    """A thread whose accesses are checked against those of others."""

    __slots__ = (
        "owner", "engine", "fences", "released", "heard", "observed",
        "stores", "loads", "open_group", "groups", "issued",
    )  # fmt: skip

    def __init__(self, block: Block, thread_idx: int, warp: Warp, hub: greenlet):
        super().__init__(block, thread_idx, warp, hub)
        launch = block.launch
        clock = block.serial * MAX_WARPS + self.warp
        number, known = launch.number, launch.first_signal
        self.owner = Owner(self.rank, launch.name, block.serial, clock, block.index, thread_idx, number, known)
        self.engine: Owner | None = None  # of its copies, as long as the thread has not waited for them
        if launch.known is None:
            so_far = {ALL_CLOCKS: launch.first_signal}
            launch.known = Knowledge(so_far, so_far, so_far, so_far)
        self.knowledge: Knowledge = launch.known
        self.warp_known = 0  # the last signal of its warp that it knows besides
        # What a store takes along that no release orders: what was known at the last fence of each reach, and at this
        # thread's last release of each reach to the same cell.
        self.fences: dict[int, Knowledge] = {}
        self.released: dict[Cell, dict[int, Knowledge]] = {}
        # What relaxed loads have met, for a later acquire or fence that reaches as far.
        self.heard: dict[tuple[Cell, int], Knowledge] = {}
        self.observed: set[Access] = set()  # strong stores whose values this thread has loaded
        self.stores: list[Access] = []  # those that no release tells of yet
        self.loads: list[Access] = []  # those that no signal tells of yet
        # What the copy engine does for bulk stores, until the thread has waited for it.
        self.open_group: list[Access] = []
        self.groups: deque[list[Access]] = deque()
        self.issued: list[tuple[Access, Access, MBarrier]] = []  # bulk loads under way: the load and the store of each

    # --- signals ------------------------------------------------------------------------------------------------

    def signal(self, releases: bool) -> None:
        """Number the loads since the last signal, and the stores since the last release."""
        self.world.signals += 1
        number = self.world.signals
        for load in self.loads:
            load.number = number
        self.loads.clear()
        if releases:
            for store in self.stores:
                store.number = number
            self.stores.clear()

    def with_latest(self, knowledge: Knowledge) -> Knowledge:
        """The knowledge, and all that the warp has signalled."""
        return with_signals(knowledge, {self.owner.clock: self.world.signals})

    def send(self, allocation: Allocation, store: Access, modifies: bool) -> None:
        """A store to a cell; one that modifies it, as atomics do, passes on what the cell said before."""
        offset, order, reach = store.begin, store.order, store.reach
        if not reach:
            if allocation.messages.pop(offset, None) is not None:
                self.world.history.add(Forgotten(allocation, offset))
            return
        self.world.history.add(Stored(allocation, store))
        cell = allocation, offset
        self.signal(order in RELEASES)
        now = self.with_latest(self.knowledge)
        if order in RELEASES:
            self.released.setdefault(cell, {})[reach] = now
        else:
            now = NOTHING.with_loads(now.loads)
        earlier = [*self.fences.items(), *self.released.get(cell, {}).items()]
        before = allocation.messages.get(offset) if modifies else None
        passes_on = False
        if before is not None and reach >= distance(self.owner, before.owner):
            passes_on = True
            earlier += before.parts.items()
        parts = {reach: now}
        for its_reach, knowledge in earlier:
            least = min(its_reach, reach)
            parts[least] = join_two(parts.get(least, NOTHING), knowledge)
        allocation.messages[offset] = Message(self.owner, parts, passes_on)

    def receive(self, allocation: Allocation, offset: int, order: str, scope: str) -> None:
        """A strong access has read a cell."""
        cell, reach = (allocation, offset), SCOPES[scope]
        for store in allocation.last_stores.get(offset >> GRANULE_BITS, ()):
            if store.begin == offset and min(store.reach, reach) >= distance(store.owner, self.owner):
                self.observed.add(store)
        message = allocation.messages.get(offset)
        needed = 0 if message is None else distance(message.owner, self.owner)
        said = NOTHING if message is None or reach < needed else message.heard(needed)
        if needed > SCOPES["cta"]:  # a proxy fence of another block says nothing to this block's copy engine
            said = said._replace(engine=NOTHING.engine, shared=NOTHING.shared)
        if order in ACQUIRES:
            self.knowledge = join_two(self.knowledge, said)
            for near in range(1, reach + 1) if self.heard else ():
                self.knowledge = join_two(self.knowledge, self.heard.get((cell, near), NOTHING))
        elif any(said):
            self.heard[cell, needed] = join_two(self.heard.get((cell, needed), NOTHING), said)
            self.knowledge = self.knowledge.with_loads(later(self.knowledge.loads, said.loads))

    def fence(self, order: str, scope: str) -> None:
        super().fence(order, scope)
        if order in RELEASES:
            reach = SCOPES[scope]
            heard = (knowledge for (_, needed), knowledge in self.heard.items() if needed <= reach)
            self.knowledge = join((self.knowledge, *heard))
            self.signal(True)
            self.fences[reach] = self.with_latest(self.knowledge)

    def converge(self, name: str, mask: int, value: Any, site: Site | None) -> Collective:
        if name == "syncwarp":
            self.signal(True)
        collective = super().converge(name, mask, value, site)
        if not collective.knowledge or collective.knowledge[-1] is not self.knowledge:
            collective.knowledge.append(self.knowledge)
        if not collective.missing:
            self.remember_collective(collective)
            collective.known = join(collective.knowledge), self.world.signals
        return collective

    def collect(self, name: str, mask: int, value: Any, site: Site | None) -> Collective:
        collective = super().collect(name, mask, value, site)
        if name == "syncwarp":  # a vote or a shuffle orders no memory
            self.knowledge, self.warp_known = collective.known
        return collective

    def arrive(self, barrier_id: int, num_threads: int, wait: bool, predicate: bool = True) -> NamedBarrier:
        self.signal(True)
        barrier = super().arrive(barrier_id, num_threads, wait, predicate)
        barrier.signals[self.owner.clock] = self.world.signals
        if not barrier.knowledge or barrier.knowledge[-1] is not self.knowledge:
            barrier.knowledge.append(self.knowledge)
        if barrier.is_full:
            told = NOTHING._replace(stores=barrier.signals, loads=barrier.signals)  # bar.arrive: some know more by now
            barrier.known = join((*barrier.knowledge, told))
        return barrier

    def meet(self, barrier_id: int, num_threads: int, predicate: bool) -> NamedBarrier:
        barrier = super().meet(barrier_id, num_threads, predicate)
        self.knowledge = barrier.known
        known = self.knowledge.stores
        self.warp_known = known.get(self.owner.clock, known.get(ALL_CLOCKS, 0))
        return barrier

    def mbarrier_init(self, address: int, count: int) -> None:
        super().mbarrier_init(address, count)
        self.note_store(self.shared, address, MBARRIER_BYTES, "weak", "cta")

    def mbarrier_arrive(self, address: int) -> None:
        super().mbarrier_arrive(address)
        self._arrived(address)

    def mbarrier_arrive_expect_tx(self, address: int, nbytes: int) -> None:
        super().mbarrier_arrive_expect_tx(address, nbytes)
        self._arrived(address)

    def _arrived(self, address: int) -> None:
        mbarrier = self.block.mbarriers[address]
        self.note_load(self.shared, address, MBARRIER_BYTES, "relaxed", "cta")  # it must know of the initialisation
        self.signal(True)
        mbarrier.knowledge = join((mbarrier.knowledge or NOTHING, self.with_latest(self.knowledge)))

    def mbarrier_try_wait(self, address: int, parity: int) -> bool:
        done = super().mbarrier_try_wait(address, parity)
        mbarrier = self.block.mbarriers.get(address)
        if done and mbarrier is not None:
            self.note_load(self.shared, address, MBARRIER_BYTES, "relaxed", "cta")
            self.world.signals += 1
            number = self.world.signals
            for access in mbarrier.copies:
                access.number = number
            signals = {access.owner.clock: number for access in mbarrier.copies}
            self.world.history.add(Waited(self.owner, address, tuple(mbarrier.copies)))
            mbarrier.copies = []
            mbarrier.knowledge = with_signals(mbarrier.knowledge or NOTHING, signals)
            self.knowledge = join((self.knowledge, mbarrier.knowledge))
        return done

    def spin(self, deadline_ns: int) -> bool:
        """A wait that is over time ends the checks: what threads do then, they do to bytes that are not there."""
        is_over = super().spin(deadline_ns)
        self.world.has_failed |= is_over
        return is_over

    def leave(self) -> None:
        groups = [self.open_group, *self.groups]
        if any(access.verb == "load" for group in groups for access in group):
            message = "a thread leaves the kernel without having waited until its bulk stores have read shared memory"
            raise error_at(self, EmulatorError, f"{message}: wait_group.read is missing")
        copies = [access for group in groups for access in group]
        if copies:  # nobody has waited until they are written: the end of the kernel does
            self.block.launch.callbacks.append(partial(self.end_copies, copies))
        for access in self.stores:
            access.at_exit = True
        self.signal(True)
        super().leave()

    def end_copies(self, copies: list[Access]) -> None:
        """The kernel is done, and so are copies for which no thread has waited."""
        self.take_over(copies)
        self.signal(True)

    # --- accesses -----------------------------------------------------------------------------------------------

    def locate(self, address: int) -> Cell:
        """What stands at a global address that has been accessed."""
        return self.segments[address >> OFFSET_BITS], address & OFFSET_MASK

    def load(self, address: int, kind: str, order: str, scope: str) -> Any:
        value = super().load(address, kind, order, scope)
        allocation, offset = self.locate(address)
        load = self.note_load(allocation, offset, KINDS[kind].size, order, scope)
        if order in POLLED:
            self.receive(allocation, offset, order, scope)
            self.remember_polled(allocation, load)
        return value

    def store(self, address: int, kind: str, value: Any, order: str, scope: str) -> None:
        super().store(address, kind, value, order, scope)
        allocation, offset = self.locate(address)
        store = self.note_store(allocation, offset, KINDS[kind].size, order, scope)
        self.send(allocation, store, modifies=False)

    def atomic(
        self, op: str, address: int, kind: str, operand: Any, order: str, scope: str, compare: Any = None
    ) -> Any:
        old = super().atomic(op, address, kind, operand, order, scope, compare)
        allocation, offset = self.locate(address)
        self._modified(allocation, offset, kind, order, scope)
        return old

    def load_shared(self, address: int, kind: str, order: str) -> Any:
        value = super().load_shared(address, kind, order)
        load = self.note_load(self.shared, address, KINDS[kind].size, order, "cta")
        if order in POLLED:
            self.receive(self.shared, address, order, "cta")
            self.remember_polled(self.shared, load)
        return value

    def store_shared(self, address: int, kind: str, value: Any, order: str) -> None:
        super().store_shared(address, kind, value, order)
        store = self.note_store(self.shared, address, KINDS[kind].size, order, "cta")
        self.send(self.shared, store, modifies=False)

    def atomic_shared(self, op: str, address: int, kind: str, operand: Any, order: str, compare: Any = None) -> Any:
        old = super().atomic_shared(op, address, kind, operand, order, compare)
        self._modified(self.shared, address, kind, order, "cta")
        return old

    def _modified(self, allocation: Allocation, offset: int, kind: str, order: str, scope: str) -> None:
        self.receive(allocation, offset, order, scope)
        store = self.note_store(allocation, offset, KINDS[kind].size, order, scope, is_atomic=True)
        self.send(allocation, store, modifies=True)

    def note_load(self, allocation: Allocation, offset: int, nbytes: int, order: str, scope: str) -> Access:
        """A load of at most 16 aligned bytes: check it, and remember it."""
        site, now = site_of(sys._getframe(2)), self.world.history.now
        load = Access(self.owner, "load", offset, offset + nbytes, order, scope, site, now)
        load.serving = self.serving
        self.check(allocation, load)
        if order == "nc":
            self.check_constant(allocation, load)
        if allocation.writable:
            self.loads.append(load)
            self.remember_load(allocation, load)
        return load

    def check_constant(self, allocation: Allocation, load: Access) -> None:
        """Stop the run when bytes are read as constant that have changed since this kernel began."""
        if self.world.has_failed:
            return
        before = {ALL_CLOCKS: self.block.launch.first_signal}
        for store in allocation.last_stores.get(load.begin >> GRANULE_BITS, ()):
            if store.begin < load.end and load.begin < store.end and store.is_beyond(before):
                raise self.not_constant(allocation, load.begin)

    def note_store(
        self, allocation: Allocation, offset: int, nbytes: int, order: str, scope: str, is_atomic: bool = False
    ) -> Access:
        """A store of at most 16 aligned bytes: check it, and remember it."""
        site, now = site_of(sys._getframe(2)), self.world.history.now
        store = Access(self.owner, "store", offset, offset + nbytes, order, scope, site, now)
        store.serving = self.serving
        store.is_atomic = is_atomic
        store.proxy_fences = self.shared_fences if allocation is self.shared else self.global_fences
        self.check(allocation, store)
        self.stores.append(store)
        remember_store(allocation, store)
        return store

    # --- bulk copies --------------------------------------------------------------------------------------------

    def bulk_load(self, smem: int, gmem: int, nbytes: int, mbarrier: int) -> None:
        super().bulk_load(smem, gmem, nbytes, mbarrier)
        load, store = self.note_copy(self.locate(gmem), (self.shared, smem), nbytes)
        self.issued.append((load, store, self.block.mbarriers[mbarrier]))

    def bulk_store(self, gmem: int, smem: int, nbytes: int) -> None:
        super().bulk_store(gmem, smem, nbytes)
        self.open_group += self.note_copy((self.shared, smem), self.locate(gmem), nbytes)

    def note_copy(self, source: Cell, target: Cell, nbytes: int) -> tuple[Access, Access]:
        """A copy starts: check what it will do, and remember it, as the copy engine's until somebody waits for it."""
        site = site_of(sys._getframe(2))
        (read, begin), (written, to) = source, target
        load = Access(self.owner, "load", begin, begin + nbytes, "bulk", "cta", site)
        store = Access(self.owner, "store", to, to + nbytes, "bulk", "cta", site)
        self.check(read, load)
        self.check(written, store)
        if self.engine is None:
            self.engine = self.owner._replace(clock=-self.owner.clock)
        for access in (load, store):
            access.owner, access.number, access.time = self.engine, NOT_WAITED, self.world.history.now
        if read.writable:
            self.remember_load(read, load)
        remember_store(written, store)
        return load, store

    def put_bytes(self, allocation: Allocation, offset: int, data: bytes, site: Site | None) -> None:
        super().put_bytes(allocation, offset, data, site)
        if allocation is self.shared:
            here = next(i for i, (_, store, _) in enumerate(self.issued) if store.begin == offset)
            load, store, mbarrier = self.issued.pop(here)
            mbarrier.copies += load, store

    def bulk_commit_group(self) -> None:
        super().bulk_commit_group()
        self.groups.append(self.open_group)
        self.open_group = []

    def bulk_wait_group(self, n: int) -> None:
        super().bulk_wait_group(n)
        while len(self.groups) > n:
            self.take_over(self.groups.popleft())

    def bulk_wait_group_read(self, n: int) -> None:
        super().bulk_wait_group_read(n)
        for group in list(self.groups)[: max(len(self.groups) - n, 0)]:
            self.take_over([access for access in group if access.verb == "load"])
            group[:] = [access for access in group if access.verb == "store"]

    def take_over(self, copies: list[Access]) -> None:
        """What the copy engine has done is as if this thread had done it."""
        for access in copies:
            access.owner = self.owner
            access.number = NOT_YET
            access.time = self.world.history.now
            (self.loads if access.verb == "load" else self.stores).append(access)

    # --- the check ----------------------------------------------------------------------------------------------

    def remember_load(self, allocation: Allocation, load: Access) -> None:
        for granule in load.granules:
            loads = allocation.last_loads.get(granule)
            if loads is None:
                loads = allocation.last_loads[granule] = {}
            key = id(load.owner), load.begin, load.end
            if (before := loads.get(key)) is not None:
                load.before = before.before or (before,)
            loads[key] = load
            if len(loads) > MANY_LOADS and len(loads).bit_count() == 1:  # not every time
                known = min(launch.first_signal for launch in self.world.launches)
                allocation.last_loads[granule] = {key: one for key, one in loads.items() if one.number > known}

    def check(self, allocation: Allocation, access: Access) -> None:
        """Stop the run if this access meets one that the thread cannot know of."""
        if self.world.has_failed:
            return
        stores, loads = allocation.last_stores, allocation.last_loads
        is_store = access.verb == "store"
        is_proxys = access.order == "bulk" and not is_store
        for granule in access.granules:
            for store in stores.get(granule, ()):
                is_new = self.is_new(store)
                if (is_new or (is_proxys and self.is_hidden(allocation, store))) and self.may_not_meet(access, store):
                    if is_new or allocation is not self.shared:
                        raise self.world.error_of(Race(self, allocation, access, store))
                    raise self.no_proxy_fence(access, store)
            if is_store and granule in loads:
                for load in loads[granule].values():
                    if self.is_new(load) and self.may_not_meet(access, load):
                        raise self.world.error_of(Race(self, allocation, access, load))

    def is_new(self, access: Access) -> bool:
        """Whether this thread cannot know of an access."""
        owner, own = access.owner, self.owner
        if owner is own:
            return False
        is_store = access.verb == "store"
        if owner.clock == own.clock and access.number <= self.warp_known:
            return False
        return access.is_beyond(self.knowledge.stores if is_store else self.knowledge.loads)

    def may_not_meet(self, access: Access, earlier: Access) -> bool:
        return (
            earlier.begin < access.end
            and access.begin < earlier.end
            and min(access.reach, earlier.reach) < distance(access.owner, earlier.owner)
            and earlier not in self.observed
        )
