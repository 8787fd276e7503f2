"""One rank on a GPU; and virtual ranks: several on one card, one Python thread and one set of streams each.

 caller's current stream --event--> comm stream: notify, dispatch, ... --event--> caller's current stream

A kernel that spins waits for peers whose host code may not have run yet. So nothing here makes the host wait for the
device between construction and destroy: nbep's kernels are loaded when the runtime is made, memory comes from the
caller's library (torch's and CuPy's pools) and the counters that the CPU polls lie in pinned memory. Kernels of virtual
ranks wait for each other inside one GPU, so all their blocks must be resident at once; `CudaRuntime.launch` checks it.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import numpy as np
from cuda.bindings import driver as cu

from nbep.device.cards import has_bulk_copies
from nbep.device.jit import spec_of
from nbep.device.library import load_kernels
from nbep.device.protocols.staging import VEC_BYTES
from nbep.device.types import flatten_args
from nbep.host.ranks.comm import CommGroup, InProcessComm
from nbep.host.target.arrays import ByColumns, Make, Parts, PartsLayout, View, Wanted, view_of
from nbep.host.target.base import (
    LATER,
    Array,
    Kernel,
    MaybeArray,
    NicDevice,
    PreparedLaunch,
    Recognizer,
    Runtime,
    Stream,
    set_current_runtime,
)
from nbep.host.target.cuda.driver import Device, check, current_ordinal
from nbep.host.target.cuda.launcher import Card, LoadedKernel, ParameterBlock, source_key
from nbep.host.target.cuda.memory import SYMMETRIC_MEMORY, DeviceMemory, HostVisibleMemory
from nbep.host.target.cuda.nic import CudaNic
from nbep.host.target.cuda.streams import CudaStream, HostWait, idle_streams, is_capturing
from nbep.host.target.launches import check_launch
from nbep.host.target.libraries import (
    TorchArrays,
    arguments_of,
    current_stream_handle,
    known_libraries,
    library_of,
    on_stream,
    pointer_of,
)
from nbep.host.target.memory import Describe, Memory, Reach, SymmetricMemory, WantedMemory


class SharedDevice:
    """What the ranks of a process have in common on one GPU: its loaded kernels, by function.

    nbep's own are loaded at once, because loading may wait for what runs on the card. A user's kernel is loaded when it
    is first asked for: one that does not compile concerns no other kernel.

    num_ranks is how many of them run on this card: their spinning blocks must be resident at once.

    Source: CUDA Programming Guide, Lazy Loading, "Concurrent execution"
    """

    def __init__(self, ordinal: int, num_ranks: int = 1):
        self.device = Device(ordinal)
        self.num_ranks = num_ranks
        self._key = source_key()
        self._lock = threading.Lock()
        self._card = Card(self.device.compute_capability, self.device.num_sms, num_ranks)
        self.kernels: dict[Kernel, LoadedKernel] = {}
        for spec in load_kernels().values():
            self.load(spec.function)

    def load(self, kernel: Kernel) -> LoadedKernel:
        """A kernel, loaded once.

        Raises: TypeError if it is no kernel; CompileError if it does not compile
        """
        with self._lock:
            if kernel not in self.kernels:
                self.kernels[kernel] = LoadedKernel.load(spec_of(kernel), self._card, self._key)
            return self.kernels[kernel]


class CudaParts(Parts):
    """One array of words; the others are views of it, made when they are asked for."""

    __slots__ = ("_arrays", "_layout", "_words")

    def __init__(self, layout: PartsLayout, words: Array):
        self._layout = layout
        self._words = words
        self._arrays: dict[int, Array] | None = None

    @property
    def arguments(self) -> tuple[Any, ...]:
        return tuple(map(pointer_of(self._words).__add__, self._layout.offsets))

    def array(self, index: int) -> Array:
        if self._arrays is None:
            self._arrays = {}
        if index not in self._arrays:
            first, shape, dtype = self._layout.parts[index]
            num_words = math.prod(shape) * np.dtype(dtype).itemsize // 4
            part = self._words[first : first + num_words]
            if dtype != "int32":
                part = part.view(library_of(part).dtype(dtype))
            self._arrays[index] = part if len(shape) == 1 else part.reshape(shape)
        return self._arrays[index]


class CudaPreparedLaunch(PreparedLaunch):
    """Its last arguments are packed once; a launch packs the first ones in front of them."""

    def __init__(self, loaded: LoadedKernel, size: tuple[int, int, int], last: list[Any], nics: dict[int, CudaNic]):
        self._loaded = loaded
        self._size = size
        self._parameters = ParameterBlock(loaded.spec.params)
        self._start = loaded.start
        num_first = len(loaded.spec.params) - len(last)
        self._pack_later = [self._parameters.packer_of(num_first + i) for i, leaf in enumerate(last) if leaf is LATER]
        last = [0 if leaf is LATER else leaf for leaf in last]
        self._parameters.pack([0] * num_first + last)
        self._pack_first = self._parameters.packer(num_first)
        self._turn = threading.Lock()  # of the threads that launch
        self._configs: dict[int, Any] = {}  # by stream
        queues = loaded.queues - num_first
        self._nic = nics.get(last[queues]) if queues >= 0 else None

    def launch(
        self, stream: Any, first: Sequence[Any] = (), keep: Sequence[Any] = (), later: Sequence[Any] = ()
    ) -> None:
        config = self._configs.get(stream.handle)
        if config is None:
            config = self._configs[stream.handle] = self._loaded.config(stream.handle, *self._size)
        with self._turn if self._nic is None else self._beside_nic(stream):
            self._pack_first(*first)
            if self._pack_later:
                for pack, number in zip(self._pack_later, later, strict=True):
                    pack(number)
            self._start(config, self._parameters)
        if not stream.is_callers:
            stream.unrecorded += keep

    @contextmanager
    def _beside_nic(self, stream: Any) -> Iterator[None]:
        assert self._nic is not None
        with self._nic.beside(stream), self._turn:
            yield


class CudaRuntime(Runtime):
    """Attributes: failed is set when another virtual rank has raised; waits then end."""

    target = "cuda"
    host_reads_arrays = False
    has_recognizers = True
    max_symmetric_bytes = None
    array_kinds = "an array of torch, CuPy or Numba on this GPU"

    def __init__(self, shared: SharedDevice, rank: int, failed: threading.Event | None = None):
        self.shared = shared
        self.device = shared.device
        self.rank = rank
        self.max_smem_bytes = self.device.max_smem_bytes
        self.failed = failed or threading.Event()
        self.device.make_current()
        # A copy to pageable memory keeps the driver locked while it waits for a stream. If a kernel in there waits
        # for another virtual rank, whose launch waits for the lock, nothing moves. So the hosts of virtual ranks wait
        # for their kernels themselves, by polling, before the caller can ask for such a copy.
        self._host_wait: HostWait | None = self.wait_until if shared.num_ranks > 1 else None
        self.has_own_stream = shared.num_ranks == 1
        self._current_streams: dict[int, CudaStream] = {}
        # A launch packs its parameters in place, so virtual ranks, each in a thread of its own, must not share blocks.
        self._kernels = {kernel: loaded.for_rank() for kernel, loaded in shared.kernels.items()}
        self.nics: dict[int, CudaNic] = {}  # by the address of the queues that each serves

    @property
    def has_tma(self) -> bool:
        return has_bulk_copies(self.device.compute_capability)

    # Memory

    def allocate_symmetric(self, comm: Any, wanted: WantedMemory, reach: Reach) -> SymmetricMemory:
        return SYMMETRIC_MEMORY[wanted.handle_type](self.device, wanted.num_bytes, wanted.name)

    def allocate(self, num_bytes: int, name: str, describe: Describe | None = None) -> Memory:
        return DeviceMemory(self.device, num_bytes, name)

    def create_nic(self) -> NicDevice:
        return CudaNic(self, self.nics)

    def allocate_host_visible(self, num_bytes: int, name: str) -> HostVisibleMemory:
        return HostVisibleMemory(num_bytes, name)

    # Arrays

    def empty(self, shape: tuple[int, ...], dtype: str, like: Array) -> Array:
        return library_of(like).empty(shape, dtype, like)

    def stand_in(self, like: Array) -> Array:
        library = library_of(like)
        return like if library is None else library.empty((0,), "int32", like)

    def empty_parts(self, layout: PartsLayout, like: Array) -> Parts:
        return CudaParts(layout, library_of(like).empty((layout.num_words,), "int32", like))

    def empty_by_columns(self, shape: tuple[int, int, int], dtype: str, like: Array) -> Array:
        return library_of(like).empty_by_columns(shape, dtype, like)

    def prepare_empty(self, wanted: Sequence[Wanted | ByColumns | PartsLayout | None], like: Array) -> Make:
        library = library_of(like)
        if library is not TorchArrays:
            return super().prepare_empty(wanted, like)
        layouts = [(i, each) for i, each in enumerate(wanted) if isinstance(each, PartsLayout)]
        make: Make = library.prepare_empty(
            [((each.num_words,), "int32") if isinstance(each, PartsLayout) else each for each in wanted],
            self.stand_in(like),
        )
        if not layouts:
            return make

        def make_with_parts() -> tuple[list[Any], list[Any]]:
            arrays, addresses = make()
            for i, layout in layouts:
                addresses[i] = tuple(map(addresses[i].__add__, layout.offsets))
                arrays[i] = CudaParts(layout, arrays[i])
            return arrays, addresses

        return make_with_parts

    def view(self, value: Any) -> View:
        library = library_of(value)
        if library is None or not library.is_array(value):
            return View(value)
        flaw = library.flaw(value) if library is TorchArrays else ""
        return View(value, flaw) if flaw else view_of(value, library)

    def look_at(self, values: Sequence[Any], num_free: int = 0) -> tuple[tuple[Any, ...] | None, list[Any], list[View]]:
        kinds: list[Any] = []
        addresses: list[Any] = []
        for i, value in enumerate(values):
            if value is None:
                kinds.append(None)
                addresses.append(0)
                continue
            library = known_libraries.get(value.__class__) or library_of(value)
            if library is TorchArrays and value.is_cuda:  # the most frequent ones, without functions in between
                try:
                    has_gaps, address = not value.is_contiguous(), value.data_ptr()
                except (RuntimeError, ValueError):  # of a tensor with a flaw
                    return None, [], []
                if value.is_neg():  # another one, which no attribute of a plain array shows
                    return None, [], []
                if i == 0:  # where the first lies, outputs are made
                    kinds.append(value.get_device())
            elif library is not None and library.is_array(value):
                has_gaps, address = not library.is_contiguous(value), pointer_of(value)
            else:
                return None, [], []
            kinds += (value.__class__, value.shape if i >= num_free else value.shape[1:], value.dtype)
            if has_gaps:
                kinds.append(library.strides(value))
            if not address or address % VEC_BYTES:
                kinds.append(address % VEC_BYTES)
            addresses.append(address)
        return tuple(kinds), addresses, []

    def recognizer(self, values: Sequence[Any], num_free: int = 0) -> Recognizer | None:
        if all(value is None or library_of(value) is TorchArrays for value in values):
            return TorchArrays.recognizer(values, num_free)
        return None

    def arguments(self, arrays: Sequence[MaybeArray]) -> list[Any]:
        return arguments_of(arrays)

    def dtype_like(self, dtype: str, like: Array) -> Any:
        return library_of(like).dtype(dtype)

    def allocating_on(self, stream: Stream) -> AbstractContextManager[None]:
        assert isinstance(stream, CudaStream)
        return on_stream(stream.handle, stream.ordinal)

    def let_current_stream_use(self, arrays: list[Array]) -> bool:
        there = [array for array in arrays if array is not None]
        return library_of(there[0]).let_current_stream_use(there)

    # Work

    @property
    def current_stream(self) -> CudaStream:
        handle = current_stream_handle()
        found = self._current_streams.get(handle)
        if found is None:
            found = CudaStream(handle, "current", self.device.ordinal, self._host_wait, is_callers=True)
            self._current_streams[handle] = found
        return found

    @property
    def is_capturing(self) -> bool:
        return is_capturing(current_stream_handle())

    def create_stream(self, name: str) -> CudaStream:
        try:
            handle = idle_streams[self.device.ordinal].pop()
        except LookupError:
            flags = cu.CUstream_flags.CU_STREAM_NON_BLOCKING
            _, highest = check("cuCtxGetStreamPriorityRange", cu.cuCtxGetStreamPriorityRange())
            handle = int(check("cuStreamCreateWithPriority", cu.cuStreamCreateWithPriority(flags, highest)))
        return CudaStream(handle, name, self.device.ordinal, self._host_wait)

    def launch(self, stream: Stream, kernel: Kernel, grid: int, block: int, smem_bytes: int, *args: Any) -> None:
        """Raises: as Runtime.launch; CompileError for a kernel that does not compile; ValueError if the blocks of one
        that waits, with those of the card's other ranks, cannot be resident at once
        """
        assert isinstance(stream, CudaStream)
        try:
            loaded = self._kernels[kernel]
        except KeyError:
            loaded = self._load(kernel)
        leaves = flatten_args(args) if loaded.is_own else check_launch(self, loaded.spec, grid, block, smem_bytes, args)
        arrays = []
        for i in loaded.addresses:
            leaf = leaves[i]
            if type(leaf) is int:
                continue
            if leaf is None:
                leaves[i] = 0
            else:
                arrays.append(leaf)
                leaves[i] = pointer_of(leaf)
        nic = self.nics.get(leaves[loaded.queues]) if loaded.queues >= 0 else None
        loaded.config(stream.handle, grid, block, smem_bytes)  # what it asks the driver is asked before the NIC runs
        with nullcontext() if nic is None else nic.beside(stream):
            loaded.launch(stream.handle, grid, block, smem_bytes, leaves)
        if not stream.is_callers:  # whose memory is handed out in the order of that stream
            stream.unrecorded += arrays

    def prepare(self, kernel: Kernel, grid: int, block: int, smem_bytes: int, *last_args: Any) -> PreparedLaunch:
        self.load(kernel)
        size = grid, block, smem_bytes
        leaves = [leaf if library_of(leaf) is None else pointer_of(leaf) for leaf in flatten_args(last_args)]
        return CudaPreparedLaunch(self._kernels[kernel], size, leaves, self.nics)

    def load(self, kernel: Kernel) -> None:
        if kernel not in self._kernels:
            self._load(kernel)

    def module_of(self, kernel: Kernel) -> int:
        """The driver's handle of the module of a kernel that is loaded, for a library that fills its constants."""
        return int(self._kernels[kernel].module)

    def _load(self, kernel: Kernel) -> LoadedKernel:
        loaded = self._kernels[kernel] = self.shared.load(kernel).for_rank()
        return loaded

    def wait_until(
        self,
        predicate: Callable[[], bool],
        describe: Callable[[], str],
        timeout_ns: int | None = None,
        told: Any = None,
    ) -> bool:
        deadline = None if timeout_ns is None else time.monotonic_ns() + timeout_ns
        while not predicate():
            if self.failed.is_set():
                raise PeerFailed(f"rank {self.rank} waited for {describe()} when another rank failed")
            if deadline is not None and time.monotonic_ns() > deadline:
                return predicate()
            time.sleep(0)  # lets the other virtual ranks run
        return True

    @property
    def shares_current_stream(self) -> bool:  # type: ignore[override]
        return self.shared.num_ranks > 1 and current_stream_handle() == 0

    def settle(self, stream: Stream) -> bool:
        if self._host_wait is None:
            return False
        stream.record().current_stream_wait()
        return True

    def resident_blocks(self, handles: list[Any], num_taken: int) -> int:
        num_ranks = sum(handle.bus_id == self.device.bus_id for handle in handles)
        return max(1, self.device.num_sms // max(num_ranks, self.shared.num_ranks) - num_taken)


class PeerFailed(RuntimeError):
    """Another rank of the process has raised; this one only stops."""


# --- Virtual ranks


def run_virtual_ranks(fn: Callable[..., Any], num_ranks: int, args: Sequence[Any]) -> list[Any]:
    """Run fn(comm, *args) once per rank on the current GPU, or else the first one; the results, by rank.

    Raises: the first exception of a rank, with a note that names the rank
    """
    shared = SharedDevice(current_ordinal() or 0, num_ranks)
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        # torch gives the pool its own settings when it first allocates.
        torch.empty(1, device=torch.device("cuda", shared.device.ordinal))
    shared.device.prepare_pool()
    group = CommGroup(range(num_ranks))
    failed = threading.Event()
    results: list[Any] = [None] * num_ranks
    failures: list[tuple[int, BaseException]] = []

    def run(rank: int) -> None:
        try:
            runtime = CudaRuntime(shared, rank, failed)
            set_current_runtime(runtime)
            with own_streams(shared.device.ordinal):
                results[rank] = fn(InProcessComm(group, rank, runtime), *args)
            group.returned.add(rank)
        except BaseException as error:  # raised again below
            failures.append((rank, error))
            failed.set()

    threads = [
        threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(num_ranks)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        rank, error = next((f for f in failures if not isinstance(f[1], PeerFailed)), failures[0])
        error.add_note(f"raised in rank {rank}")
        raise error
    return results


@contextmanager
def own_streams(ordinal: int) -> Iterator[None]:
    """Give the calling thread current streams of its own in the libraries that are loaded.

    The default stream waits for all others of the context, so ranks that share it would wait for each other.
    """
    with ExitStack() as stack:
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_available():
            torch.cuda.set_device(ordinal)
            stack.enter_context(torch.cuda.stream(torch.cuda.Stream(ordinal)))
        cupy = sys.modules.get("cupy")
        if cupy is not None:
            stack.enter_context(cupy.cuda.Stream(non_blocking=True))
        yield
