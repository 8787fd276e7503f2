"""Where the calls of a buffer run, and what they come behind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

from nbep.host.arguments import refuse
from nbep.host.events import EventHandle, EventOverlap, handle_of
from nbep.host.target.arrays import Make
from nbep.host.target.base import Array, Event, PastEvent, Runtime, Stream


class Order(NamedTuple):
    """What the caller said of a call's place among other work; see Buffer.get_dispatch_layout."""

    previous_event: EventOverlap | None
    async_finish: bool
    allocate_on_comm_stream: bool


class CommWork:
    """One behind the other.

    A call runs on the comm stream. One that holds the caller's current stream back anyway runs on that stream itself,
    where it is the rank's own: then no event has to lead to the comm stream and back.

    stream: of the call under way
    is_deep_eps: a blocking call returns the empty event that DeepEP's does
    """

    runtime: Runtime
    comm_stream: Stream
    check_faults: Callable[[], None]
    stream: Stream
    is_deep_eps = False
    latest_event: Event | None = None  # at the end of the latest call, where the host reads arrays
    _last_stream: Stream | None = None  # of the call before
    _previous: EventHandle | None = None  # what the call under way comes behind

    def _choose_stream(self, is_blocking: bool) -> bool:
        """Set `stream`, whose next work comes behind the call before. Returns whether it is the caller's own.

        is_blocking: the call comes behind the current stream, which waits for it
        """
        runtime = self.runtime
        is_callers = runtime.has_own_stream and is_blocking
        stream = self.stream = runtime.current_stream if is_callers else self.comm_stream
        last = self._last_stream
        if last is not stream and not runtime.is_capturing:  # the order of a graph's calls is the caller's
            if last is not None and last.key != stream.key:
                if last.is_capturing:  # its end is that of work that a graph records, not of the call
                    got = "another one than the call before had, which is being captured"
                    refuse("current stream", got, "the same one until the capture has ended")
                stream.wait(last.record())
            self._last_stream = stream
        return is_callers

    def allocate(
        self, order: Any, make: Make | None = None, numbers: Sequence[int] = ()
    ) -> tuple[list[Array], list[Any]]:
        """New arrays for the next kernels to write, of `make`; after it `stream` comes behind what it has to.

        That is the previous_event of `order`, an Order or a request, or else the current stream, which may still use
        memory that an allocator hands out. So behind an event alone the memory is the comm stream's own, if its library
        minds other streams; if not, the comm stream comes behind the current one after all.
        """
        made: tuple[list[Array], list[Any]] = ([], [])
        if order.previous_event is None:
            if make is not None:
                made = make(numbers)
            if not self._choose_stream(not order.async_finish):
                self.comm_stream.wait_current_stream()
            return made
        self._choose_stream(False)
        previous = self._previous = handle_of(order.previous_event)
        if previous is not None and not isinstance(previous.event, PastEvent):
            self.comm_stream.wait(previous.event)
        is_own = previous is not None and (order.allocate_on_comm_stream or not self.runtime.is_capturing)
        if make is not None:
            with self.runtime.allocating_on(self.comm_stream) if is_own else nullcontext():
                made = make(numbers)
        if not (is_own and (not made[0] or self.runtime.let_current_stream_use(made[0]))):
            self.comm_stream.wait_current_stream()
        return made

    def finish(self, async_finish: bool) -> EventOverlap:
        """The event at the end of a call; unless async_finish, the caller's current stream waits for it."""
        end: Event | None = None
        if async_finish or self.stream is self.comm_stream:
            end = self.comm_stream.record() if async_finish else self.comm_stream.hand_over()
            if self.runtime.host_reads_arrays:
                self.latest_event = end
        previous, self._previous = self._previous, None
        checks: tuple[Callable[[], None], ...] = (self.check_faults,)
        if previous is not None:  # the call may have read what a call of another buffer has failed to bring
            checks += tuple(check for check in previous.checks if check != self.check_faults)
        if not async_finish:
            for check in checks:
                check()
            if self.is_deep_eps:
                return EventOverlap()
        return EventOverlap(EventHandle(end, checks, self.stream))

    def synchronize_calls(self) -> None:
        """Block until the calls so far are done, which may be on a stream of the caller."""
        self.comm_stream.synchronize()
        if self._last_stream is not None and self._last_stream is not self.comm_stream:
            self._last_stream.synchronize()
