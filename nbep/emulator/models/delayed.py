"""The memory model "delayed": a store is seen by others as late as its order allows.

A store of less than release order to global memory waits in a buffer.  Who sees it already, by its level:

    0 thread   the thread that stored
    1 block    its block: after a barrier or syncwarp, or a release of scope cta
    2 gpu      its rank: after a release of scope gpu
    3 sys      everybody: the bytes are in memory

A release lifts what its thread stored, and what the thread can know of its block's and its GPU's stores (cumulativity),
to the level of its scope before it is seen itself.  Without one, stores arrive at random later steps in random order,
but in order within 16 aligned bytes.  So a tail that is published relaxed overtakes its payload under some seed.
A bulk store goes the same way from where it is done: waiting for it makes it visible to its own thread alone.
Loads are never early, so a missing acquire does not show: that is for `checked`.  A kernel is done when all its stores
have arrived.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from ..machine.access import FAULTS, wake_watchers
from ..machine.kinds import decode, encode
from ..machine.memory import Allocation
from ..machine.thread import FULL_MASK, Thread
from ..machine.warp import Warp
from ..reports.errors import Uninitialized
from ..reports.faults import error_at, explain
from ..reports.source import Site, site_of
from ..schedule.scheduler import SKIPPED
from .orders import POLLED, RELEASES, SCOPES

if TYPE_CHECKING:
    from greenlet import greenlet

    from ..machine.block import Block

GRANULE = 16  # bytes within which stores arrive in order


class PendingStore:
    """A store on its way to memory.  Called by the scheduler, it arrives."""

    __slots__ = ("thread", "allocation", "offset", "data", "order", "site", "level", "done")

    def __init__(
        self, thread: DelayedThread, allocation: Allocation, offset: int, data: bytes, order: str, site: Site | None
    ):
        self.thread = thread
        self.allocation = allocation
        self.offset = offset
        self.data = data
        self.order = order
        self.site = site
        self.level = 0
        self.done = False
        allocation.pending.setdefault(offset >> 4, []).append(self)
        thread.block.launch.stores[self] = None

    def __call__(self) -> object:
        if self.done:
            return SKIPPED
        self.commit()
        return None

    def commit(self) -> None:
        """Write to memory, after the earlier stores to the same 16 bytes."""
        if self.done:
            return
        granule = self.offset >> 4
        queue = self.allocation.pending[granule]
        first = None
        while first is not self:
            first = queue.pop(0)
            first._arrive()
        if not queue:
            del self.allocation.pending[granule]

    def _arrive(self) -> None:
        self.done = True
        thread, allocation, offset = self.thread, self.allocation, self.offset
        launch = thread.block.launch
        del launch.stores[self]
        for stores in (thread.buffer, thread.block.stores, thread.world.gpu_stores[thread.rank]):
            stores.pop(self, None)
        if not allocation.freed:
            self._write(thread, allocation, offset)
        if not launch.stores:
            launch.check_done()

    def _write(self, thread: DelayedThread, allocation: Allocation, offset: int) -> None:
        allocation.memory[offset : offset + len(self.data)] = self.data
        allocation.mark_written(offset, len(self.data))
        if self.order != "weak":
            allocation.writers[offset] = (thread.block.name, thread.thread_idx, self.site)
        self.show()

    def show(self) -> None:
        """Wake the threads that poll these bytes, if they see a change."""
        allocation, offset = self.allocation, self.offset
        if allocation.watchers:
            for granule in range(offset >> 3, (offset + len(self.data) + 7) >> 3):
                if granule in allocation.watchers:
                    allocation.writers[offset] = (self.thread.block.name, self.thread.thread_idx, self.site)
                    wake_watchers(allocation, granule)


class DelayedThread(Thread):
    """A thread whose stores to global memory are delayed."""

    __slots__ = ("buffer",)

    def __init__(self, block: Block, thread_idx: int, warp: Warp, hub: greenlet):
        super().__init__(block, thread_idx, warp, hub)
        self.buffer: dict[PendingStore, None] = {}

    # --- accesses -----------------------------------------------------------------------------------------------

    def load(self, address: int, kind: str, order: str, scope: str) -> Any:
        self._count()
        try:
            allocation = self.segments[address >> 32]
            offset = address & 0xFFFFFFFF
            if offset >> 4 not in allocation.pending:
                return super().load(address, kind, order, scope)
            misfit = allocation.loads[kind][2]
            if offset & misfit or offset + misfit >= allocation.nbytes:
                raise IndexError
        except FAULTS as fault:
            raise explain(self, address, kind, False, False, fault) from None
        data, unwritten = self.visible(allocation, offset, misfit + 1)
        if unwritten >= 0:
            message = f"load of {misfit + 1} bytes ({kind}) at {address:#x}: never written, as far as this thread sees"
            raise error_at(self, Uninitialized, f"{message}\n  in {allocation.cell(offset)}")
        value = decode(data, kind)
        self.left -= 1
        if order in POLLED:
            self.polled[allocation, offset] = (allocation, offset, kind, value)
        elif order == "nc":
            self.note_nc(allocation, offset, misfit + 1)
        return value

    def store(self, address: int, kind: str, value: Any, order: str, scope: str) -> None:
        self._count()
        level = SCOPES[scope] if order == "release" else 0
        self.publish(level)
        if level == SCOPES["sys"]:
            return super().store(address, kind, value, order, scope)
        self.left -= 1
        try:
            allocation = self.segments[address >> 32]
            offset = address & 0xFFFFFFFF
            misfit = allocation.stores[kind][2]
            if offset & misfit or offset + misfit >= allocation.nbytes:
                raise IndexError
            data = encode(value, kind)
        except FAULTS as fault:
            raise explain(self, address, kind, True, False, fault) from None
        site = None if order == "weak" else site_of(sys._getframe(1))
        store = PendingStore(self, allocation, offset, data, order, site)
        self.buffer[store] = None
        if allocation.nc_reads:
            self.check_nc(allocation, offset, misfit + 1)
        if level:
            self.publish(level)
        self.world.submit(store)
        return None

    def atomic(
        self, op: str, address: int, kind: str, operand: Any, order: str, scope: str, compare: Any = None
    ) -> Any:
        """Atomics act on memory itself; a releasing one publishes first."""
        self._count()
        if order in RELEASES:
            self.publish(SCOPES[scope])
        allocation = self.segments.get(address >> 32)
        if allocation is not None:
            for store in reversed(allocation.pending.get((address & 0xFFFFFFFF) >> 4, [])):
                if self.sees(store):
                    store.commit()
                    break
        return super().atomic(op, address, kind, operand, order, scope, compare)

    def _count(self) -> None:
        """Be switched here, not between looking at the buffers and acting; the access itself counts the call."""
        self.left -= 1
        if self.left < 0:
            self.pause()
        self.left += 1

    # --- what this thread sees ----------------------------------------------------------------------------------

    def sees(self, store: PendingStore) -> bool:
        """Whether a store that is not in memory yet is visible to this thread."""
        return (
            store.thread is self
            or (store.level >= 1 and store.thread.block is self.block)
            or (store.level >= 2 and store.thread.rank == self.rank)
        )

    def visible(self, allocation: Allocation, offset: int, nbytes: int) -> tuple[bytearray, int]:
        """The bytes as this thread sees them, and the offset of the first that is not written (-1: all are)."""
        data = bytearray(allocation.memory[offset : offset + nbytes])
        shadow = allocation.shadow
        written = bytearray(b"\1" * nbytes if shadow is None else shadow[offset : offset + nbytes])
        for granule in range(offset >> 4, (offset + nbytes + 15) >> 4):
            for store in allocation.pending.get(granule, ()):
                if self.sees(store):
                    for i, byte in enumerate(store.data, store.offset - offset):
                        if 0 <= i < nbytes:
                            data[i] = byte
                            written[i] = 1
        hole = written.find(0)
        return data, hole if hole < 0 else offset + hole

    def peek(self, allocation: Allocation, offset: int, kind: str) -> Any:
        if offset >> 4 not in allocation.pending:
            return allocation.read(offset, kind)
        return decode(self.visible(allocation, offset, allocation.loads[kind][2] + 1)[0], kind)

    def peek_bytes(self, allocation: Allocation, offset: int, nbytes: int, site: Site | None) -> bytes:
        if not allocation.pending or allocation.freed:
            return super().peek_bytes(allocation, offset, nbytes, site)
        data, unwritten = self.visible(allocation, offset, nbytes)
        return super().peek_bytes(allocation, offset, nbytes, site) if unwritten >= 0 else bytes(data)

    # --- what makes stores visible ------------------------------------------------------------------------------

    def publish(self, level: int) -> None:
        """Lift this thread's stores, and what its block and rank have published below that level, to `level`."""
        if level >= 1 and self.buffer:
            self._lift(self.buffer, 1, self.block.stores)
        if level >= 2 and self.block.stores:
            self._lift(self.block.stores, 2, self.world.gpu_stores[self.rank])
        if level >= 3:
            for store in list(self.world.gpu_stores[self.rank]):
                store.commit()

    def _lift(self, stores: dict[PendingStore, None], level: int, target: dict[PendingStore, None]) -> None:
        for store in stores:
            store.level = level
            target[store] = None
            store.show()
        stores.clear()

    def store_shared(self, address: int, kind: str, value: Any, order: str) -> None:
        if order == "release":
            self.publish(1)
        super().store_shared(address, kind, value, order)

    def atomic_shared(self, op: str, address: int, kind: str, operand: Any, order: str, compare: Any = None) -> Any:
        if order in RELEASES:
            self.publish(1)
        return super().atomic_shared(op, address, kind, operand, order, compare)

    def put_bytes(self, allocation: Allocation, offset: int, data: bytes, site: Site | None) -> None:
        """A bulk copy that is done is visible to its thread; to others as if the thread had stored the bytes."""
        if allocation is self.shared or allocation.freed:
            return super().put_bytes(allocation, offset, data, site)
        if allocation.nc_reads:
            self.check_nc(allocation, offset, len(data))
        for begin in range(0, len(data), GRANULE):
            piece = data[begin : begin + GRANULE]
            store = PendingStore(self, allocation, offset + begin, piece, "weak", site)
            self.buffer[store] = None
            self.world.submit(store)
        return None

    def fence(self, order: str, scope: str) -> None:
        if order in RELEASES:
            self.publish(SCOPES[scope])
        super().fence(order, scope)

    def syncwarp(self, mask: int = FULL_MASK) -> None:
        self.publish(1)
        super().syncwarp(mask)

    def barrier(self, barrier_id: int, num_threads: int, predicate: bool = True) -> bool:
        self.publish(1)
        return super().barrier(barrier_id, num_threads, predicate)

    def barrier_arrive(self, barrier_id: int, num_threads: int) -> None:
        self.publish(1)
        super().barrier_arrive(barrier_id, num_threads)

    def mbarrier_arrive(self, address: int) -> None:
        self.publish(1)
        super().mbarrier_arrive(address)

    def mbarrier_arrive_expect_tx(self, address: int, nbytes: int) -> None:
        self.publish(1)
        super().mbarrier_arrive_expect_tx(address, nbytes)
