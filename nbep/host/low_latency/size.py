"""How large the RDMA buffer of the low-latency mode has to be.

Source: DeepEP csrc/config.hpp, get_low_latency_rdma_size_hint
"""

from __future__ import annotations

from nbep.device.layout.intranode import ALIGNMENT_BYTES, align_up
from nbep.device.layout.low_latency import MAX_TOPK, NUM_HALVES, LowLatencyShape, message_stride, row_stride
from nbep.device.layout.low_latency_host import shape_of
from nbep.host.arguments import integer
from nbep.host.config import INT4_BYTES


def low_latency_rdma_size_hint(
    num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
) -> int:
    """num_rdma_bytes that serve any call with these numbers: DeepEP's, or ours if larger."""
    num_max_tokens = integer("num_max_dispatch_tokens_per_rank", num_max_dispatch_tokens_per_rank, 0)
    hidden, num_experts = integer("hidden", hidden, 0), integer("num_experts", num_experts, 0)
    num_ranks = integer("num_ranks", num_ranks, 1)
    shape = shape_of(num_ranks, num_experts, num_max_tokens, hidden, MAX_TOPK, 0, 1, 0)
    return max(NUM_HALVES * 2 * quarter_bytes_needed(shape), _deep_ep_bytes(num_max_tokens, hidden, num_experts))


def quarter_bytes_needed(shape: LowLatencyShape) -> int:
    """What the largest part of one half takes in dispatches and combines of this shape, whatever their options."""
    num_messages = shape.num_experts // shape.num_ranks * shape.num_max_tokens
    bf16 = LowLatencyShape(*shape._replace(use_fp8=0))
    message = max(message_stride(bf16), message_stride(bf16._replace(use_fp8=1)))
    needed = num_messages * max(message, row_stride(shape._replace(use_logfmt=1)))
    if shape.deduplicate:
        needed = max(needed, shape.num_max_tokens * message_stride(shape._replace(use_fp8=0)))
    return shape.num_ranks * align_up(needed, ALIGNMENT_BYTES)


def _deep_ep_bytes(num_max_tokens: int, hidden: int, num_experts: int) -> int:
    """DeepEP's: signals, send and receive buffers, each of them twice."""
    num_scales = hidden // 128
    dispatch_msg = INT4_BYTES + max(2 * hidden, hidden + 4 * num_scales)
    combine_msg = 4 * num_scales + 2 * hidden
    send = max(num_max_tokens * dispatch_msg, num_experts * num_max_tokens * combine_msg)
    recv = num_experts * num_max_tokens * max(dispatch_msg, combine_msg)
    signals = align_up(4 * num_experts, ALIGNMENT_BYTES)
    # DeepEP rounds up past an exact multiple too.
    return (2 * (send + recv + signals) + ALIGNMENT_BYTES) // ALIGNMENT_BYTES * ALIGNMENT_BYTES
