"""Dispatch and combine between nodes.

Ranks of a node are consecutive: rank node * num_nvl_peers + local. A token goes over the network once to each node that
it has a rank on, to the rank there with the local index of its source: the forwarder.

 dispatch: rank s --network--> forwarder on node d --NVLink--> every rank of d that owns one of the token's experts
 combine:  rank s <--network-- forwarder on node d <--NVLink-- the same ranks

What arrives is what arrives inside a node of that many ranks, in the same order. Sums are made in two steps.

Source: DeepEP csrc/kernels/internode.cu
"""

from dataclasses import dataclass

import numpy as np

from nbep.reference.fp8 import BF16
from nbep.reference.intranode import (
    Dispatched,
    Layout,
    add_rows,
    added_biases,
    channel_prefix_matrix,
    channel_task_range,
    dispatch,
    encode_range,
    head_of_channels,
)


@dataclass
class InternodeDispatched(Dispatched):
    """What one rank holds after a dispatch between nodes: `Dispatched`, and the handle as DeepEP's 10-tuple has it.

    num_rdma_recv_tokens are the tokens that the rank forwards, those of its own node among them. They run by source
    node, then channel, then token.
    """

    rdma_channel_prefix_matrix: np.ndarray  # [num_nodes (dst), num_channels] int32, inclusive over channels
    gbl_channel_prefix_matrix: np.ndarray  # [num_ranks (dst), num_channels] int32, inclusive over channels
    recv_rdma_channel_prefix_matrix: np.ndarray  # [num_nodes (src), num_channels] int32, inclusive over channels
    recv_rdma_rank_prefix_sum: np.ndarray  # [num_nodes (src)] int32, inclusive over src
    recv_gbl_channel_prefix_matrix: np.ndarray  # [num_ranks (src), num_channels] int32: the first row in recv_x
    recv_gbl_rank_prefix_sum: np.ndarray  # [num_ranks (src)] int32, inclusive over src
    send_rdma_head: np.ndarray  # [num_tokens, num_nodes] int32: the index among its channel's tokens to the node, or -1
    # The index among the tokens of its source node and channel that are forwarded to the local rank, or -1.
    send_nvl_head: np.ndarray  # [num_rdma_recv_tokens, num_nvl_peers] int32


def is_token_in_node(is_token_in_rank: np.ndarray, num_nvl_peers: int) -> np.ndarray:
    """[num_tokens, num_nodes] bool: whether a token goes to any rank of the node."""
    num_tokens, num_ranks = is_token_in_rank.shape
    in_node = np.zeros((num_tokens, num_ranks // num_nvl_peers), bool)
    for token in range(num_tokens):
        for rank in range(num_ranks):
            in_node[token, rank // num_nvl_peers] |= is_token_in_rank[token, rank]
    return in_node


def count_tokens_per_rdma_rank(layout: Layout, num_nvl_peers: int) -> np.ndarray:
    """[num_nodes] int32: what get_dispatch_layout returns as num_tokens_per_rdma_rank."""
    return is_token_in_node(layout.is_token_in_rank, num_nvl_peers).sum(axis=0, dtype=np.int32)


def encode_send_nvl_head(
    send_nvl_head: np.ndarray, recv_rdma_channel_prefix_matrix: np.ndarray, recv_rdma_rank_prefix_sum: np.ndarray
) -> np.ndarray:
    """What combine makes of send_nvl_head, as `encode_send_head` does it: for each source node and channel."""
    encoded = send_nvl_head.copy()
    num_nodes, num_channels = recv_rdma_channel_prefix_matrix.shape
    for src_node in range(num_nodes):
        begin = int(recv_rdma_rank_prefix_sum[src_node - 1]) if src_node else 0
        first = begin
        for channel in range(num_channels):
            end = first + int(recv_rdma_channel_prefix_matrix[src_node, channel])
            encode_range(encoded, begin, end)
            begin = end
    return encoded


def internode_dispatch(
    x: list, layouts: list[Layout], num_channels: int, num_nvl_peers: int, **options
) -> list[InternodeDispatched]:
    """Send each token once to every node that has one of its ranks, and there to each of these ranks.

    Args:     as `dispatch`, and num_nvl_peers, the ranks of a node
    """
    num_ranks = len(x)
    num_nodes = num_ranks // num_nvl_peers
    in_node = [is_token_in_node(layout.is_token_in_rank, num_nvl_peers) for layout in layouts]
    rdma_channel_prefix = [channel_prefix_matrix(to_node, num_channels) for to_node in in_node]
    results = []
    for rank, received in enumerate(dispatch(x, layouts, num_channels, **options)):
        node, local = divmod(rank, num_nvl_peers)
        # The ranks that this one forwards for: its own local index on every node.
        sources = [src_node * num_nvl_peers + local for src_node in range(num_nodes)]
        recv_gbl_rank_prefix_sum = received.rank_prefix_matrix[:, rank].copy()
        recv_gbl_channel_prefix_matrix = received.recv_channel_prefix_matrix.copy()
        for src in range(1, num_ranks):
            recv_gbl_channel_prefix_matrix[src] += recv_gbl_rank_prefix_sum[src - 1]
        results.append(
            InternodeDispatched(
                **vars(received),
                rdma_channel_prefix_matrix=rdma_channel_prefix[rank],
                gbl_channel_prefix_matrix=received.channel_prefix_matrix.copy(),
                recv_rdma_channel_prefix_matrix=np.stack([rdma_channel_prefix[src][node] for src in sources]),
                recv_rdma_rank_prefix_sum=np.cumsum([in_node[src][:, node].sum() for src in sources], dtype=np.int32),
                recv_gbl_channel_prefix_matrix=recv_gbl_channel_prefix_matrix,
                recv_gbl_rank_prefix_sum=recv_gbl_rank_prefix_sum,
                send_rdma_head=head_of_channels(in_node[rank], num_channels),
                send_nvl_head=_send_nvl_head([layouts[src] for src in sources], num_channels, node, num_nvl_peers),
            )
        )
    return results


def _send_nvl_head(sources: list[Layout], num_channels: int, node: int, num_nvl_peers: int) -> np.ndarray:
    """What one rank of a node forwards, given the layouts of the ranks that it forwards for."""
    rows = [np.zeros((0, num_nvl_peers), np.int32)]
    for layout in sources:
        to_node = layout.is_token_in_rank[:, node * num_nvl_peers : (node + 1) * num_nvl_peers]
        for channel in range(num_channels):
            begin, end = channel_task_range(len(to_node), num_channels, channel)
            ring_index = np.zeros(num_nvl_peers, np.int32)
            for token in range(begin, end):
                if to_node[token].any():
                    rows.append(np.where(to_node[token], ring_index, -1)[None])
                    ring_index += to_node[token]
    return np.concatenate(rows, dtype=np.int32)


def internode_combine(
    x: list[np.ndarray],
    dispatched: list[InternodeDispatched],
    num_nvl_peers: int,
    *,
    topk_weights: list[np.ndarray] | None = None,
    bias: list | None = None,
) -> list[tuple[np.ndarray, np.ndarray | None]]:
    """Add up what became of each token: first on each node, then at the rank that it came from.

    On a node the sum is 0, then local ranks ascending, in float32, rounded to bf16. At the source it is 0, then the
    biases in order, then nodes ascending, in float32, rounded to bf16. What the source's own node adds is rounded in
    between, too. Weights are added the same way, and not rounded: they are float32 anyhow. Nothing is weighted.

    Args:     as `combine`, and num_nvl_peers
    Returns:  per rank combined_x [num_tokens, hidden] bf16 and combined_topk_weights [num_tokens, num_topk] float32
    """
    num_ranks = len(x)
    results: list[tuple[np.ndarray, np.ndarray | None]] = []
    for rank in range(num_ranks):
        num_tokens, hidden = len(dispatched[rank].is_token_in_rank), x[rank].shape[1]
        num_topk = 0 if topk_weights is None else topk_weights[rank].shape[1]
        total = np.zeros((num_tokens, hidden), np.float32)
        total_weights = np.zeros((num_tokens, num_topk), np.float32)
        for term in added_biases(bias[rank] if bias is not None else None):
            total += term.astype(np.float32)
        for first in range(0, num_ranks, num_nvl_peers):
            of_node = np.zeros((num_tokens, hidden), np.float32)
            weights_of_node = np.zeros((num_tokens, num_topk), np.float32)
            add_rows(of_node, weights_of_node, rank, range(first, first + num_nvl_peers), x, dispatched, topk_weights)
            total += of_node.astype(BF16).astype(np.float32)
            total_weights += weights_of_node
        results.append((total.astype(BF16), None if topk_weights is None else total_weights))
    return results
