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
A load may return an older value than the present one, unless an acquire or a barrier orders it: see `versions`.  So
bytes that are read after a poll without an acquire are those from before, under some seed.  Reads of shared memory are
never early.  A kernel is done when all its stores have arrived.
A relaxed atomic whose result nobody uses waits as a store does, and is performed when it arrives.  All others are
performed at once.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from ..machine.access import FAULTS
from ..machine.kinds import KINDS, decode, encode
from ..machine.memory import Allocation
from ..machine.thread import Thread
from ..machine.warp import Warp
from ..reports.errors import Uninitialized
from ..reports.faults import explain, who_and_where
from ..reports.source import Site, site_of
from ..reports.unwritten import with_hole
from .orders import ACQUIRES, POLLED, RELEASES, SCOPES
from .pending import PendingAtomic, PendingStore, is_unused, perform
from .versions import GRANULE, MAX_VERSIONS, Version

if TYPE_CHECKING:
    from greenlet import greenlet

    from ..machine.block import Block, NamedBarrier
    from ..machine.warp import Collective


class DelayedThread(Thread):
    """A thread whose stores to global memory are delayed, and whose loads may be early."""

    __slots__ = ("buffer", "floor", "block_floor", "told", "heard", "heard_shared", "first_moment")

    def __init__(self, block: Block, thread_idx: int, warp: Warp, hub: greenlet):
        super().__init__(block, thread_idx, warp, hub)
        self.buffer: dict[PendingStore, None] = {}
        # Moments; see `versions`.
        self.first_moment = self.floor = self.block_floor = self.world.moment
        self.told = (0, 0)  # its floor at its last release or fence, and the moment of that
        self.heard = [0, 0, 0, 0]  # what relaxed loads have met, by how far away that was stored
        self.heard_shared = (0, 0)

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
                    return super().load(address, kind, order, scope)
            nbytes = allocation.loads[kind][2] + 1
            if offset % nbytes or offset + nbytes > allocation.nbytes:
                raise IndexError
        except FAULTS as fault:
            raise explain(self, address, kind, False, False, fault) from None
        if order == "nc" and allocation.writable:
            self.check_constant(allocation, offset, nbytes)
        data, unwritten, versions = self.look(allocation, offset, nbytes)
        if unwritten >= 0:
            message = f"load of {nbytes} bytes ({kind}) at {address:#x}: never written, as far as this thread sees"
            error = Uninitialized(f"{message}\n  in {allocation.cell(offset)}", *who_and_where(self))
            raise with_hole(error, self, allocation, offset, nbytes, order in POLLED)
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
            self.told = self.floor, self.world.moment
        try:
            allocation = self.segments[address >> 32]
            offset = address & 0xFFFFFFFF
            misfit = allocation.stores[kind][2]
            if offset & misfit or offset + misfit >= allocation.nbytes:
                raise IndexError
            data = encode(value, kind)
        except FAULTS as fault:
            raise explain(self, address, kind, True, False, fault) from None
        version = Version(self, offset, misfit + 1, order, scope, self.told[1])
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
        self.world.submit(store)
        return

    def atomic(
        self, op: str, address: int, kind: str, operand: Any, order: str, scope: str, compare: Any = None
    ) -> Any:
        """Atomics act on memory itself; a releasing one publishes first."""
        if self.left <= 0:
            self._count()
        if order in RELEASES:
            self.publish(SCOPES[scope])
            self.told = self.floor, self.world.moment
        allocation = self.segments.get(address >> 32)
        offset = address & 0xFFFFFFFF
        if allocation is None or allocation.freed or kind not in KINDS:
            return super().atomic(op, address, kind, operand, order, scope, compare)
        if order == "relaxed" and self.may_be_late(allocation, offset, kind) and is_unused(sys._getframe(1)):
            self.left -= 1
            version = Version(self, offset, KINDS[kind].size, order, scope, self.told[1])
            late = PendingAtomic(self, allocation, version, site_of(sys._getframe(1)), (op, kind, operand, compare))
            self.buffer[late] = None
            self.world.submit(late)
            return None
        for store in reversed(allocation.pending.get(offset // GRANULE, [])):
            if self.sees(store):
                store.commit()
                break
        nbytes = KINDS[kind].size
        version = Version(self, offset, nbytes, order, scope, self.told[1])
        version.keep(allocation)
        old = super().atomic(op, address, kind, operand, order, scope, compare)
        versions = allocation.versions.get(offset // GRANULE, [])
        said = self.hear(allocation, versions, offset, nbytes, order, scope)
        if op != "cas" or old == compare:
            version.says = max(version.says, said)  # it passes on what it has read
            version.arrive(allocation, self.next_moment())
        return old

    def may_be_late(self, allocation: Allocation, offset: int, kind: str) -> bool:
        """Whether an atomic would find nothing wrong now; memory of other processes and of the host is for `super`."""
        nbytes = KINDS[kind].size
        is_there = offset % nbytes == 0 and allocation.first_unwritten(offset, nbytes) < 0
        return is_there and not (allocation.shared or allocation.on_host or allocation.nc_reads)

    def _count(self) -> None:
        """Be switched here, not between looking at the buffers and acting; the access itself counts the call."""
        self.left -= 1
        self.pause()
        self.left += 1

    # --- what this thread sees ----------------------------------------------------------------------------------

    def stores_of(self, level: int) -> dict[PendingStore, None]:
        """Where this thread's stores on their way are noted that are visible on a level."""
        return self.buffer if level == 0 else self.block.stores if level == 1 else self.world.gpu_stores[self.rank]

    def sees(self, store: PendingStore) -> bool:
        """Whether a store that is not in memory yet is visible to this thread."""
        return (
            store.thread is self
            or (store.level >= 1 and store.thread.block is self.block)
            or (store.level >= 2 and store.thread.rank == self.rank)
        )

    def place_in(self, queue: list[PendingStore]) -> int:
        """Where a new store of this thread comes among those to the same 16 bytes: behind those that it sees."""
        least = len(queue)
        while least and not self.sees(queue[least - 1]):
            least -= 1
        return least if least == len(queue) else self.world.early.randint(least, len(queue))

    def knows(self, version: Version) -> bool:
        """Whether no load of this thread may miss a version that it sees."""
        if version.block == self.block.serial:
            return version.thread_idx == self.thread_idx or version.seen[1] <= max(self.floor, self.block_floor)
        return version.seen[2 if version.rank == self.rank else 3] <= self.floor

    def look(
        self, allocation: Allocation, offset: int, nbytes: int, is_early: bool = True
    ) -> tuple[bytearray, int, list[Version]]:
        """The bytes as this thread sees them, the offset of the first that is not written (-1: all are), and the
        versions of the last 16 bytes that are in them. Unless is_early they are the latest.
        """
        end = offset + nbytes
        if allocation.pending:
            perform([store for store in self.buffer if store.allocation is allocation])
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
        views, cell = self.block.views, (allocation, granule)
        last = views.get(cell)
        if last in versions[least:]:
            least = versions.index(last) + 1
        world = self.world
        if least < count and world.early.random() < world.early_rate:
            count = world.early.randrange(least, count)
        if count:
            views[cell] = versions[count - 1]
        return count

    def hear(
        self, allocation: Allocation, versions: list[Version], offset: int, nbytes: int, order: str, scope: str
    ) -> int:
        """A strong access has read bytes, in which these versions are; what they say is known now, or after a fence."""
        reach, away, said = SCOPES[scope], 1, 0
        for version in reversed(versions):
            if version.overlaps(offset, offset + nbytes):
                away = version.distance(self)
                said = version.says if min(version.reach, reach) >= away else 0
                break
        else:
            in_memory = allocation.versions.get(offset // GRANULE, [])
            if len(in_memory) == MAX_VERSIONS:  # it may be forgotten, and have said so much
                said = in_memory[0].seen[SCOPES["sys"]]
        if allocation.shared:
            said = self.world.moment
        elif not versions and offset // GRANULE in allocation.signals:  # the CPU's: it tells all that has arrived
            said, away = self.world.moment, SCOPES["sys"]
        if order in ACQUIRES:
            self.floor = max(self.floor, said, *self.heard[1 : reach + 1])
        else:
            self.heard[away] = max(self.heard[away], said)
        return said

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

    def next_moment(self) -> int:
        self.world.moment += 1
        return self.world.moment

    # --- what makes stores visible ------------------------------------------------------------------------------

    def publish(self, level: int) -> None:
        """Lift this thread's stores, and what its block and rank have published below that level, to `level`."""
        if level >= 1 and self.buffer:
            self._lift(self.buffer, 1, self.block.stores)
        if level >= 2 and self.block.stores:
            self._lift(self.block.stores, 2, self.world.gpu_stores[self.rank])
        if level >= 3:
            for store in list(self.world.gpu_stores[self.rank]):
                if not store.done:  # not with one before it
                    store.commit()

    def _lift(self, stores: dict[PendingStore, None], level: int, target: dict[PendingStore, None]) -> None:
        perform(stores)
        moment = self.next_moment()
        for store in stores:
            store.level = level
            store.version.lift(level, moment)
            target[store] = None
            store.show()
        stores.clear()

    def put_bytes(self, allocation: Allocation, offset: int, data: bytes, site: Site | None) -> None:
        """A bulk copy that is done is visible to its thread; to others as if the thread had stored the bytes."""
        if allocation is self.shared or allocation.freed:
            return super().put_bytes(allocation, offset, data, site)
        if allocation.nc_reads:
            self.check_nc(allocation, offset, len(data))
        for begin in range(0, len(data), GRANULE):
            piece = data[begin : begin + GRANULE]
            store = PendingStore(
                self, allocation, piece, Version(self, offset + begin, len(piece), "weak", "cta", 0), site
            )
            self.buffer[store] = None
            self.world.submit(store)
        return None

    # --- what orders loads besides ------------------------------------------------------------------------------

    def fence(self, order: str, scope: str) -> None:
        if order in RELEASES:
            self.publish(SCOPES[scope])
            self.floor = max(self.floor, self.heard_shared[0], *self.heard[1 : SCOPES[scope] + 1])
            self.block_floor = max(self.block_floor, self.heard_shared[1])
            self.told = self.floor, self.world.moment
        super().fence(order, scope)

    def store_shared(self, address: int, kind: str, value: Any, order: str) -> None:
        if order == "release":
            self.publish(1)
        super().store_shared(address, kind, value, order)
        self.tell_shared(address, order, modifies=False)

    def load_shared(self, address: int, kind: str, order: str) -> Any:
        value = super().load_shared(address, kind, order)
        if order in POLLED:
            self.hear_shared(address, order)
        return value

    def atomic_shared(self, op: str, address: int, kind: str, operand: Any, order: str, compare: Any = None) -> Any:
        if order in RELEASES:
            self.publish(1)
        old = super().atomic_shared(op, address, kind, operand, order, compare)
        self.hear_shared(address, order)
        if op != "cas" or old == compare:
            self.tell_shared(address, order, modifies=True)
        return old

    def tell_shared(self, address: int, order: str, modifies: bool) -> None:
        """A store to shared memory tells what its thread knows."""
        told = self.block.told
        if order == "weak":
            told.pop(address, None)
            return
        if order in RELEASES:
            self.told = self.floor, self.world.moment
        told[address] = later(self.told, told.get(address, (0, 0))) if modifies else self.told

    def hear_shared(self, address: int, order: str) -> None:
        said = later(self.heard_shared, self.block.told.get(address, (0, 0)))
        if order in ACQUIRES:
            self.learn(*said)
        else:
            self.heard_shared = said

    def learn(self, floor: int, block_floor: int) -> None:
        self.floor = max(self.floor, floor)
        self.block_floor = max(self.block_floor, block_floor)

    def converge(self, name: str, mask: int, value: Any, site: Site | None) -> Collective:
        if name == "syncwarp":
            self.publish(1)
            self.floor = max(self.floor, self.heard[1])
        collective = super().converge(name, mask, value, site)
        collective.known = max(collective.known or 0, self.floor)
        return collective

    def collect(self, name: str, mask: int, value: Any, site: Site | None) -> Collective:
        collective = super().collect(name, mask, value, site)
        if name == "syncwarp":
            self.learn(collective.known, self.world.moment)
        return collective

    def arrive(self, barrier_id: int, num_threads: int, wait: bool, predicate: bool = True) -> NamedBarrier:
        self.publish(1)
        self.floor = max(self.floor, self.heard[1])
        barrier = super().arrive(barrier_id, num_threads, wait, predicate)
        barrier.known = max(barrier.known or 0, self.floor)
        return barrier

    def meet(self, barrier_id: int, num_threads: int, predicate: bool) -> NamedBarrier:
        barrier = super().meet(barrier_id, num_threads, predicate)
        self.learn(barrier.known, self.world.moment)
        return barrier

    def mbarrier_arrive(self, address: int) -> None:
        self.publish(1)
        self._told(address)
        super().mbarrier_arrive(address)

    def mbarrier_arrive_expect_tx(self, address: int, nbytes: int) -> None:
        self.publish(1)
        self._told(address)
        super().mbarrier_arrive_expect_tx(address, nbytes)

    def _told(self, address: int) -> None:
        mbarrier = self.block.mbarriers.get(address)
        if mbarrier is not None:
            mbarrier.knowledge = max(mbarrier.knowledge or 0, self.floor, self.heard[1])

    def mbarrier_try_wait(self, address: int, parity: int) -> bool:
        done = super().mbarrier_try_wait(address, parity)
        mbarrier = self.block.mbarriers.get(address)
        if done and mbarrier is not None:
            self.learn(mbarrier.knowledge or 0, self.world.moment)
        return done


def later(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    return max(a[0], b[0]), max(a[1], b[1])
