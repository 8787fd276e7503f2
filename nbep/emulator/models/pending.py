"""What is on its way to memory under `delayed`: stores, and atomics whose results are not used; and older values of
cells: a load may return one as long as nothing orders it behind the store over it.

That is what a load does that is executed early, or that hits a stale line of a cache.  Each store to global memory is a
*version* of its 16 bytes.  Moments number the points at which versions become visible: to a block, a rank, everybody.
A thread has a floor, a moment up to which it knows all versions that it could see then, and one more for those of its
own block.  A load returns any version that is not older than one which its thread knows, nor than what its block has
read there before.

What raises the floor: an acquire that reads a released version, up to the moment of that release; a fence, for what
relaxed loads have read; a barrier, a syncwarp or an mbarrier, to the highest floor of those that meet; the start of a
kernel.  An acquire knows more then than PTX promises it, never less: all that anybody could see at the release.
"""

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
from ..machine.orders import ACQUIRES, RELEASES, SCOPES, WEAK
from ..machine.source import Site
from ..machine.thread import Thread
from ..machine.warp import Warp
from ..machine.world import SKIPPED

if TYPE_CHECKING:
    from greenlet import greenlet


MAX_VERSIONS = 8  # of 16 bytes; the oldest are forgotten
GRANULE = 16  # bytes within which stores arrive in order


class Version:
    """One store to at most 16 aligned bytes.

    rank, block, thread_idx: who stored; block is a number that no other block of the run has
    reach: of its scope; 0 for a weak one, which says nothing to who reads it
    says: the moment up to which who acquires it knows all versions
    seen: by level, the moment at which it became visible there, 0 if it is not yet
    before, written_before: the 16 bytes that were there, and which of them were written (None: all)
    """

    __slots__ = (
        "rank", "block", "thread_idx", "begin", "end", "reach", "says", "seen", "before", "written_before",
    )  # fmt: skip

    def __init__(self, thread: Any, begin: int, nbytes: int, order: str, scope: str, says: int):
        self.rank: int = thread.rank
        self.block: int = thread.block.serial
        self.thread_idx: int = thread.thread_idx
        self.begin = begin
        self.end = begin + nbytes
        self.reach = 0 if order in WEAK else SCOPES[scope]
        self.says = says if self.reach else 0
        self.seen = [0, 0, 0, 0]
        self.before = b""
        self.written_before: bytes | None = None

    def pass_on(self, said: Any) -> None:
        """It is that of an atomic, which also passes on what it has read."""
        self.says = max(self.says, said)

    def keep(self, allocation: Allocation) -> None:
        """Keep the bytes that it is about to change."""
        low = self.begin & -GRANULE
        self.before = bytes(allocation.memory[low : low + GRANULE])
        shadow = allocation.shadow
        self.written_before = None if shadow is None else bytes(shadow[low : low + GRANULE])

    def arrive(self, allocation: Allocation, moment: int) -> None:
        """It is in memory now, for everybody."""
        _, cta, gpu, sys = self.seen
        self.seen = [0, cta or moment, gpu or moment, sys or moment]
        granule = self.begin // GRANULE
        versions = allocation.versions.get(granule)
        if versions is None:
            allocation.versions[granule] = [self]
            return
        if len(versions) == MAX_VERSIONS:
            del versions[0]
        versions.append(self)

    def distance(self, thread: Thread) -> int:
        """The reach that an order needs between the two, and the level on which the thread sees it."""
        return 1 if self.block == thread.block.serial else 2 if self.rank == thread.rank else 3

    def overlaps(self, begin: int, end: int) -> bool:
        return self.begin < end and begin < self.end


class KnowingThread(Thread):
    """A thread, and up to which moments it knows the versions that others have stored."""

    __slots__ = ("floor", "block_floor", "last_release", "heard", "heard_shared", "first_moment")

    def __init__(self, block: Block, thread_idx: int, warp: Warp, hub: greenlet):
        super().__init__(block, thread_idx, warp, hub)
        self.first_moment = self.floor = self.block_floor = self.world.moment
        self.last_release = (0, 0)  # its floor at its last release or fence, and the moment of that
        self.heard = [0, 0, 0, 0]  # what relaxed loads have met, by how far away that was stored
        self.heard_shared = (0, 0)

    def new_version(self, allocation: Allocation, offset: int, nbytes: int, order: str, scope: str) -> Version:
        return Version(self, offset, nbytes, order, scope, self.last_release[1])

    def next_moment(self) -> int:
        self.world.moment += 1
        return self.world.moment

    def knows(self, version: Version) -> bool:
        """Whether no load of this thread may miss a version that it sees."""
        if version.block == self.block.serial:
            return version.thread_idx == self.thread_idx or version.seen[1] <= max(self.floor, self.block_floor)
        return version.seen[2 if version.rank == self.rank else 3] <= self.floor

    def hear(
        self, allocation: Allocation, versions: list[Version], offset: int, nbytes: int, order: str, scope: str
    ) -> Any:
        """A strong access has read bytes, in which these versions are; what they say is known now, or after a fence."""
        reach, away, said, end = SCOPES[scope], 1, 0, offset + nbytes
        for version in reversed(versions):
            if version.begin < end and offset < version.end:
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

    def hear_late(self, allocation: Allocation, versions: list[Version], offset: int, nbytes: int, scope: str) -> Any:
        """The same where a relaxed atomic arrives whose old value nobody uses."""
        return self.hear(allocation, versions, offset, nbytes, "relaxed", scope)

    def tell_shared(self, address: int, nbytes: int, order: str, modifies: bool) -> None:
        """A store to shared memory tells what its thread knows."""
        releases = self.block.shared_releases
        if order == "weak":
            releases.pop(address, None)
            return
        if order in RELEASES:
            self.last_release = self.floor, self.world.moment
        releases[address] = later(self.last_release, releases.get(address, (0, 0))) if modifies else self.last_release

    def hear_shared(self, address: int, nbytes: int, order: str) -> None:
        said = later(self.heard_shared, self.block.shared_releases.get(address, (0, 0)))
        if order in ACQUIRES:
            self.learn(*said)
        else:
            self.heard_shared = said

    def with_own(self, known: Any, heard: int = 0) -> Any:
        """What those who meet know, and this thread."""
        floor = self.floor if self.floor > heard else heard
        return floor if known is None or floor > known else known

    def learn(self, floor: Any, block_floor: int) -> None:
        if floor > self.floor:
            self.floor = floor
        if block_floor > self.block_floor:
            self.block_floor = block_floor


def later(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    return max(a[0], b[0]), max(a[1], b[1])


# Stores and atomics on their way


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
        for store in list(stores):
            if store.done:  # who polls has let an atomic arrive, and this one before it
                continue
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
