"""Streams and events of a GPU, and how long the arrays of launches live."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from sys import getrefcount
from threading import Lock
from typing import Any

from cuda.bindings import driver as cu

from nbep.host.target.base import Event, Stream
from nbep.host.target.cuda.driver import check
from nbep.host.target.libraries import current_stream_handle

SUCCESS = cu.CUresult.CUDA_SUCCESS
ACTIVE = cu.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE
EVENT_FLAGS = int(cu.CUevent_flags.CU_EVENT_DISABLE_TIMING)
ONLY_HERE = 3  # references to an event that its stream and a variable hold, and sys.getrefcount itself
HostWait = Callable[[Callable[[], bool], Callable[[], str]], Any]


def is_capturing(stream: int) -> bool:
    """Whether the stream's work goes into a CUDA graph."""
    code, status = cu.cuStreamIsCapturing(stream)[:2]
    return bool(code == SUCCESS and status == ACTIVE)


def order(call: str, result: tuple) -> None:
    """As `check`, of a driver call that returns nothing; these come several times in each of nbep's calls."""
    if result[0] != SUCCESS:
        check(call, result)


class CudaEvent(Event):
    """A CUDA event without timing. host_wait, if given, blocks the host until a predicate is true.

    It may keep the arrays of the launches before it. When the stream of the caller that gave them waits for the event,
    they are let go: what that stream does with their memory from then on comes after the launches.
    """

    _host_wait: HostWait | None = None
    _arrays: Sequence[Any] = ()
    _caller = -1
    _is_captured = False
    _goes_to: list[Any] | None = None

    def __init__(self, stream: int, host_wait: HostWait | None = None, idle: list[Any] | None = None):
        """idle: events of the driver that are free again; this one comes from there, and goes there."""
        if host_wait is not None:
            self._host_wait = host_wait
        self._idle = idle
        try:
            self.event = idle.pop() if idle else None
        except IndexError:  # another thread took it
            self.event = None
        if self.event is None:
            self.event = check("cuEventCreate", cu.cuEventCreate(EVENT_FLAGS))
        self.record(stream)

    def record(self, stream: int) -> None:
        order("cuEventRecord", cu.cuEventRecord(self.event, stream))

    def __del__(self) -> None:
        event = getattr(self, "event", None)
        if event is None:
            return
        if self._goes_to is not None:  # who waits for it waits for what it stood for then, also if it is recorded anew
            self._goes_to.append(event)
        else:
            cu.cuEventDestroy(event)

    @property
    def done(self) -> bool:
        code = cu.cuEventQuery(self.event)
        if code[0] == cu.CUresult.CUDA_ERROR_NOT_READY:
            return False
        check("cuEventQuery", code)
        return True

    @property
    def is_past(self) -> bool:
        """Whether it is done, or belongs to a capture, which must have ended. Not to be asked during a capture."""
        return self._is_captured or self.done

    def keep(self, arrays: list[Any], is_captured: bool) -> None:
        """Keep the arrays alive; their caller's stream is the current one."""
        self._arrays, self._caller, self._is_captured = arrays, current_stream_handle(), is_captured

    def use_again(self) -> None:
        """Reuse it once no caller holds it any more. Not for one that belongs to a graph."""
        self._goes_to = self._idle

    def let_go(self) -> None:
        self._arrays = ()

    def current_stream_wait(self) -> None:
        """Later work of the caller's current stream starts after the event. Only a virtual rank's host waits too."""
        current = current_stream_handle()
        # The host waits first: virtual ranks may share a current stream (Numba's default one), and a pending wait for
        # one rank's kernel would hold the kernels of the others back, which it waits for.
        if self._host_wait is not None and not is_capturing(current):
            self._host_wait(lambda: self.done, lambda: "an event of its comm stream")
        order("cuStreamWaitEvent", cu.cuStreamWaitEvent(current, self.event, 0))
        if current == self._caller:
            self.let_go()


class CudaStream(Stream):
    """A stream. `handle` 0 is the default one. Its events keep the arrays of its launches until those are done."""

    def __init__(
        self, handle: int, name: str, ordinal: int, host_wait: HostWait | None = None, is_callers: bool = False
    ):
        self.handle = handle
        self.is_callers = is_callers
        self.name = name
        self.ordinal = ordinal
        self._host_wait = host_wait
        self.unrecorded: list[Any] = []  # arrays of the launches since the last event
        self._in_flight: deque[CudaEvent] = deque()  # those that keep arrays, or did so
        self._behind_current: CudaEvent | None = None  # of wait_current_stream; recorded anew each time
        self._handed_over: CudaEvent | None = None  # the latest one of hand_over; recorded anew if no one else has it
        self._idle_events: list[Any] = []
        self._turn = Lock()  # of the threads that record it

    @property
    def key(self) -> object:
        return self.handle

    @property
    def is_capturing(self) -> bool:
        return is_capturing(self.handle)

    @property
    def cuda_stream(self) -> int:
        """What torch.cuda.ExternalStream and cupy.cuda.ExternalStream take."""
        return self.handle

    def record(self, event: Event | None = None) -> CudaEvent:
        if event is not None:
            assert isinstance(event, CudaEvent)
            event.record(self.handle)
            return event
        arrays, self.unrecorded = self.unrecorded, []  # another thread's that come from here on stay
        event = CudaEvent(self.handle, self._host_wait, self._idle_events)
        capturing = is_capturing(self.handle)
        if not capturing:
            event.use_again()
        if arrays:
            event.keep(arrays, capturing)
            if not capturing:
                self._let_go_of_the_past()
            self._in_flight.append(event)
        return event

    def hand_over(self) -> Event:
        if self._host_wait is not None:
            return super().hand_over()
        self.unrecorded = []  # what the current stream does with their memory comes after the event
        capturing = is_capturing(self.handle)
        event = self._record_again(capturing)
        order("cuStreamWaitEvent", cu.cuStreamWaitEvent(current_stream_handle(), event.event, 0))
        if self._in_flight and not capturing:
            self._let_go_of_the_past()
        return event

    def _record_again(self, capturing: bool) -> CudaEvent:
        """An event at the end: the latest one of these, unless somebody else holds it, who may wait for it yet."""
        event = self._handed_over
        if event is None or capturing or getrefcount(event) > ONLY_HERE:
            event = CudaEvent(self.handle, self._host_wait, self._idle_events)
            if not capturing:
                event.use_again()
                self._handed_over = event
        else:
            event.record(self.handle)
        return event

    def _let_go_of_the_past(self) -> None:
        """What the launches used that are done, and what a graph used whose capture has ended.

        Not during a capture: no event may be asked then.
        """
        in_flight = self._in_flight
        while in_flight and (not in_flight[0]._arrays or in_flight[0].is_past):
            in_flight.popleft().let_go()

    def wait(self, event: Event) -> None:
        assert isinstance(event, CudaEvent)
        order("cuStreamWaitEvent", cu.cuStreamWaitEvent(self.handle, event.event, 0))

    def wait_current_stream(self) -> None:
        current = current_stream_handle()
        if current != self.handle:
            with self._turn:
                if self._behind_current is None:
                    self._behind_current = CudaEvent(current)
                else:
                    self._behind_current.record(current)
                self.wait(self._behind_current)

    def synchronize(self) -> None:
        arrays, self.unrecorded = self.unrecorded, []  # another thread's that come from here on stay
        check("cuStreamSynchronize", cu.cuStreamSynchronize(self.handle))
        del arrays
        self._let_go_of_the_past()

    def close(self) -> None:
        """Keep the stream for the next one that is created: arrays that belong to it are freed on it, maybe later."""
        idle_streams.setdefault(self.ordinal, []).append(self.handle)


idle_streams: dict[int, list[int]] = {}  # by device, of all runtimes of the process
