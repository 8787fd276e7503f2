"""Symmetric memory of the emulator that the processes of a job map.

 num_bytes of the buffer | the lock that a kernel of any rank holds during an atomic on them

No process outside of the job has this memory, and so none can hold its lock. A NIC reaches the memory of other ranks
through channels alone, also inside a node: see nbep.emulator.machine.remote.
"""

from __future__ import annotations

from typing import Any

from nbep.emulator.machine.remote import Channel
from nbep.emulator.process import ProcessWorld
from nbep.emulator.process_lock import ALIGNMENT, ProcessLock, lock_bytes
from nbep.host.ranks.timeouts import PeerTimeout, timeout_ns
from nbep.host.target.base import NicDevice, Runtime
from nbep.host.target.emulated_memory import EmulatedSymmetricMemory
from nbep.host.target.emulator import EmulatedNic, EmulatorRuntime
from nbep.host.target.memory import SymmetricMemory, WantedMemory


class JobMemory(EmulatedSymmetricMemory):
    """Memory of this rank that the peers' processes map, and theirs as this process sees it.

    whole: mapped_bytes(wanted.num_bytes, comm.size) that are this rank's
    """

    def __init__(self, space: Any, comm: Any, wanted: WantedMemory, whole: memoryview):
        self.name = wanted.name
        self.describe = wanted.describe
        self.comm = comm
        own = self._adopt(space, whole, wanted.num_bytes, wanted.name)
        own.lock.create()
        super().__init__(space, own)

    @staticmethod
    def mapped_bytes(num_bytes: int, num_ranks: int) -> int:
        """What the processes map of a rank."""
        return -(-num_bytes // ALIGNMENT) * ALIGNMENT + lock_bytes(num_ranks)

    def _adopt(self, space: Any, whole: memoryview, num_bytes: int, name: str) -> Any:
        allocation = space.adopt(whole[:num_bytes], name, shared=True, describe=self.describe)
        of_lock = whole[len(whole) - lock_bytes(self.comm.size) :]
        allocation.lock = ProcessLock(
            of_lock, self.comm.rank, timeout_ns(), lambda holder: self.timed_out(name, holder)
        )
        return allocation

    def timed_out(self, name: str, holder: int) -> PeerTimeout:
        """The error of a kernel that could not make an atomic on the memory of that name. holder: -1 if unknown"""
        rank, who = self.comm.rank, "a rank" if holder < 0 else f"rank {holder}"
        message = (
            f"rank {rank}: waited more than {timeout_ns() / 1e6:g} ms to make an atomic on `{name}`: {who} holds the "
            f"lock of that memory, and its process is stopped or has ended"
        )
        return PeerTimeout(message, rank, holder, "atomic")

    def _map(self, handle: Any, peer: int) -> Any:
        return self._adopt(self.space, self._open(handle, peer), self.num_bytes, f"{self.name} of peer {peer}")

    def _open(self, handle: Any, peer: int) -> memoryview:
        """The peer's whole memory, mapped by this process."""
        raise NotImplementedError

    def _unmap(self, mapping: Any) -> None:
        self.space.free(mapping)

    def channel(self, handle: Any, peer: int) -> Channel | None:
        """The NIC's way to a peer's memory; None if it has nothing to do for any peer."""
        raise NotImplementedError


class JobNic(EmulatedNic):
    """A NIC whose peers are other processes."""

    def __init__(self, runtime: EmulatorRuntime, world: ProcessWorld):
        super().__init__(runtime)
        self._world = world
        self._remotes: list[Any] = []

    def open_peers(self, symmetric: SymmetricMemory, handles: list[Any], rank: int) -> list[int]:
        assert isinstance(symmetric, JobMemory)
        addresses = [self._reach(symmetric, handle, peer) if peer != rank else 0 for peer, handle in enumerate(handles)]
        addresses[rank] = self.address_of(symmetric)
        return addresses

    def _reach(self, symmetric: JobMemory, handle: Any, peer: int) -> int:
        channel = symmetric.channel(handle, peer)
        if channel is None:
            return 0
        space = self._context.space
        name, num_bytes = symmetric.name, symmetric.num_bytes
        allocation = self._world.map_remote(space, peer, name, num_bytes, channel, symmetric.describe)
        self._remotes.append(allocation)
        return allocation.address

    def close(self) -> None:
        super().close()
        for allocation in self._remotes:
            self._context.space.free(allocation)
        self._remotes.clear()


class JobRuntime(EmulatorRuntime):
    """This process's rank of an emulated world."""

    world: ProcessWorld

    def create_nic(self) -> NicDevice:
        return JobNic(self, self.world)

    def check_caller(self, verb: str) -> None:
        """Any thread of the process may, one at a time: the kernels have one of their own."""
        Runtime.check_caller(self, verb)


def spread_error(node_size: int, num_ranks: int) -> ValueError:
    """The error of ranks of a node that are on several hosts."""
    if node_size < num_ranks:
        return ValueError(
            f"num_nvl_peers: got {node_size}; must be such that the ranks of a node are on one host: on the emulator "
            f"they share memory"
        )
    return ValueError(
        f"group: got {num_ranks} ranks on several hosts; must be on one host, unless there are several nodes: "
        f'transport="ibgda", with a num_nvl_peers that divides the ranks of each host'
    )
