"""The emulator with one process per rank, under torchrun.

 rank 0: memory <--mmap-- file descriptor --mailbox--> rank 1: mmap --> the same memory

Ranks are on one host and map each other's memory. The memory has no name, and goes when the last process that has it
open does: whatever ends a process, nothing is left behind. Between nodes ranks reach each other through NICs. Those of
the emulator take MPI's one-sided calls from process to process, so there are none here.

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
from nbep.host.target.cuda.mailbox import Mailbox, MailboxAddress, send
from nbep.host.target.emulator import EmulatorRuntime
from nbep.host.target.job_memory import JobMemory
from nbep.host.target.memory import Reach, SymmetricMemory, WantedMemory


class MemoryHandle(NamedTuple):
    """What a rank tells its peers: where it wants file descriptors of theirs, and how much of it they map."""

    mailbox: MailboxAddress
    mapped_bytes: int


class SharedMemory(JobMemory):
    """Memory of this rank that the peers' processes map, and theirs as this process sees it."""

    def __init__(self, space: Any, comm: Any, wanted: WantedMemory):
        mapped_bytes = self.mapped_bytes(wanted.num_bytes, comm.size)
        self._file = os.memfd_create(f"nbep {wanted.name}", os.MFD_CLOEXEC)
        os.ftruncate(self._file, mapped_bytes)
        self._mailbox = Mailbox()
        super().__init__(space, comm, wanted, memoryview(mmap.mmap(self._file, mapped_bytes)))
        self.handle = MemoryHandle(self._mailbox.address, mapped_bytes)

    def open_peers(self, handles: list[Any], rank: int) -> list[int]:
        """Raises: RuntimeError that names a peer of another host, or of another network namespace"""
        for peer, handle in enumerate(handles):
            if handle is not None and peer != rank:
                try:
                    send(self._file, handle.mailbox, rank)
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

    def free(self) -> None:
        self._mailbox.close()
        super().free()
        os.close(self._file)


class TorchEmulatorRuntime(EmulatorRuntime):
    """This process's rank of an emulated world. Kernels run in a thread of their own while the host is in torch."""

    has_nic = False
    world: ProcessWorld

    def allocate_symmetric(self, comm: Any, wanted: WantedMemory, reach: Reach) -> SymmetricMemory:
        if not isinstance(comm, TorchComm):
            refuse("group", type(comm).__name__, "a process group of torch, as the first one of this process")
        return SharedMemory(self.space, comm, wanted)

    def check_caller(self, verb: str) -> None:
        """Any thread of the process may, one at a time: the kernels have one of their own."""
        Runtime.check_caller(self, verb)

    @classmethod
    def of_process(cls) -> TorchEmulatorRuntime:
        """This process's rank of a new world, which lives as long as the process."""
        import torch.distributed

        rank = torch.distributed.get_rank()
        return cls(ProcessWorld(torch.distributed.get_world_size(), local_rank=rank), rank)
