"""The thread that primitives talk to: accesses, fences, collectives, barriers, time."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from . import errors
from .block import NamedBarrier
from .bulk import CopyingThread
from .carrier import CURRENT
from .faults import error_at
from .source import Site, site_of
from .warp import Collective, match_result, shfl_source, vote_result

FULL_MASK = 0xFFFFFFFF
_SHFL = {mode: f"shfl.{mode}" for mode in ("idx", "xor", "up", "down")}
_VOTE = {mode: f"vote.{mode}" for mode in ("any", "all", "ballot")}

# The running thread.  It is an error to call a primitive outside a kernel.
current_thread: Callable[[], Thread] = CURRENT.get


class Thread(CopyingThread):
    """A thread of a kernel: `current_thread()` in the body of a primitive."""

    __slots__ = ()
    smem_base = 0  # shared addresses start here

    def fence(self, order: str, scope: str) -> None:
        """Order this thread's accesses; with the memory model "sc" they are in order anyway."""
        self.left -= 1
        if self.left < 0:
            self.pause()

    def syncwarp(self, mask: int = FULL_MASK) -> None:
        """Wait for the lanes in `mask`."""
        self.collect("syncwarp", mask, None, site_of(sys._getframe(1)))

    def shfl(self, mode: str, mask: int, value: Any, lane_or_delta: int) -> Any:
        """The `value` of another lane of `mask`: mode idx, xor, up or down."""
        values = self.collect(_SHFL[mode], mask, value, site_of(sys._getframe(1))).values
        source = shfl_source(mode, self.lane, lane_or_delta)
        if source not in values:
            message = f"shfl.{mode}: lane {self.lane} reads lane {source}, which mask {mask:#010x} does not name"
            raise error_at(self, errors.Divergence, message)
        return values[source]

    def vote(self, mode: str, mask: int, predicate: Any) -> Any:
        """Mode any, all: a bool; ballot: the mask of the lanes whose predicate holds."""
        collective = self.collect(_VOTE[mode], mask, predicate, site_of(sys._getframe(1)))
        if collective.result is None:
            collective.result = vote_result(mode, collective.values)
        return collective.result

    def match_any(self, mask: int, value: Any) -> int:
        """The mask of the lanes that pass the same value."""
        collective = self.collect("match_any", mask, value, site_of(sys._getframe(1)))
        if collective.result is None:
            collective.result = match_result(collective.values)
        return collective.result[value]

    def collect(self, name: str, mask: int, value: Any, site: Site | None) -> Collective:
        """Wait in a collective for the other lanes of `mask`; the collective, which is full."""
        self.empty_spins = 0
        collective = self.converge(name, mask, value, site)
        if collective.missing:
            self.waits_for = collective
            self.park()
        return collective

    def converge(self, name: str, mask: int, value: Any, site: Site | None) -> Collective:
        """Count this lane in.  When it was the last, nothing is missing and the others are runnable."""
        self.left -= 1
        if self.left < 0:
            self.pause()
        warp, lane = self.warp_state, self.lane
        collective = warp.pending.get(mask)
        if collective is None or collective.site != site or collective.name != name or len(warp.pending) > 1:
            collective = warp.collective(self, name, mask, site)
        collective.values[lane] = value
        collective.missing ^= 1 << lane
        if collective.missing:
            collective.threads.append(self)
            if self.has_news:
                self.has_news = False
                warp.bring(collective)
        else:
            del warp.pending[mask]
            self.runnable.extend(collective.threads)
        return collective

    def barrier(self, barrier_id: int, num_threads: int, predicate: bool = True) -> bool:
        """bar.sync and bar.red.and: wait until `num_threads` threads of the block have arrived; whether all agree."""
        return self.meet(barrier_id, num_threads, predicate).holds

    def barrier_arrive(self, barrier_id: int, num_threads: int) -> None:
        """bar.arrive: count this thread in and go on."""
        self.arrive(barrier_id, num_threads, wait=False)

    def meet(self, barrier_id: int, num_threads: int, predicate: bool) -> NamedBarrier:
        """Wait at a barrier; the barrier, which is full."""
        self.empty_spins = 0
        barrier = self.arrive(barrier_id, num_threads, wait=True, predicate=predicate)
        if not barrier.is_full:
            self.waits_for = barrier
            self.park()
        return barrier

    def arrive(self, barrier_id: int, num_threads: int, wait: bool, predicate: bool = True) -> NamedBarrier:
        """Count this thread in."""
        self.left -= 1
        if self.left < 0:
            self.pause()
        return self.block.arrive(self, barrier_id, num_threads, wait, predicate)

    def globaltimer(self) -> int:
        """Nanoseconds.  In one process: a virtual clock, one per primitive call; under MPI: real time."""
        self.left -= 1
        if self.left < 0:
            self.pause()
        self.world.has_changed = True  # its clock has: whoever looks at it may wait for a time
        return self.world.now(self)

    def trap(self, message: str = "") -> None:
        """Stop the run."""
        raise error_at(self, errors.Trap, f"trap: {message}" if message else "trap")
