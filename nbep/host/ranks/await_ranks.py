"""Collective calls of MPI that have an end, and say who did not come.

           rank 0                      rank 1                       rank 2
 barrier   comes                       comes, a little later        computes, is stopped, or has been killed
           time is up: "are you here?" -> 1, 2
           "here" from 1               answers while it waits       says nothing: it is missing

MPI's blocking calls wait for a rank that was killed for ever. So nbep makes none: it starts calls that return at once,
and looks again and again whether they are done. Calls that MPI has in their blocking form alone, as those for windows,
wait in a thread of their own; so does the one that makes a communicator.

The calls are of the user's communicator. Messages go over it only when something has gone wrong: before, one could be
taken by a receive of the user's that takes messages from anybody.
"""

from __future__ import annotations

import atexit
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from nbep.host.ranks.timeouts import MISSED_MEETING, PeerTimeout, join_ranks

Result = TypeVar("Result")

SHORTEST_PAUSE_S = 20e-6
LONGEST_PAUSE_S = 1e-3
QUESTION, ANSWER = 0x6E62, 0x6E63  # tags
ANSWER_S = 2.0  # who waits looks for questions every LONGEST_PAUSE_S

_under_way: list[Any] = []  # requests that were given up: MPI may still use their arrays


def await_all(comm: Any, timeout_ns: int) -> None:
    """Wait until all ranks of an mpi4py communicator call this. Collective.

    Raises: PeerTimeout if some do not. MPI's own end, which waits for them, is left out then when the process ends
    """
    _finish(comm, comm.Ibarrier(), timeout_ns)


def gather_objects(comm: Any, value: Any, timeout_ns: int) -> list[Any]:
    """What every rank of an mpi4py communicator passes, by rank. Collective. Raises: as await_all"""
    from mpi4py import MPI

    data = np.frombuffer(pickle.dumps(value), np.uint8)
    sizes = np.zeros(comm.size, "<i8")  # hosts of another byte order are refused later: see ranks.hosts
    own = np.array([data.size], "<i8").view(np.uint8)
    _finish(comm, comm.Iallgather([own, MPI.BYTE], [sizes.view(np.uint8), MPI.BYTE]), timeout_ns)
    ends = np.cumsum(sizes)
    received = np.zeros(ends[-1], np.uint8)
    whole = [received, sizes, ends - sizes, MPI.BYTE]
    _finish(comm, comm.Iallgatherv([data, MPI.BYTE], whole), timeout_ns)
    return [pickle.loads(received[end - size : end].tobytes()) for size, end in zip(sizes, ends, strict=True)]


def duplicate(comm: Any, timeout_ns: int) -> Any:
    """A communicator of the same ranks. Collective.

    A test of MPICH's Idup may itself wait for a rank, for ever if that rank is killed meanwhile.

    Raises: as await_all
    """
    if _may_call_from_threads():
        return call_bounded(comm, comm.Dup, timeout_ns)
    copy, request = comm.Idup()
    _finish(comm, request, timeout_ns)
    return copy


def call_bounded(comm: Any, call: Callable[[], Result], timeout_ns: int) -> Result:
    """What a call of MPI returns that waits for ranks of comm. Who waits elsewhere on comm is not taken for missing.

    Where MPI does not let two threads call it, the wait has no end.

    Raises: as await_all, and what the call raises
    """
    if not _may_call_from_threads():
        return call()
    results: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:  # raised by who waits
            errors.append(error)

    thread = threading.Thread(target=run, name="nbep-mpi-call", daemon=True)
    thread.start()

    def is_done(pause_s: float) -> bool:
        thread.join(pause_s)
        return not thread.is_alive()

    _wait(comm, is_done, timeout_ns)
    if errors:
        raise errors[0]
    return results[0]


def _may_call_from_threads() -> bool:
    from mpi4py import MPI

    return bool(MPI.Query_thread() == MPI.THREAD_MULTIPLE)


def _finish(comm: Any, request: Any, timeout_ns: int) -> None:
    """Wait for a request of all ranks."""

    def is_done(pause_s: float) -> bool:
        if request.Test():
            return True
        time.sleep(pause_s)
        return False

    try:
        _wait(comm, is_done, timeout_ns)
    except PeerTimeout:
        _under_way.append(request)
        raise


def _wait(comm: Any, is_done: Callable[[float], bool], timeout_ns: int) -> None:
    """Wait until is_done, which may pause for the seconds it is given. Answers those who ask meanwhile."""
    deadline, pause_s = time.monotonic_ns() + timeout_ns, SHORTEST_PAUSE_S
    while not is_done(pause_s):
        _answer(comm)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        if time.monotonic_ns() > deadline:
            missing = _silent_peers(comm)
            if is_done(0):
                return  # all have come meanwhile
            end_without_mpi()
            names = join_ranks(missing) if missing else "a rank that has given up"
            what = f"did not come to make, or to destroy, a Buffer in {timeout_ns / 1e6:g} ms"
            peer = missing[0] if missing else -1
            raise PeerTimeout(f"rank {comm.rank}: {names} {what}", comm.rank, peer, MISSED_MEETING)


def _answer(comm: Any) -> None:
    """Answer the roll call."""
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


def end_without_mpi(status: int = 1) -> None:
    """Let this process end with a status, and without MPI_Finalize: that would wait for the missing ranks for ever."""
    atexit.unregister(_leave)
    atexit.register(_leave, status)


def _leave(status: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def end_after_timeouts() -> None:
    """Let a PeerTimeout that is not caught end this process, after its report: MPI_Finalize may wait for ever."""
    report = sys.excepthook
    if getattr(report, "ends_after_timeouts", False):
        return

    def hook(kind: type[BaseException], error: BaseException, traceback: Any) -> None:
        report(kind, error, traceback)
        if isinstance(error, PeerTimeout):
            _leave(1)

    hook.ends_after_timeouts = True  # type: ignore[attr-defined]
    sys.excepthook = hook
