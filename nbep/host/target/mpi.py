"""The emulator with one process per rank, under mpiexec.

 rank 0 --shared window--> rank 1   |   rank 2 --shared window--> rank 3       a node: ranks that map each other
     NIC of rank 0 ------------- one-sided calls -------------> memory of rank 2

Ranks of a node are on one host and map their memory through MPI shared windows. The NIC of a rank reaches the memory of
every other rank, and it does so through MPI one-sided calls alone, also inside a node and a host: all that NICs add to
a cell goes the same way, so that nothing is lost. A kernel's own atomics hold the lock of the memory, which one-sided
calls know nothing of: see nbep.device.network.seam on who may add to a cell.

 the NIC              the rank's window over the same memory
 stores               MPI_Put
 fetch-and-add        MPI_Rget_accumulate with MPI_SUM, after MPI_Win_flush
 completion           after MPI_Win_flush

MPI lets in what comes for a process while that calls MPI. So a thread of each process calls it now and then, as long as
it has such memory, whatever the kernels and the host do; MPI has to be initialized with MPI_THREAD_MULTIPLE for that,
as mpi4py does by default.

Nothing of this needs one host for all nodes. It is run with MPICH, on one machine and between two network namespaces
over TCP (tests/hosts). It was run neither on several machines nor with another MPI. What goes to a peer that was killed
never arrives: kernels' waits end at their deadlines all the same. MPI_Finalize would then wait for ever, as it does
without a network: see host.ranks.await_ranks.

Source: MPI 4.1, sections "Window That Allocates Shared Memory" (MPI_Win_allocate_shared, MPI_Win_shared_query),
"Memory Model" and "Progress" of the chapter "One-Sided Communications"
"""

from __future__ import annotations

import atexit
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar, cast
from weakref import WeakValueDictionary

import numpy as np
from mpi4py import MPI

from nbep.emulator.process import ProcessWorld
from nbep.host.arguments import refuse
from nbep.host.ranks.await_ranks import call_bounded, duplicate, end_without_mpi
from nbep.host.ranks.comm import gather_objects, is_mpi_comm
from nbep.host.ranks.timeouts import PeerTimeout, timeout_ns
from nbep.host.target.job_memory import JobMemory, JobRuntime, spread_error
from nbep.host.target.memory import Reach, SymmetricMemory, WantedMemory

Result = TypeVar("Result")

SHORTEST_PAUSE_S = 20e-6  # between two looks for whether a message has arrived
PAUSE_S = 1e-3  # between two looks for what has come; also the longest of those


class SharedWindow(JobMemory):
    """This rank's segment of a shared window, and the peers' of its node as this process sees them.

    comm: all ranks of the buffer; node_comm: those of its node
    `handle` is a window rank; `network`: what NICs reach it through, None if they do not

    Raises: RuntimeError on every rank if a host has no room for it
    """

    held_bytes: ClassVar[int] = 0  # of this process, in all such windows

    def __init__(
        self, space: Any, comm: MPI.Intracomm, node_comm: MPI.Intracomm, wanted: WantedMemory, network_of: Any
    ):
        self._node_comm = node_comm
        mapped_bytes = self.mapped_bytes(wanted.num_bytes, comm.size)
        self._window = _bounded(comm, lambda: MPI.Win.Allocate_shared(mapped_bytes, 1, comm=node_comm))
        whole = self._open(node_comm.rank, comm.rank)
        lack = lack_of_room(wanted.name, gather_objects(comm, room_of(whole, SharedWindow.held_bytes)))
        SharedWindow.held_bytes += len(whole)
        self._mapped_bytes = len(whole)
        if lack:
            self._free_window(comm)
            raise RuntimeError(lack)
        super().__init__(space, comm, wanted, whole)
        self.handle = node_comm.rank
        self._arrays: WeakValueDictionary[int, np.ndarray] = WeakValueDictionary()  # views of one keep it alive
        self.network: RemoteWindow | None = network_of(self.allocation.memory)

    def _open(self, handle: Any, peer: int) -> memoryview:
        segment, _ = self._window.Shared_query(handle)
        return memoryview(cast(Any, segment)).cast("B")

    def _array(self, dtype: np.dtype, offset: int, count: int) -> np.ndarray:
        array = super()._array(dtype, offset, count)
        self._arrays[id(array)] = array
        return array

    @property
    def is_shown(self) -> bool:
        return len(self._arrays) > 0

    def _map(self, handle: Any, peer: int) -> Any:
        allocation = super()._map(handle, peer)
        allocation.on_host = self.allocation.on_host
        return allocation

    def channel(self, handle: Any, peer: int) -> WindowChannel | None:
        return None if self.network is None else self.network.channel(peer)

    def timed_out(self, name: str, holder: int) -> PeerTimeout:
        end_without_mpi()
        return super().timed_out(name, holder)

    def free(self) -> None:
        if self.network is not None:
            self.network.free()
        super().free()
        self._free_window(self.comm)

    def _free_window(self, comm: MPI.Intracomm) -> None:
        _bounded(comm, self._window.Free)
        self._node_comm.Free()
        SharedWindow.held_bytes -= self._mapped_bytes


class RemoteWindow:
    """A window over the memory that each rank of comm has already. Making it and freeing it is collective."""

    def __init__(self, comm: MPI.Intracomm, memory: memoryview):
        self._users = comm
        # No rank sends anything on this one: to probe it is what always makes progress.
        self._comm = duplicate(comm, 2 * timeout_ns())
        self._window = _bounded(comm, lambda: MPI.Win.Create(memory, 1, comm=self._comm))
        self._window.Lock_all(MPI.MODE_NOCHECK)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._let_in, name="nbep-let-in", daemon=True)
        self._thread.start()
        atexit.register(self._end)

    def _let_in(self) -> None:
        """Let in what has come for this process, again and again; then its threads may see it."""
        while not self._stop.wait(PAUSE_S):
            self._comm.Iprobe()
            self._window.Sync()

    def _end(self) -> None:
        self._stop.set()
        self._thread.join()
        atexit.unregister(self._end)

    def channel(self, rank: int) -> WindowChannel:
        """The way to the memory of a rank of comm."""
        return WindowChannel(self._window, rank)

    def free(self) -> None:
        self._end()

        def free() -> None:
            self._window.Unlock_all()
            self._window.Free()

        _bounded(self._users, free)
        self._comm.Free()


class WindowChannel:
    """The memory of one rank in a window, as `nbep.emulator.machine.remote` wants it."""

    def __init__(self, window: MPI.Win, rank: int):
        self._window = window
        self._rank = rank
        self._under_way: list[bytes] = []

    def put(self, offset: int, data: bytes) -> None:
        self._under_way.append(data)
        self._window.Put([data, MPI.BYTE], self._rank, (offset, len(data), MPI.BYTE))

    def flush(self) -> None:
        """MPI_Win_flush spins. So first wait, with pauses, for something that most likely arrives after the bytes."""
        self._get_and(MPI.NO_OP, 0, np.zeros((), np.int32))
        self._under_way.clear()

    def fetch_and_add(self, offset: int, size: int, value: int) -> int:
        return self._get_and(MPI.SUM, offset, np.array(value, np.int32 if size == 4 else np.int64))

    def _get_and(self, op: MPI.Op, offset: int, operand: np.ndarray) -> int:
        """An atomic, and a flush."""
        old = np.zeros_like(operand)
        request = self._window.Rget_accumulate(operand, old, self._rank, offset, op)
        pause_s = SHORTEST_PAUSE_S
        while not request.Test():
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSE_S)
        self._window.Flush(self._rank)
        return int(old)


class MpiEmulatorRuntime(JobRuntime):
    """Kernels run in a thread of their own while the host is in MPI calls."""

    def allocate_symmetric(self, comm: Any, wanted: WantedMemory, reach: Reach) -> SymmetricMemory:
        if not is_mpi_comm(comm):
            refuse("group", type(comm).__name__, "a communicator of MPI, as the first one of this process")
        node_comm = node_of(comm, reach)

        def network_of(memory: memoryview) -> RemoteWindow | None:
            return RemoteWindow(comm, memory) if reach.by_nics else None

        window = SharedWindow(self.space, comm, node_comm, wanted, network_of)
        window.allocation.on_host = wanted.handle_type == "host"
        if wanted.zero:
            window.write(0, np.zeros(wanted.num_bytes, np.uint8))
        return window


def runtime_of_process() -> MpiEmulatorRuntime:
    """This process's rank of a new world, which lives as long as the process."""
    rank = MPI.COMM_WORLD.rank
    return MpiEmulatorRuntime(ProcessWorld(MPI.COMM_WORLD.size, local_rank=rank), rank)


def _bounded(comm: MPI.Intracomm, call: Callable[[], Result]) -> Result:
    """What a collective call returns. Raises: PeerTimeout if a rank of comm does not come"""
    return call_bounded(comm, call, 2 * timeout_ns())


def node_of(comm: Any, reach: Reach) -> MPI.Intracomm:
    """The ranks of this rank's node. Collective.

    Raises: on every rank, ValueError if the ranks of a node are on several hosts; RuntimeError if NICs are to reach the
            memory and MPI does not let two threads call it
    """
    node_comm = _bounded(comm, lambda: comm.Split(comm.rank // reach.node_size, comm.rank))
    on_this_host = _bounded(comm, lambda: node_comm.Split_type(MPI.COMM_TYPE_SHARED))
    is_spread = on_this_host.size != node_comm.size
    on_this_host.Free()
    lacks_threads = reach.by_nics and MPI.Query_thread() != MPI.THREAD_MULTIPLE
    spread, lacking = zip(*gather_objects(comm, (is_spread, lacks_threads)), strict=True)
    if not any(spread) and not any(lacking):
        return node_comm
    node_comm.Free()
    if any(lacking):
        raise RuntimeError(
            "MPI: was not initialized with MPI_THREAD_MULTIPLE, which the emulator's network needs; with mpi4py: "
            'mpi4py.rc.thread_level = "multiple" before MPI is imported'
        )
    raise spread_error(reach.node_size, comm.size)


# --- Whether the file system that holds MPI's shared windows has room for them ----------------------------------------
# MPI makes a file as large as it is asked for, mostly in /dev/shm, of which a container has 64 MB by default. The file
# takes no room before its pages are written, and a write that finds none ends the process with SIGBUS.


class Room(NamedTuple):
    """What a rank says of the file system of its window. held: of its process, in all windows; wanted: in this one"""

    host: str
    folder: str  # "" where it is unknown
    free: int
    total: int
    held: int
    wanted: int


def room_of(window: memoryview, held: int) -> Room:
    """The room for a window of this process, which has held so much before."""
    folder = _folder_of(np.frombuffer(window, np.uint8).ctypes.data)
    if not folder:
        return Room("", "", 0, 0, held, len(window))
    found = os.statvfs(folder)
    free, total = (blocks * found.f_frsize for blocks in (found.f_bavail, found.f_blocks))
    return Room(socket.gethostname(), folder, free, total, held, len(window))


def lack_of_room(name: str, rooms: Sequence[Room]) -> str:
    """What the ranks lack who make windows together, "" if nothing. rooms: of all of them"""
    for host, folder in sorted({(room.host, room.folder) for room in rooms if room.folder}):
        there = [room for room in rooms if (room.host, room.folder) == (host, folder)]
        wanted, held = sum(room.wanted for room in there), sum(room.held for room in there)
        total, free = there[0].total, min(room.free for room in there)
        taken = max(held, total - free)  # what was made before need not have been written yet
        if wanted > total - taken:
            size = -(-(taken + wanted) // (1 << 20))
            return (
                f"{name}: {len(there)} ranks on {host} need {wanted} bytes of {folder}, which has room for "
                f"{max(0, total - taken)}; start the container with --shm-size={size}m, or enlarge the file system: "
                f"mount -o remount,size={size}m {folder}"
            )
    return ""


def _folder_of(address: int) -> str:
    """The folder of the file that is mapped at an address."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:  # not Linux
        return ""
    for line in lines:
        span, *_, path = line.split(maxsplit=5)
        begin, end = (int(bound, 16) for bound in span.split("-"))
        if begin <= address < end:
            return str(Path(path).parent) if path.startswith("/") else ""
    return ""
