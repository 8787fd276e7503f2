"""Symmetric memory of the emulator that the processes of a job map.

 num_bytes of the buffer | the lock that a kernel of any rank holds during an atomic on them

Nobody outside of the job has this memory, and so nobody else can hold its lock.
"""

from __future__ import annotations

from typing import Any

from nbep.emulator.process_lock import ALIGNMENT, ProcessLock, lock_bytes
from nbep.host.faults import lock_error
from nbep.host.ranks.timeouts import PeerTimeout, timeout_ns
from nbep.host.target.emulator import EmulatedSymmetricMemory
from nbep.host.target.memory import WantedMemory


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
        """The error of a kernel that has not come to make an atomic on the memory of that name."""
        return lock_error(self.comm.rank, holder, name, timeout_ns() / 1e6)

    def _map(self, handle: Any, peer: int) -> Any:
        return self._adopt(self.space, self._open(handle, peer), self.num_bytes, f"{self.name} of peer {peer}")

    def _open(self, handle: Any, peer: int) -> memoryview:
        """The peer's whole memory, mapped by this process."""
        raise NotImplementedError

    def _unmap(self, mapping: Any) -> None:
        self.space.free(mapping)
