"""What reports of nbep's kernels mean that are no time-outs: an exception that names the cause."""

from __future__ import annotations

from nbep.device.kernels.elastic.dispatch import ELASTIC_ROWS, ELASTIC_SOURCES
from nbep.device.kernels.low_latency.calls import LOW_LATENCY_CALLS_DIFFER
from nbep.device.kernels.low_latency.coordinator import LOW_LATENCY_HALF, UNCLEAN
from nbep.device.kernels.low_latency.dispatch_sender import LOW_LATENCY_CHOICE
from nbep.device.kernels.parts.spoil import DISPATCH_RECEIVER_ROWS, SUM_ROWS
from nbep.device.protocols.waits import FaultReport
from nbep.host.calls import Made, difference
from nbep.host.low_latency import calls as low_latency_calls


def cause_of(rank: int, report: FaultReport) -> ValueError | None:
    """What a report of nbep's kernels means that is no time-out."""
    if report.site == DISPATCH_RECEIVER_ROWS and report.channel == ELASTIC_ROWS:
        return ValueError(
            f"recv_x: got {report.seen} rows on rank {rank}; must be at least {report.expected}, the rows that came: "
            f"tokens name an expert more than once. do_cpu_sync=True makes room for all"
        )
    if report.site == DISPATCH_RECEIVER_ROWS and report.channel == SUM_ROWS and report.expected == 0:
        return ValueError(
            f"handle.recv_src_metadata: got a rewritten one on rank {rank}; must be as dispatch made it with "
            f"topk_weights, and without allow_multiple_reduction: the row of each choice is looked up there"
        )
    if report.site == DISPATCH_RECEIVER_ROWS and report.channel == SUM_ROWS:
        return ValueError(
            f"x: got {report.seen} rows on rank {rank}; must be at least {report.expected}, as a token of "
            f"handle.recv_src_metadata has row {report.expected - 1}"
        )
    if report.site == DISPATCH_RECEIVER_ROWS and report.channel == ELASTIC_SOURCES:
        return ValueError(
            f"handle.recv_src_metadata: got a row {report.expected - 1} on rank {rank} that is of no token; "
            f"must be as dispatch made it"
        )
    if report.site == DISPATCH_RECEIVER_ROWS and report.channel < 0:
        return ValueError(
            f"recv_x: got {report.seen} rows on rank {rank}; must be at least {report.expected}, the tokens that came. "
            f"Either num_worst_tokens or, if none was given, num_zero_copy_bytes at construction is too small"
        )
    if report.site == DISPATCH_RECEIVER_ROWS:
        return ValueError(
            f"recv_x: got {report.seen} rows on rank {rank}; must be at least {report.expected}, "
            f"the tokens that came up to channel {report.channel} of rank {report.peer}. Either num_worst_tokens is "
            f"too small or, if none was given, rank {report.peer} sends more tokens (is_token_in_rank) than it "
            f"announced (num_tokens_per_rank, or the handle)"
        )
    if report.site == LOW_LATENCY_CALLS_DIFFER:  # its channel is the word that differs
        own, theirs = (low_latency_calls.named(report.channel, word) for word in (report.expected, report.seen))
        return difference(Made(rank, *own), Made(report.peer, *theirs))
    if report.site == LOW_LATENCY_HALF and report.expected == UNCLEAN:
        return ValueError(
            f"low-latency calls: got a replay of a CUDA graph on rank {rank} after masks were taken off; must come "
            f"after clean_low_latency_buffer on all ranks"
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
    return None
