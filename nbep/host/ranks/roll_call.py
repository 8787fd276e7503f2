"""Who has come to a meeting of the ranks. MPI's collective calls wait for ever; this tells who is missing.

           rank 0                  rank 1                  rank 2
 round 1   "here" -> 1, 2          "here" -> 0, 2          computes
           time is up: 2 missing   time is up: 2 missing
 round 2   "gone" -> 1, 2          "gone" -> 0, 2
 round 1                                                   "here" -> 0, 1; finds their "here"
 round 2                                                   "here" -> 0, 1; finds their "gone": 0 and 1 missing

The second round is for the late: a rank goes on to a collective call only if all others do.

A rank that shrinks says in its word which ranks it has masked. Who gets the word does not wait for those: they may be
dead. And no rank goes on to a collective call, which would wait for them: so there is no second round.

           rank 0                  rank 1                  rank 2
 round 1   "here without 2" -> 1   "here" -> 0             has been killed
           hears 1                 hears 0: not without 2

Elsewhere a rank that does not come needs no clock of ours: the emulator reports the deadlock, a virtual rank that fails
ends the others' waits, and processes of torch have meetings of their own: see torch_meeting. In one process ranks that
shrink write on a board; in a process group of torch each of them knows only whom it has masked itself.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any, NamedTuple

from nbep.host.ranks.await_ranks import duplicate
from nbep.host.ranks.comm import Communicator, InProcessComm, is_mpi_comm
from nbep.host.ranks.mail import mail_of
from nbep.host.ranks.timeouts import join_ranks, timeout_ns

SHORTEST_PAUSE_S = 20e-6
LONGEST_PAUSE_S = 1e-3
HERE, GONE = 1, 0
WORD = 0  # the tag; mail has another
REPORTS_S = 1.0  # ranks that wait for the same one time out at about the same time
MASK_BYTES = 8


def _duplicate(comm: Any) -> Any:
    return duplicate(comm, 2 * timeout_ns())


class Attendance(NamedTuple):
    """The ranks that did not come, and those that a rank has masked and none waits for."""

    missing: list[int]
    masked: list[int]


class RollCall:
    """One meeting of the ranks of comm, who make and close it together.

    It has a communicator of its own: its messages meet none of the user's, nor another buffer's.
    can_mask: ranks may come with others masked
    """

    def __init__(self, comm: Communicator, can_mask: bool = False):
        self._rank, self._size = comm.rank, comm.size
        self._comm: Any = _duplicate(comm) if is_mpi_comm(comm) else None
        self._mail = mail_of(comm, self._comm)
        self._in_process = comm if isinstance(comm, InProcessComm) and can_mask else None
        self._board: dict[int, frozenset[int]] = {} if self._in_process is None else self._in_process.bcast({})
        self._masked: set[int] = set()

    def meet(self, timeout_ns: int, masked: Collection[int] = ()) -> Attendance:
        """Meet the peers. Those count as missing that do not come in timeout_ns, or have given up by now.

        masked: the ranks that this one does not wait for
        """
        self._masked = set(masked)
        missing: list[int] = []
        if self._in_process is not None:
            missing = self._meet_in_process(self._in_process, timeout_ns)
        elif self._comm is not None:
            missing = self._meet_by_messages(timeout_ns)
        return Attendance(missing, sorted(self._masked))

    def reports(self, own: str) -> list[str]:
        """What the ranks have to report that fail now, on the rank that is to know it: else an empty list."""
        self._mail.post(own)
        if not self._mail.takes:
            return []
        found, deadline = {self._rank: own}, time.monotonic() + REPORTS_S
        while len(found) < self._size and time.monotonic() < deadline:
            found.update(self._mail.take())
            time.sleep(LONGEST_PAUSE_S)
        return [found[rank] for rank in sorted(found)]

    def _meet_in_process(self, comm: InProcessComm, timeout_ns: int) -> list[int]:
        self._board[comm.rank] = frozenset(self._masked)

        def missing() -> list[int]:
            self._masked.update(*list(self._board.values()))
            return [rank for rank in range(comm.size) if rank not in self._board and rank not in self._masked]

        comm.runtime.wait_until(
            lambda: not missing(), lambda: f"destroy: {join_ranks(missing())} did not come", timeout_ns
        )
        return missing()

    def _meet_by_messages(self, timeout_ns: int) -> list[int]:
        missing: list[int] = []
        for _ in range(2):
            self._tell(HERE)
            missing = self._not_heard(timeout_ns)
            if missing:
                self._tell(GONE)
            if missing or self._masked:
                break
        return missing

    def _tell(self, word: int) -> None:
        """Send a word to every peer, without waiting: one that has given up never receives it."""
        masked = sum(1 << rank for rank in self._masked)
        message = bytes([word]) + masked.to_bytes(MASK_BYTES, "little")
        for peer in self._peers():
            self._comm.Isend(message, peer, WORD).Free()

    def _not_heard(self, timeout_ns: int) -> list[int]:
        """The peers that are not masked and whose next word is not HERE."""
        words = {peer: bytearray(1 + MASK_BYTES) for peer in self._peers()}
        pending = {peer: self._comm.Irecv(word, peer, WORD) for peer, word in words.items()}
        deadline, pause_s = time.monotonic_ns() + timeout_ns, SHORTEST_PAUSE_S
        while pending.keys() - self._masked and time.monotonic_ns() < deadline:
            come = [peer for peer, request in pending.items() if request.Test()]
            for peer in come:
                del pending[peer]
                masked = int.from_bytes(words[peer][1:], "little")
                self._masked.update(rank for rank in range(self._comm.size) if masked >> rank & 1)
            if not come:
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        for request in pending.values():
            request.Cancel()
            request.Wait()
        return [peer for peer, word in words.items() if word[0] != HERE and peer not in self._masked]

    def _peers(self) -> list[int]:
        return [rank for rank in range(self._comm.size) if rank != self._comm.rank]

    def close(self) -> None:
        """Give the communicator back. Collective."""
        if self._comm is not None:
            self._mail.close()
            self._comm.Free()
