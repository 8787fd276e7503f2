"""What is on its way to memory under `delayed`: stores, and atomics whose results are not used."""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterable
from functools import lru_cache
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

from ..machine.access import OPS, wake_watchers
from ..machine.block import Block
from ..machine.kinds import encode
from ..machine.memory import Allocation
from ..machine.source import Site
from ..machine.warp import Warp
from ..machine.world import SKIPPED
from .versions import GRANULE, KnowingThread, Version

if TYPE_CHECKING:
    from greenlet import greenlet


class PendingStore:
    """A store on its way to memory.  Called by the scheduler, it arrives."""

    __slots__ = ("thread", "allocation", "offset", "data", "site", "level", "done", "version")

    def __init__(
        self, thread: BufferedThread, allocation: Allocation, data: bytes, version: Version, site: Site | None
    ):
        self.thread = thread
        self.allocation = allocation
        self.offset = offset = version.begin
        self.data = data
        self.version = version
        self.site = site
        self.level = 0
        self.done = False
        queue = allocation.pending.get(offset >> 4)
        if queue is None:
            allocation.pending[offset >> 4] = [self]
        else:
            queue.insert(thread.place_in(queue), self)
        thread.block.launch.stores[self] = None

    def __call__(self) -> object:
        if self.done:
            return SKIPPED
        self.commit()
        return None

    def commit(self) -> None:
        """Write to memory, after the earlier stores to the same 16 bytes."""
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
        del (thread.stores_of(self.level) if self.level else thread.buffer)[self]
        if not allocation.freed:
            self._write(thread, allocation, offset)
        if not launch.stores:
            launch.check_done()

    def _write(self, thread: BufferedThread, allocation: Allocation, offset: int) -> None:
        if self.version.reach:
            value = int.from_bytes(self.data, sys.byteorder, signed=True)
            thread.note_writer(allocation, offset, f"s{8 * len(self.data)}", value, self.site)
        self.version.keep(allocation)
        self.version.arrive(allocation, thread.next_moment())
        allocation.memory[offset : offset + len(self.data)] = self.data
        if allocation.shadow is not None:
            allocation.mark_written(offset, len(self.data))
        if allocation.watchers:
            self.show()

    def show(self) -> None:
        """Wake the threads that poll these bytes, if they see a change."""
        allocation, offset = self.allocation, self.offset
        for granule in range(offset >> 3, (offset + len(self.data) + 7) >> 3):
            if granule in allocation.watchers:
                allocation.writers[offset] = (self.thread.block.name, self.thread.thread_idx, self.site)
                wake_watchers(allocation, granule)


class PendingAtomic(PendingStore):
    """A relaxed atomic on its way: it is performed when it arrives, and before its thread looks there or releases."""

    __slots__ = ("change",)

    def __init__(
        self,
        thread: BufferedThread,
        allocation: Allocation,
        version: Version,
        site: Site | None,
        change: tuple[str, str, Any, Any],
    ):
        super().__init__(thread, allocation, bytes(version.end - version.begin), version, site)
        self.change = change

    def _write(self, thread: BufferedThread, allocation: Allocation, offset: int) -> None:
        op, kind, operand, compare = self.change
        version, versions = self.version, allocation.versions.get(offset // 16, [])
        self.data = encode(OPS[op](allocation.read(offset, kind), operand, compare), kind)
        # Whoever knows more shows less, so it does no harm that the thread has then heard what it passes on.
        scope = "cta", "gpu", "sys"
        said = thread.hear_late(allocation, versions, offset, len(self.data), scope[version.reach - 1])
        version.pass_on(said)
        super()._write(thread, allocation, offset)


class BufferedThread(KnowingThread):
    """A thread whose stores wait in a buffer until they are seen, by a level of threads or by all."""

    __slots__ = ("buffer",)

    def __init__(self, block: Block, thread_idx: int, warp: Warp, hub: greenlet):
        super().__init__(block, thread_idx, warp, hub)
        self.buffer: dict[PendingStore, None] = {}

    def stores_of(self, level: int) -> dict[PendingStore, None]:
        """Where this thread's stores on their way are noted that are visible on a level."""
        return self.buffer if level == 0 else self.block.stores if level == 1 else self.world.gpu_stores[self.rank]

    def perform_in(self, allocation: Allocation) -> None:
        """Let those of its atomics arrive that are on their way to an allocation."""
        if self.buffer:
            perform([store for store in self.buffer if store.allocation.identity is allocation.identity])

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
        return least if least == len(queue) else self.pick_place(least, len(queue))

    def pick_place(self, least: int, most: int) -> int:
        return self.world.early.randint(least, most)

    def send_off(self, store: PendingStore) -> None:
        """A store is on its way from now on."""
        self.world.submit(store)

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
            store.version.seen[level] = store.version.seen[level] or moment
            target[store] = None
            if store.allocation.watchers:
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
            version = self.new_version(allocation, offset + begin, len(piece), "weak", "cta")
            store = PendingStore(self, allocation, piece, version, site)
            self.buffer[store] = None
            self.send_off(store)
        return None


def perform(stores: Iterable[PendingStore]) -> None:
    """Let the atomics among some stores arrive."""
    for store in list(stores):
        if isinstance(store, PendingAtomic) and not store.done:
            store.commit()


def is_unused(frame: FrameType | None) -> bool:
    """Whether a function that a frame calls now returns a value that is not used, through any that only pass it on."""
    while frame is not None:
        following = _following(frame.f_code, frame.f_lasti)
        if following != "RETURN_VALUE":
            return following == "POP_TOP"
        frame = frame.f_back
    return False


@lru_cache(maxsize=4096)
def _following(code: CodeType, offset: int) -> str:
    """The name of the instruction behind an offset: a call that is under way has caches behind it."""
    return next((one.opname for one in dis.get_instructions(code) if one.offset > offset), "")
