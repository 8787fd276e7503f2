"""Events at the end of a call, and the object that makes overlapping easy to write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nbep.host.runtime.base import Event, current_runtime


class EventHandle:
    """A point in a stream. `EventHandle()` is the present end of the caller's current stream.

    Raises: RuntimeError if made without an event outside of a rank
    """

    def __init__(self, event: Event | None = None, check: Callable[[], None] | None = None):
        if event is None:
            runtime = current_runtime()
            if runtime is None:
                raise RuntimeError("no rank runs here: capture is for the function that nbep.spawn or mpiexec runs")
            event = runtime.current_stream.record()
        self.event = event
        self._check = check

    @property
    def done(self) -> bool:
        return self.event.done

    def current_stream_wait(self) -> None:
        """Hold back the current stream until the event is done.

        Raises: PeerTimeout if a wait of the call was over time by now
        """
        self.event.current_stream_wait()
        if self._check is not None:
            self._check()


class EventOverlap:
    """An event with the arrays that must live until it is done.

        with buffer.dispatch(..., async_finish=True)[-1]:
            ...  # runs while tokens travel
        # here the current stream waits for them

    event          None if there is nothing to wait for
    extra_tensors  kept alive as long as this object

    Source: DeepEP deep_ep/utils.py, EventOverlap
    """

    def __init__(self, event: EventHandle | None = None, extra_tensors: tuple[Any, ...] | None = None):
        self.event = event
        self.extra_tensors = extra_tensors

    def current_stream_wait(self) -> None:
        """Hold back the current stream until the event is done. On the emulator: wait for it.

        Raises: ValueError if there is no event
        """
        if self.event is None:
            raise ValueError("event: got None; there is nothing to wait for")
        self.event.current_stream_wait()

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self.event is not None:
            self.event.current_stream_wait()
