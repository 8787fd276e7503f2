"""The transport over NVSHMEM: one world of ranks in a process, which the first buffer sets up and the last one ends.

 1  kernels               each rank alone; all hear if one cannot
 2  init                  the first buffer: a unique id goes over the communicator, then all ranks start NVSHMEM
 3  register              kernels' modules get NVSHMEM's constants
 4  allocate              symmetric memory, at the same offset of the heap on all ranks
    free                  memory; with the last one what 3 and 2 have made, backwards

A process is in one world at a time. When that has ended, another may be set up. A start that fails cannot be taken
back: NVSHMEM counts it as one that has to be ended, and ranks that did start cannot end without the others. Then the
process is of no more use for it, and says so.

A rank's number in its world, that of all ranks of the buffer, is its PE.

All of it waits for all ranks without a bound. A process can hold one PE only, so ranks that share a process, as those
of nbep.spawn do, cannot use it; the emulator has none.

Source: DeepEP csrc/kernels/runtime.cu (init, alloc, finalize), csrc/deep_ep.cpp (Buffer::sync), deep_ep/buffer.py;
NVSHMEM API, nvshmemx_init_attr with a unique id, nvshmemx_cumodule_init
"""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from cuda.bindings import driver as cu

from nbep.device.compile import with_variants
from nbep.device.jit import over
from nbep.device.library import load_kernels
from nbep.device.network.nvshmem import NeedsGpu, NvshmemNetwork
from nbep.device.network.nvshmem_library import NvshmemMissing
from nbep.device.network.seam import Network
from nbep.host.arguments import refuse
from nbep.host.ranks.comm import Communicator, InProcessComm, gather_results
from nbep.host.target.base import Kernel
from nbep.host.target.cuda.driver import check
from nbep.host.target.cuda.memory import DeviceMemory
from nbep.host.target.cuda.runtime import CudaRuntime
from nbep.host.target.memory import SymmetricMemory, WantedMemory
from nbep.host.transport.base import Transport

HEAP_ALIGNMENT = 128
UNIQUE_ID_BYTES = 128

# As DeepEP sets them. What the user has set stays.
ENVIRONMENT = {
    "NVSHMEM_QP_DEPTH": "1024",
    "NVSHMEM_MAX_TEAMS": "16",  # NVSHMEM 3.8 makes 7 of its own; more take memory
    "NVSHMEM_DISABLE_NVLS": "1",  # multicast over NVLink takes memory, and rights that a container may lack
    "NVSHMEM_CUMEM_GRANULARITY": str(1 << 29),
}
INFINIBAND = Path("/sys/class/infiniband")


class Library:
    """NVSHMEM's host calls. They are those of nvshmem4py; each raises RuntimeError, or nvshmem4py's own error."""

    def __init__(self, core: Any, bindings: Any, device: Callable[[int], Any]):
        self._core = core
        self._bindings = bindings
        self._device = device

    def version(self) -> tuple[int, int]:
        """Of NVSHMEM: 3, 8."""
        major, minor = self._core.get_version().libnvshmem_version.split(".")[:2]
        return int(major), int(minor)

    def unique_id(self) -> bytes:
        """A new name for a world, which one of its ranks tells the others."""
        return ctypes.string_at(self._core.get_unique_id().ptr, UNIQUE_ID_BYTES)

    def init(self, ordinal: int, unique_id: bytes, pe: int, num_pes: int) -> None:
        """Start NVSHMEM on a GPU of this process. Collective over the world."""
        uid = self._core.get_unique_id(empty=True)
        ctypes.memmove(uid.ptr, unique_id, UNIQUE_ID_BYTES)
        self._core.init(device=self._device(ordinal), uid=uid, rank=pe, nranks=num_pes, initializer_method="uid")

    def finalize(self) -> None:
        """End NVSHMEM. Collective."""
        self._core.finalize()

    def allocate(self, num_bytes: int) -> int:
        """The address of new symmetric memory. Collective; all ranks ask for the same size."""
        address = int(self._bindings.align(HEAP_ALIGNMENT, num_bytes))
        if address == 0:
            raise RuntimeError(f"nvshmem_align of {num_bytes} bytes: the symmetric heap has no room")
        return address

    def free(self, address: int) -> None:
        """Collective."""
        self._bindings.free(address)

    def peer_address(self, address: int, pe: int) -> int:
        """Where this rank sees a PE's symmetric memory; 0 if it is not mapped."""
        return int(self._bindings.ptr(address, pe))

    def register(self, module: int) -> None:
        """Fill NVSHMEM's constants in a module of the driver. It waits for the device."""
        self._check("nvshmemx_cumodule_init", self._bindings.cumodule_init(module))

    def unregister(self, module: int) -> None:
        self._check("nvshmemx_cumodule_finalize", self._bindings.cumodule_finalize(module))

    @staticmethod
    def _check(call: str, status: int | None) -> None:
        if status:
            raise RuntimeError(f"{call}: status {status}; does NVSHMEM run, and is its library of the same version?")


def load_library() -> Library:
    """Raises: NvshmemMissing if nvshmem4py or NVSHMEM is not installed"""
    try:
        import nvshmem.bindings
        import nvshmem.core
        from cuda.core import Device
    except ImportError as error:
        raise NvshmemMissing("nvshmem4py is not installed") from error
    return Library(nvshmem.core, nvshmem.bindings, Device)


class Running(NamedTuple):
    """A world that runs, and which PE of it a rank is."""

    name: bytes
    pe: int
    num_pes: int


class World:
    """NVSHMEM in this process, while it runs.

    Attributes: running: its unique id, this rank's PE, and how many there are; num_users: memories that keep it
    """

    def __init__(self, library: Library, running: Running):
        self.library = library
        self.running = running
        self.num_users = 0
        self._undo = ExitStack()
        self._undo.callback(library.finalize)

    def register(self, modules: Sequence[int]) -> None:
        """Let modules have NVSHMEM's constants."""
        for module in modules:
            self.library.register(module)
            self._undo.callback(self.library.unregister, module)

    def end(self) -> None:
        """Collective over the world."""
        self._undo.close()


class _Process:
    """What this process knows of NVSHMEM: the world that it is in, or why it can be in none any more."""

    world: World | None = None
    broken: str = ""


_process = _Process()


def kernels_over_nvshmem() -> list[Kernel]:
    """nbep's kernels that use a network, for this one."""
    specs = with_variants(load_kernels().values()).values()
    return [over(spec.function, NvshmemNetwork) for spec in specs if spec.hints.get("network") is Network]


class NvshmemHandle(NamedTuple):
    """What a rank tells the others of its memory. NVSHMEM knows the rest."""

    bus_id: str


class NvshmemMemory(DeviceMemory, SymmetricMemory):
    """Memory on the symmetric heap, all zeros at first. It keeps NVSHMEM running until it is freed."""

    def __init__(self, runtime: CudaRuntime, comm: Communicator, world: World, num_bytes: int, name: str):
        self._comm = comm
        self._world = world
        self._is_freed = False
        super().__init__(runtime.device, num_bytes, name)
        self.handle = NvshmemHandle(runtime.device.bus_id)

    def _allocate(self, undo: ExitStack) -> int:
        # Not given back if what comes next fails on this rank alone: that would wait for the others. NVSHMEM frees its
        # whole heap when it ends.
        return self._world.library.allocate(self.allocated_bytes)

    def open_peers(self, handles: list[NvshmemHandle], rank: int) -> list[int]:
        """0 stands for a peer that is not mapped."""
        library, pe = self._world.library, self._world.running.pe
        return [
            self.address if peer == pe else library.peer_address(self.address, peer) for peer in range(len(handles))
        ]

    def close_peers(self) -> None:
        """Nothing to do: NVSHMEM has mapped the heaps, not this memory."""

    def free(self) -> None:
        """Give the memory back, unless it has been, and end NVSHMEM if this was its last user. Collective.

        Raises: RuntimeError if NVSHMEM could not be ended, or may not be, because the work of a GPU has failed; the
                process cannot set it up again then
        """
        if self._is_freed:
            return
        self._is_freed = True
        try:
            gather_results(self._comm, lambda: check("cuCtxSynchronize", cu.cuCtxSynchronize()))
        except Exception as error:  # NVSHMEM would end the process
            _process.world, _process.broken = None, f"the work of a GPU failed ({error})"
            raise
        try:
            self._world.library.free(self.address)
        finally:
            _leave(self._world)


class NvshmemTransport(Transport):
    """One rank's end of the network of one buffer. The first one of a process starts NVSHMEM.

    create: collective; it talks to the other ranks several times, so it comes outside of gather_results, and raises on
    all ranks if it fails on one -> allocate -> `handle` to all ranks -> open -> launches -> close -> end

    Args:   num_bytes of each rank, the same on all
            num_nvl_peers  ranks of a node, which divides the ranks of comm or is not less than they are
            num_qps        queue pairs to each peer, where there is a NIC
            may_be_mapped  tells of (rank, peer) whether kernels may reach a peer through a mapping, if NVSHMEM has one;
                           others get NVSHMEM's calls
    Raises: ValueError on the emulator, and for ranks that share a process or a GPU; RuntimeError if NVSHMEM is not
            installed, does not start, or runs for other ranks, if kernels do not compile, or if there is no memory
    Blocks: until all ranks are here. The first call compiles kernels unless they are in the cache.
    """

    network_type: type = NvshmemNetwork

    def __init__(
        self,
        runtime: Any,
        comm: Communicator,
        num_bytes: int,
        num_nvl_peers: int,
        num_qps: int,
        may_be_mapped: Callable[[int, int], bool],
    ):
        self._rank = comm.rank
        self._may_be_mapped = may_be_mapped
        world = _enter(runtime, comm, num_nvl_peers, num_qps)
        made: list[NvshmemMemory] = []
        try:
            gather_results(comm, lambda: made.append(NvshmemMemory(runtime, comm, world, num_bytes, "rdma_buffer")))
        except Exception:
            _leave(world)
            raise
        self._memory = made[0]

    def allocate(self, comm: Any, wanted: WantedMemory) -> NvshmemMemory:
        """The memory that there is already; of that many bytes. It is all zeros."""
        assert wanted.num_bytes == self._memory.num_bytes
        return self._memory

    @property
    def handle(self) -> NvshmemHandle:
        return self._memory.handle

    def open(self, handles: list[Any], table_offset: int, bounds: Any) -> NvshmemNetwork:
        """As Transport.open. bounds are not needed: NVSHMEM's waits have no end."""
        memory, rank = self._memory, self._rank
        addresses = [
            at if peer == rank or self._may_be_mapped(rank, peer) else 0
            for peer, at in enumerate(memory.open_peers(handles, rank))
        ]
        memory.write(table_offset, np.array(addresses, np.int64))
        return NvshmemNetwork(memory.address + table_offset, rank, len(addresses), addresses.count(0), addresses[rank])

    def close(self) -> None:
        """Nothing to do."""

    def unread_by_nic(self) -> int | None:
        """None: a kernel calls nvshmem_quiet behind its puts, and ends after that."""
        return None

    def end(self) -> None:
        """Free the memory, unless it has been freed. Collective; what a buffer whose construction fails calls."""
        if not self._memory.is_kept:
            self._memory.free()


class Prepared(NamedTuple):
    """What a rank knows before all start together: its GPU, the world that runs here, and a name for a new one."""

    gpu: tuple[str, str]  # its host, and its number there
    running: Running | None
    new_name: bytes


def _enter(runtime: Any, comm: Communicator, num_nvl_peers: int, num_qps_per_rank: int) -> World:
    """Join the NVSHMEM world, which the first user creates, and count this user."""

    def prepare() -> Prepared:
        """What can fail on one rank alone."""
        _refuse(runtime, comm, num_nvl_peers)
        library = load_library()
        gpu = socket.gethostname(), runtime.device.bus_id
        if _process.world is not None:
            return Prepared(gpu, _process.world.running, b"")
        for kernel in kernels_over_nvshmem():
            runtime.load(kernel)
        settings = dict(ENVIRONMENT)
        if INFINIBAND.is_dir() and any(INFINIBAND.glob("mlx5_*")):
            settings |= {"NVSHMEM_IB_ENABLE_IBGDA": "1", "NVSHMEM_IBGDA_NUM_RC_PER_PE": str(num_qps_per_rank)}
        for name, value in settings.items():
            os.environ.setdefault(name, value)
        return Prepared(gpu, None, library.unique_id() if comm.rank == 0 else b"")

    prepared = gather_results(comm, prepare)
    gpus, first, world = [rank.gpu for rank in prepared], prepared[0].running, _process.world
    for rank, gpu in enumerate(gpus):
        if gpu in gpus[:rank]:  # NVSHMEM serves them in part: it ends a process that asks for a team
            what = f"'nvshmem' for ranks {gpus.index(gpu)} and {rank}, which share GPU {gpu[1]}"
            refuse("transport", what, "another, or one GPU a rank")
    if any(rank.running is not None for rank in prepared):
        wanted = [first and Running(first.name, pe, len(prepared)) for pe in range(len(prepared))]
        if world is None or [rank.running for rank in prepared] != wanted:  # of just these ranks, in this order
            raise RuntimeError("NVSHMEM runs in some of these processes for other ranks; destroy their buffers first")
        world.num_users += 1
        return world
    world = _start(runtime, comm, prepared[0].new_name)
    world.num_users += 1
    modules = [runtime.module_of(kernel) for kernel in kernels_over_nvshmem()]
    try:
        gather_results(comm, lambda: world.register(modules))
    except Exception:
        _leave(world)
        raise
    return world


def _refuse(runtime: Any, comm: Communicator, num_nvl_peers: int) -> None:
    if runtime.target == "emulator":
        raise ValueError(str(NeedsGpu()))
    if isinstance(comm, InProcessComm) and comm.size > 1:
        refuse("transport", "'nvshmem' for ranks that share a process", "another, or one process a rank: mpiexec")
    if comm.size > num_nvl_peers and comm.size % num_nvl_peers:
        refuse("num_nvl_peers", num_nvl_peers, f"a divisor of the {comm.size} ranks")
    if _process.broken:
        raise RuntimeError(f"NVSHMEM cannot be used in this process any more: {_process.broken}")


def _start(runtime: CudaRuntime, comm: Communicator, name: bytes) -> World:
    """Start NVSHMEM on all ranks of comm. Collective."""
    runtime.device.make_current()
    library = load_library()
    try:
        gather_results(comm, lambda: library.init(runtime.device.ordinal, name, comm.rank, comm.size))
    except Exception as error:
        _process.broken = f"it did not start on all ranks ({error})"
        raise
    _process.world = World(library, Running(name, comm.rank, comm.size))
    return _process.world


def _leave(world: World) -> None:
    """One user less; the last one ends the world."""
    world.num_users -= 1
    if world.num_users > 0:
        return
    _process.world = None
    try:
        world.end()
    except Exception as error:
        _process.broken = f"it did not end: {error}"
        raise
