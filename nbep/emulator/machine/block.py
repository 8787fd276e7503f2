"""Thread blocks: named barriers, shared memory, and what happens when a thread leaves.

A barrier releases all its waiters at once when the last expected thread arrives.  A barrier that can no longer fill,
because too many threads have left the kernel, is reported at once instead of hanging.

In a launch with `by_ptx` threads meet as PTX has it: none waits at a barrier of the whole block, or in a collective
of a warp, for threads that have left, and lanes may come to a collective from different lines.  Without it the rules
are stricter, and find more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import errors
from .faults import NeverFull, error_at
from .memory import Allocation
from .names import name_of, ranges

if TYPE_CHECKING:
    from .bulk import MBarrier
    from .stream import Launch
    from .thread import Thread
    from .warp import Warp

WARP_SIZE = 32
NUM_BARRIERS = 16
MANY_BLOCKS = 1 << 14  # of a launch: it does not keep those that have left


class NamedBarrier:
    """One phase of `bar.sync id, expected`."""

    __slots__ = (
        "number", "expected", "arrived", "waiting", "passed", "is_full", "holds", "knowledge", "signals", "known",
        "clock",
    )  # fmt: skip

    def __init__(self, number: int, expected: int):
        self.number = number
        self.expected = expected
        self.arrived: list[int] = []  # thread indices, with those of bar.arrive
        self.waiting: list[Thread] = []
        self.passed: set[int] = set()  # those of bar.arrive
        self.is_full = False
        self.holds = True  # the predicates of all threads so far
        # For `checked`: what those who have arrived know and have signalled, and what all know then.
        self.knowledge: list[Any] = []
        self.signals: dict[int, int] = {}
        self.known: Any = None
        self.clock: Any = {}  # of those who have arrived; see `every`


class Block:
    """The threads that share a barrier set and a shared memory."""

    __slots__ = (
        "launch",
        "index",
        "name",
        "shared",
        "threads",
        "warps",
        "live",
        "barriers",
        "members",
        "mbarriers",
        "proxy_fences",
        "stores",
        "views",
        "shared_releases",
        "serial",
    )

    def __init__(self, launch: Launch, index: int, shared: Allocation):
        self.launch = launch
        self.index = index
        # For reports, also when it is gone.
        self.name = f"{name_of(launch.rank)}, {launch.title}, block {index}"
        self.shared = shared
        self.threads: list[Thread] = []
        self.warps: list[Warp] = []
        self.live = launch.block
        self.barriers: dict[int, NamedBarrier] = {}
        self.members: dict[int, list[int]] = {}  # number -> who met there last
        self.mbarriers: dict[int, MBarrier] = {}
        self.proxy_fences = 0
        self.stores: dict[Any, None] = {}  # visible to the block, not beyond; see `delayed`
        self.views: dict[Any, Any] = {}  # what its threads have read where they had a choice; see `delayed`
        self.shared_releases: dict[int, tuple[int, int]] = {}  # of strong stores to its shared memory; see `delayed`
        self.serial = launch.world.count_block()

    def arrive(self, thread: Thread, number: int, expected: int, wait: bool, predicate: bool = True) -> NamedBarrier:
        """Count `thread` in. If it waits, it may go on when the barrier is full."""
        barrier = self.barriers.get(number)
        if barrier is None:
            if not 0 <= number < NUM_BARRIERS:
                raise error_at(thread, errors.EmulatorError, f"barrier {number}: there are {NUM_BARRIERS}")
            if expected != self.launch.block and not (expected < self.launch.block and expected % WARP_SIZE == 0):
                rule = f"a multiple of {WARP_SIZE}, at most the block's {self.launch.block}"
                raise error_at(thread, errors.EmulatorError, f"barrier {number} for {expected} threads: must be {rule}")
            barrier = self.barriers[number] = NamedBarrier(number, expected)
        elif barrier.expected != expected:
            raise error_at(
                thread,
                errors.Divergence,
                f"barrier {number}: this thread says {expected} threads, threads {ranges(barrier.arrived)} said "
                f"{barrier.expected}",
            )
        elif thread.thread_idx in barrier.passed:
            so_far = f"{len(barrier.arrived)} of {expected} threads have come so far"
            message = f"barrier {number}: this thread arrives again, but {so_far}: nothing makes it wait for the others"
            raise error_at(thread, errors.Divergence, message)
        barrier.arrived.append(thread.thread_idx)
        barrier.holds &= predicate
        if len(barrier.arrived) + self.absent(barrier) == expected:
            self.fill(barrier, thread)
            return barrier
        if wait:
            barrier.waiting.append(thread)
        else:
            barrier.passed.add(thread.thread_idx)
        if self.live < self.launch.block:
            self.check_barrier(barrier)
        return barrier

    def absent(self, barrier: NamedBarrier) -> int:
        """How many threads have left for which a barrier does not wait."""
        launch = self.launch
        return launch.block - self.live if launch.by_ptx and barrier.expected == launch.block else 0

    def fill(self, barrier: NamedBarrier, thread: Thread) -> None:
        """Let those go on that wait; thread: the last one for which they did."""
        barrier.is_full = True
        del self.barriers[barrier.number]
        self.members[barrier.number] = barrier.arrived
        thread.runnable.extend(barrier.waiting)

    def check_barrier(self, barrier: NamedBarrier) -> None:
        """Stop the run when the threads still alive cannot fill `barrier`."""
        lacks = barrier.expected - self.absent(barrier)
        if len(barrier.arrived) + self.live - len(barrier.waiting) < lacks:
            raise self.launch.world.error_of(NeverFull(self, barrier))

    def thread_left(self, thread: Thread) -> None:
        """A thread has returned from the kernel."""
        self.live -= 1
        if thread.warp_state.pending:
            thread.warp_state.lane_left(thread)
        if self.barriers:
            for barrier in list(self.barriers.values()):
                if self.live and len(barrier.arrived) + self.absent(barrier) == barrier.expected:
                    self.fill(barrier, thread)
                else:
                    self.check_barrier(barrier)
        if not self.live:
            self.launch.block_left()
            if self.launch.grid > MANY_BLOCKS:
                self.release()

    def release(self) -> None:
        """Break the cycles between it and its threads, which have left."""
        for warp in self.warps:
            warp.lanes = []
        self.threads, self.warps, self.mbarriers = [], [], {}
        self.shared.release()
