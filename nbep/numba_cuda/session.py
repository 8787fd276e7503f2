"""The emulated device of this process: its world, its streams, and the options under which kernels run.

A launch is queued; it runs when the host waits for it. The default stream is CUDA's legacy one: what is queued there
comes after all that was queued before in other streams, and before all that is queued in them later.
"""

from __future__ import annotations

import atexit
import contextlib
import weakref
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, ClassVar

from nbep.emulator import World
from nbep.emulator.machine import stream as machine
from nbep.emulator.machine.errors import EmulatorError, Uninitialized
from nbep.emulator.schedule.scheduler import Stuck

from .hangs import hang
from .loops import LoopingThread, is_endless
from .reports import describe, show_source, tell_writer, words_of

MANY_CALLS = 1 << 12  # primitive calls between two looks for loops that never end
OPTIONS: dict[str, Any] = {
    "seed": 0,
    "memory_model": "sc",
    "strategy": "uniform",
    "num_sms": None,
    "tracer": None,
    "on_failure": None,
}


class CudaWorld(World):
    """An emulated GPU that speaks of threads as Numba does."""

    def __init__(self, seed: int, **given: Any):
        super().__init__(1, seed, **given)
        self.thread_class: Any = named(self.thread_class)
        self._looked_for_loops = 0  # after so many primitive calls
        self.dims: dict[tuple[str, int], Any] = {}
        self.cooperative: set[tuple[str, int]] = set()  # launches that may sync the grid

    def error_of(self, fact: Any) -> Any:
        return hang(self) if isinstance(fact, Stuck) else words_of(self, fact, super().error_of)

    def explain(self, error: BaseException) -> None:
        if isinstance(error, Uninitialized):
            tell_writer(error, self)
        if isinstance(error, EmulatorError):
            show_source(error)

    def _look_around(self, finished: Any, describe: Any) -> None:
        super()._look_around(finished, describe)
        if self.calls - self._looked_for_loops > MANY_CALLS:
            self._looked_for_loops = self.calls
            if is_endless(self):
                raise self._deadlock(describe)

    def _find_endless_loops(self, what: Any) -> None:
        """`_look_around` does, also while threads store."""

    def dims_of(self, kernel: str, launch: int) -> Any:
        """Grid and block of a launch."""
        return self.dims.get((kernel, launch), ((1 << 31, 1, 1), (1024, 1, 1)))


def _named(thread_class: Any) -> Any:
    """A class of threads that are called as Numba does."""
    slots = "looks", "looker", "turn", "notes", "is_silent"
    bases = LoopingThread, thread_class
    return type(f"Cuda{thread_class.__name__}", bases, {"__slots__": slots, "describe": describe})


named: Callable[[Any], Any] = cache(_named)


class Session:
    """One emulated GPU, until a kernel fails on it or the options change."""

    def __init__(self) -> None:
        options = {name: value for name, value in OPTIONS.items() if name != "seed"}
        self.options = dict(OPTIONS)
        self.world = CudaWorld(OPTIONS["seed"], **options)
        self.rank = self.world.ranks[0]
        self.space = self.rank.space
        self.is_fast = OPTIONS["memory_model"] == "sc" and OPTIONS["tracer"] is None
        self.streams: list[Any] = []
        self.default = self.new_stream("default stream")
        self.launches = 0

    def new_stream(self, name: str) -> machine.Stream:
        stream = self.rank.create_stream(name)
        self.streams.append(stream)
        self.dirty: dict[Any, bool] = getattr(self, "dirty", {})
        return stream

    def order(self, stream: machine.Stream) -> None:
        """Something is about to be queued in a stream: what the legacy default stream makes it wait for."""
        if len(self.streams) == 1:  # whoever comes later has to wait for what this one has to do
            self.dirty[stream] = True
            return
        if stream is self.default:
            for other in self.streams[1:]:
                if self.dirty.pop(other, False):
                    stream.wait(other.record())
            self.behind = dict.fromkeys(self.streams[1:], False)
        else:
            behind = getattr(self, "behind", {})
            if self.dirty.get(self.default) and not behind.get(stream, False):
                stream.wait(self.default.record())
                behind[stream] = True
                self.behind = behind
        self.dirty[stream] = True

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """What fails here ends the session: the next launch finds a new device."""
        try:
            yield
        except BaseException:
            if current(create=False) is self:
                _drop()
            raise

    def synchronize(self, stream: machine.Stream | None = None) -> None:
        with self.guarded():
            for one in self.streams if stream is None else [stream]:
                if one.is_busy or self.world.memory_model != "sc":
                    one.synchronize()


_current: list[Session] = []
_latest: list[Any] = []  # the world that was made last, also when its session is over


def current(create: bool = True) -> Any:
    """The session that runs now."""
    if _current and _current[0].options != OPTIONS:
        finish()
        _drop()
    if not _current and create:
        _current.append(Session())
        _latest[:] = [_current[0].world]
    return _current[0] if _current else None


def latest_world() -> Any:
    return _latest[0] if _latest else None


def _drop() -> None:
    _current.clear()


def reset() -> None:
    """Forget all that was queued, and all races so far."""
    _drop()


def finish() -> None:
    """Run what is queued."""
    if _current:
        _current[0].synchronize()


atexit.register(finish)


@contextlib.contextmanager
def options(**given: Any) -> Iterator[None]:
    """How kernels run meanwhile, on a new device. Arrays stay what they are.

    Args:
        given: seed, memory_model ("sc", "checked" or "delayed"), strategy, num_sms, tracer, on_failure: see `World`

    Raises:
        TypeError: for others
        Exception: at the end, what kernels that were not waited for have failed with
    """
    unknown = set(given) - set(OPTIONS)
    if unknown:
        raise TypeError(f"options: {', '.join(sorted(unknown))}; allowed: {', '.join(OPTIONS)}")
    finish()
    _drop()
    before = dict(OPTIONS)
    OPTIONS.update(given)
    try:
        yield
        finish()
    finally:
        _drop()
        OPTIONS.update(before)


class Stream:
    """A stream of CUDA. copies: to pinned arrays, that are under way"""

    _count = 0
    of_number: ClassVar[weakref.WeakValueDictionary[int, Stream]] = weakref.WeakValueDictionary()
    external = False

    def __init__(self, is_default: bool = False):
        Stream._count += 1
        self.name = "the default stream" if is_default else f"stream {Stream._count - 1}"
        self.is_default = is_default
        self.handle = self
        self.copies: list[tuple[Any, Any]] = []
        self._session: Session | None = None
        self._stream: Any = None
        self._callbacks: list[Callable[[], Any]] = []
        if not is_default:
            self.of_number[id(self)] = self

    def as_external(self) -> Stream:
        """It, as who gets it by its number has it."""
        return _ExternalStream(self)

    def __repr__(self) -> str:
        return f"<CUDA {self.name}>"

    def __int__(self) -> int:
        return 0 if self.is_default else id(self.handle)

    def real(self) -> machine.Stream:
        """The emulator's stream, in the session that runs now."""
        session = current()
        if self._session is not session:
            self._session = session
            self._stream = session.default if self.is_default else session.new_stream(self.name)
        return self._stream

    def synchronize(self) -> None:
        """Block until all that was queued here is done."""
        stream = self.real()
        session = current()
        if self.is_default and len(session.streams) > 1:
            session.order(stream)
        session.synchronize(stream)
        copies, self.copies = self.copies, []
        for ary, device in copies:
            ary._arrives = None
            device._read_into(ary)
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    @contextlib.contextmanager
    def auto_synchronize(self) -> Iterator[Stream]:
        yield self
        self.synchronize()

    def add_callback(self, callback: Callable[..., Any], arg: Any = None) -> None:
        self._callbacks.append(lambda: callback(self, 0, arg))

    def query(self) -> bool:
        self.synchronize()
        return True


class _ExternalStream(Stream):
    external = True

    def __init__(self, there: Stream):
        self.__dict__ = there.__dict__


DEFAULT = Stream(is_default=True)


def stream_of(given: Any) -> Stream:
    """What a stream argument means."""
    if isinstance(given, Stream):
        return given
    if not given or isinstance(given, int) or hasattr(given, "__cuda_stream__"):
        return DEFAULT
    raise TypeError(f"stream: {given!r}; must be a stream of cuda.stream(), or 0")


class Event:
    """A point of a stream."""

    def __init__(self, timing: bool = True):
        self.timing = timing
        self.handle = self
        self._event: Any = None
        self._stream: Stream | None = None
        self._session: Any = None

    def record(self, stream: Any = 0) -> None:
        self._stream = stream_of(stream)
        there = self._stream.real()
        self._session = current()
        self._session.order(there)
        self._event = there.record()

    def wait(self, stream: Any = 0) -> None:
        """Later work of the stream waits for it."""
        there = stream_of(stream).real()
        if self._event is not None and self._session is current():
            there.wait(self._event)

    def synchronize(self) -> None:
        if self._event is None or self._session is not current():
            return
        with self._session.guarded():
            self._session.world.host_wait(lambda: self._event.done, "an event")
            self._event.tell_host()
        if self._stream is not None and self._stream.copies:
            self._stream.synchronize()

    def query(self) -> bool:
        self.synchronize()
        return True

    def elapsed_time(self, other: Event) -> float:
        """Milliseconds between two events. The emulator has no time: it is 0."""
        return 0.0
