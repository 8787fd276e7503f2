"""The thread that primitives talk to: accesses, fences, collectives, barriers, time."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from greenlet import getcurrent

from . import errors
from .bulk import CopyingThread
from .faults import error_at
from .source import site_of
from .warp import SHFL, VOTE, finish_match

FULL_MASK = 0xFFFFFFFF

# The running thread.  It is an error to call a primitive outside a kernel.
current_thread: Callable[[], Thread] = getcurrent


class Thread(CopyingThread):
    """A thread of a kernel: `current_thread()` in the body of a primitive."""

    __slots__ = ()
    smem_base = 0  # shared addresses start here

    @property
    def has_tma(self) -> bool:
        return self.world.has_tma

    def fence(self, order: str, scope: str) -> None:
        """Order this thread's accesses; with the memory model "sc" they are in order anyway."""
        self.left -= 1
        if self.left < 0:
            self.pause()

    def syncwarp(self, mask: int = FULL_MASK) -> None:
        """Wait for the lanes in `mask`."""
        self.left -= 1
        if self.left < 0:
            self.pause()
        warp = self.warp_state
        if not warp.arrive(self, "syncwarp", mask, site_of(sys._getframe(1)), None, 0, None):
            self.waits_for = warp.pending[mask]
            self.park()

    def shfl(self, mode: str, mask: int, value: Any, lane_or_delta: int) -> Any:
        """The `value` of another lane of `mask`: mode idx, xor, up or down."""
        return self._collect(f"shfl.{mode}", mask, value, int(lane_or_delta), SHFL[mode])

    def vote(self, mode: str, mask: int, predicate: Any) -> Any:
        """Mode any, all: a bool; ballot: the mask of the lanes whose predicate holds."""
        return self._collect(f"vote.{mode}", mask, predicate, 0, VOTE[mode])

    def match_any(self, mask: int, value: Any) -> int:
        """The mask of the lanes that pass the same value."""
        return self._collect("match_any", mask, value, 0, finish_match)

    def _collect(self, name: str, mask: int, value: Any, extra: int, finish: Any) -> Any:
        self.left -= 1
        if self.left < 0:
            self.pause()
        warp = self.warp_state
        if not warp.arrive(self, name, mask, site_of(sys._getframe(2)), value, extra, finish):
            self.waits_for = warp.pending[mask]
            self.park()
        return self.result

    def barrier(self, barrier_id: int, num_threads: int) -> None:
        """bar.sync: wait until `num_threads` threads of the block have arrived."""
        self.left -= 1
        if self.left < 0:
            self.pause()
        barrier = self.block.arrive(self, barrier_id, num_threads, True)
        if barrier is not None:
            self.waits_for = barrier
            self.park()

    def barrier_arrive(self, barrier_id: int, num_threads: int) -> None:
        """bar.arrive: count this thread in and go on."""
        self.left -= 1
        if self.left < 0:
            self.pause()
        self.block.arrive(self, barrier_id, num_threads, False)

    def globaltimer(self) -> int:
        """Nanoseconds.  In one process: a virtual clock, one per primitive call; under MPI: real time."""
        self.left -= 1
        if self.left < 0:
            self.pause()
        return self.world.now(self)

    def trap(self, message: str = "") -> None:
        """Stop the run."""
        raise error_at(self, errors.Trap, f"trap: {message}" if message else "trap")
