"""Who has come to a meeting of the ranks. MPI's collective calls wait for ever; this tells who is missing.

           rank 0                  rank 1                  rank 2
 round 1   "here" -> 1, 2          "here" -> 0, 2          computes
           time is up: 2 missing   time is up: 2 missing
 round 2   "gone" -> 1, 2          "gone" -> 0, 2
 round 1                                                   "here" -> 0, 1; finds their "here"
 round 2                                                   "here" -> 0, 1; finds their "gone": 0 and 1 missing

The second round is for the late: a rank goes on to a collective call only if all others do.

Elsewhere a rank that does not come needs no clock of ours: the emulator reports the deadlock, a virtual rank that fails
ends the others' waits, and a process group of torch has a time-out of its own.
"""

from __future__ import annotations

import time
from typing import Any

from nbep.host.comm import Communicator, is_mpi_comm

SHORTEST_PAUSE_S = 20e-6
LONGEST_PAUSE_S = 1e-3
HERE, GONE = b"\1", b"\0"


class RollCall:
    """One meeting of the ranks of comm, who make and close it together.

    It has a communicator of its own: its messages meet none of the user's, nor another buffer's.
    """

    def __init__(self, comm: Communicator):
        self._comm: Any = comm.Dup() if is_mpi_comm(comm) else None  # type: ignore[attr-defined]

    def missing(self, timeout_ns: int) -> list[int]:
        """Meet the peers. The ranks that do not come in timeout_ns, or have given up by now; [] if all are here."""
        if self._comm is None:
            return []
        missing: list[int] = []
        for _ in range(2):
            self._tell(HERE)
            missing = self._not_heard(timeout_ns)
            if missing:
                self._tell(GONE)
                break
        return missing

    def _tell(self, word: bytes) -> None:
        """Send a byte to every peer, without waiting: one that has given up never receives it."""
        for peer in self._peers():
            self._comm.Isend(word, peer).Free()

    def _not_heard(self, timeout_ns: int) -> list[int]:
        """The peers whose next word is not HERE."""
        words = {peer: bytearray(1) for peer in self._peers()}
        pending = {peer: self._comm.Irecv(word, peer) for peer, word in words.items()}
        deadline, pause_s = time.monotonic_ns() + timeout_ns, SHORTEST_PAUSE_S
        while pending and time.monotonic_ns() < deadline:
            pending = {peer: request for peer, request in pending.items() if not request.Test()}
            if pending:
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        for request in pending.values():
            request.Cancel()
            request.Wait()
        return [peer for peer, word in words.items() if word != HERE]

    def _peers(self) -> list[int]:
        return [rank for rank in range(self._comm.size) if rank != self._comm.rank]

    def close(self) -> None:
        """Give the communicator back. Collective."""
        if self._comm is not None:
            self._comm.Free()
