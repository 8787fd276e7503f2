"""What a rank that fails reports to the others while it fails, and they perhaps too: nothing here waits for anybody.

 where the ranks are              a report goes                            who takes it
 processes under MPI              as a message, which may stay unread      rank 0
 processes of torch.distributed   into the store of the default group      rank 0
 threads that share a GPU         into a dict                              each: who raises first ends the others

The emulator in one process has none: its own report tells all.
"""

from __future__ import annotations

import uuid
from contextlib import suppress
from typing import Any

from nbep.host.ranks.comm import Communicator, InProcessComm, TorchComm, is_mpi_comm
from nbep.host.ranks.hosts import hosts_of
from nbep.host.ranks.torch_meeting import default_store

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
