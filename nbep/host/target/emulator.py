"""The emulator as a target: NumPy arrays and torch's tensors, one greenlet per rank, all ranks in one process.

The host reads arrays at once, so the host itself is the rank's current stream: waiting for an event blocks it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import ml_dtypes  # noqa: F401 - registers bfloat16 and float8_e4m3fn with NumPy
import numpy as np

from nbep.device.cards import has_bulk_copies, max_smem_bytes
from nbep.device.jit import spec_of
from nbep.device.library import describe_shared
from nbep.device.protocols.peers import Bounds
from nbep.device.types import flatten_args, unflatten_args
from nbep.emulator import World
from nbep.emulator.machine.arrays import OFFSET_MASK, extent
from nbep.host.faults import read_report
from nbep.host.target.arrays import NO_ARRAY, Parts, PartsLayout, View, view_of
from nbep.host.target.base import LATER, Array, Event, Kernel, NicDevice, PreparedLaunch, Runtime, Stream, check_rank
from nbep.host.target.checked_arrays import LentArray, Outputs, Span, Watched, check, is_over, lend
from nbep.host.target.cpu_arrays import CpuTensors, own_modes
from nbep.host.target.emulated_memory import EmulatedMemory, EmulatedPolledMemory, EmulatedSymmetricMemory
from nbep.host.target.launches import check_launch, check_leaf
from nbep.host.target.libraries import native_name, numpy_dtype
from nbep.host.target.memory import Describe, Memory, PolledMemory, Reach, SymmetricMemory, WantedMemory
from nbep.host.target.torch_ranks import Hold, RankThread, TensorWatch

WARP = 32
AFTER_EVENT = "behind the event that the call returns, or not at all"


class EmulatedNic(NicDevice):
    """An address space of its own, in which the memory of other nodes is mapped, too."""

    def __init__(self, runtime: EmulatorRuntime):
        self._runtime = runtime
        self._context = runtime.world.add_nic(runtime.rank)
        self._stream = EmulatedStream(runtime, self._context.create_stream("nic", is_service=True), "nic")
        self._mappings: list[Any] = []

    def allocate(self, num_bytes: int, name: str, describe: Describe | None = None) -> Memory:
        space = self._context.space
        return EmulatedMemory(space, space.allocate(num_bytes, name, zero=True, describe=describe))

    def address_of(self, memory: Memory) -> int:
        assert isinstance(memory, EmulatedMemory)
        return self._open(memory.allocation)

    def open_peers(self, symmetric: SymmetricMemory, handles: list[Any], rank: int) -> list[int]:
        return [self._open(handle) for handle in handles]

    def _open(self, allocation: Any) -> int:
        mapping = self._context.space.open(allocation)
        self._mappings.append(mapping)
        return mapping.address

    def explain(self, describe: Callable[[int], list[str]] | None) -> None:
        networks = self._runtime.world.networks
        networks.pop(self._runtime.rank, None)
        if describe is not None:
            networks[self._runtime.rank] = describe

    def start(
        self, kernel: Kernel, queues: Memory, num_queue_pairs: int, timeout_ns: int, nic: Any, *args: Any
    ) -> None:
        self._runtime.launch(self._stream, kernel, num_queue_pairs, WARP, 0, nic, *args)

    def join(self) -> None:
        self._stream.synchronize()

    def close(self) -> None:
        for mapping in self._mappings:
            self._context.space.close(mapping)
        self._mappings.clear()


class EmulatedEvent(Event):
    """behind: which of the host's writes come before it; see TensorWatch"""

    def __init__(self, runtime: EmulatorRuntime, stream: EmulatedStream):
        self._runtime, self._stream = runtime, stream
        self.event = stream.stream.record()
        self.behind = stream.seen()

    @property
    def done(self) -> bool:
        is_done = self.event.done
        if is_done:
            self.event.tell_host()
            self._stream.waited = max(self._stream.waited, self.event.mark.place)
        return is_done

    @property
    def is_past(self) -> bool:
        """Whether the host has waited for it, or for a later one of its stream: that it is done is not enough."""
        return self._stream.waited >= self.event.mark.place

    def current_stream_wait(self) -> None:
        self._runtime.wait_until(lambda: self.done, lambda: f"an event of stream {self.event.stream.name}")
        if self._runtime.tensors is not None:
            self._runtime.tensors.settle()


class EmulatedStream(Stream):
    """behind: the host's writes that its next work comes behind; waited: place of the last mark that the host saw"""

    def __init__(self, runtime: EmulatorRuntime, stream: Any, name: str):
        self._runtime = runtime
        self.stream = stream
        self.name = name
        self.behind = self.waited = 0

    def seen(self) -> int:
        """Which of the host's writes come before its end: the current stream is the host itself."""
        if self._runtime.made_current_stream is self:
            self.see_host()
        return self.behind

    def see_host(self) -> None:
        if self._runtime.tensors is not None:
            self.behind = self._runtime.tensors.clock

    @property
    def key(self) -> object:
        return self.stream

    def record(self, event: Event | None = None) -> Event:
        if event is None:
            return EmulatedEvent(self._runtime, self)
        assert isinstance(event, EmulatedEvent)
        self.stream.record(event.event)
        event.behind = self.seen()
        return event

    def wait(self, event: Event) -> None:
        assert isinstance(event, EmulatedEvent)
        self.stream.wait(event.event)
        self.behind = max(self.behind, event.behind)

    def wait_current_stream(self) -> None:
        """What the host has done is done; what it has queued in its current stream need not be."""
        self.see_host()
        current = self._runtime.made_current_stream
        if current is not None and current is not self and current.stream.is_busy:
            self.wait(current.record())

    def synchronize(self) -> None:
        self.record().current_stream_wait()

    def close(self) -> None:
        """Nothing to do: a stream without work costs nothing."""


class EmulatedParts(Parts):
    def __init__(self, arrays: list[Array]):
        self._arrays = arrays

    @property
    def arguments(self) -> tuple[Any, ...]:
        return tuple(self._arrays)

    def array(self, index: int) -> Array:
        return self._arrays[index]


class EmulatedPreparedLaunch(PreparedLaunch):
    """The launch of one of nbep's own kernels. Its first arguments are those that `Buffer` has checked.

    The others are checked once: when it is first launched, as a mode may prepare more launches than it makes.
    """

    def __init__(self, runtime: EmulatorRuntime, what: tuple[Kernel, int, int, int], last_args: tuple[Any, ...]):
        self._runtime, self._what, self._spec = runtime, what, spec_of(what[0])
        last = flatten_args(last_args)
        self._num_first = len(self._spec.params) - len(last)
        self._later = [self._num_first + i for i, leaf in enumerate(last) if leaf is LATER]
        self._leaves = [0] * self._num_first + [0 if leaf is LATER else leaf for leaf in last]
        self._is_checked = False

    def launch(
        self, stream: Stream, first: Sequence[Any] = (), keep: Sequence[Any] = (), later: Sequence[Any] = ()
    ) -> None:
        if not self._is_checked:
            args = unflatten_args(self._what[0], self._leaves)
            self._leaves = check_launch(self._runtime, self._spec, *self._what[1:], args)
            self._is_checked = True
        leaves = [*first, *self._leaves[self._num_first :]]
        for i, number in zip(self._later, later, strict=True):
            leaves[i] = check_leaf(self._runtime, self._spec, self._spec.params[i], number)
        self._runtime.start(stream, *self._what, leaves)


class EmulatorRuntime(Runtime):
    """One rank of an emulated world."""

    target = "emulator"
    host_reads_arrays = True
    max_symmetric_bytes = OFFSET_MASK
    shares_current_stream = False

    array_kinds = "a NumPy array, a tensor of torch on the CPU"

    def __init__(self, world: World, rank: int):
        self.world = world
        world.read_report = read_report
        self.rank = rank
        self._context = world.ranks[rank]
        self._current_streams: dict[int, EmulatedStream] = {}  # by thread: each is a host of its own
        # Launches, the arrays that they use, and where those lie that they write
        self._in_flight: list[tuple[Any, list[Any], list[Span]]] = []
        self._outputs = Outputs()
        self._thread = threading.get_ident()
        self._rank_thread: RankThread | None = None
        self.tensors: TensorWatch | None = None
        self.num_forks = -1  # so that each verb asks check_caller

    def run(self, function: Callable[[], Any]) -> Any:
        """What the rank's function returns, in a thread of its own if torch may run in it; see torch_ranks."""
        if not hasattr(sys.modules.get("torch"), "_C"):
            return function()

        def begin() -> Any:
            self._thread = threading.get_ident()
            self.watch_tensors()
            return function()

        self._rank_thread = RankThread(begin)
        return self._rank_thread.run()

    def check_caller(self, verb: str) -> None:
        """Raises: RuntimeError as Runtime's, in another thread than the ranks', after its run, in a backward pass"""
        super().check_caller(verb)
        if threading.get_ident() != self._thread:
            raise RuntimeError(
                f"{verb}: called in another thread; emulated ranks run in the thread that called spawn: to call from "
                f"several threads, start a process for each rank, with mpiexec or torchrun"
            )
        check_rank(verb, self)
        if self.world.is_over:
            raise RuntimeError(f"{verb}: called after the end of the spawn that this rank was part of")
        torch: Any = sys.modules.get("torch")
        in_backward_pass = hasattr(torch, "_C") and torch._C._current_graph_task_id() != -1
        if self._rank_thread is None and in_backward_pass:
            # torch's engine takes the backward pass of the next rank for a part of this one's, and mixes up their work.
            raise RuntimeError(
                f"{verb}: called in torch's backward pass by a rank of nbep.spawn that torch was not imported before; "
                f"import torch first: each rank has a thread of its own then"
            )

    @property
    def is_failing(self) -> bool:  # type: ignore[override]
        return self.world.failure is not None

    @property
    def has_tma(self) -> bool:
        return has_bulk_copies(self.world.compute_capability)

    @property
    def max_smem_bytes(self) -> int:  # type: ignore[override]
        return max_smem_bytes(self.world.compute_capability)

    @property
    def space(self) -> Any:
        """The rank's address space."""
        return self._context.space

    def allocate_symmetric(self, comm: Any, wanted: WantedMemory, reach: Reach) -> SymmetricMemory:
        # After a wait that times out a kernel runs on and reads what never came. It reads zeros then, so that the
        # run ends with the time-out and not with a read of never-written memory.
        zero = wanted.zero or self.world.on_deadlock == "expire"
        allocation = self.space.allocate(wanted.num_bytes, wanted.name, zero=zero, describe=wanted.describe)
        allocation.on_host = wanted.handle_type == "host"
        return EmulatedSymmetricMemory(self.space, allocation)

    def allocate(self, num_bytes: int, name: str, describe: Describe | None = None) -> Memory:
        return EmulatedMemory(self.space, self.space.allocate(num_bytes, name, zero=True, describe=describe))

    def create_nic(self) -> NicDevice:
        return EmulatedNic(self)

    def allocate_host_visible(self, num_bytes: int, name: str) -> PolledMemory:
        return EmulatedPolledMemory(self.space, self.space.allocate(num_bytes, name, zero=True))

    def view(self, value: Any) -> View:
        if value is None:
            return NO_ARRAY
        if not isinstance(value, np.ndarray):
            flaw = CpuTensors.flaw(value) if CpuTensors.is_array(value) else None
            return view_of(value, CpuTensors) if flaw == "" else View(value, flaw or "")
        if value.__class__ is LentArray:
            check(value)
        dtype, flags = value.dtype, value.flags
        strides = tuple(stride // (dtype.itemsize or 1) for stride in value.strides)
        of_memory = value.nbytes, strides, flags.c_contiguous, flags.writeable, value.ctypes.data
        return View(value, "", True, value.shape, native_name(dtype), dtype.itemsize, *of_memory)

    def contents(self, array: Array) -> np.ndarray:
        return array if isinstance(array, np.ndarray) else CpuTensors.view(array)

    def empty(self, shape: tuple[int, ...], dtype: str, like: Array) -> Array:
        array = np.empty(shape, numpy_dtype(dtype))
        self._outputs.add(array)
        return array if isinstance(like, np.ndarray) else CpuTensors.wrap(array, dtype)

    def stand_in(self, like: Array) -> Array:
        array = np.empty(0, np.int32)
        return (
            array if isinstance(like, np.ndarray) or not CpuTensors.is_array(like) else CpuTensors.wrap(array, "int32")
        )

    def empty_parts(self, layout: PartsLayout, like: Array) -> Parts:
        return EmulatedParts([self.empty(shape, dtype, like) for _, shape, dtype in layout.parts])

    def empty_by_columns(self, shape: tuple[int, int, int], dtype: str, like: Array) -> Array:
        by_columns = self.empty((shape[0], shape[2], shape[1]), dtype, like)
        return by_columns.transpose(0, 2, 1) if isinstance(like, np.ndarray) else by_columns.transpose(1, 2)

    def lend(self, array: Array, lease: Any) -> Array:
        if self.tensors is not None and not isinstance(array, np.ndarray):
            self.tensors.lend(array, lease)
        return lend(array, lease)

    def hold_outputs(self) -> Callable[[], None]:
        hold = Hold()
        if self.tensors is not None:
            self.tensors.hold = hold
        return hold.release

    def watch_tensors(self) -> None:
        """Look at what torch does in this thread, from now on."""
        if hasattr(sys.modules.get("torch"), "_C"):
            self.tensors = TensorWatch()
            self.tensors.begin()

    def dtype_like(self, dtype: str, like: Array) -> Any:
        return np.dtype(dtype) if isinstance(like, np.ndarray) else CpuTensors.dtype(dtype)

    def allocating_on(self, stream: Stream) -> AbstractContextManager[None]:
        return nullcontext()  # NumPy's memory belongs to no stream

    def let_current_stream_use(self, arrays: list[Array]) -> bool:
        return True  # the host is done with an array when it lets go of it

    @property
    def current_stream(self) -> Stream:
        thread = threading.get_ident()
        if thread not in self._current_streams:
            self._current_streams[thread] = self.create_stream("compute")
        return self._current_streams[thread]

    @property
    def made_current_stream(self) -> EmulatedStream | None:
        """The current stream, if anybody has asked for it."""
        return self._current_streams.get(threading.get_ident())

    @property
    def is_capturing(self) -> bool:
        return False

    def tell_calls(self, so_far: Callable[[], list[tuple[int, str]]]) -> None:
        self.world.call_logs.append(so_far)

    def create_stream(self, name: str) -> EmulatedStream:
        return EmulatedStream(self, self._context.create_stream(name), name)

    def launch(self, stream: Stream, kernel: Kernel, grid: int, block: int, smem_bytes: int, *args: Any) -> None:
        self.check_caller("a launch")
        leaves = check_launch(self, spec_of(kernel), grid, block, smem_bytes, args)
        self.start(stream, kernel, grid, block, smem_bytes, leaves)

    def start(self, stream: Stream, kernel: Kernel, grid: int, block: int, smem_bytes: int, leaves: list[Any]) -> None:
        """Start a kernel whose arguments are checked. leaves: of them, in a list of its own"""
        assert isinstance(stream, EmulatedStream)
        self.check_caller("a launch")
        self._unmap_finished()
        spec = spec_of(kernel)
        mappings = []
        inputs, written = [], []
        tensors: list[tuple[str, Any, bool]] = []
        for i, param in enumerate(spec.params):
            leaf = leaves[i]
            if leaf is None:
                leaves[i] = 0
            elif leaf.__class__ is not int and param.type.is_address:
                if leaf.__class__ is LentArray:
                    check(leaf)
                name, array = param.path.rpartition(".")[2], leaf
                if not isinstance(leaf, np.ndarray):
                    array = CpuTensors.view(leaf)
                    if self.tensors is not None:
                        self.tensors.check_launch(stream, spec.name, name, leaf)
                        tensors.append((name, leaf, param.type.is_writable))
                if param.type.is_writable and not array.flags.writeable:
                    check_leaf(self, spec, param, leaf)  # says so
                mappings.append(self.space.map_array(array, name, writable=param.type.is_writable))
                leaves[i] = mappings[-1].address
                if param.type.is_writable:
                    written.append(extent(array))
                elif mappings[-1].number >= 0:  # peers may write symmetric memory
                    inputs.append((name, array, mappings[-1].allocation))

        flat = unflatten_args(kernel, leaves)
        describe = describe_shared(spec.name, flat, block, self.has_tma)
        together = Bounds in spec.hints.values()  # as on a GPU, where such a kernel is a cooperative launch
        launch = stream.stream.launch(
            kernel, flat, grid, block, smem_bytes, spec.name, describe_shared=describe, starts_together=together
        )
        if self.is_checked:
            others = sum((spans for other, _, spans in self._in_flight if not other.done), written)
            for name, array, allocation in inputs:
                if not is_over(array, others):
                    self._outputs.hide_unwritten(array, allocation)
                    launch.callbacks.append(Watched(name, array, self.rank, spec.name, AFTER_EVENT).check)
        self._in_flight.append((launch, mappings, written))
        if self.tensors is not None:
            self.tensors.launched(stream, spec.name, tensors)

    def after_launch(self, call: Callable[[], None]) -> None:
        self._in_flight[-1][0].callbacks.append(call)

    def watch(self, reader: str, until: str, arrays: dict[str, Array]) -> Callable[[], None] | None:
        if not self.is_checked:
            return None
        watched = [Watched(name, self.contents(array), self.rank, reader, until) for name, array in arrays.items()]

        def check_all() -> None:
            for each in watched:
                each.check()

        return check_all

    @property
    def is_checked(self) -> bool:
        return self.world.memory_model == "checked"

    def prepare(self, kernel: Kernel, grid: int, block: int, smem_bytes: int, *last_args: Any) -> PreparedLaunch:
        return EmulatedPreparedLaunch(self, (kernel, grid, block, smem_bytes), last_args)

    def load(self, kernel: Kernel) -> None:
        spec_of(kernel)

    def wait_until(
        self,
        predicate: Callable[[], bool],
        describe: Callable[[], str],
        timeout_ns: int | None = None,
        told: Callable[[], Iterable[Any]] | None = None,
    ) -> bool:
        self.check_caller("a wait")
        if self._rank_thread is not None:
            in_time = self._rank_thread.ask(lambda: self.world.host_wait(predicate, describe, timeout_ns, told))
        else:
            with own_modes():  # other ranks run meanwhile
                in_time = self.world.host_wait(predicate, describe, timeout_ns, told)
        self._unmap_finished()
        return in_time

    def tell_hosts(self) -> Any:
        return self.world.cpu.tells()

    def settle(self, stream: Stream) -> bool:
        stream.record().current_stream_wait()
        return True

    def resident_blocks(self, handles: list[Any], num_taken: int) -> int:
        return 2

    def _unmap_finished(self) -> None:
        """Give up the arrays of launches that are done. The host does it, so that only one thread maps and unmaps."""
        in_flight = self._in_flight
        self._in_flight = []
        for launch, mappings, written in in_flight:
            if launch.done:
                for mapping in mappings:
                    self.space.unmap(mapping)
            else:
                self._in_flight.append((launch, mappings, written))
