"""The emulator with one process per rank: peers are reached through MPI shared windows.

Source: MPI 4.1, section "Window That Allocates Shared Memory" (MPI_Win_allocate_shared, MPI_Win_shared_query)
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, cast

import numpy as np
from mpi4py import MPI

from nbep.emulator import World
from nbep.host.runtime.base import Describe, HandleType, SymmetricMemory
from nbep.host.runtime.emulator import EmulatedSymmetricMemory, EmulatorRuntime


class SharedWindow(EmulatedSymmetricMemory):
    """This rank's segment of a shared window, and the peers' as this process sees them. `handle` is a window rank."""

    def __init__(self, space: Any, node_comm: MPI.Intracomm, num_bytes: int, name: str, describe: Describe):
        self._name = name
        self._describe = describe
        self._node_comm = node_comm
        self._window = MPI.Win.Allocate_shared(num_bytes, 1, comm=node_comm)
        super().__init__(space, self._adopt(space, node_comm.rank, name))
        self.handle = node_comm.rank

    def _adopt(self, space: Any, window_rank: int, name: str) -> Any:
        segment, _ = self._window.Shared_query(window_rank)
        return space.adopt(memoryview(cast(Any, segment)), name, shared=True, describe=self._describe)

    def _map(self, handle: Any, peer: int) -> Any:
        return self._adopt(self.space, handle, f"{self._name} of peer {peer}")

    def _unmap(self, mapping: Any) -> None:
        self.space.free(mapping)

    def free(self) -> None:
        super().free()
        self._window.Free()
        self._node_comm.Free()


class MpiEmulatorRuntime(EmulatorRuntime):
    """This process's rank of an emulated world. Kernels run in a thread of their own while the host is in MPI calls."""

    def allocate_symmetric(
        self, comm: Any, num_bytes: int, name: str, describe: Describe, handle_type: HandleType, zero: bool
    ) -> SymmetricMemory:
        node_comm = comm.Split_type(MPI.COMM_TYPE_SHARED)
        if node_comm.size != comm.size:
            node_comm.Free()
            raise NotImplementedError(
                f"group: {comm.size} ranks on several nodes; kernels between nodes are not built yet"
            )
        window = SharedWindow(self.space, node_comm, num_bytes, name, describe)
        if zero:
            window.write(0, np.zeros(num_bytes, np.uint8))
        return window

    def wait_until(
        self, predicate: Callable[[], bool], describe: Callable[[], str], timeout_ns: int | None = None
    ) -> bool:
        """Other processes are out of the deadlock detector's sight, so here the clock bounds the wait."""
        if timeout_ns is None:
            return super().wait_until(predicate, describe)
        deadline = time.monotonic_ns() + timeout_ns
        super().wait_until(lambda: predicate() or time.monotonic_ns() > deadline, describe)
        return predicate()

    @classmethod
    def of_process(cls) -> MpiEmulatorRuntime:
        """This process's rank of a new world, which lives as long as the process."""
        world = World(MPI.COMM_WORLD.size, local_rank=MPI.COMM_WORLD.rank)
        return cls(world, MPI.COMM_WORLD.rank)
