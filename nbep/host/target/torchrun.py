"""The emulator with one process per rank, under torchrun.

 rank 0: memory <--mmap-- file descriptor --mailbox--> rank 1: mmap --> the same memory

Ranks of a node are on one host and map each other's memory. The memory has no name, and goes when the last process that
has it open does: whatever ends a process, nothing is left behind. NICs reach the memory of other nodes, also on other
hosts, over TCP: see `sockets`.

Source: memfd_create(2), mmap(2)
"""

from __future__ import annotations

import mmap
import os
from typing import Any, NamedTuple

from nbep.emulator.process import ProcessWorld
from nbep.host.arguments import refuse
from nbep.host.ranks.comm import TorchComm
from nbep.host.target.base import Runtime
from nbep.host.target.cuda.mailbox import Mailbox, MailboxAddress
from nbep.host.target.emulator import EmulatorRuntime
from nbep.host.target.job_memory import JobMemory, JobNic, spread_error
from nbep.host.target.memory import Reach, SymmetricMemory, WantedMemory
from nbep.host.target.sockets import MemoryServer, SocketAddress, SocketChannel


class MemoryHandle(NamedTuple):
    """What a rank tells its peers: where it wants file descriptors of theirs, and how much of it they map.

    network: where their NICs reach it; None if they do not
    """

    mailbox: MailboxAddress
    mapped_bytes: int
    network: SocketAddress | None = None


class SharedMemory(JobMemory):
    """Memory of this rank that the peers' processes map, and theirs as this process sees it."""

    def __init__(self, space: Any, comm: Any, wanted: WantedMemory, by_nics: bool = False):
        mapped_bytes = self.mapped_bytes(wanted.num_bytes, comm.size)
        self._file = os.memfd_create(f"nbep {wanted.name}", os.MFD_CLOEXEC)
        os.ftruncate(self._file, mapped_bytes)
        self._mailbox = Mailbox()
        super().__init__(space, comm, wanted, memoryview(mmap.mmap(self._file, mapped_bytes)))
        self._channels: list[SocketChannel] = []
        self._server = MemoryServer(self.allocation.memory, comm.size) if by_nics else None
        address = self._server.address if self._server else None
        self.handle = MemoryHandle(self._mailbox.address, mapped_bytes, address)

    def open_peers(self, handles: list[Any], rank: int) -> list[int]:
        """Raises: RuntimeError that names a peer of another host, or of another network namespace"""
        for peer, handle in enumerate(handles):
            if handle is not None and peer != rank:
                try:
                    self._mailbox.send(self._file, handle.mailbox, rank, peer)
                except OSError as error:
                    raise RuntimeError(f"cannot send a file descriptor to rank {peer}: {error}") from error
        addresses = super().open_peers(handles, rank)
        self._mailbox.close()
        return addresses

    def _open(self, handle: Any, peer: int) -> memoryview:
        file = self._mailbox.receive(peer)
        try:
            return memoryview(mmap.mmap(file, handle.mapped_bytes))
        finally:
            os.close(file)

    def channel(self, handle: Any, peer: int) -> SocketChannel | None:
        """Raises: RuntimeError that names a peer to which there is no way"""
        if handle.network is None:
            return None
        try:
            channel = SocketChannel(handle.network)
        except OSError as error:
            host, port, _ = handle.network
            raise RuntimeError(f"cannot connect to rank {peer} at {host}, port {port}: {error}") from error
        self._channels.append(channel)
        return channel

    def close_peers(self) -> None:
        super().close_peers()
        for channel in self._channels:
            channel.close()
        self._channels.clear()

    def free(self) -> None:
        self._mailbox.close()
        if self._server is not None:
            self._server.close()
        super().free()
        os.close(self._file)


class TorchEmulatorRuntime(EmulatorRuntime):
    """This process's rank of an emulated world. Kernels run in a thread of their own while the host is in torch."""

    world: ProcessWorld

    def allocate_symmetric(self, comm: Any, wanted: WantedMemory, reach: Reach) -> SymmetricMemory:
        if not isinstance(comm, TorchComm):
            refuse("group", type(comm).__name__, "a process group of torch, as the first one of this process")
        nodes = (comm.hosts[first : first + reach.node_size] for first in range(0, comm.size, reach.node_size))
        if any(len(set(hosts)) > 1 for hosts in nodes):
            raise spread_error(reach.node_size, comm.size)
        return SharedMemory(self.space, comm, wanted, reach.by_nics)

    def create_nic(self) -> JobNic:
        return JobNic(self, self.world)

    def check_caller(self, verb: str) -> None:
        """Any thread of the process may, one at a time: the kernels have one of their own."""
        Runtime.check_caller(self, verb)

    @classmethod
    def of_process(cls) -> TorchEmulatorRuntime:
        """This process's rank of a new world, which lives as long as the process."""
        import torch.distributed

        rank = torch.distributed.get_rank()
        return cls(ProcessWorld(torch.distributed.get_world_size(), local_rank=rank), rank)
