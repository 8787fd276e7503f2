"""Events at the end of a call, and the object that makes overlapping easy to write."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from nbep.host.arguments import refuse
from nbep.host.entry import untraced
from nbep.host.handles import OfThisProcess
from nbep.host.target.base import Event, PastEvent, Stream, current_runtime
from nbep.host.target.resolve import why_no_gpu


class EventHandle(OfThisProcess):
    """A point in a stream. `EventHandle()` is the present end of the caller's current stream.

    It may be made before the first Buffer, too: the rank of a process has a runtime from then on only.

    Args:
        event: the emulator's or CUDA's; without it the end of the current stream is recorded
        checks: what raises the report of a buffer whose kernels come before that point
        stream: of the caller, on which a blocking call ran. Its later work comes behind the call anyway, and most
            programs never ask for the event: it is recorded when somebody does
    """

    def __init__(
        self,
        event: Event | None = None,
        checks: tuple[Callable[[], None], ...] = (),
        stream: Stream | None = None,
    ):
        if event is None and stream is None:
            runtime = current_runtime()
            event = _end_without_runtime() if runtime is None else runtime.current_stream.record()
        self._event = event
        self._stream = stream
        self.checks = checks

    @property
    def event(self) -> Event:
        """The target's event."""
        if self._event is None:
            assert self._stream is not None
            self._event = self._stream.record()
        return self._event

    @property
    def done(self) -> bool:
        """Whether the stream has got there.

        Raises:
            as current_stream_wait, once it has
        """
        is_done = self.event.done
        if is_done:
            self.check()
        return is_done

    @untraced
    def current_stream_wait(self) -> None:
        """Hold back the current stream until the event is done.

        Raises:
            PeerTimeout: if a wait of the call has timed out by now
        """
        self.event.current_stream_wait()
        self.check()

    def check(self) -> None:
        """Raise what the call's kernels have reported by now, or those of a call that it came behind."""
        for check in self.checks:
            check()


def _end_without_runtime() -> Event:
    """The end of the current stream of a GPU, where one is in use. What the emulator runs comes with its runtime."""
    if os.environ.get("NBEP_TARGET") == "emulator" or why_no_gpu() is not None:
        return PastEvent()
    from nbep.host.target.cuda.driver import current_ordinal
    from nbep.host.target.cuda.streams import CudaEvent
    from nbep.host.target.libraries import current_stream_handle

    return PastEvent() if current_ordinal() is None else CudaEvent(current_stream_handle())


def handle_of(previous_event: Any) -> EventHandle | None:
    """The event that a call is to wait for: of an EventOverlap or whatever has such an `event`, or the event itself.

    Raises:
        ValueError: if it is something else
    """
    if previous_event is None or isinstance(previous_event, EventHandle):
        return previous_event
    try:
        event = previous_event.event
    except AttributeError:
        refuse("previous_event", type(previous_event).__name__, "an EventOverlap or None")
    if event is not None and not isinstance(event, EventHandle):
        refuse("previous_event.event", type(event).__name__, "an EventHandle or None")
    return event


class EventOverlap(OfThisProcess):
    """An event with the arrays that must live until it is done.

    In a `with` statement the current stream waits for it at the end of the block::

        with buffer.dispatch(..., async_finish=True)[-1]:
            ...  # runs while tokens travel

    Args:
        event: None if there is nothing to wait for
        extra_tensors: kept alive as long as this object

    Source:
        DeepEP deep_ep/utils.py, EventOverlap; later deep_ep/utils/event.py
    """

    hook_after_wait: Callable[[], object] | None = None
    _release_handle = False

    def __init__(self, event: EventHandle | None = None, extra_tensors: tuple[Any, ...] | None = None):
        self.event = event
        self.extra_tensors = extra_tensors

    @untraced
    def current_stream_wait(self, release_handle: bool = False) -> None:
        """Hold back the current stream until the event is done, then call the hook. On the emulator: wait for it.

        Args:
            release_handle: let go of the event, and with it of the arrays that it keeps alive

        Raises:
            ValueError: if there is no event
        """
        if self.event is None:
            raise ValueError("event: got None; there is nothing to wait for")
        self.event.current_stream_wait()
        hook, self.hook_after_wait = self.hook_after_wait, None
        if hook is not None:
            hook()
        if release_handle:
            self.event = None

    def register_hook_after_wait(self, hook_after_wait: Callable[[], object]) -> None:
        """Have current_stream_wait call it once, after the wait.

        Raises:
            ValueError: if there is a hook already
        """
        if self.hook_after_wait is not None:
            raise ValueError("hook_after_wait: got a second one; wait first, which calls the one that is registered")
        self.hook_after_wait = hook_after_wait

    def __call__(self, release_handle: bool = False) -> EventOverlap:
        """For `with event(release_handle=True):`, which lets go of the event at the end."""
        self._release_handle = release_handle
        return self

    @untraced
    def __enter__(self) -> EventOverlap:
        return self

    @untraced
    def __exit__(self, *exc_info: object) -> None:
        release_handle, self._release_handle = self._release_handle, False
        if self.event is not None:
            self.current_stream_wait(release_handle)
