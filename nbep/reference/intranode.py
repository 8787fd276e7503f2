"""Dispatch and combine inside a node.

Blocks, rings and memory orders do not show; `num_channels` does, because channels decide some of what a handle holds.

 tokens of rank s --> split over channels --> rank r receives them by source rank, then channel, then token

x may be a pair: (x_fp8 [num_tokens, hidden] e4m3, scales [num_tokens, num_scales] f32 or s32).
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from nbep.reference.fp8 import BF16

NO_MORE_TOKENS = 1 << 25  # "the next token's ring index" where no token follows


class Layout(NamedTuple):
    """Where the tokens of one rank go. A token with two experts on one rank goes there once."""

    num_tokens_per_rank: np.ndarray  # [num_ranks] int32
    num_tokens_per_expert: np.ndarray  # [num_experts] int32
    is_token_in_rank: np.ndarray  # [num_tokens, num_ranks] bool


@dataclass
class Dispatched:
    """What one rank holds after a dispatch. Rows of the recv_ arrays run by source rank, then channel, then token."""

    recv_x: np.ndarray  # [num_recv_tokens, hidden]
    recv_x_scales: np.ndarray | None  # [num_recv_tokens, num_scales]
    recv_topk_idx: np.ndarray | None  # [num_recv_tokens, num_topk] int64: local expert, or -1
    recv_topk_weights: np.ndarray | None  # [num_recv_tokens, num_topk] float32: 0 where recv_topk_idx is -1
    num_recv_tokens_per_expert_list: list[int]
    rank_prefix_matrix: np.ndarray  # [num_ranks (src), num_ranks (dst)] int32, inclusive over src
    channel_prefix_matrix: np.ndarray  # [num_ranks (dst), num_channels] int32, inclusive over channels
    recv_channel_prefix_matrix: np.ndarray  # [num_ranks (src), num_channels] int32, exclusive over channels
    recv_src_idx: np.ndarray  # [num_recv_tokens] int32: the token's index at its source
    recv_src_rank: np.ndarray  # [num_recv_tokens] int32: not in DeepEP's handle, for provenance in reports
    is_token_in_rank: np.ndarray  # [num_tokens, num_ranks] bool
    send_head: np.ndarray  # [num_tokens, num_ranks] int32: the index among its channel's tokens to the rank, or -1


def channel_task_range(num_tokens: int, num_channels: int, channel: int) -> tuple[int, int]:
    """Tokens [begin, end) of a channel: equal shares, the last ones shorter or empty."""
    share = -(-num_tokens // num_channels)
    begin = min(share * channel, num_tokens)
    return begin, min(begin + share, num_tokens)


def get_dispatch_layout(topk_idx: np.ndarray, num_experts: int, num_ranks: int) -> Layout:
    """Count and mark where the tokens of one rank go.

    Args:     topk_idx [num_tokens, num_topk] int64, -1 = unused
    """
    num_tokens = len(topk_idx)
    experts_per_rank = num_experts // num_ranks
    num_tokens_per_rank = np.zeros(num_ranks, np.int32)
    num_tokens_per_expert = np.zeros(num_experts, np.int32)
    is_token_in_rank = np.zeros((num_tokens, num_ranks), bool)
    for token in range(num_tokens):
        for expert in topk_idx[token]:
            if expert >= 0:
                num_tokens_per_expert[expert] += 1
                is_token_in_rank[token, expert // experts_per_rank] = True
        num_tokens_per_rank += is_token_in_rank[token]
    return Layout(num_tokens_per_rank, num_tokens_per_expert, is_token_in_rank)


def channel_prefix_matrix(is_token_in_rank: np.ndarray, num_channels: int) -> np.ndarray:
    """[num_ranks (dst), num_channels] int32: tokens for dst in this channel and those before it."""
    num_tokens, num_ranks = is_token_in_rank.shape
    prefix = np.zeros((num_ranks, num_channels), np.int32)
    for dst in range(num_ranks):
        total = 0
        for channel in range(num_channels):
            begin, end = channel_task_range(num_tokens, num_channels, channel)
            total += int(is_token_in_rank[begin:end, dst].sum())
            prefix[dst, channel] = total
    return prefix


def head_of_channels(is_token_in_rank: np.ndarray, num_channels: int) -> np.ndarray:
    """[num_tokens, num_ranks] int32: how many tokens of the same channel went to the rank before this one, or -1."""
    num_tokens, num_ranks = is_token_in_rank.shape
    head = np.full((num_tokens, num_ranks), -1, np.int32)
    for channel in range(num_channels):
        begin, end = channel_task_range(num_tokens, num_channels, channel)
        for dst in range(num_ranks):
            ring_index = 0
            for token in range(begin, end):
                if is_token_in_rank[token, dst]:
                    head[token, dst] = ring_index
                    ring_index += 1
    return head


def encode_send_head(send_head: np.ndarray, num_channels: int) -> np.ndarray:
    """What combine makes of send_head: an absent token says -h - 1, h being the ring index of the channel's next token.

    Encoding twice is encoding once.
    """
    num_tokens = len(send_head)
    encoded = send_head.copy()
    for channel in range(num_channels):
        encode_range(encoded, *channel_task_range(num_tokens, num_channels, channel))
    return encoded


def encode_range(send_head: np.ndarray, begin: int, end: int) -> None:
    """Encode rows [begin, end) in place: absent tokens name the next one among these rows."""
    for dst in range(send_head.shape[1]):
        following = NO_MORE_TOKENS
        for token in reversed(range(begin, end)):
            if send_head[token, dst] >= 0:
                following = int(send_head[token, dst])
            else:
                send_head[token, dst] = -following - 1


def _localise_topk(topk_idx: np.ndarray, topk_weights: np.ndarray, rank: int, experts_per_rank: int):
    """One token's experts as rank numbers them; experts of other ranks become -1 with weight 0."""
    local_idx = np.full_like(topk_idx, -1)
    local_weights = np.zeros_like(topk_weights)
    for k, expert in enumerate(topk_idx):
        if expert >= 0 and expert // experts_per_rank == rank:
            local_idx[k] = expert - rank * experts_per_rank
            local_weights[k] = topk_weights[k]
    return local_idx, local_weights


def _pad_rows(rows: list, like: np.ndarray, num_rows: int, fill) -> np.ndarray:
    """Rows under each other in an array of num_rows rows; those past the end hold fill."""
    out = np.full((num_rows, *like.shape[1:]), fill, like.dtype)
    for i, row in enumerate(rows):
        out[i] = row
    return out


def dispatch(
    x: list,
    layouts: list[Layout],
    num_channels: int,
    *,
    topk_idx: list[np.ndarray] | None = None,
    topk_weights: list[np.ndarray] | None = None,
    expert_alignment: int = 1,
    num_worst_tokens: int = 0,
) -> list[Dispatched]:
    """Send each token once to every rank that owns one of its experts.

    Args:     x, topk_idx, topk_weights: one item per source rank, see the module; a pair as x carries scales along
              expert_alignment: counts of num_recv_tokens_per_expert_list are rounded up to a multiple of it
              num_worst_tokens: if positive, outputs have that many rows; x, scales and weights of unused rows are 0,
              their recv_topk_idx is -1, and num_recv_tokens_per_expert_list is empty
    """
    num_ranks = len(x)
    values = [item[0] if isinstance(item, tuple) else item for item in x]
    scales = [item[1] for item in x] if isinstance(x[0], tuple) else None
    rank_prefix_matrix = np.cumsum([layout.num_tokens_per_rank for layout in layouts], axis=0, dtype=np.int32)
    channel_prefix = [channel_prefix_matrix(layout.is_token_in_rank, num_channels) for layout in layouts]
    experts_per_rank = len(layouts[0].num_tokens_per_expert) // num_ranks
    results = []
    for rank in range(num_ranks):
        # Channels hold ascending tokens, so tokens in order are channels in order.
        sources = [
            (src, token)
            for src in range(num_ranks)
            for token in range(len(values[src]))
            if layouts[src].is_token_in_rank[token, rank]
        ]
        num_rows = num_worst_tokens or len(sources)
        recv_topk_idx, recv_topk_weights = None, None
        if topk_idx is not None and topk_weights is not None:
            local = [
                _localise_topk(topk_idx[src][token], topk_weights[src][token], rank, experts_per_rank)
                for src, token in sources
            ]
            recv_topk_idx = _pad_rows([idx for idx, _ in local], topk_idx[rank], num_rows, -1)
            recv_topk_weights = _pad_rows([weights for _, weights in local], topk_weights[rank], num_rows, 0)
        counts = np.sum([layout.num_tokens_per_expert for layout in layouts], axis=0)
        exclusive = np.zeros((num_ranks, num_channels), np.int32)
        for src in range(num_ranks):
            exclusive[src, 1:] = channel_prefix[src][rank, :-1]
        results.append(
            Dispatched(
                recv_x=_pad_rows([values[src][token] for src, token in sources], values[rank], num_rows, 0),
                recv_x_scales=(
                    None
                    if scales is None
                    else _pad_rows([scales[src][token] for src, token in sources], scales[rank], num_rows, 0)
                ),
                recv_topk_idx=recv_topk_idx,
                recv_topk_weights=recv_topk_weights,
                num_recv_tokens_per_expert_list=[
                    -(-int(count) // expert_alignment) * expert_alignment
                    for count in counts[rank * experts_per_rank : (rank + 1) * experts_per_rank]
                    if not num_worst_tokens
                ],
                rank_prefix_matrix=rank_prefix_matrix.copy(),
                channel_prefix_matrix=channel_prefix[rank],
                recv_channel_prefix_matrix=exclusive,
                recv_src_idx=np.array([token for _, token in sources], np.int32),
                recv_src_rank=np.array([src for src, _ in sources], np.int32),
                is_token_in_rank=layouts[rank].is_token_in_rank.copy(),
                send_head=head_of_channels(layouts[rank].is_token_in_rank, num_channels),
            )
        )
    return results


def combine(
    x: list[np.ndarray],
    dispatched: list[Dispatched],
    *,
    topk_weights: list[np.ndarray] | None = None,
    bias: list | None = None,
) -> list[tuple[np.ndarray, np.ndarray | None]]:
    """Add up what became of each token, at the rank that it came from.

    Sums are in float32: 0, then the biases in order, then ranks ascending, rounded once to bf16. Nothing is weighted.

    Args:     x: per rank [num_recv_tokens, hidden] bf16, rows as dispatch delivered them
              topk_weights: per rank [num_recv_tokens, num_topk] float32, added up the same way
              bias: per rank None, an array [num_tokens, hidden] bf16, or a pair of them
    Returns:  per rank combined_x [num_tokens, hidden] bf16 and combined_topk_weights [num_tokens, num_topk] float32
    """
    num_ranks = len(x)
    results: list[tuple[np.ndarray, np.ndarray | None]] = []
    for rank in range(num_ranks):
        num_tokens = len(dispatched[rank].is_token_in_rank)
        total = np.zeros((num_tokens, x[rank].shape[1]), np.float32)
        for term in added_biases(bias[rank] if bias is not None else None):
            total += term.astype(np.float32)
        weights = None if topk_weights is None else np.zeros((num_tokens, topk_weights[rank].shape[1]), np.float32)
        add_rows(total, weights, rank, range(num_ranks), x, dispatched, topk_weights)
        results.append((total.astype(BF16), weights))
    return results


def add_rows(total, weights, rank: int, owners, x: list, dispatched: list, topk_weights: list | None) -> None:
    """Add up the rows, and their weights, that some ranks send back for the tokens of one."""
    for owner in owners:
        there = dispatched[owner]
        for row, (source, token) in enumerate(zip(there.recv_src_rank, there.recv_src_idx, strict=True)):
            if source == rank:
                total[token] += x[owner][row].astype(np.float32)
                if topk_weights is not None:
                    weights[token] += topk_weights[owner][row]


def added_biases(bias) -> tuple:
    if bias is None:
        return ()
    return tuple(term for term in bias if term is not None) if isinstance(bias, tuple) else (bias,)
