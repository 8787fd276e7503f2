"""How the calls of a buffer come behind each other, and behind the caller's own work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from nbep.host.events import EventHandle, EventOverlap, handle_of
from nbep.host.node import Empty, Ordered
from nbep.host.target.base import Array, Runtime
from nbep.host.target.new_arrays import Make
from nbep.host.target.streams import Event, PastEvent, Stream


class CommWork:
    """Where the calls of a buffer run, one behind the other.

    A call runs on the comm stream. One that holds the caller's current stream back anyway runs on that stream itself,
    where it is the rank's own: then no event has to lead to the comm stream and back.

    stream: of the call under way
    """

    runtime: Runtime
    comm_stream: Stream
    check_faults: Callable[[], None]
    stream: Stream
    latest_event: Event | None = None  # at the end of the latest call, where the host reads arrays
    _last_stream: Stream | None = None  # of the call before
    _last_end: Event | None = None  # of the call before, if that was on the caller's stream
    _previous: EventHandle | None = None  # what the call under way comes behind

    def _choose_stream(self, order: Ordered) -> bool:
        """Set `stream`, whose next work comes behind the call before. Returns whether it is the caller's own."""
        runtime = self.runtime
        is_callers = runtime.has_own_stream and order.previous_event is None and not order.async_finish
        stream = self.stream = runtime.current_stream if is_callers else self.comm_stream
        last = self._last_stream
        if last is not stream and not runtime.is_capturing:  # the order of a graph's calls is the caller's
            if last is not None and last.key != stream.key:
                stream.wait(last.record() if self._last_end is None else self._last_end)
            self._last_stream, self._last_end = stream, None
        return is_callers

    @contextmanager
    def _new_arrays(self, order: Ordered) -> Iterator[list[Array]]:
        """Where arrays are made for the next kernels to write, which the list is told; after it `stream` is ordered.

        It comes behind previous_event, or else behind the current stream. That may still use memory that an allocator
        hands out. So behind an event alone the memory is the comm stream's own, if its library minds other streams;
        if not, the comm stream comes behind the current one after all.
        """
        is_callers = self._choose_stream(order)
        previous = self._previous = handle_of(order.previous_event)
        if previous is not None and not isinstance(previous.event, PastEvent):
            self.comm_stream.wait(previous.event)
        outputs: list[Array] = []
        is_own = previous is not None and (order.allocate_on_comm_stream or not self.runtime.is_capturing)
        with self.runtime.allocating_on(self.comm_stream) if is_own else nullcontext():
            yield outputs
        if not is_callers and not (is_own and (not outputs or self.runtime.let_current_stream_use(outputs))):
            self.comm_stream.wait_current_stream()

    @contextmanager
    def allocations(self, order: Ordered, like: Array) -> Iterator[Empty]:
        """Allocate arrays like `like`, one by one, for the next kernels to write."""
        with self._new_arrays(order) as outputs:

            def empty(shape: tuple[int, ...], dtype: str) -> Array:
                outputs.append(self.runtime.empty(shape, dtype, like))
                return outputs[-1]

            yield empty

    def allocate(
        self, order: Ordered, like: Array, make: Make | None = None, num_rows: int = 0
    ) -> tuple[list[Array], list[Any]]:
        """As `allocations`, all at once; num_rows: of those whose first size is ROWS."""
        if order.previous_event is None:
            made: tuple[list[Array], list[Any]] = ([], []) if make is None else make(like, num_rows)
            if not self._choose_stream(order):
                self.comm_stream.wait_current_stream()
            return made
        with self._new_arrays(order) as outputs:
            made = ([], []) if make is None else make(like, num_rows)
            outputs += made[0]
        return made

    def finish(self, async_finish: bool) -> EventOverlap:
        """The event at the end of a call; unless async_finish, the caller's current stream waits for it."""
        stream = self.comm_stream if async_finish else self.stream
        if stream is not self.comm_stream:
            end = stream.mark()
            if stream is self._last_stream and not end.is_of_graph:
                self._last_end = end
        else:
            end = stream.record() if async_finish else stream.hand_over()
        if self.runtime.host_reads_arrays:
            self.latest_event = end
        previous, self._previous = self._previous, None
        checks: tuple[Callable[[], None], ...] = (self.check_faults,)
        if previous is not None:  # the call may have read what a call of another buffer has failed to bring
            checks += tuple(check for check in previous.checks if check != self.check_faults)
        event = EventHandle(end, checks)
        if not async_finish:
            event.check()
        return EventOverlap(event)

    def synchronize_calls(self) -> None:
        """Block until the calls so far are done, which may be on a stream of the caller."""
        self.comm_stream.synchronize()
        if self._last_stream is not None and self._last_stream is not self.comm_stream:
            self._last_stream.synchronize()
