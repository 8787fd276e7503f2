"""A lock between the processes of a job, in memory that they share.

 the shared memory   bytes of the job | mutex | thread number of each rank
                                          |              |
 the first word of a held mutex: the number of the thread that holds it

It is a mutex of POSIX threads, shared between processes and robust: when its holder dies, the kernel gives it to the
next one. No thread waits inside a call of the system: who finds it held looks again, with pauses, and gives up at a
deadline.

macOS has no robust mutexes, and keeps the holder's number elsewhere. There a holder that dies leaves the lock held: the
others give up at their deadlines and cannot say who holds it.

Source: POSIX.1-2017, pthread_mutexattr_setrobust; Linux Documentation/locking/robust-futex-ABI.rst on the first word
"""

from __future__ import annotations

import ctypes
import errno
import sys
import threading
import time
from collections.abc import Callable
from functools import cache

import numpy as np

# --- A clock for waits between processes: it does not run while this process stands still -----------------------------
# A job that is stopped as a whole and goes on has missed nothing: its peers stood still, too. By the time of day all
# of its waits would have timed out.


LONGEST_STEP_NS = 100_000_000  # far above the pauses between two looks at the clock


class RunningClock:
    """Nanoseconds, of which no more than LONGEST_STEP_NS pass between two looks. For one thread."""

    def __init__(self) -> None:
        self._latest = time.monotonic_ns()
        self._skipped = 0

    def now(self) -> int:
        latest = time.monotonic_ns()
        step = latest - self._latest
        if step > LONGEST_STEP_NS:
            self._skipped += step - LONGEST_STEP_NS
        self._latest = latest
        return latest - self._skipped


MUTEX_BYTES = 64  # no system here has larger ones
ALIGNMENT = 128
NUMBER_MASK = 0x3FFFFFFF  # FUTEX_TID_MASK
OWNER_DIED = getattr(errno, "EOWNERDEAD", -1)
IS_ROBUST = sys.platform == "linux"
SHORTEST_PAUSE_S = 1e-6
LONGEST_PAUSE_S = 1e-3


@cache
def _library() -> ctypes.PyDLL:
    """The C library. Its calls keep Python's own lock: those that are made here never block."""
    library = ctypes.PyDLL(None)
    for name in ("trylock", "unlock", "consistent"):
        if hasattr(library, f"pthread_mutex_{name}"):
            getattr(library, f"pthread_mutex_{name}").argtypes = [ctypes.c_void_p]
    library.pthread_mutex_init.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    return library


def lock_bytes(num_ranks: int) -> int:
    """Bytes of a lock of so many ranks."""
    return -(-(MUTEX_BYTES + 4 * num_ranks) // ALIGNMENT) * ALIGNMENT


class ProcessLock:
    """One rank's view of a lock, for one thread of its process.

    memory: lock_bytes(num_ranks) that all ranks map
    timed_out: what to raise when the lock is held for timeout_ns; it takes the holder's rank, -1 if that is unknown
    """

    def __init__(self, memory: memoryview, rank: int, timeout_ns: int, timed_out: Callable[[int], BaseException]):
        words = np.frombuffer(memory, np.uint32)
        self._mutex = words.ctypes.data
        self._state = words[:2]  # glibc has the holder in the first word, musl in the second
        self._threads = words[MUTEX_BYTES // 4 :]
        self._rank = rank
        self._timeout_ns = timeout_ns
        self._timed_out = timed_out
        self._is_known = False  # whether the peers know this rank's thread
        self._try = _library().pthread_mutex_trylock
        self._unlock = _library().pthread_mutex_unlock

    def create(self) -> None:
        """Make the mutex, before any other process sees the memory."""
        self._threads[:] = 0
        library = _library()
        attributes = ctypes.create_string_buffer(MUTEX_BYTES)
        results = [
            library.pthread_mutexattr_init(attributes),
            library.pthread_mutexattr_setpshared(attributes, 1),
            library.pthread_mutexattr_setrobust(attributes, 1) if IS_ROBUST else 0,
            library.pthread_mutex_init(self._mutex, attributes),
        ]
        if any(results):
            raise OSError(max(results), "cannot make a mutex between processes")

    def acquire(self) -> None:
        if not self._is_known:
            self._threads[self._rank] = threading.get_native_id() & NUMBER_MASK
            self._is_known = True
        result = self._try(self._mutex)
        if result:
            self._wait(result)

    def release(self) -> None:
        self._unlock(self._mutex)

    def _wait(self, result: int) -> None:
        """Take the lock that somebody holds, or whose holder has died: that one left a whole old or new value."""
        clock, pause_s = RunningClock(), SHORTEST_PAUSE_S
        deadline = clock.now() + self._timeout_ns
        while result == errno.EBUSY:
            if clock.now() > deadline:
                raise self._timed_out(self.holder())
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            result = self._try(self._mutex)
        if result == OWNER_DIED:
            result = _library().pthread_mutex_consistent(self._mutex)
        if result:
            raise OSError(result, "cannot take a mutex between processes")

    def holder(self) -> int:
        """The rank that holds it; -1 if that is unknown."""
        numbers = (self._state & NUMBER_MASK).tolist()
        ranks = [rank for rank, number in enumerate(self._threads.tolist()) if number and number in numbers]
        return ranks[0] if ranks else -1
