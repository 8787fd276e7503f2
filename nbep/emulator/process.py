"""The emulator under MPI and torchrun: this process runs one rank, and other processes write its memory.

Kernels run in a thread of their own, so that they progress while the host waits for other ranks.  What the host wants
of that thread goes through an inbox.  Four things differ from a world in one process:

- a store by another process wakes no thread: cells that parked threads poll are looked at again and again, with pauses
  that grow while nothing changes
- time is real time while this process runs, and a deadlock cannot be distinguished from a slow peer: waits end at
  their deadlines; see `clock`
- an atomic on shared memory must exclude the other processes: it holds the lock of that memory; see `process_lock`
- memory of another process may be reached by messages alone; see `remote`
"""

from __future__ import annotations

import atexit
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from .machine.errors import EmulatorError
from .machine.remote import ReachingThread, RemoteAllocation, map_remote
from .machine.world import NEVER
from .process_lock import RunningClock
from .run import MEMORY_MODELS
from .world import World

if TYPE_CHECKING:
    from .machine.memory import AddressSpace
    from .machine.memory import Describe as DescribeCell
    from .machine.remote import Channel
    from .machine.thread import Thread
    from .schedule.scheduler import Describe

_SHORTEST_PAUSE_S = 20e-6
_LONGEST_PAUSE_S = 1e-3
_TICKS_BETWEEN_LOOKS = 8


class ProcessWorld(World):
    """A world of which this process has one rank; local_rank: which."""

    max_idle_calls = NEVER  # another process may still store
    spans_processes = True
    thread_classes = {**MEMORY_MODELS, "sc": ReachingThread}  # noqa: RUF012 - never changed

    def __init__(self, num_ranks: int, seed: int = 0, *, local_rank: int, **options: Any):
        super().__init__(num_ranks, seed, local_rank=local_rank, **options)
        self.clock = RunningClock()  # the kernel thread's
        self._inbox: deque[Callable[[], object]] = deque()
        self._wakeup = threading.Event()  # for the kernel thread: the inbox has something
        self._progress = threading.Event()  # for the host: something has happened
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._pause_s = _SHORTEST_PAUSE_S
        self._ticks = 0

    # --- the host's side ----------------------------------------------------------------------------------------

    def submit(self, operation: Callable[[], object]) -> None:
        if threading.current_thread() is self._thread:
            self.operations.append(operation)
            return
        if self.failure is not None:
            raise self.failure
        self._inbox.append(operation)
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="nbep-emulator", daemon=True)
            self._thread.start()
            atexit.register(self.close)
        self._wakeup.set()

    def host_wait(
        self, predicate: Callable[[], bool], describe: Describe, timeout_ns: int | None = None, told: Any = None
    ) -> bool:
        """Block the host until `predicate()` holds, or raise what has stopped the kernels."""
        clock = RunningClock()
        deadline = None if timeout_ns is None else clock.now() + timeout_ns
        while not predicate():
            if self.failure is not None:
                raise self.failure
            if threading.current_thread() is self._thread:
                raise EmulatorError("host_wait called from a kernel")
            if deadline is not None and clock.now() > deadline:
                return predicate()
            self._progress.wait(_LONGEST_PAUSE_S)
            self._progress.clear()
        return True

    def run(self, functions: Sequence[Callable[[], Any]]) -> list[Any]:
        raise EmulatorError("run: this world has one rank in this process; call its host function directly")

    def map_remote(
        self, space: AddressSpace, rank: int, name: str, nbytes: int, channel: Channel, describe: DescribeCell | None
    ) -> RemoteAllocation:
        """Give memory of rank `rank`, in another process, an address in a space of this one. See `remote`."""
        if self.memory_model != "sc":
            raise EmulatorError(f"memory_model: {self.memory_model!r}; memory of other processes takes 'sc'")
        return map_remote(space, rank, name, nbytes, channel, self.submit, describe)

    def close(self) -> None:
        """Stop the kernel thread; what still runs is abandoned."""
        self._stopping = True
        self._wakeup.set()
        if self._thread is not None:
            self._thread.join(timeout=5)

    # --- the kernel thread's side -------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            self._run_guarded(lambda: self._stopping)
            self._abort()
        except BaseException as error:
            self.failure = error
        self._progress.set()

    def now(self, thread: Thread) -> int:
        return self.clock.now()

    def _poll_hosts(self) -> None:
        """Between two batches of steps: take in what the host wants, look for other processes' stores."""
        self.current = None
        while self._inbox:
            self.operations.append(self._inbox.popleft())
        self._ticks += 1
        if self._ticks % _TICKS_BETWEEN_LOOKS == 0 and self._look():
            self._pause_s = _SHORTEST_PAUSE_S
        self._progress.set()

    def _look(self) -> bool:
        """Wake the parked threads whose cells have changed or whose deadlines have passed."""
        woken = False
        now = self.clock.now()
        for thread in list(self.polling):
            thread.expired = thread.deadline < now
            if thread.expired or thread.changed(thread.waits_for):
                thread.unwatch()
                woken = True
        return woken

    def _idle(self, describe: Describe) -> None:
        if self.operations:
            self._operate()
        elif self._look():
            self._pause_s = _SHORTEST_PAUSE_S
        elif not self._inbox:
            # With nothing parked only the host can make work: no need to look for stores meanwhile.
            self._wakeup.wait(self._pause_s if self.polling else None)
            self._wakeup.clear()
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
