"""How the calls of a buffer come behind each other, and behind the caller's own work."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from nbep.host.events import EventHandle, EventOverlap, handle_of
from nbep.host.node import Empty, Ordered
from nbep.host.target.base import Array, Runtime
from nbep.host.target.new_arrays import Make, Wanted
from nbep.host.target.streams import Event, PastEvent, Stream


class CommWork:
    """What is launched on the comm stream."""

    runtime: Runtime
    comm_stream: Stream
    check_faults: Callable[[], None]
    latest_event: Event | None = None  # at the end of the latest call, where the host reads arrays
    _previous: EventHandle | None = None  # what the call under way comes behind

    @contextmanager
    def allocations(self, order: Ordered, like: Array) -> Iterator[Empty]:
        """Allocate arrays like `like` for the next kernels to write; after it the comm stream is ordered.

        It comes behind previous_event, or else behind the current stream. That may still use memory that an allocator
        hands out. So behind an event alone the memory is the comm stream's own, if its library minds other streams;
        if not, the comm stream comes behind the current one after all.
        """
        previous = self._previous = handle_of(order.previous_event)
        if previous is not None and not isinstance(previous.event, PastEvent):
            self.comm_stream.wait(previous.event)
        outputs: list[Array] = []

        def empty(shape: tuple[int, ...], dtype: str) -> Array:
            outputs.append(self.runtime.empty(shape, dtype, like))
            return outputs[-1]

        is_own = previous is not None and (order.allocate_on_comm_stream or not self.runtime.is_capturing)
        with self.runtime.allocating_on(self.comm_stream) if is_own else nullcontext():
            yield empty
        if not (is_own and (not outputs or self.runtime.let_current_stream_use(outputs))):
            self.comm_stream.wait_current_stream()

    def allocate(
        self, order: Ordered, like: Array, wanted: Sequence[Wanted] = (), make: Make | None = None
    ) -> tuple[list[Array], list[Any]]:
        """As `allocations`, for calls that seldom have an event to come behind. make: of what is wanted"""
        if order.previous_event is None:
            made: tuple[list[Array], list[Any]] = ([], []) if make is None else make(like)
            self.comm_stream.wait_current_stream()
            return made
        with self.allocations(order, like) as empty:
            arrays = [empty(shape, dtype) for shape, dtype in wanted]
        return arrays, self.runtime.arguments(arrays)

    def finish(self, async_finish: bool) -> EventOverlap:
        """The event at the end of a call; unless async_finish, the caller's current stream waits for it."""
        stream = self.comm_stream
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

    def wait(self) -> None:
        """Block until all work of the comm stream is done.

        Raises: PeerTimeout if a wait of this rank's kernels has timed out
        """
        end = self.comm_stream.record()
        self.runtime.wait_until(lambda: end.done, lambda: "the end of its comm stream")
        self.check_faults()
