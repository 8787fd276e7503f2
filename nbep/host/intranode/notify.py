"""What comes before dispatch inside a node: the exchange of counts, or only the reset of cells."""

from __future__ import annotations

from typing import NamedTuple

from nbep.device.kernels.intranode.cached_notify_dispatch import cached_notify_dispatch
from nbep.device.kernels.intranode.notify_dispatch import NotifySizes, notify_dispatch
from nbep.device.kernels.parts.calls import Call
from nbep.device.protocols.peers import Peers
from nbep.host.block_sizes import block_sizes
from nbep.host.handles import Taken
from nbep.host.intranode.handle import DispatchHandle, DispatchTuple
from nbep.host.node import Node
from nbep.host.request import DispatchRequest
from nbep.host.target.base import Array, PreparedLaunch


class Routes(NamedTuple):
    """Where the tokens of a dispatch go: what notify_dispatch writes, and what it reads."""

    rank_prefix_matrix: Array
    channel_prefix_matrix: Array
    is_token_in_rank: Array

    def handle(
        self,
        memory: Node,
        recv_channel_prefix_matrix: Array,
        recv_src_idx: Array,
        send_head: Array,
        taken: Taken | None = None,
    ) -> DispatchHandle:
        """The handle of a dispatch along them, with what the dispatch writes. taken: what calls take of it"""
        of_channels = self.channel_prefix_matrix, recv_channel_prefix_matrix
        arrays = self.rank_prefix_matrix, *of_channels, recv_src_idx, self.is_token_in_rank, send_head
        kind = DispatchTuple if memory.is_deep_eps else DispatchHandle
        return kind.made(arrays, memory.identity, memory.num_dispatches, taken)


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


def prepare_reset(memory: Node, peers: Peers, num_cell_words: int, call: Call) -> PreparedLaunch:
    """The launch of the kernel that resets so many words and meets the peers, whose calls it compares."""
    runtime = memory.runtime
    threads = block_sizes(runtime).notify
    kernel = memory.kernel(cached_notify_dispatch)
    return runtime.prepare(kernel, 1, threads, 0, num_cell_words, peers, memory.bounds, call)
