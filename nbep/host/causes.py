"""What reports of nbep's kernels mean: an exception that names the cause.

A wait may have timed out because its peer has ended with an error: another rank has made another call. Then this rank
reports that, with both values.
"""

from __future__ import annotations

import numpy as np

from nbep.device.kernels.elastic.combine import ELASTIC_SUM_ROWS
from nbep.device.kernels.elastic.dispatch import ELASTIC_ROWS
from nbep.device.kernels.low_latency.calls import LOW_LATENCY_CALLS_DIFFER
from nbep.device.kernels.low_latency.coordinator import LOW_LATENCY_HALF, UNCLEAN
from nbep.device.kernels.low_latency.dispatch_sender import LOW_LATENCY_CHOICE
from nbep.device.kernels.parts.arrivals import number_of
from nbep.device.kernels.parts.calls import CALLS_DIFFER, TOLD_WORDS
from nbep.device.kernels.parts.spoil import DISPATCH_RECEIVER_ROWS
from nbep.device.layout.intranode import CALL_BYTES, CALL_WORDS, MAX_NVL_PEERS, RELAYED_WORDS, TOLD
from nbep.device.layout.low_latency import WORDS_OF_CALL, call_offset
from nbep.device.protocols.waits import FaultReport
from nbep.host import calls
from nbep.host.low_latency import calls as low_latency_calls
from nbep.host.low_latency.memory import LowLatencyMemory
from nbep.host.node import Node


def known_cause(memory: Node) -> Exception | None:
    """Why a wait has timed out, where that is known: another rank has made another call."""
    return _late_error(memory) or _passed_on(memory)


def _late_error(memory: Node) -> Exception | None:
    """What words of low-latency calls say that no kernel has come to compare."""
    report = None if memory.low_latency is None else _late_difference(memory.low_latency)
    return None if report is None else cause_of(memory.rank, report)


def _late_difference(mode: LowLatencyMemory) -> FaultReport | None:
    """What the teller would have reported, had it come that far: another call than this rank's in a received half."""
    for half, own in mode.received_calls():
        rows = [call_offset(mode.num_rdma_bytes, mode.num_ranks, half, 0, index) for index in range(WORDS_OF_CALL)]
        words = np.stack([mode.symmetric.read(row, mode.num_ranks, np.int32) for row in rows], axis=1)
        for (peer, index), value in np.ndenumerate(words):
            if value < 0 and number_of(value) != own[index]:
                return FaultReport(1, LOW_LATENCY_CALLS_DIFFER, peer, own[index], number_of(int(value)), 0, 0, index)
    return None


def _passed_on(memory: Node) -> ValueError | None:
    """What another rank of this node has passed on of a call that differs; see kernels.internode.meet_nodes."""
    read, signals = memory.symmetric.read, memory.num_nvl_bytes
    for peer in read(signals + TOLD, MAX_NVL_PEERS, np.int32).nonzero()[0].tolist():
        own, relayed = (
            read(signals + start + CALL_BYTES * peer, TOLD_WORDS, np.int32) - 1 for start in (CALL_WORDS, RELAYED_WORDS)
        )
        error = calls.relayed_error(memory.rank, own.tolist(), relayed.tolist())
        if error is not None:
            return error
    return None


def cause_of(rank: int, report: FaultReport) -> ValueError | None:
    """What a report of nbep's kernels means that is no time-out."""
    if report.site == DISPATCH_RECEIVER_ROWS and report.channel == ELASTIC_ROWS:
        return ValueError(
            f"recv_x: got {report.seen} rows on rank {rank}; must be at least {report.expected}, the rows that came: "
            f"tokens name an expert more than once. do_cpu_sync=True makes room for all"
        )
    if report.site == DISPATCH_RECEIVER_ROWS and report.channel == ELASTIC_SUM_ROWS:
        return ValueError(
            f"x: got {report.seen} rows on rank {rank}; must be at least {report.expected}, as a token of "
            f"handle.recv_src_metadata has row {report.expected - 1}"
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
    if report.site == CALLS_DIFFER:
        return calls.difference_error(rank, report)
    if report.site == LOW_LATENCY_CALLS_DIFFER:
        return low_latency_calls.difference_error(rank, report)
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
