"""Older values of cells, for `delayed`: a load may return one as long as nothing orders it behind the store over it.

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

from typing import TYPE_CHECKING, Any

from ..machine.block import Block
from ..machine.memory import Allocation
from ..machine.orders import ACQUIRES, RELEASES, SCOPES, WEAK
from ..machine.thread import Thread
from ..machine.warp import Warp

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
