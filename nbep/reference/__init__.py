"""What the kernels compute, in plain NumPy loops: the living definition of dispatch and combine.

Every function sees all ranks at once: a list holds one item per rank.

Arrays: x [num_tokens, hidden] bf16; topk_idx [num_tokens, num_topk] int64, -1 = unused; topk_weights
[num_tokens, num_topk] float32.
"""

import numpy as np

from nbep.reference.elastic import ElasticDispatched, elastic_combine, elastic_dispatch
from nbep.reference.fp8 import (
    AMAX_FLOOR,
    BF16,
    COLUMNS_PER_SCALE,
    E4M3,
    E4M3_MAX,
    calc_diff,
    decode_logfmt,
    encode_logfmt,
    logfmt_scale,
    pack_ue8m0,
    per_token_cast_back,
    per_token_cast_to_fp8,
    through_logfmt,
    unpack_ue8m0,
)
from nbep.reference.internode import (
    InternodeDispatched,
    count_tokens_per_rdma_rank,
    encode_send_nvl_head,
    internode_combine,
    internode_dispatch,
)
from nbep.reference.intranode import (
    NO_MORE_TOKENS,
    Dispatched,
    Layout,
    _localise_topk,
    channel_task_range,
    combine,
    dispatch,
    encode_send_head,
    get_dispatch_layout,
)
from nbep.reference.low_latency import (
    LowLatencyDispatched,
    low_latency_combine,
    low_latency_dispatch,
)

__all__ = [
    "AMAX_FLOOR",
    "BF16",
    "COLUMNS_PER_SCALE",
    "E4M3",
    "E4M3_MAX",
    "NO_MORE_TOKENS",
    "Dispatched",
    "ElasticDispatched",
    "InternodeDispatched",
    "Layout",
    "LowLatencyDispatched",
    "calc_diff",
    "channel_task_range",
    "combine",
    "count_tokens_per_rdma_rank",
    "decode_logfmt",
    "dispatch",
    "elastic_combine",
    "elastic_dispatch",
    "encode_logfmt",
    "encode_send_head",
    "encode_send_nvl_head",
    "expert_layer",
    "gate",
    "get_dispatch_layout",
    "internode_combine",
    "internode_dispatch",
    "logfmt_scale",
    "low_latency_combine",
    "low_latency_dispatch",
    "moe_layer",
    "pack_ue8m0",
    "per_token_cast_back",
    "per_token_cast_to_fp8",
    "through_logfmt",
    "unpack_ue8m0",
]


def gate(x: np.ndarray, gate_weight: np.ndarray, num_topk: int) -> tuple[np.ndarray, np.ndarray]:
    """Choose each token's experts by score; weights are the softmax over those chosen.

    Args:     x [num_tokens, hidden]; gate_weight [hidden, num_experts]
    Returns:  topk_idx [num_tokens, num_topk] int64, best first; topk_weights [num_tokens, num_topk] float32
    """
    scores = x.astype(np.float32) @ gate_weight.astype(np.float32)
    topk_idx = np.argsort(-scores, axis=1, kind="stable")[:, :num_topk].astype(np.int64)
    chosen = np.take_along_axis(scores, topk_idx, axis=1)
    exponentials = np.exp(chosen - chosen.max(axis=1, keepdims=True))
    return topk_idx, (exponentials / exponentials.sum(axis=1, keepdims=True)).astype(np.float32)


def expert_layer(
    recv_x: np.ndarray, recv_topk_idx: np.ndarray, recv_topk_weights: np.ndarray, expert_weight: np.ndarray
) -> np.ndarray:
    """Apply one rank's experts to the tokens that it received, and add up each token's weighted results.

    Args:     recv_x [n, hidden] bf16; recv_topk_idx [n, num_topk] local or -1; recv_topk_weights [n, num_topk];
              expert_weight [num_local_experts, hidden, hidden] float32
    Returns:  [n, hidden] bf16, summed in float32 in the order of num_topk
    """
    out = np.zeros(recv_x.shape, np.float32)
    for row, choices in enumerate(recv_topk_idx):
        for k, expert in enumerate(choices):
            if expert >= 0:
                out[row] += recv_topk_weights[row, k] * (recv_x[row].astype(np.float32) @ expert_weight[expert])
    return out.astype(BF16)


def moe_layer(
    x: np.ndarray, topk_idx: np.ndarray, topk_weights: np.ndarray, expert_weight: np.ndarray, num_ranks: int
) -> np.ndarray:
    """A Mixture-of-Experts layer for the tokens of one rank, as if that rank owned all experts.

    What one of num_ranks ranks would compute is rounded to bf16, as when it travels; the sum over ranks is in float32.

    Args:     x [num_tokens, hidden] bf16; expert_weight [num_experts, hidden, hidden] float32
    Returns:  [num_tokens, hidden] bf16
    """
    experts_per_rank = len(expert_weight) // num_ranks
    total = np.zeros(x.shape, np.float32)
    for rank in range(num_ranks):
        local_idx = np.full_like(topk_idx, -1)
        local_weights = np.zeros_like(topk_weights)
        for token in range(len(x)):
            local_idx[token], local_weights[token] = _localise_topk(
                topk_idx[token], topk_weights[token], rank, experts_per_rank
            )
        mine = expert_weight[rank * experts_per_rank : (rank + 1) * experts_per_rank]
        total += expert_layer(x, local_idx, local_weights, mine).astype(np.float32)
    return total.astype(BF16)
