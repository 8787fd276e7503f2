"""The run loop: one greenlet, the hub, picks who runs next; everything it decides comes from the seed and a strategy.

Runnable are kernel threads and host functions alike.  A picked thread runs for a quantum of primitive calls, or until
it parks; parked threads are in no list and cost nothing.  Launch starts and bulk copies are *asynchronous
operations*: they happen at some later step.  Hosts wait for predicates, which the hub looks at now and then.

When nothing is runnable, no predicate holds and no operation is pending, time passes to the earliest deadline of a
spinning thread or a host, if that thread goes on without a fault then, or `on_deadlock="expire"` lets faults happen.
Else the run is dead, and the loop says so at once.  It is dead, too, when all that run poll and poll, while no thread
stores or looks at the time.
"""

from __future__ import annotations

import gc
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import copy_context
from threading import get_ident
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

from greenlet import getcurrent, greenlet

from ..machine.carrier import CURRENT
from ..machine.errors import EmulatorError, explaining
from ..machine.source import Site, site_of
from ..machine.world import NEVER, SKIPPED
from .strategies import Ready, Strategy, strategy_of

if TYPE_CHECKING:
    from ..machine.stream import Launch, Stream
    from ..machine.thread import Thread

Describe = str | Callable[[], str]

_TICK = 64  # steps between two looks at the waiting hosts
_NUM_QUANTA = 4096  # quanta drawn at a time
_MOST_TIME_OUTS = 1000  # of one thread, after which a loop that waits again and again is endless
_FAR_NS = 10**14  # a deadline as far away as a day is to mean that there is none
_COLLECT_AFTER = 50_000  # new objects that Python's garbage collector waits for


class Host(greenlet):
    """A host function of one rank. thread: of Python, that runs it in the greenlet's place; see torch_ranks"""

    __slots__ = (
        "rank", "function", "result", "predicate", "waits_for", "deadline", "left", "reluctance", "finished", "thread",
    )  # fmt: skip

    def __init__(self, rank: int, function: Callable[[], Any], hub: greenlet):
        greenlet.__init__(self, parent=hub)
        self.gr_context = copy_context()  # type: ignore[misc]
        self.rank = rank
        self.function = function
        self.result: Any = None
        self.predicate: Callable[[], bool] | None = None
        self.waits_for: Describe = ""
        self.deadline = NEVER
        self.left = 0
        self.reluctance = 0.0
        self.finished = False
        self.thread: int | None = None

    def run(self) -> None:
        self.result = self.function()
        self.finished = True

    @property
    def gr_frame(self) -> FrameType | None:
        """Where it stands; see `Thread.gr_frame`."""
        return super().gr_frame if self.thread is None else sys._current_frames().get(self.thread)


threads_of_hosts: dict[int, Host] = {}  # by `Host.thread`


def running_host() -> Host | None:
    """The host that runs now, if one does."""
    host = getcurrent()
    return host if isinstance(host, Host) else threads_of_hosts.get(get_ident())


class Stuck(NamedTuple):
    """Nothing can go on any more. caller: what the caller waits for, if no run() is under way and it is the host"""

    world: Scheduler
    hosts: list[Host]
    caller: Describe


class Aborted(BaseException):
    """Unwinds a host whose run another rank's error has ended."""


@contextmanager
def few_collections() -> Iterator[None]:
    """Let Python look for garbage less often: threads and stores are many objects, and most of them are none."""
    thresholds = gc.get_threshold()
    if 0 < thresholds[0] < _COLLECT_AFTER:
        gc.set_threshold(_COLLECT_AFTER, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


class Scheduler:
    """Who runs next.

    Attributes:
        runnable: threads and hosts that can run, in no particular order
        slow: more of them, which run less often: the loop puts those here that are reluctant
        launches: the kernels running now
        polling: threads parked on cells they poll
        calls, steps, parks: primitive calls, quanta given, times a thread parked on polled cells
    """

    max_idle_calls = 1 << 21  # primitive calls without a store or the like, after which a loop that polls is endless

    def __init__(
        self,
        seed: int,
        on_deadlock: str,
        strategy: str | Strategy = "uniform",
        on_failure: Callable[[BaseException], object] | None = None,
    ):
        if on_deadlock not in ("raise", "expire"):
            raise ValueError(f"on_deadlock: {on_deadlock!r}; allowed: 'raise', 'expire'")
        self.seed = seed
        self.on_deadlock = on_deadlock
        self.on_failure = on_failure
        self.random = random.Random(seed)
        self.strategy = strategy_of(strategy, seed, self.random)
        self.strategy.world = self
        self._ready = self.strategy.ready_list()
        self.hub: greenlet = getcurrent()
        self.runnable: Any = [] if self._ready is None else self._ready
        self.slow: list[Any] = []
        self.launches: dict[Launch, None] = {}
        self.polling: dict[Thread, None] = {}
        self.streams: list[Stream] = []
        self.hosts: list[Host] = []
        self.waiting_hosts: list[Host] = []
        self.operations: list[Callable[[], object]] = []
        self.failure: BaseException | None = None
        self.current: Any = None
        self.calls = 0
        self.steps = 0
        self.parks = 0
        # Since the last look: a store, the time, what is under way, the end of a thread, a host that goes on.
        self.has_changed = True
        self._last_change = 0  # in primitive calls
        self._was_idle = False  # once already, since then
        self._skipped_ns = 0
        self._deadline = NEVER  # of the caller that waits while no run() is under way
        self._granted = 0
        self._quanta = self.strategy.quanta(_NUM_QUANTA)

    # --- what threads and hosts ask for -------------------------------------------------------------------------

    def submit(self, operation: Callable[[], object]) -> None:
        """Have `operation` happen at a later step."""
        self.has_changed = True
        self.operations.append(operation)

    @property
    def step(self) -> int:
        """Primitive calls so far, those of the running quantum included."""
        return self.calls + (self._granted - self.current.left if self._granted else 0)

    @property
    def host_now(self) -> int:
        """Virtual nanoseconds, as hosts read them: between the quanta of threads."""
        return self.calls + self._skipped_ns

    def now(self, thread: Thread) -> int:
        """Virtual nanoseconds, as `thread` reads them."""
        return self.calls + self._granted - thread.left + self._skipped_ns

    def overdue(self, thread: Thread, deadline_ns: int) -> bool:
        """Whether a deadline has passed for `thread`."""
        return self.now(thread) > deadline_ns

    def host_wait(self, predicate: Callable[[], bool], describe: Describe, timeout_ns: int | None = None) -> bool:
        """Block the calling host until `predicate()` holds; kernels and other hosts run meanwhile.

        Args:
            describe: what the host waits for, in the deadlock report

        Returns:
            False if timeout_ns have passed first, as a thread sees time
        """
        host = getcurrent()
        if self.failure is not None:
            if isinstance(host, Host):
                raise Aborted
            raise EmulatorError("this world has ended with an error") from self.failure
        predicate = self.strategy.wait_of(predicate)
        if not (isinstance(host, Host) and self.strategy.chooses_hosts) and predicate():
            return True
        deadline = NEVER if timeout_ns is None else self.host_now + timeout_ns

        def is_over() -> bool:
            return predicate() or self.host_now > deadline

        if isinstance(host, Host):
            host.predicate = is_over
            host.waits_for = describe
            host.deadline = deadline
            self.waiting_hosts.append(host)
            self.hub.switch()
        elif CURRENT.get() is not None:
            raise EmulatorError("host_wait called from a kernel")
        else:  # no run() is under way: the caller is the only host
            self._deadline = deadline
            self._run_guarded(is_over, describe)
            self._deadline = NEVER
        return predicate()

    # --- what is said of it ---------------------------------------------------------------------------------------

    def error_of(self, fact: Any) -> Exception:
        """The error that says in words what a fact means."""
        raise NotImplementedError

    def stop(self, error: BaseException) -> None:
        """An error ends the run. Its threads stand where they were."""

    def explain(self, error: BaseException) -> None:
        """Say more in an error that has ended the run. Its threads stand where they were, and may go on a little."""

    # --- the loop -----------------------------------------------------------------------------------------------

    def _run_guarded(self, finished: Callable[[], bool], describe: Describe = "") -> None:
        """Run until `finished()`; an error ends everything that runs and names where it came from."""
        self.hub = getcurrent()
        try:
            with few_collections():
                if self._ready is None:
                    self._loop(finished, describe)
                else:
                    self._loop_by_priority(self._ready, finished, describe)
        except BaseException as error:
            self.failure = error
            self.stop(error)
            where = self.current.describe() if hasattr(self.current, "describe") else None
            if isinstance(self.current, Host):
                error.add_note(f"raised by the host function of rank {self.current.rank}, seed {self.seed}")
            elif where is not None and not isinstance(error, EmulatorError):
                error.add_note(f"raised in {where}, seed {self.seed}")
            else:
                error.add_note(f"seed {self.seed} replays this run")
            if self.on_failure is not None:
                with explaining(error):
                    self.on_failure(error)
            with explaining(error):
                self.explain(error)
            self._abort()
            raise

    def _loop(self, finished: Callable[[], bool], describe: Describe) -> None:
        runnable, slow = self.runnable, self.slow
        operations = self.operations
        uniform, operation_rate = self.random.random, self.strategy.operation_rate
        willing = 1 - self.strategy.slow_reluctance
        while not finished():
            start = self.random.randrange(_NUM_QUANTA - _TICK)
            for quantum in self._quanta[start : start + _TICK]:
                if not (runnable or slow):
                    break
                # Those in `slow` count for less, so that no thread that is picked has to give way again and again.
                draw = uniform() * (len(runnable) + len(slow) * willing)
                if draw < len(runnable):
                    index, waiting = int(draw), runnable
                else:
                    index, waiting = min(int((draw - len(runnable)) / willing), len(slow) - 1), slow
                thread = waiting[index]
                last = waiting.pop()
                if last is not thread:
                    waiting[index] = last
                if thread.reluctance and waiting is runnable:
                    slow.append(thread)
                    continue
                self._granted = thread.left = quantum
                self.current = thread
                thread.switch()
                self.calls += quantum - thread.left
                self._granted = 0
                self.steps += 1
                if operations and uniform() < operation_rate:
                    self._operate()
            self._look_around(finished, describe)

    def _loop_by_priority(self, ready: Ready, finished: Callable[[], bool], describe: Describe) -> None:
        """As `_loop`, where the strategy says who is next."""
        strategy = ready.strategy
        while not finished():
            for quantum in self._quanta[:_TICK]:
                if not ready:
                    break
                thread = ready.take()
                quantum = strategy.quantum(self.calls, quantum)
                self._granted = thread.left = quantum
                self.current = thread
                thread.switch()
                self.calls += quantum - thread.left
                if thread.left < 0:
                    strategy.put_last(thread)  # preempted, or it polls and polls
                self._granted = 0
                self.steps += 1
                if self.operations and self.random.random() < strategy.operation_rate:
                    self._operate()
            self._look_around(finished, describe)

    def _look_around(self, finished: Callable[[], bool], describe: Describe) -> None:
        """Between two batches of steps: hosts, endless loops, and what happens when nothing is runnable."""
        self.current = None
        if not self.strategy.chooses_hosts:
            self._poll_hosts()
        if self.has_changed:
            self.has_changed = self._was_idle = False
            self._last_change = self.calls
        elif self.calls - self._last_change > self.max_idle_calls:
            self._find_endless_loops(describe)
        if not (self.runnable or self.slow) and not finished():
            self._idle(describe)

    def _operate(self) -> None:
        """Let one asynchronous operation happen."""
        operations = self.operations
        while operations:
            index = int(self.random.random() * len(operations))
            operations[index], operations[-1] = operations[-1], operations[index]
            if operations.pop()() is not SKIPPED:
                return

    def _poll_hosts(self) -> None:
        """Make runnable the hosts that need not wait any more."""
        for host in list(self.waiting_hosts):
            self.current = host
            if host.predicate is not None and host.predicate():
                self.waiting_hosts.remove(host)
                self.runnable.append(host)
                self.has_changed = True
        self.current = None

    def _idle(self, describe: Describe) -> None:
        """Nothing is runnable: an operation, time, or a deadlock."""
        if self.operations:
            self._operate()
        elif not self.strategy.chooses_hosts and self._expire():  # a tree of schedules knows no clock
            pass
        elif not self._look_again():
            raise self._deadlock(describe)

    def _look_again(self) -> bool:
        """Let each parked thread poll once more before a deadlock is reported; whether there is one that has not.

        Then they wait for what their loops poll, and not for what they have met on the way there besides.
        """
        again = [thread for thread in self.polling if not thread.has_looked_again]
        for thread in again:
            thread.has_looked_again = True
            thread.unwatch()
        return bool(again)

    def _find_endless_loops(self, describe: Describe) -> None:
        """Stop the run if each thread that can run has polled lately, or another one of its block has."""
        self.runnable += self.slow
        self.slow.clear()
        threads = [thread for thread in self.runnable if hasattr(thread, "polled")]
        blocks = {thread.block for thread in threads}
        is_endless = all(any(thread.polled for thread in block.threads) for block in blocks)
        if self._was_idle and blocks and is_endless and not self._look_again():
            raise self._deadlock(describe)
        for thread in threads:
            thread.polled.clear()  # what it polled long ago
        self._was_idle = True
        self._last_change = self.calls

    def _deadlock(self, describe: Describe) -> Exception:
        return self.error_of(Stuck(self, list(self.waiting_hosts), describe))

    def single_steps(self, most: int, operation_rate: float) -> Iterator[tuple[Any, Site | None]]:
        """Once a run has ended: let its threads go on by one primitive call at a time, all in turn.

        Yields: who has made a step, and from which line; None for what was under way
        """
        ready: deque[Any] = deque()
        for _ in range(most):
            ready += [one for one in (*self.runnable, *self.slow) if not isinstance(one, Host)]
            self.runnable.clear()
            self.slow.clear()
            if not ready and not self.operations:
                return
            if self.operations and (not ready or self.random.random() < operation_rate):
                with suppress(Exception):
                    self._operate()
                yield None, None
                continue
            thread = ready.popleft()
            if thread.exited or thread.carrier.dead:
                continue
            site = None if thread.gr_frame is None else site_of(thread.gr_frame)
            self._granted = thread.left = 0
            self.current = thread
            with suppress(Exception):
                thread.switch()
            self.current = None
            yield thread, site

    def _expire(self) -> bool:
        """Let time pass to the earliest deadline of those that wait, and wake the threads that have reached it.

        The loop finds the hosts. With `on_deadlock="raise"` only a thread that has a way on without a fault times out.
        """
        deadlines = [thread.deadline for thread in self.polling] + [host.deadline for host in self.waiting_hosts]
        earliest = min([*deadlines, self._deadline])
        due = [thread for thread in self.polling if thread.deadline <= earliest]
        if self.on_deadlock == "raise":
            due = [thread for thread in due if thread.may_time_out and thread.num_time_outs < _MOST_TIME_OUTS]
            if not due or earliest - self.host_now > _FAR_NS:
                return False
        elif earliest == NEVER:
            return False
        self._skipped_ns = max(self._skipped_ns, earliest - self.calls + 1)
        for thread in due:
            thread.num_time_outs += 1
            thread.expired = True
            thread.unwatch()
        return True

    def _abort(self) -> None:
        """End every thread and host of the run, letting hosts run their `finally` clauses."""
        for thread in list(self.polling):  # a watch list would keep it, and so the world, for good: see `memory.Writer`
            thread.unwatch()
        self.runnable.clear()
        self.slow.clear()
        self.operations.clear()
        for host in self.hosts:
            if host:
                with suppress(BaseException):  # the first error is the one to report
                    host.throw(Aborted)
        for launch in list(self.launches):
            for block in launch.blocks:
                for thread in block.threads:
                    thread.end()
        self.launches.clear()
        self.waiting_hosts.clear()
