"""A barrier of MPI's ranks that has an end, and says who did not come to it.

           rank 0                      rank 1                       rank 2
 barrier   comes                       comes, a little later        computes, or has been killed
           time is up: "are you here?" -> 1, 2
           "here" from 1               answers while it waits       says nothing: it is missing

The barrier is a collective call of the user's communicator. Messages go over it only when something has gone wrong:
before, one could be taken by a receive of the user's that takes messages from anybody.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from typing import Any

from nbep.host.comm import join_ranks
from nbep.host.faults import PeerTimeout

SHORTEST_PAUSE_S = 20e-6
LONGEST_PAUSE_S = 1e-3
QUESTION, ANSWER = 0x6E62, 0x6E63  # tags
ANSWER_S = 2.0  # who waits looks for questions every LONGEST_PAUSE_S


def await_all(comm: Any, timeout_ns: int) -> None:
    """Wait until all ranks of an mpi4py communicator call this. Collective.

    Raises: PeerTimeout if some do not. MPI's own end, which waits for them, is left out then when the process ends
    """
    request = comm.Ibarrier()
    deadline, pause_s = time.monotonic_ns() + timeout_ns, SHORTEST_PAUSE_S
    while not request.Test():
        _answer(comm)
        if time.monotonic_ns() > deadline:
            missing = _silent_peers(comm)
            if request.Test():
                return  # all have come meanwhile
            end_without_mpi()
            names = join_ranks(missing) if missing else "a rank that has given up"
            what = f"did not come to make, or to destroy, a Buffer in {timeout_ns / 1e6:g} ms"
            peer = missing[0] if missing else -1
            raise PeerTimeout(f"rank {comm.rank}: {names} {what}", comm.rank, peer, "construction")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def _answer(comm: Any) -> None:
    """Tell those who ask that this rank is here."""
    from mpi4py import MPI

    status = MPI.Status()
    while comm.Iprobe(MPI.ANY_SOURCE, QUESTION, status):
        comm.Recv(bytearray(1), status.source, QUESTION)
        comm.Isend(b"!", status.source, ANSWER).Free()


def _silent_peers(comm: Any) -> list[int]:
    """The ranks that do not answer."""
    silent = [rank for rank in range(comm.size) if rank != comm.rank]
    for peer in silent:
        comm.Isend(b"?", peer, QUESTION).Free()
    deadline = time.monotonic() + ANSWER_S
    while silent and time.monotonic() < deadline:
        _answer(comm)
        for peer in [peer for peer in silent if comm.Iprobe(peer, ANSWER)]:
            comm.Recv(bytearray(1), peer, ANSWER)
            silent.remove(peer)
        time.sleep(LONGEST_PAUSE_S)
    return silent


def end_without_mpi() -> None:
    """Let this process end with status 1, and without MPI_Finalize: that would wait for the missing ranks for ever."""

    def leave() -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)

    atexit.register(leave)


def end_after_timeouts() -> None:
    """Let a PeerTimeout that nobody catches end this process, after its report: MPI_Finalize may wait for ever."""
    report = sys.excepthook
    if getattr(report, "ends_after_timeouts", False):
        return

    def hook(kind: type[BaseException], error: BaseException, traceback: Any) -> None:
        report(kind, error, traceback)
        if isinstance(error, PeerTimeout):
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)

    hook.ends_after_timeouts = True  # type: ignore[attr-defined]
    sys.excepthook = hook
