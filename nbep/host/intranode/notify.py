"""What comes before dispatch inside a node: the exchange of counts, or only the reset of cells."""

from __future__ import annotations

from nbep.device.kernels.intranode.cached_notify_dispatch import cached_notify_dispatch
from nbep.device.kernels.intranode.notify_dispatch import NotifyInputs, NotifyOutputs, NotifySizes, notify_dispatch
from nbep.device.protocols.calls import Call
from nbep.device.protocols.peers import Peers
from nbep.host.node import Node
from nbep.host.target.base import Array, PreparedLaunch
from nbep.host.tokens import Counts


def exchange_counts(
    memory: Node,
    peers: Peers,
    num_cell_words: int,
    counts: Counts,
    expert_alignment: int,
    polled: bool,
    rank_prefix_matrix: Array,
    channel_prefix_matrix: Array,
    call: Call,
) -> None:
    """Launch the kernel that does it, compares the ranks' calls, and resets so many words.

    polled: the CPU is going to wait for the counters
    """
    runtime = memory.runtime
    if polled:
        memory.counters.reset()
    runtime.launch(
        memory.comm_stream,
        memory.kernel(notify_dispatch),
        1 + memory.num_ranks,
        runtime.notify_threads,
        0,
        NotifyOutputs(rank_prefix_matrix, channel_prefix_matrix, *memory.counters.addresses(polled)[:2]),
        NotifyInputs(counts.num_tokens_per_rank, counts.num_tokens_per_expert, counts.is_token_in_rank),
        peers,
        memory.bounds,
        NotifySizes(
            counts.is_token_in_rank.shape[0],
            counts.num_tokens_per_expert.shape[0],
            channel_prefix_matrix.shape[1],
            num_cell_words,
            expert_alignment,
        ),
        call,
    )


def prepare_reset(memory: Node, peers: Peers, num_cell_words: int, call: Call) -> PreparedLaunch:
    """The launch of the kernel that resets so many words and meets the peers, whose calls it compares."""
    runtime = memory.runtime
    threads = runtime.notify_threads
    kernel = memory.kernel(cached_notify_dispatch)
    return runtime.prepare(kernel, 1, threads, 0, num_cell_words, peers, memory.bounds, call)
