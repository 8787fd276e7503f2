"""Ranks of the emulator that use torch: a thread for each of `nbep.spawn`, and a look at what they do with tensors.

 greenlet of the rank          its thread
 go on ----------------------> calls nbep, torch; torch runs a backward pass
 host_wait(...), other ranks <---- waits; the thread stands still
 go on ----------------------> ...

What torch keeps for a thread is then a rank's own: gradients on or off, the modes and hooks of `with` statements, and
the engine of the backward pass, which takes what another rank of its thread asks for as a part of its own work. The
thread begins with the modes of the one that called spawn. The order of a run is the same as without threads.

Each operation on tensors passes through a mode of torch's dispatcher:

 a kernel is launched    its outputs are not there, its inputs must stay, until the rank has waited for an event behind
                         it; with a hook its outputs come with that. The tensors are kept alive until then
 torch writes a tensor   a call that comes behind an event alone finds it there only if the event is later

What counts is whether the program waits, not whether the kernel is done by then: the same line is found with every
seed. What takes a tensor's memory without an operation, as tolist() and numpy() do, is not seen.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextvars import copy_context
from functools import cache
from threading import Semaphore, Thread, get_ident
from typing import Any, NamedTuple

from nbep.emulator import DataRace
from nbep.emulator.machine.source import caller_site, describe_site
from nbep.emulator.schedule.scheduler import Host, running_host, threads_of_hosts
from nbep.host.target.checked_arrays import Lease


class RankThread:
    """A thread that calls `function` for the rank whose greenlet calls `run`."""

    def __init__(self, function: Callable[[], Any]):
        self._function = function
        self._to_thread, self._to_greenlet = Semaphore(0), Semaphore(0)
        self._asked: Callable[[], Any] | None = None  # what the greenlet is to do for the thread; None: it has ended
        self._result: Any = None
        self._error: BaseException | None = None

    def run(self) -> Any:
        """What the function returns. Called in the rank's greenlet, which does what the thread asks for meanwhile."""
        host = running_host()
        assert host is not None
        thread = Thread(target=copy_context().run, args=(self._main, host, _modes()), name=f"rank {host.rank}")
        thread.daemon = True
        thread.start()
        self._to_greenlet.acquire()
        while self._asked is not None:
            self._error = None
            try:
                self._result = self._asked()
            except BaseException as error:  # also that of a rank that has ended the run
                self._error = error
            self._to_thread.release()
            self._to_greenlet.acquire()
        thread.join()
        if self._error is not None:
            raise self._error
        return self._result

    def ask(self, what: Callable[[], Any]) -> Any:
        """What the greenlet gets of `what()`. Called in the thread."""
        self._asked = what
        self._to_greenlet.release()
        self._to_thread.acquire()
        error, self._error = self._error, None
        if error is not None:
            raise error
        return self._result

    def _main(self, host: Host, modes: Callable[[], None]) -> None:
        threads_of_hosts[get_ident()], host.thread = host, get_ident()
        error = result = None
        try:
            modes()
            result = self._function()
        except BaseException as caught:
            error = caught
        del threads_of_hosts[get_ident()]
        host.thread = None
        self._asked, self._result, self._error = None, result, error
        self._to_greenlet.release()


def _modes() -> Callable[[], None]:
    """What gives another thread the modes that torch has in this one."""
    torch: Any = sys.modules["torch"]
    from torch.overrides import _get_current_function_mode_stack, _push_mode
    from torch.utils import _python_dispatch as dispatch

    with_gradients, in_inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    functions, dispatches = _get_current_function_mode_stack(), dispatch._get_current_dispatch_mode_stack()

    def begin() -> None:
        if in_inference:
            torch.inference_mode().__enter__()
        torch._C._set_grad_enabled(with_gradients)
        for mode in functions:
            _push_mode(mode)
        for mode in dispatches:
            dispatch._push_mode(mode)

    return begin


# --- What a rank does with tensors that kernels use


UNTIL = "the event or the hook of its call"
# They ask only for the shape.
SHAPE_ALONE = {
    *(f"{name}_like" for name in ("empty", "zeros", "ones", "full", "rand", "randn", "randint")),
    *(f"new_{name}" for name in ("empty", "empty_strided", "zeros", "ones", "full")),
    *("_unsafe_view", "is_same_size", "record_stream", "set_"),
}


class Hold:
    """What keeps the outputs of a launch back that a hook completes."""

    is_open = True

    def release(self) -> None:
        self.is_open = False


class Pending:
    """When what a launch uses is the caller's; an event, as a Lease takes it."""

    def __init__(self, stream: Any, place: int, hold: Hold | None):
        self._stream, self._place, self._hold = stream, place, hold

    @property
    def is_past(self) -> bool:
        return self._stream.waited >= self._place and not (self._hold and self._hold.is_open)


class Use(NamedTuple):
    """A tensor that a kernel, or whoever lends it, still uses. input_of: the kernel that only reads it; else ''"""

    tensor: Any
    lease: Lease
    input_of: str


class TensorWatch:
    """Of one rank. clock: the operations that have written so far; written: the clock behind each storage's latest"""

    def __init__(self) -> None:
        self.clock = 0
        self.hold: Hold | None = None  # of the next launch
        self._written: dict[int, int] = {}
        self._uses: dict[int, list[Use]] = {}  # by storage

    def begin(self) -> None:
        """Watch the calling thread from now on, below the modes that it has."""
        from torch.utils import _python_dispatch as dispatch

        above = [dispatch._pop_mode() for _ in dispatch._get_current_dispatch_mode_stack()]
        for mode in (_mode_class()(self), *reversed(above)):
            dispatch._push_mode(mode)

    def check_launch(self, stream: Any, kernel: str, name: str, tensor: Any) -> None:
        """Raises: UseAfterFree if its lease has ended; DataRace if torch wrote it behind what the stream waits for"""
        for use in self._uses.get(tensor.untyped_storage()._cdata, ()):
            use.lease.check()
        if self._written.get(_address(tensor), 0) > stream.seen():
            raise DataRace(
                f"{name}: the caller's stream has written it behind the previous_event of the call, so {kernel} may "
                f"read what was there before; take the event behind the write"
            )

    def launched(self, stream: Any, kernel: str, used: list[tuple[str, Any, bool]]) -> None:
        """A kernel uses tensors from now on. used: names, tensors, and whether it writes them"""
        pending = Pending(stream, stream.stream.num_marks + 1, self.hold)
        self.hold = None
        plain = Pending(stream, stream.stream.num_marks + 1, None)
        for name, tensor, is_output in used:
            lease = Lease(f"{name}, which kernel {kernel} {'writes' if is_output else 'reads'},", begin=UNTIL)
            lease.begins_with = pending if is_output else plain
            if is_output:
                self._written.pop(_address(tensor), None)
            self.lend(tensor, lease, "" if is_output else kernel)

    def lend(self, tensor: Any, lease: Lease, input_of: str = "") -> None:
        uses = self._uses.setdefault(tensor.untyped_storage()._cdata, [])
        uses[:] = [use for use in uses if not _is_over(use)]
        uses.append(Use(tensor, lease, input_of))

    def settle(self) -> None:
        """Let go of what nothing uses any more."""
        for storage, uses in list(self._uses.items()):
            uses[:] = [use for use in uses if not _is_over(use)]
            if not uses:
                del self._uses[storage]

    def before(self, operation: Any, arguments: list[tuple[Any, bool]]) -> None:
        """An operation begins. arguments: of torch's kinds, and whether it writes them

        Raises: Uninitialized, UseAfterFree, DataRace
        """
        for value, writes in arguments:
            for tensor in _tensors(value):
                begin, end = _extent(tensor)
                for use in self._uses.get(tensor.untyped_storage()._cdata, ()):
                    its_begin, its_end = _extent(use.tensor)
                    if (use.input_of and not writes) or not (begin < its_end and its_begin < end):
                        continue
                    where = f"a use by {operation} at {describe_site(caller_site(sys._getframe()))}"
                    if not use.input_of:
                        use.lease.check_read(where)
                    elif not use.lease.begins_with.is_past:
                        what = use.lease.what.rstrip(",")
                        raise DataRace(f"{where[9:]} writes {what}, before {UNTIL}: the kernel may still read it")

    def after(self, written: list[Any]) -> None:
        """It has ended. written: what it has returned, and what it has changed"""
        self.clock += 1
        for tensor in _tensors(written):
            self._written[_address(tensor)] = self.clock


def _is_over(use: Use) -> bool:
    pending = use.lease.begins_with
    return isinstance(pending, Pending) and pending.is_past


def _address(tensor: Any) -> int:
    return tensor.untyped_storage().data_ptr()


def _extent(tensor: Any) -> tuple[int, int]:
    reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1 if tensor.numel() else 0
    return tensor.storage_offset() * tensor.itemsize, (tensor.storage_offset() + reach) * tensor.itemsize


def _tensors(value: Any) -> Iterator[Any]:
    """The tensors of the CPU in a value; none of a class of its own, whose memory is another tensor's."""
    torch: Any = sys.modules["torch"]
    if type(value) in (torch.Tensor, torch.nn.Parameter):
        if value.device.type == "cpu" and value.layout is torch.strided:
            yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _tensors(each)


@cache
def _mode_class() -> Callable[[TensorWatch], Any]:
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    on_cpu = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)

    class Watching(TorchDispatchMode):
        supports_higher_order_operators = True

        def __init__(self, watch: TensorWatch):
            super().__init__()
            self.watch = watch

        @classmethod
        def ignore_compile_internals(cls) -> bool:
            return True

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            schema = getattr(func, "_schema", None)
            if schema is None:
                return func(*args, **kwargs)
            with self:  # what is made of other operations below autograd, as reshape() is, which may copy or not
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
            if func.is_view:
                return func(*args, **kwargs)
            if not schema.name.startswith(("aten::", "prims::")):  # a program's own: what it does inside is looked at
                if not torch._C._dispatch_has_computed_kernel_for_dispatch_key(func.name(), "CPU"):
                    return func(*args, **kwargs)
                with self, torch._C._AutoDispatchBelowAutograd():
                    return func.redispatch(on_cpu, *args, **kwargs)
            by_name = ((argument, kwargs[argument.name]) for argument in schema.arguments if argument.name in kwargs)
            given = [
                (value, argument.alias_info is not None and argument.alias_info.is_write)
                for argument, value in (*zip(schema.arguments, args, strict=False), *by_name)
            ]
            if schema.name[6:] not in SHAPE_ALONE:
                self.watch.before(func, given)
            result = func(*args, **kwargs)
            self.watch.after([result, [value for value, is_written in given if is_written]])
            return result

    return Watching
