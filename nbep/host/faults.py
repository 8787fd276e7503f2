"""What a kernel reports when a wait is over time, as an exception."""

from __future__ import annotations

from nbep.device.protocols.waits import BARRIER, DISPATCH_RECEIVER_ROWS, SITES, FaultReport


class PeerTimeout(RuntimeError):
    """A kernel of this rank waited too long for a peer. What the call returned is garbage; the buffer is of no use now.

    Attributes:
        rank: who waited
        peer: for whom
        role: the waiting role, e.g. "dispatch receiver"
        cell: the cell it polled, e.g. "tail"
        report: the whole FaultReport
    """

    def __init__(self, rank: int, report: FaultReport, timeout_ms: float):
        self.rank = rank
        self.peer = report.peer
        self.report = report
        self.role, self.cell, awaited = SITES.get(report.site) or ("kernel", f"a cell of site {report.site}", "it")
        where = f"block {report.block}, thread {report.thread}"
        if report.site != BARRIER:
            where += f", channel {report.channel}"
        super().__init__(
            f"rank {rank}: the {self.role} ({where}) waited more than {timeout_ms:g} ms for rank {report.peer}: "
            f"{awaited}. It polled {self.cell}, expected {report.expected}, saw {report.seen}"
        )


def fault_error(rank: int, report: FaultReport, timeout_ms: float) -> Exception:
    """The exception for a report whose status is not 0."""
    if report.site == DISPATCH_RECEIVER_ROWS:
        return ValueError(
            f"recv_x: got {report.seen} rows on rank {rank}; must be at least {report.expected}, "
            f"the tokens that came up to channel {report.channel} of rank {report.peer}. Either num_worst_tokens is "
            f"too small or, if none was given, rank {report.peer} sends more tokens (is_token_in_rank) than it "
            f"announced (num_tokens_per_rank, or the handle)"
        )
    return PeerTimeout(rank, report, timeout_ms)
