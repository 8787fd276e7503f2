"""A wait that timed out, as an exception: one that a kernel reports, or the CPU's own."""

from __future__ import annotations

from collections.abc import Sequence
from types import FrameType
from typing import Any

from nbep.device.protocols.waits import OF_NODE, SITES, report_fault
from nbep.emulator.reports.expected import TimedOutWait
from nbep.host.ranks.timeouts import NONE_GONE, Gone, PeerTimeout, join_ranks

# Source: rdma-core providers/mlx5/mlx5dv.h, MLX5_CQE_SYNDROME_*
SYNDROMES = {
    0x01: "local length error",
    0x02: "local queue pair operation error",
    0x04: "local protection error",
    0x05: "work request flushed",
    0x10: "bad response",
    0x11: "local access error",
    0x12: "remote invalid request",
    0x13: "remote access error",
    0x14: "remote operation error",
    0x15: "transport retry counter exceeded",
    0x16: "receiver-not-ready retry counter exceeded",
    0x22: "remote aborted",
}


class NetworkError(RuntimeError):
    """The NIC has refused an entry of a send queue. The buffer is of no use now.

    Attributes:
        rank, peer, queue: whose queue it is, and to whom
        entry: the first one that was refused; from a real NIC the low 16 bits of its index
        syndrome: why, one of MLX5_CQE_SYNDROME_*. From a real NIC it may say that the entry was flushed: then one
        before it was refused, and the completion that said why is overwritten
    """

    def __init__(self, rank: int, peer: int, queue: int, entry: int, syndrome: int, network: Sequence[str] = ()):
        what = f"the NIC has refused entry {entry} of queue {queue} to rank {peer}"
        message = f"rank {rank}: {what}: {syndrome_name(syndrome)}"
        super().__init__("\n  ".join((message, *network)))
        self.rank = rank
        self.peer = peer
        self.queue = queue
        self.entry = entry
        self.syndrome = syndrome


def syndrome_name(syndrome: int) -> str:
    return f"{SYNDROMES.get(syndrome, 'error')} (syndrome {syndrome:#04x})"


def read_report(thread: Any, frame: FrameType | None) -> TimedOutWait | None:
    """What a thread of the emulator is about to report, if it is in `report_fault`: for the report of a deadlock."""
    words: dict[str, Any] | None = None
    first_in_node = 0
    while frame is not None:
        if frame.f_code is report_fault.__code__:
            words = frame.f_locals
        elif words is not None and words["site"] in OF_NODE and "peers" in frame.f_locals:
            first_in_node = thread.rank - frame.f_locals["peers"].rank  # its peer counts the ranks of the node
            break
        frame = frame.f_back
    if words is None:
        return None
    role, cell, awaited = SITES.get(words["site"]) or ("kernel", "", "what its report does not name")
    peer = int(words["peer"])
    return TimedOutWait(
        role, peer if peer < 0 else peer + first_in_node, awaited, cell, int(words["expected"]), int(words["seen"])
    )


def destroy_error(rank: int, missing: list[int], timeout_ms: float, gone: Gone = NONE_GONE) -> PeerTimeout:
    """The exception of a rank that came to destroy while others did not."""
    message = (
        f"rank {rank}: {join_ranks(missing)} did not come to destroy in {timeout_ms:g} ms, or had given up before. The "
        f"buffer's memory stays allocated until the process ends: a peer may still use it"
    )
    return noting(PeerTimeout(with_gone(message, gone), rank, missing[0], "destroy"), gone)


def with_gone(message: str, gone: Gone) -> str:
    return f"{message}; {gone}" if gone else message


def noting(error: PeerTimeout, gone: Gone) -> PeerTimeout:
    """The error, which also says what is known of its peer: the host, if there are several, and who is gone."""
    error.gone = tuple(sorted(gone.ended + gone.stopped))
    if gone.hosts and error.peer >= 0:
        first, *rest = str(error).split("\n")
        where = f"rank {error.peer} is on {gone.hosts[error.peer]}, this rank on {gone.hosts[error.rank]}"
        error.args = ("\n".join((f"{first}; {where}", *rest)),)
    return error
