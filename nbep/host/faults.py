"""A wait that is over time, as an exception: one that a kernel reports, or the CPU's own."""

from __future__ import annotations

from nbep.device.protocols.waits import (
    BARRIER,
    DISPATCH_RECEIVER_ROWS,
    LOW_LATENCY_CHOICE,
    LOW_LATENCY_HALF,
    SITES,
    FaultReport,
)
from nbep.host.comm import join_ranks


class PeerTimeout(RuntimeError):
    """This rank waited too long for a peer. What the call returned is garbage; the buffer is of no use now.

    Attributes:
        rank: who waited
        peer: for whom, or for whom first
        role: the waiting role, e.g. "dispatch receiver"; "destroy" if the CPU waited for peers to destroy theirs
        cell: the cell that a kernel polled, e.g. "tail"; None if the CPU waited
        report: the whole FaultReport of a kernel; None if the CPU waited
    """

    def __init__(
        self, message: str, rank: int, peer: int, role: str, cell: str | None = None, report: FaultReport | None = None
    ):
        super().__init__(message)
        self.rank = rank
        self.peer = peer
        self.role = role
        self.cell = cell
        self.report = report


def fault_error(rank: int, report: FaultReport, timeout_ms: float) -> Exception:
    """The exception for a report whose status is not 0."""
    if report.site == DISPATCH_RECEIVER_ROWS:
        return ValueError(
            f"recv_x: got {report.seen} rows on rank {rank}; must be at least {report.expected}, "
            f"the tokens that came up to channel {report.channel} of rank {report.peer}. Either num_worst_tokens is "
            f"too small or, if none was given, rank {report.peer} sends more tokens (is_token_in_rank) than it "
            f"announced (num_tokens_per_rank, or the handle)"
        )
    if report.site == LOW_LATENCY_HALF:
        return ValueError(
            f"low-latency calls: got one in half {report.seen} on rank {rank}; must be in half {report.expected}: "
            f"calls take the halves in turn, and a CUDA graph holds an even number of them"
        )
    if report.site == LOW_LATENCY_CHOICE:
        return ValueError(
            f"topk_idx[{report.channel}, {report.expected}]: got {report.seen} on rank {rank}; must be -1 or an expert "
            f"that there is, each once for a token. If it is so, calls did not take the halves in turn and used slots "
            f"of another call: a CUDA graph holds an even number of calls"
        )
    role, cell, awaited = SITES.get(report.site) or ("kernel", f"a cell of site {report.site}", "it")
    where = f"block {report.block}, thread {report.thread}"
    if report.site != BARRIER:
        where += f", channel {report.channel}"
    message = (
        f"rank {rank}: the {role} ({where}) waited more than {timeout_ms:g} ms for rank {report.peer}: "
        f"{awaited}. It polled {cell}, expected {report.expected}, saw {report.seen}"
    )
    return PeerTimeout(message, rank, report.peer, role, cell, report)


def destroy_error(rank: int, missing: list[int], timeout_ms: float) -> PeerTimeout:
    """The exception of a rank that came to destroy while others did not."""
    message = (
        f"rank {rank}: {join_ranks(missing)} did not come to destroy in {timeout_ms:g} ms, or had given up before. The "
        f"buffer's memory stays allocated until the process ends: a peer may still use it"
    )
    return PeerTimeout(message, rank, missing[0], "destroy")


def destroyed_without(rank: int, masked: list[int]) -> str:
    """What a rank is told that destroys a buffer while ranks are masked."""
    return (
        f"rank {rank}: destroy does not wait for {join_ranks(masked)}, masked. Nothing is given back: the buffer's "
        f"memory stays allocated until the process ends, because a masked rank may still use it"
    )
