"""What reports of nbep's kernels mean: an exception that names the cause.

A wait may have timed out because its peer has ended with an error: another rank has made another call. Then this rank
reports that, with both values.
"""

from __future__ import annotations

import numpy as np

from nbep.device.kernels.elastic.dispatch import ELASTIC_ROWS, ELASTIC_SOURCES
from nbep.device.kernels.low_latency.calls import LOW_LATENCY_CALLS_DIFFER
from nbep.device.kernels.low_latency.coordinator import LOW_LATENCY_HALF, UNCLEAN
from nbep.device.kernels.low_latency.dispatch_sender import LOW_LATENCY_CHOICE
from nbep.device.kernels.parts.arrivals import number_of
from nbep.device.kernels.parts.calls import CALLS_DIFFER, NUM_WORDS
from nbep.device.kernels.parts.spoil import DISPATCH_RECEIVER_ROWS, SUM_ROWS
from nbep.device.layout.internode import call_offset
from nbep.device.layout.intranode import CALL_BYTES, CALL_ROWS
from nbep.device.layout.low_latency import call_offset as word_offset
from nbep.device.protocols.waits import FaultReport
from nbep.host import calls
from nbep.host.low_latency import calls as low_latency_calls
from nbep.host.node import Node
from nbep.host.ranks.call_log import Made, difference


def known_cause(memory: Node, report: FaultReport) -> Exception | None:
    """Why a wait has timed out, where that is known: another rank has made another call."""
    if report.site == CALLS_DIFFER:  # the words of the others may be on their way
        has_come, timeout_ns = (lambda: _received_error(memory) is not None), int(memory.timeout_ms * 1e6)
        memory.runtime.wait_until(has_come, lambda: "the words of another call", timeout_ns)
    return _late_error(memory) or _received_error(memory)


def _late_error(memory: Node) -> Exception | None:
    """What words of low-latency calls say that no kernel has come to compare: of the latest call of each half."""
    mode = memory.low_latency
    if mode is None:
        return None
    for half, own in mode.received_calls():
        for index, word in enumerate(own):
            row = word_offset(mode.num_rdma_bytes, mode.num_ranks, half, 0, index)
            for peer, value in enumerate(mode.symmetric.read(row, mode.num_ranks, np.int32).tolist()):
                if value < 0 and number_of(value) != word:
                    report = FaultReport(1, LOW_LATENCY_CALLS_DIFFER, peer, word, number_of(value), 0, 0, index)
                    return cause_of(memory.rank, report)
    return None


def _received_error(memory: Node) -> ValueError | None:
    """What the words say that ranks have sent since one of them met another call; see kernels.parts.calls."""
    symmetric, rows, num_ranks = memory.symmetric, memory.num_nvl_bytes + CALL_ROWS, memory.num_ranks
    if memory.internode is not None:
        symmetric, rows = memory.internode.rdma.symmetric, call_offset(memory.internode.cells, memory.num_nodes, 0)
    elif memory.elastic is not None and memory.elastic.rdma is not None:
        symmetric, rows = memory.elastic.symmetric, call_offset(memory.elastic.nodes.cells, num_ranks, 0)
    elif num_ranks > memory.num_nvl_peers:  # a buffer of the low-latency mode alone
        return None
    words = symmetric.read(rows, num_ranks * CALL_BYTES // 4, np.int32).reshape(num_ranks, -1)[:, :NUM_WORDS]
    sent = {rank: (row - 1).tolist() for rank, row in enumerate(words) if row.all()}
    of_node = range(memory.first_in_node, memory.first_in_node + memory.num_nvl_peers)
    return calls.received_error(memory.rank, of_node, sent)


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
