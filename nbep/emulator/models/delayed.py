"""The memory model "delayed": a store is seen by others as late as its order allows, and a load may be early.

A store of less than release order to global memory waits in a buffer.  Who sees it already, by its level:

    0 thread   the thread that stored
    1 block    its block: after a barrier or syncwarp, or a release of scope cta
    2 gpu      its rank: after a release of scope gpu
    3 sys      everybody: the bytes are in memory

A release lifts what its thread stored, and what the thread can know of its block's and its GPU's stores (cumulativity),
to the level of its scope before it is seen itself.  Without one, stores arrive at random later steps in random order,
but in the order of their thread within 16 aligned bytes.  So a tail that is published relaxed overtakes its payload
under some seed.
A bulk store goes the same way from where it is done: waiting for it makes it visible to its own thread alone.
A load may return an older value than the present one, unless an acquire or a barrier orders it: see `pending`.  So
bytes that are read after a poll without an acquire are those from before, under some seed.  Reads of shared memory are
never early.  A kernel is done when all its stores have arrived.
A relaxed atomic whose result is not used waits as a store does, and is performed when it arrives.  All others are
performed at once.  A compare-and-swap that fails is a load: it publishes nothing, and may be early.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from ..machine.access import FAULTS, AccessingThread, writes
from ..machine.errors import Uninitialized
from ..machine.faults import Hole, who_and_where
from ..machine.kinds import KINDS, decode, encode
from ..machine.memory import Allocation
from ..machine.orders import ACQUIRES, POLLED, RELEASES, SCOPES
from ..machine.source import Site, site_of
from ..machine.thread import Thread
from .pending import GRANULE, BufferedThread, PendingAtomic, PendingStore, Version, is_unused

if TYPE_CHECKING:
    from ..machine.block import NamedBarrier
    from ..machine.bulk import MBarrier
    from ..machine.warp import Collective


def check_place(allocation: Allocation, offset: int, kind: str) -> int:
    """The size of an access. Raises: IndexError if it is misaligned or out of bounds"""
    misfit = allocation.loads[kind][2]
    if offset & misfit or not allocation.lowest <= offset < allocation.nbytes - misfit:
        raise IndexError
    return misfit + 1


class DelayedThread(BufferedThread):
    """A thread whose stores to global memory are delayed, and whose loads may be early."""

    __slots__ = ()

    # --- accesses -----------------------------------------------------------------------------------------------

    def load(self, address: int, kind: str, order: str, scope: str) -> Any:
        if self.left <= 0:
            self._count()
        try:
            allocation = self.segments[address >> 32]
            offset = address & 0xFFFFFFFF
            granule = offset // GRANULE
            if granule not in allocation.pending:
                versions = allocation.versions.get(granule)
                if versions is None or (order == "weak" and self.knows(versions[-1])):
                    if allocation.shared and order in ACQUIRES:
                        self.floor = self.world.moment  # what other processes store has no versions
                    elif granule in allocation.signals and order in POLLED:
                        self.hear(allocation, [], offset, 0, order, scope)
                    return AccessingThread.load(self, address, kind, order, scope)
                check_place(allocation, offset, kind)
                if order in POLLED and allocation.shadow is None:
                    if allocation.pending:
                        self.perform_in(allocation)
                    count = self.choose(allocation, granule, versions)
                    if count == len(versions):  # it sees memory as it is
                        value = AccessingThread.load(self, address, kind, order, scope)
                    else:
                        begin = offset % GRANULE
                        value = decode(bytearray(versions[count].before[begin : begin + KINDS[kind].size]), kind)
                        versions = versions[:count]
                        self.left -= 1
                        self.note_polled(allocation, offset, kind, value)
                    self.hear(allocation, versions, offset, KINDS[kind].size, order, scope)
                    return value
            nbytes = check_place(allocation, offset, kind)
        except FAULTS as fault:
            raise self.fault(address, kind, False, False, fault) from None
        if order == "nc" and allocation.may_change:
            self.check_constant(allocation, offset, nbytes)
        data, unwritten, versions = self.look(allocation, offset, nbytes)
        if unwritten >= 0:
            message = f"load of {nbytes} bytes ({kind}) at {address:#x}: never written, as far as this thread sees"
            hole = Hole(self, allocation, offset, nbytes, order in POLLED)
            raise Uninitialized(f"{message}\n  in {allocation.cell(offset)}", *who_and_where(self), hole)
        value = decode(data, kind)
        self.left -= 1
        if order in POLLED:
            self.note_polled(allocation, offset, kind, value)
            self.hear(allocation, versions, offset, nbytes, order, scope)
        elif order == "nc":
            self.note_nc(allocation, offset, nbytes)
        return value

    def store(self, address: int, kind: str, value: Any, order: str, scope: str) -> None:
        if self.left <= 0:
            self._count()
        level = 0
        if order == "release":
            level = SCOPES[scope]
            self.publish(level)
            self.last_release = self.floor, self.world.moment
        try:
            allocation = self.segments[address >> 32]
            offset = address & 0xFFFFFFFF
            misfit = allocation.stores[kind][2]
            if offset & misfit or offset + misfit >= allocation.nbytes or offset < allocation.lowest:
                raise IndexError
            data = encode(value, kind)
        except FAULTS as fault:
            raise self.fault(address, kind, True, False, fault) from None
        version = self.new_version(allocation, offset, misfit + 1, order, scope)
        if level == SCOPES["sys"]:
            version.keep(allocation)
            super().store(address, kind, value, order, scope)
            version.arrive(allocation, self.next_moment())
            return
        self.left -= 1
        site = None if order == "weak" else site_of(sys._getframe(1))
        store = PendingStore(self, allocation, data, version, site)
        self.buffer[store] = None
        if allocation.nc_reads:
            self.check_nc(allocation, offset, misfit + 1)
        if level:
            self.publish(level)
        self.send_off(store)

    def atomic(
        self, op: str, address: int, kind: str, operand: Any, order: str, scope: str, compare: Any = None
    ) -> Any:
        """Atomics act on memory itself; a releasing one publishes first."""
        if self.left <= 0:
            self._count()
        allocation = self.segments.get(address >> 32)
        offset = address & 0xFFFFFFFF
        if op == "cas" and allocation is not None and self.is_there(allocation, offset, kind):
            is_bare = not any(offset // GRANULE in of for of in (allocation.pending, allocation.versions))
            for is_early in (True, False):
                data, _, versions = self.look(allocation, offset, KINDS[kind].size, is_early)
                old = allocation.read(offset, kind) if is_bare else decode(data, kind)
                if old != compare:
                    self.left -= 1
                    self.note_polled(allocation, offset, kind, old)
                    self.hear(allocation, versions, offset, len(data), order, scope)
                    return old
        if order in RELEASES:
            self.publish(SCOPES[scope])
            self.last_release = self.floor, self.world.moment
        if allocation is None or allocation.freed or kind not in KINDS:
            return super().atomic(op, address, kind, operand, order, scope, compare)
        may_be_late = order == "relaxed" and not allocation.nc_reads and self.is_there(allocation, offset, kind)
        if may_be_late and is_unused(sys._getframe(1)):
            self.left -= 1
            version = self.new_version(allocation, offset, KINDS[kind].size, order, scope)
            late = PendingAtomic(self, allocation, version, site_of(sys._getframe(1)), (op, kind, operand, compare))
            self.buffer[late] = None
            self.send_off(late)
            return None
        for store in reversed(allocation.pending.get(offset // GRANULE, [])):
            if self.sees(store):
                store.commit()
                break
        nbytes = KINDS[kind].size
        version = self.new_version(allocation, offset, nbytes, order, scope)
        version.keep(allocation)
        old = super().atomic(op, address, kind, operand, order, scope, compare)
        versions = allocation.versions.get(offset // GRANULE, [])
        said = self.hear(allocation, versions, offset, nbytes, order, scope)
        if writes(op, old, compare):
            version.pass_on(said)
            version.arrive(allocation, self.next_moment())
        return old

    def is_there(self, allocation: Allocation, offset: int, kind: str) -> bool:
        """Whether an atomic would find nothing wrong now; memory of other processes and of the host is for `super`."""
        if allocation.freed or kind not in KINDS or allocation.shared or allocation.on_host:
            return False
        nbytes, lowest = KINDS[kind].size, allocation.lowest
        is_fit = offset % nbytes == 0 and lowest <= offset <= allocation.nbytes - nbytes
        return is_fit and allocation.first_unwritten(offset, nbytes) < 0

    def _count(self) -> None:
        """Be switched here, not between looking at the buffers and acting; the access itself counts the call."""
        self.left -= 1
        self.pause()
        self.left += 1

    # --- what this thread sees ----------------------------------------------------------------------------------

    def look(
        self, allocation: Allocation, offset: int, nbytes: int, is_early: bool = True
    ) -> tuple[bytearray, int, list[Version]]:
        """The bytes as this thread sees them, the offset of the first that is not written (-1: all are), and the
        versions of the last 16 bytes that are in them. Unless is_early they are the latest.
        """
        end = offset + nbytes
        if allocation.pending:
            self.perform_in(allocation)
        data = bytearray(allocation.memory[offset:end])
        shadow = allocation.shadow
        written = bytearray(b"\1" * nbytes if shadow is None else shadow[offset:end])
        seen: list[Version] = []
        for granule in range(offset // GRANULE, -(-end // GRANULE)):
            in_memory = allocation.versions.get(granule, [])
            stores = [store for store in allocation.pending.get(granule, ()) if self.sees(store)]
            seen = [*in_memory, *(store.version for store in stores)]
            if is_early and seen:
                count = self.choose(allocation, granule, seen)
                if count < len(in_memory):
                    older, low = in_memory[count], granule * GRANULE
                    here = slice(max(low, offset) - offset, min(low + GRANULE, end) - offset)
                    there = slice(max(low, offset) - low, min(low + GRANULE, end) - low)
                    data[here] = older.before[there]
                    if older.written_before is not None:
                        written[here] = older.written_before[there]
                del seen[count:], stores[max(count - len(in_memory), 0) :]
            for store in stores:
                for i, byte in enumerate(store.data, store.offset - offset):
                    if 0 <= i < nbytes:
                        data[i] = byte
                        written[i] = 1
        hole = written.find(0)
        return data, hole if hole < 0 else offset + hole, seen

    def choose(self, allocation: Allocation, granule: int, versions: list[Version]) -> int:
        """How many of the versions of some bytes, oldest first, are in what a load of this thread returns."""
        least = count = len(versions)
        while least and not self.knows(versions[least - 1]):
            least -= 1
        if least == count:
            return count
        views, cell = self.block.views, (allocation.identity, granule)
        last = views.get(cell)
        if last in versions[least:]:
            least = versions.index(last) + 1
        world = self.world
        if least < count and world.early.random() < world.early_rate:
            count = world.early.randrange(least, count)
        if count:
            views[cell] = versions[count - 1]
        return count

    def check_constant(self, allocation: Allocation, offset: int, nbytes: int) -> None:
        """Stop the run when bytes are read as constant that have changed since this kernel began."""
        granule = offset // GRANULE
        stores = [store.version for store in allocation.pending.get(granule, ())]
        for version in [*allocation.versions.get(granule, ()), *stores]:
            if version.overlaps(offset, offset + nbytes) and (
                not version.seen[3] or version.seen[3] > self.first_moment
            ):
                raise self.not_constant(allocation, offset)

    def peek(self, allocation: Allocation, offset: int, kind: str) -> Any:
        if offset // GRANULE not in allocation.pending:
            return allocation.read(offset, kind)
        return decode(self.look(allocation, offset, allocation.loads[kind][2] + 1, is_early=False)[0], kind)

    def peek_bytes(self, allocation: Allocation, offset: int, nbytes: int, site: Site | None) -> bytes:
        if not (allocation.pending or allocation.versions) or allocation.freed:
            return super().peek_bytes(allocation, offset, nbytes, site)
        data, unwritten, _ = self.look(allocation, offset, nbytes)
        return super().peek_bytes(allocation, offset, nbytes, site) if unwritten >= 0 else bytes(data)

    # --- what else orders loads ---------------------------------------------------------------------------------

    def fence(self, order: str, scope: str) -> None:
        if order in RELEASES:
            self.publish(SCOPES[scope])
            self.floor = max(self.floor, self.heard_shared[0], *self.heard[1 : SCOPES[scope] + 1])
            self.block_floor = max(self.block_floor, self.heard_shared[1])
            self.last_release = self.floor, self.world.moment
        super().fence(order, scope)

    def store_shared(self, address: int, kind: str, value: Any, order: str) -> None:
        if order == "release":
            self.publish(1)
        super().store_shared(address, kind, value, order)
        self.tell_shared(address, KINDS[kind].size, order, modifies=False)

    def load_shared(self, address: int, kind: str, order: str) -> Any:
        value = AccessingThread.load_shared(self, address, kind, order)
        if order in POLLED:
            self.hear_shared(address, KINDS[kind].size, order)
        return value

    def atomic_shared(self, op: str, address: int, kind: str, operand: Any, order: str, compare: Any = None) -> Any:
        if order in RELEASES and (op != "cas" or self.shared.read(address, kind) == compare):
            self.publish(1)
        old = super().atomic_shared(op, address, kind, operand, order, compare)
        self.hear_shared(address, KINDS[kind].size, order)
        if writes(op, old, compare):
            self.tell_shared(address, KINDS[kind].size, order, modifies=True)
        return old

    def converge(self, name: str, mask: int, value: Any, site: Site | None) -> Collective:
        if name != "syncwarp":  # a vote or a shuffle orders no memory
            return Thread.converge(self, name, mask, value, site)
        self.publish(1)
        if self.heard[1] > self.floor:
            self.floor = self.heard[1]
        collective = Thread.converge(self, name, mask, value, site)
        collective.known = self.with_own(collective.known)
        return collective

    def collect(self, name: str, mask: int, value: Any, site: Site | None) -> Collective:
        collective = Thread.collect(self, name, mask, value, site)
        if name == "syncwarp":
            self.learn(collective.known, self.world.moment)
        return collective

    def arrive(self, barrier_id: int, num_threads: int, wait: bool, predicate: bool = True) -> NamedBarrier:
        self.publish(1)
        self.floor = max(self.floor, self.heard[1])
        barrier = super().arrive(barrier_id, num_threads, wait, predicate)
        barrier.known = self.with_own(barrier.known)
        return barrier

    def meet(self, barrier_id: int, num_threads: int, predicate: bool) -> NamedBarrier:
        barrier = super().meet(barrier_id, num_threads, predicate)
        self.learn(barrier.known, self.world.moment)
        return barrier

    def arrive_at(self, mbarrier: MBarrier, nbytes: int) -> None:
        self.publish(1)
        mbarrier.knowledge = self.with_own(mbarrier.knowledge, self.heard[1])
        super().arrive_at(mbarrier, nbytes)

    def hear_phase(self, mbarrier: MBarrier) -> None:
        """A phase is over: this thread knows what those knew who have arrived."""
        self.learn(self.with_own(mbarrier.knowledge), self.world.moment)
