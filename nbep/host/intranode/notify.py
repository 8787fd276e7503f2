"""What comes before dispatch inside a node: the exchange of counts, or only the reset of cells."""

from __future__ import annotations

from typing import Any, NamedTuple

from nbep.device.kernels.intranode.cached_notify_dispatch import cached_notify_dispatch
from nbep.device.kernels.intranode.notify_dispatch import NotifySizes, notify_dispatch
from nbep.device.kernels.parts.calls import Call
from nbep.device.protocols.peers import Peers
from nbep.host.block_sizes import block_sizes
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


def prepare_counts(
    memory: Node, peers: Peers, num_cell_words: int, request: DispatchRequest, num_channels: int, call: Call
) -> PreparedLaunch:
    """The launch of the kernel that exchanges counts, compares the ranks' calls, and resets so many words.

    It takes the fields of NotifyOutputs and NotifyInputs.
    """
    runtime, num_tokens = memory.runtime, request.is_token_in_rank.shape[0]
    sizes = NotifySizes(num_tokens, request.num_experts, num_channels, num_cell_words, request.expert_alignment)
    grid, threads = 1 + memory.num_ranks, block_sizes(runtime).notify
    return runtime.prepare(memory.kernel(notify_dispatch), grid, threads, 0, peers, memory.bounds, sizes, call)


def exchange_counts(
    memory: Node, peers: Peers, num_cell_words: int, request: DispatchRequest, routes: Routes, call: Call
) -> None:
    """Launch that kernel."""
    polled = request.num_worst_tokens == 0
    if polled:
        memory.counters.reset()
    outputs = routes.rank_prefix_matrix, routes.channel_prefix_matrix
    inputs = request.num_tokens_per_rank, request.num_tokens_per_expert, routes.is_token_in_rank
    counters, arguments = memory.counters.addresses(polled)[:2], memory.runtime.arguments
    first = *arguments(outputs), *counters, *arguments(inputs)
    num_channels = routes.channel_prefix_matrix.shape[1]
    launch = prepare_counts(memory, peers, num_cell_words, request, num_channels, call)
    launch.launch(memory.stream, first, (outputs, inputs))


def prepare_reset(memory: Node, peers: Peers, num_cell_words: int, call: Call) -> PreparedLaunch:
    """The launch of the kernel that resets so many words and meets the peers, whose calls it compares."""
    runtime = memory.runtime
    threads = block_sizes(runtime).notify
    kernel = memory.kernel(cached_notify_dispatch)
    return runtime.prepare(kernel, 1, threads, 0, num_cell_words, peers, memory.bounds, call)
