"""The emulated device of this process: its world, its streams, and the options under which kernels run.

A launch is queued; it runs when the host waits for it. The default stream is CUDA's legacy one: what is queued there
comes after all that was queued before in other streams, and before all that is queued in them later.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, ClassVar

from nbep.device.engine import is_kept
from nbep.emulator import World
from nbep.emulator.engine import check_explained
from nbep.emulator.engine.state import MOST_WARPS
from nbep.emulator.machine import stream as machine
from nbep.emulator.machine.block import WARP_SIZE
from nbep.emulator.machine.errors import EmulatorError, Uninitialized
from nbep.emulator.schedule.scheduler import Stuck
from nbep.host.spawn import LONG, engine_for

from . import children
from .code import KernelTypeError
from .loops import LoopingThread, hang, is_endless
from .reports import describe, show_source, tell_writer, words_of

MANY_CALLS = 1 << 12  # primitive calls between two looks for loops that never end
FEW_CALLS = 1 << 9  # that Python runs as fast as machine code, which begins with a copy of memory
FIRST_CALLS = 1 << 12  # or threads, that Python runs while the compiled engine is loaded
_by_python = 0  # calls that Python has run
OPTIONS: dict[str, Any] = {
    "seed": 0, "memory_model": "sc", "strategy": "uniform", "num_sms": None, "tracer": None, "on_failure": None,
    "max_calls": None, "engine": None,
}  # fmt: skip


class CudaWorld(World):
    """An emulated GPU that speaks of threads as Numba does."""

    def __init__(self, seed: int, max_calls: int | None = None, **given: Any):
        super().__init__(1, seed, **given)
        self.max_calls = max_calls
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
        if self.max_calls is not None and self.calls > self.max_calls:
            raise hang(self, f"limit: after {self.max_calls:,} calls (max_calls) these are not done: ")
        if self.calls - self._looked_for_loops > MANY_CALLS:
            self._looked_for_loops = self.calls
            if not finished() and is_endless(self):
                raise self._deadlock(describe)

    def _find_endless_loops(self, what: Any) -> None:
        """`_look_around` does, also while threads store."""

    def dims_of(self, kernel: str, launch: int) -> Any:
        """Grid and block of a launch."""
        return self.dims.get((kernel, launch), ((1 << 31, 1, 1), (1024, 1, 1)))


@cache
def named(thread_class: Any) -> Any:
    """A class of threads that are called as Numba does."""
    slots = "looks", "looker", "turn", "notes", "is_silent"
    bases = LoopingThread, thread_class
    return type(f"Cuda{thread_class.__name__}", bases, {"__slots__": slots, "describe": describe})


LOCK = threading.RLock()  # threads of the host take turns with the device
_findings: list[tuple[EmulatorError, threading.Thread]] = []  # what has ended sessions, and who heard of it


class Session:
    """One emulated GPU, until a kernel fails on it or the options change."""

    def __init__(self) -> None:
        options = {name: value for name, value in OPTIONS.items() if name not in ("seed", "engine")}
        self.options = dict(OPTIONS)
        name, model, strategy, tracer = (OPTIONS[one] for one in ("engine", "memory_model", "strategy", "tracer"))
        name = name or os.environ.get("NBEP_ENGINE", "auto")
        self.engine = engine_for(name, model, strategy, tracer, ("sc", "checked"))
        self.world = CudaWorld(OPTIONS["seed"], **options)
        self.rank = self.world.ranks[0]
        self.space = self.rank.space
        self.is_fast = OPTIONS["memory_model"] == "sc" and OPTIONS["tracer"] is None
        self.streams: list[Any] = []
        self.dirty: dict[Any, bool] = {}  # streams in which something was queued since the default one waited for them
        self.behind: set[Any] = set()  # streams that wait for the latest of the default one
        self.default = self.new_stream("default stream")
        self.small: set[Any] = set()  # what had few calls
        self.unseen: set[Any] = set()  # streams that have got work since the host has waited for all of theirs
        self.is_mixed = False  # whether the host has done something else meanwhile than to queue and to wait
        self.users: set[int] = set()  # threads of the host that have launched or waited
        self.runner = 0  # the one on which kernels have run last

    def new_stream(self, name: str) -> machine.Stream:
        stream = self.rank.create_stream(name)
        self.streams.append(stream)
        return stream

    def order(self, stream: machine.Stream) -> None:
        """Something is about to be queued in a stream: what the legacy default stream makes it wait for."""
        if stream is self.default:
            for other in self.streams[1:]:
                if self.dirty.pop(other, False):
                    stream.wait(other.record())
            self.behind.clear()
        elif self.dirty.get(self.default) and stream not in self.behind:
            stream.wait(self.default.record())
            self.behind.add(stream)
        self.dirty[stream] = True
        self.unseen.add(stream)

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """What fails here ends the session: the next launch finds a new device."""
        with LOCK:
            try:
                self.users.add(threading.get_ident())
                yield
            except BaseException as error:
                if isinstance(error, EmulatorError):
                    _findings.append((error, threading.current_thread()))
                    children.note(error)
                if current(create=False) is self:
                    _current.clear()
                raise

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """This thread of the host waits, and kernels run. They cannot change threads: if several come, all are done."""
        with LOCK:
            here = threading.get_ident()
            if self.world.launches and self.runner != here:
                raise RuntimeError(
                    "kernels are under way that another thread of the host has started by waiting for a part of them; "
                    "call cuda.synchronize() there before this thread waits"
                )
            with self.guarded():
                self.runner = here
                yield
                if len(self.users) > 1:
                    self._finish(self.streams)

    def synchronize(self, stream: machine.Stream | None = None) -> None:
        with self.running():
            self._finish(self.streams if stream is None else [stream])

    def _finish(self, streams: list[machine.Stream]) -> None:
        global _by_python
        stopped, is_done, before = None, False, self.world.calls
        queue = [item.function for one in streams for what, item, _ in one.queue if what == "launch"]
        sizes = [tuple(getattr(one, "nbytes", 0) for one in run.keep) for run in queue]
        size = tuple((run.unit, run.grid, run.block, *nbytes) for run, nbytes in zip(queue, sizes, strict=True))
        if self.may_rehearse(streams, queue, size):
            from .rehearsal import rehearse

            stopped = rehearse(self, streams)
            is_done = stopped is None
        for one in [] if is_done else streams:
            if one.is_busy or self.world.memory_model != "sc":
                one.synchronize()
        calls = self.world.calls - before
        (self.small.add if calls < FEW_CALLS else self.small.discard)(size)
        if not is_done:
            _by_python += calls
            for run in queue:
                run.unit.by_python += calls
        self.unseen.difference_update(streams)
        self.is_mixed = bool(self.unseen) and self.is_mixed
        check_explained(stopped, self.world.seed)

    def may_rehearse(self, streams: list[machine.Stream], queue: list[Any], size: Any) -> bool:
        """Whether all that is not over is in queues of these streams, and to be run as machine code. size: of that

        What is more than there are stacks is another run as machine code, so that must not depend on what was before.
        """
        is_all = self.unseen <= set(streams) and not self.is_mixed and not self.world.launches
        if not queue or not is_all or self.engine == "python":
            return False
        warps = sum(run.num_warps for run in queue)
        must = self.engine == "compiled" or warps >= MOST_WARPS
        known = sum(run.unit.by_python for run in queue)
        is_short = size in self.small or known + WARP_SIZE * warps < FIRST_CALLS
        if not must and (is_short or not (_by_python > LONG or is_kept("machine", self.world.memory_model))):
            return False
        from .compiled import entry_of

        for run in queue:
            run.entry = entry_of(run, must or _by_python > LONG)
        return all(run.entry is not None for run in queue)


launched: dict[str, int] = {}  # how often, of each kernel by module and name
_current: list[Session] = []
_latest: list[Any] = []  # the world that was made last, also when its session is over


def current(create: bool = True) -> Any:
    """The session that runs now."""
    with LOCK:
        if _current and _current[0].options != OPTIONS:
            reset()
        if not _current and create:
            _current.append(Session())
            _latest[:] = [_current[0].world]
        return _current[0] if _current else None


def latest_world() -> Any:
    return _latest[0] if _latest else None


def reset() -> None:
    """Finish what is queued; what comes then finds a new device."""
    try:
        finish()
    finally:
        _current.clear()


def finish() -> None:
    """Run what is queued."""
    if _current:
        _current[0].synchronize()


@contextlib.contextmanager
def finishing(forgives: bool = True) -> Iterator[None]:
    """However this ends, what was launched is done first: a finding comes before the end's own error.

    forgives: whether what this thread has caught is no finding. That of other threads always is one
    """
    _findings.clear()
    with children.heard():
        try:
            yield
        except (KeyboardInterrupt, EmulatorError):
            raise
        except BaseException as own:
            try:
                _judge(forgives)
            except BaseException as found:
                if isinstance(own, Exception):
                    found.add_note(f"then the program ended with {type(own).__name__}: {own}")
                raise
            raise
        _judge(forgives)


def _judge(forgives: bool) -> None:
    finish()
    for error, thread in _findings:
        if thread is not threading.current_thread() or not forgives:
            raise error
    error_of_child = children.first()
    if error_of_child is not None:
        raise error_of_child


def begin_child() -> None:
    """This process has just been forked, or has started: what its parent has queued is its parent's."""
    LOCK._at_fork_reinit()  # type: ignore[attr-defined]
    _current.clear()
    _findings.clear()


def tell(error: BaseException) -> None:
    """Print what ends a program: a report as it is, and an error of the program with its traceback."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stdout.flush()
    if isinstance(error, (EmulatorError, KernelTypeError)):
        notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
        print(f"{type(error).__name__}: {short(str(error))}{notes}", file=sys.stderr)
    else:
        traceback.print_exception(error)


def short(text: str) -> str:
    """A report without the folder in which the program runs."""
    return text.replace(f"{os.getcwd()}{os.sep}", "")  # noqa: PTH109


def end() -> None:
    """The process ends. What it has not waited for is done; what is wrong with that is its exit status."""
    try:
        finish()
    except BaseException as error:
        tell(error)
        sys.stderr.flush()
        os._exit(1)


atexit.register(end)


@contextlib.contextmanager
def options(**given: Any) -> Iterator[None]:
    """How kernels run meanwhile, on a new device. Arrays stay what they are.

    Args:
        given: seed, memory_model ("sc", "checked" or "delayed"), strategy, num_sms, tracer, on_failure: see `World`;
            max_calls: of primitives (loads, stores, barriers), after which a run ends with a report;
            engine: "python", "compiled" or "auto", see `may_rehearse`; None: what NBEP_ENGINE says, or "auto"

    Raises:
        TypeError: for others
        Exception: at the end, what kernels that were not waited for have failed with
    """
    unknown = set(given) - set(OPTIONS)
    if unknown:
        raise TypeError(f"options: {', '.join(sorted(unknown))}; allowed: {', '.join(OPTIONS)}")
    reset()
    before = dict(OPTIONS)
    OPTIONS.update(given)
    try:
        with finishing():
            yield
    finally:
        _current.clear()
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
        with LOCK:
            session = current()
            if self._session is not session:
                self._session = session
                self._stream = session.default if self.is_default else session.new_stream(self.name)
            return self._stream

    def synchronize(self) -> None:
        """Block until all that was queued here is done."""
        stream = self.real()
        session = current()
        with LOCK:
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

    # --- as cuda.core has it ----------------------------------------------------------------------------------------

    close = sync = synchronize

    @property
    def device(self) -> Any:
        from .core import Device

        return Device()

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, int(self)

    def record(self, event: Event | None = None, options: Any = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait(self, other: Any) -> None:
        """Later work of this stream waits for an event, or for what another stream has to do by now."""
        (other if isinstance(other, Event) else stream_of(other).record()).wait(self)


class _ExternalStream(Stream):
    external = True

    def __init__(self, there: Stream):
        self.__dict__ = there.__dict__


DEFAULT = Stream(is_default=True)


def stream_of(given: Any) -> Stream:
    """What a stream argument means."""
    if isinstance(given, Stream):
        return given
    if hasattr(given, "__cuda_stream__"):
        given = int(given.__cuda_stream__()[1])
    if not given or isinstance(given, int):
        return Stream.of_number.get(given, DEFAULT) if given else DEFAULT
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
        with LOCK:
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
        with self._session.running():
            self._session.is_mixed = True
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

    sync, __sub__, is_done = synchronize, elapsed_time, property(query)  # as cuda.core has it
