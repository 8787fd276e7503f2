"""Bulk asynchronous copies between shared and global memory, and the mbarriers they complete on.

A copy happens at a later step that the seed chooses; until then the old bytes are there.  A bulk store reads its shared
memory at one step and writes global memory at another, so that storing to the stage too early is seen.

The copy engine reads shared memory through another proxy than ordinary stores write it.  A bulk store is an error when
an ordinary store to its source has no `fence.proxy.async` behind it, by the thread that stored or by the one that
issues the copy.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from . import errors
from .access import AccessingThread, wake_watchers
from .errors import EmulatorError
from .faults import Hole, NoSegment, error_at
from .memory import OFFSET_BITS, OFFSET_MASK, Allocation
from .source import Site, describe_site, site_of
from .world import NEVER

if TYPE_CHECKING:
    from .block import Block
    from .thread import Thread

ALIGNMENT = 16


class MBarrier:
    """An mbarrier: phases that end when `count` arrivals have come and all expected bytes are there.

    It passes for an Allocation of one cell, its phase, so that threads wait for it as for any polled cell.
    """

    freed = False
    number = 0
    pending: dict[int, list[Any]] = {}  # noqa: RUF012 - never filled

    def __init__(self, block: Block, address: int, count: int):
        self.block = block
        self.address = address
        self.count = count
        self.arrivals_left = count
        self.tx_bytes = 0
        self.phase = 0
        self.phases = 0  # that are over
        self.last: Any = None  # who has arrived last
        self.watchers: dict[int, dict[Thread, None]] = {}
        self.writers: dict[int, Any] = {}
        # For `checked`: what those know who have arrived, and what the copies have done that are there; and so much of
        # both as belongs to phases that are over.
        self.knowledge: Any = None
        self.copies: list[Any] = []
        self.phase_knowledge: Any = None
        self.done: list[Any] = []

    def read(self, offset: int, kind: str) -> int:
        return self.phase

    def update(self, arrivals: int, tx_bytes: int) -> None:
        """Count arrivals, and bytes expected (positive) or arrived (negative)."""
        self.arrivals_left -= arrivals
        self.tx_bytes += tx_bytes
        if self.arrivals_left == 0 and self.tx_bytes == 0:
            self.phase ^= 1
            self.phases += 1
            self.arrivals_left = self.count
            self.phase_knowledge = self.knowledge
            self.done += self.copies
            self.copies = []
            wake_watchers(self, 0)  # type: ignore[arg-type]

    def cell(self, offset: int) -> str:
        return (
            f"the mbarrier at shared byte {self.address}, whose phase {self.phase} still lacks "
            f"{self.arrivals_left} of {self.count} arrivals and {self.tx_bytes} bytes"
        )


class BulkGroup:
    """The bulk stores of one thread between two commits. clock: of those that are done, with weak memory as choices"""

    __slots__ = ("reads", "writes", "clock")

    def __init__(self) -> None:
        self.reads = 0
        self.writes = 0
        self.clock: dict[Any, int] = {}


class BulkState:
    """A thread's bulk groups: the open one, and the committed ones in order; `wanted` is what it waits for."""

    __slots__ = ("open", "committed", "wanted")

    def __init__(self) -> None:
        self.open = BulkGroup()
        self.committed: deque[BulkGroup] = deque()
        self.wanted: tuple[int, bool] | None = None

    def satisfied(self, n: int, read_only: bool) -> bool:
        """Whether all but the `n` latest groups are done (`read_only`: have read their source)."""
        while self.committed and not self.committed[0].writes:
            self.committed.popleft()
        older = list(self.committed)[: max(len(self.committed) - n, 0)]
        return not any(group.reads if read_only else group.writes for group in older)

    def unread(self) -> bool:
        return bool(self.open.reads) or any(group.reads for group in self.committed)


class Copy(NamedTuple):
    """A bulk copy under way: from where, to where; what reads its bytes, writes them, and says that it is done."""

    source: Allocation
    begin: int
    target: Allocation
    to: int
    nbytes: int
    take: Callable[[], bytes]
    put: Callable[[bytes], None]
    done: Callable[[], None]

    def happen(self) -> None:
        self.finish(self.take())

    def finish(self, data: bytes) -> None:
        self.put(data)
        self.done()


class CopyingThread(AccessingThread):
    """A thread that can command the copy engine."""

    __slots__ = ()

    # --- mbarriers ----------------------------------------------------------------------------------------------

    def mbarrier_init(self, address: int, count: int) -> None:
        """Make an mbarrier of 8 shared bytes, in phase 0."""
        self._step()
        if address % 8 or not 0 <= address <= self.shared.nbytes - 8:
            where = f"8 aligned bytes inside the {self.shared.nbytes} bytes of shared memory"
            raise error_at(self, errors.Misaligned, f"mbarrier at {address:#x}: must be {where}")
        if count < 1:
            raise error_at(self, EmulatorError, f"mbarrier at {address:#x} with count {count}: must be at least 1")
        self.block.mbarriers[address] = MBarrier(self.block, address, count)

    def mbarrier_inval(self, address: int) -> None:
        """Give the 8 bytes back."""
        self._mbarrier(address)
        del self.block.mbarriers[address]

    def mbarrier_arrive(self, address: int) -> None:
        """Arrive once."""
        self.mbarrier_arrive_expect_tx(address, 0)

    def mbarrier_arrive_expect_tx(self, address: int, nbytes: int) -> None:
        """Expect `nbytes` more bytes in this phase, and arrive once."""
        mbarrier = self._mbarrier(address)
        mbarrier.last = self
        self.arrive_at(mbarrier, nbytes)

    def arrive_at(self, mbarrier: MBarrier, nbytes: int) -> None:
        """Count an arrival, and bytes that are expected."""
        mbarrier.update(1, nbytes)

    def mbarrier_try_wait(self, address: int, parity: int) -> bool:
        """Whether the phase of `parity` is complete.  Waits for that, within the limit of the hardware's patience."""
        mbarrier = self._mbarrier(address)
        if mbarrier.phase != parity & 1:
            self.hear_phase(mbarrier)
            return True
        cell: Any = (mbarrier, 0, "phase", mbarrier.phase)
        # Out of patience once, it says so; asked again without a spin() in between, it waits for good.
        deadline = NEVER if self.waited_once else 0
        self.waited_once = True
        if self.watch([cell], deadline) or not self.changed([cell]):
            self.polled[cell[0], 0] = cell
            return False
        self.waited_once = False
        self.hear_phase(mbarrier)
        return True

    def hear_phase(self, mbarrier: MBarrier) -> None:
        """A phase is over, as this thread has seen."""

    def _mbarrier(self, address: int) -> MBarrier:
        self._step()
        mbarrier = self.block.mbarriers.get(address)
        if mbarrier is None:
            raise error_at(self, errors.Uninitialized, f"no mbarrier at shared byte {address}: not initialised")
        return mbarrier

    def _step(self) -> None:
        self.left -= 1
        if self.left < 0:
            self.pause()

    # --- copies -------------------------------------------------------------------------------------------------

    def bulk_load(self, smem: int, gmem: int, nbytes: int, mbarrier: int) -> None:
        """Start a copy from global to shared memory; its bytes count on `mbarrier` when they are there."""
        target = self._mbarrier(mbarrier)
        source, offset = self._global_range(gmem, nbytes, storing=False)
        self._shared_range(smem, nbytes)
        site = site_of(sys._getframe(1))
        launch = self.block.launch
        launch.copies += 1

        def take() -> bytes:
            return self.peek_bytes(source, offset, nbytes, site)

        def put(data: bytes) -> None:
            self.put_bytes(self.shared, smem, data, site)

        def done() -> None:
            target.update(0, -nbytes)
            launch.copies -= 1
            launch.check_done()

        self.await_load(Copy(source, offset, self.shared, smem, nbytes, take, put, done), target)

    def await_load(self, load: Copy, mbarrier: MBarrier) -> None:
        """A bulk load is under way: let it be there later."""
        self.world.submit(load.happen)

    def bulk_store(self, gmem: int, smem: int, nbytes: int) -> None:
        """Start a copy from shared to global memory, in this thread's open bulk group."""
        self._step()
        target, offset = self._global_range(gmem, nbytes, storing=True)
        self._shared_range(smem, nbytes)
        self._check_fenced(smem, nbytes)
        site = site_of(sys._getframe(1))
        launch = self.block.launch
        launch.copies += 1
        state = self._bulk_state()
        group = state.open
        group.reads += 1
        group.writes += 1

        def take() -> bytes:
            data = self.peek_bytes(self.shared, smem, nbytes, site)
            group.reads -= 1
            self._bulk_progress(state)
            return data

        def put(data: bytes) -> None:
            self.put_bytes(target, offset, data, site)

        def done() -> None:
            group.writes -= 1
            self._bulk_progress(state)
            launch.copies -= 1
            launch.check_done()

        self.await_store(Copy(self.shared, smem, target, offset, nbytes, take, put, done), group)

    def await_store(self, store: Copy, group: BulkGroup) -> None:
        """A bulk store is under way: let it read its source at one step, and write at another."""

        def read() -> None:
            self.world.submit(partial(store.finish, store.take()))

        self.world.submit(read)

    def bulk_commit_group(self) -> None:
        """Close the open bulk group."""
        self._step()
        state = self._bulk_state()
        state.committed.append(state.open)
        state.open = BulkGroup()

    def bulk_wait_group(self, n: int) -> None:
        """Wait until all but the `n` latest bulk groups have written global memory."""
        self._wait_group(n, False)

    def bulk_wait_group_read(self, n: int) -> None:
        """Wait until all but the `n` latest bulk groups have read shared memory."""
        self._wait_group(n, True)

    def fence_proxy_async(self) -> None:
        """Order ordinary shared-memory stores before the copies that follow."""
        self._step()
        self.block.proxy_fences += 1
        self.fenced = self.block.proxy_fences

    def fence_proxy_async_global(self) -> None:
        """Order global memory that this thread has seen before the copies that follow: checked by `checked` alone."""
        self._step()

    def leave(self) -> None:
        if self.bulk is not None and self.bulk.unread():
            message = "a thread leaves the kernel while its bulk stores may still read shared memory"
            raise error_at(self, EmulatorError, f"{message}: wait_group.read is missing")
        super().leave()

    def peek_bytes(self, allocation: Allocation, offset: int, nbytes: int, site: Site | None) -> bytes:
        """The source of a copy, when the engine reads it."""
        if allocation.freed:
            message = f"a bulk copy reads `{allocation.name}` of rank {allocation.rank}, which is freed"
            raise errors.UseAfterFree(message, self.describe(), describe_site(site))
        unwritten = allocation.first_unwritten(offset, nbytes)
        if unwritten >= 0:
            message = f"a bulk copy of {nbytes} bytes reads {allocation.cell(unwritten)}, never written"
            hole = Hole(self, allocation, offset, nbytes)
            raise errors.Uninitialized(message, self.describe(), describe_site(site), hole)
        return bytes(allocation.memory[offset : offset + nbytes])

    def put_bytes(self, allocation: Allocation, offset: int, data: bytes, site: Site | None) -> None:
        """The destination of a copy, when the engine writes it."""
        if allocation.freed:
            message = f"a bulk copy writes `{allocation.name}` of rank {allocation.rank}, which is freed"
            raise errors.UseAfterFree(message, self.describe(), describe_site(site))
        if allocation.nc_reads:
            self.check_nc(allocation, offset, len(data))
        allocation.memory[offset : offset + len(data)] = data
        allocation.mark_written(offset, len(data))
        if allocation.watchers:
            self.notify(allocation, offset, len(data), site)

    def _bulk_state(self) -> BulkState:
        if self.bulk is None:
            self.bulk = BulkState()
        return self.bulk

    def _wait_group(self, n: int, read_only: bool) -> None:
        self._step()
        state = self._bulk_state()
        if not state.satisfied(n, read_only):
            state.wanted = (n, read_only)
            self.waits_for = "its bulk stores to read shared memory" if read_only else "its bulk stores to complete"
            self.park()

    def _bulk_progress(self, state: BulkState) -> None:
        if state.wanted is not None and state.satisfied(*state.wanted):
            state.wanted = None
            self.runnable.append(self)

    def _global_range(self, address: int, nbytes: int, storing: bool) -> tuple[Allocation, int]:
        """The allocation behind a global address, after checking that a copy may touch the range."""
        verb = "bulk store to" if storing else "bulk load from"
        allocation = self.segments.get(address >> OFFSET_BITS)
        if allocation is None or allocation.freed:
            raise self.world.error_of(NoSegment(self, address, f"{verb} {address:#x}"))
        offset = address & OFFSET_MASK
        self._check_range(allocation, offset, nbytes, f"{verb} {allocation.cell(offset)}")
        if storing and not allocation.writable:
            raise error_at(self, errors.ReadOnly, f"{verb} {allocation.cell(offset)}: an input of the host")
        return allocation, offset

    def _shared_range(self, address: int, nbytes: int) -> None:
        self._check_range(self.shared, address, nbytes, f"bulk copy at shared byte {address}")

    def _check_range(self, allocation: Allocation, offset: int, nbytes: int, what: str) -> None:
        if offset % ALIGNMENT or nbytes % ALIGNMENT or nbytes <= 0:
            message = f"{what}, {nbytes} bytes: address and size must be multiples of {ALIGNMENT}"
            raise error_at(self, errors.Misaligned, message)
        if not allocation.lowest <= offset <= allocation.nbytes - nbytes:
            there = allocation.nbytes - allocation.lowest
            message = f"{what}, {nbytes} bytes: out of bounds, the allocation has {there} bytes"
            raise error_at(self, errors.OutOfBounds, message)

    def _check_fenced(self, smem: int, nbytes: int) -> None:
        """Stop the run when an ordinary store to the source has no proxy fence behind it."""
        unfenced = self.shared.unfenced
        for granule in range(smem >> 4, (smem + nbytes) >> 4):
            last = unfenced.pop(granule, None)
            if last is not None and last[1] >= max(self.block.threads[last[0]].fenced, self.fenced):
                message = f"bulk store of {nbytes} bytes at shared byte {smem}: byte {granule * 16} was stored by "
                message += f"thread {last[0]} with no fence.proxy.async since"
                raise error_at(self, errors.ProxyFence, message)
