"""What comes before dispatch inside a node: the exchange of counts, or only the reset of cells."""

from __future__ import annotations

from typing import Any, NamedTuple

from nbep.device.kernels.intranode.cached_notify_dispatch import cached_notify_dispatch
from nbep.device.kernels.intranode.notify_dispatch import NotifyInputs, NotifyOutputs, NotifySizes, notify_dispatch
from nbep.device.protocols.calls import Call
from nbep.device.protocols.peers import Peers
from nbep.host.intranode.handle import DispatchHandle
from nbep.host.node import Empty, Node
from nbep.host.request import DispatchRequest
from nbep.host.target.base import Array, PreparedLaunch


class Routes(NamedTuple):
    """Where the tokens of a dispatch go: what notify_dispatch writes, and what it reads."""

    rank_prefix_matrix: Array
    channel_prefix_matrix: Array
    is_token_in_rank: Array

    @classmethod
    def of(cls, empty: Empty, num_ranks: int, num_channels: int, is_token_in_rank: Array) -> Routes:
        return cls(empty((num_ranks, num_ranks), "int32"), empty((num_ranks, num_channels), "int32"), is_token_in_rank)

    def handle(self, memory: Node, recv_channel_prefix_matrix: Array, recv_src_idx: Array, send_head: Array) -> Any:
        """The handle of a dispatch along them, with what the dispatch writes."""
        of_channels = self.channel_prefix_matrix, recv_channel_prefix_matrix
        made = DispatchHandle(self.rank_prefix_matrix, *of_channels, recv_src_idx, self.is_token_in_rank, send_head)
        return made.owned_by(memory.identity, memory.num_dispatches)


def exchange_counts(
    memory: Node, peers: Peers, num_cell_words: int, request: DispatchRequest, routes: Routes, call: Call
) -> None:
    """Launch the kernel that does it, compares the ranks' calls, and resets so many words."""
    runtime = memory.runtime
    polled = request.num_worst_tokens == 0
    if polled:
        memory.counters.reset()
    runtime.launch(
        memory.stream,
        memory.kernel(notify_dispatch),
        1 + memory.num_ranks,
        runtime.notify_threads,
        0,
        NotifyOutputs(routes.rank_prefix_matrix, routes.channel_prefix_matrix, *memory.counters.addresses(polled)[:2]),
        NotifyInputs(request.num_tokens_per_rank, request.num_tokens_per_expert, routes.is_token_in_rank),
        peers,
        memory.bounds,
        NotifySizes(
            routes.is_token_in_rank.shape[0],
            request.num_experts,
            routes.channel_prefix_matrix.shape[1],
            num_cell_words,
            request.expert_alignment,
        ),
        call,
    )


def prepare_reset(memory: Node, peers: Peers, num_cell_words: int, call: Call) -> PreparedLaunch:
    """The launch of the kernel that resets so many words and meets the peers, whose calls it compares."""
    runtime = memory.runtime
    threads = runtime.notify_threads
    kernel = memory.kernel(cached_notify_dispatch)
    return runtime.prepare(kernel, 1, threads, 0, num_cell_words, peers, memory.bounds, call)
