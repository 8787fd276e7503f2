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
ends the others' waits, and processes of torch have meetings of their own: see `comm.meet_torch_group`. In one process
ranks that shrink write on a board; in a process group of torch each of them knows only whom it has masked itself.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Collection
from contextlib import suppress
from typing import Any, NamedTuple

from nbep.host.ranks.await_ranks import LONGEST_PAUSE_S, SHORTEST_PAUSE_S, duplicate
from nbep.host.ranks.comm import Communicator, InProcessComm, TorchComm, default_store, is_mpi_comm
from nbep.host.ranks.hosts import hosts_of
from nbep.host.ranks.timeouts import join_ranks, timeout_ns

# --- What a rank that fails reports to the others while it fails, perhaps as they do; no rank waits here ------------
#  where the ranks are              a report goes                            who takes it
#  processes under MPI              as a message, which may stay unread      rank 0
#  processes of torch.distributed   into the store of the default group      rank 0
#  threads that share a GPU         into a dict                              each: who raises first ends the others
#
# The emulator in one process has none: its own report tells all.


REPORT = 1  # the tag


class Mail:
    """Reports of the ranks of comm, who make and close it together. This one carries none."""

    takes = False  # whether this rank takes the others' reports

    def post(self, report: str) -> None:
        """Send this rank's report."""

    def take(self) -> dict[int, str]:
        """The reports of others that have come since, by rank."""
        return {}

    def close(self) -> None:
        """Take the messages that are left."""


def mail_of(comm: Communicator, messages: Any) -> Mail:
    """How reports go between the ranks of comm. Collective. messages: the communicator for them under MPI"""
    if is_mpi_comm(comm):
        # Between hosts a report that rank 0 does not take, since it has ended, would hold up the end of this process.
        return Mail() if hosts_of(comm) else Messages(messages)
    if isinstance(comm, TorchComm):
        return Store(comm)
    if isinstance(comm, InProcessComm) and comm.runtime.target == "cuda":
        return Board(comm)
    return Mail()


class Messages(Mail):
    """Through a communicator that carries nothing else with this tag."""

    def __init__(self, comm: Any):
        self._comm = comm
        self._report = b""  # under way
        self.takes = comm.rank == 0

    def post(self, report: str) -> None:
        if not self.takes:
            self._report = report.encode()
            self._comm.Isend(self._report, 0, REPORT).Free()

    def take(self) -> dict[int, str]:
        from mpi4py import MPI

        found, status = {}, MPI.Status()
        while self._comm.Iprobe(tag=REPORT, status=status):
            text = bytearray(status.count)
            self._comm.Recv(text, status.source, REPORT)
            found[status.source] = text.decode()
        return found

    def close(self) -> None:
        self.take()


class Store(Mail):
    """Through the store with which torch's processes have found each other. Other ranks of it may be other groups."""

    def __init__(self, comm: TorchComm):
        self._rank, self._size = comm.rank, comm.size
        self._key = f"nbep/{comm.allgather(uuid.uuid4().hex)[0]}"
        self.takes = comm.rank == 0

    def post(self, report: str) -> None:
        with suppress(RuntimeError):  # the process that keeps the store may have ended
            if not self.takes:
                default_store().set(f"{self._key}/{self._rank}", report)

    def take(self) -> dict[int, str]:
        found = {}
        with suppress(RuntimeError):
            for rank in range(1, self._size):
                key = f"{self._key}/{rank}"
                if default_store().check([key]):  # to get it would wait for it
                    found[rank] = default_store().get(key).decode()
        return found


class Board(Mail):
    """In the memory of the process."""

    takes = True

    def __init__(self, comm: InProcessComm):
        self._rank = comm.rank
        self._reports: dict[int, str] = comm.bcast({})

    def post(self, report: str) -> None:
        self._reports[self._rank] = report

    def take(self) -> dict[int, str]:
        return {rank: report for rank, report in list(self._reports.items()) if rank != self._rank}


HERE, GONE = 1, 0
WORD = 0  # the tag; mail has another
REPORTS_S = 1.0  # ranks that wait for the same one time out at about the same time
MASK_BYTES = 8


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
        self._comm: Any = duplicate(comm, 2 * timeout_ns()) if is_mpi_comm(comm) else None
        self._mail = mail_of(comm, self._comm)
        self._in_process = comm if isinstance(comm, InProcessComm) and can_mask else None
        # By those who have come, whom they have masked, and what they tell.
        self._board: dict[int, tuple[frozenset[int], Any]] = (
            {} if self._in_process is None else self._in_process.bcast({})
        )
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
        self._board[comm.rank] = frozenset(self._masked), comm.runtime.tell_hosts()

        def missing() -> list[int]:
            self._masked.update(*(masked for masked, _ in list(self._board.values())))
            return [rank for rank in range(comm.size) if rank not in self._board and rank not in self._masked]

        comm.runtime.wait_until(
            lambda: not missing(),
            lambda: f"destroy: {join_ranks(missing())} did not come",
            timeout_ns,
            lambda: [told for _, told in self._board.values()],
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
