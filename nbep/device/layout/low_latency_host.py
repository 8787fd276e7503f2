"""What the host alone asks of the low-latency buffer: kernels are launched with it, or never need it."""

from nbep.device.alignment import ALIGNMENT_BYTES, align_up, inverse_of
from nbep.device.layout.low_latency import NUM_ROWS, DeduplicatedShape, LowLatencyShape, quarter_bytes, row_offset


def shape_of(
    num_ranks: int,
    num_experts: int,
    num_max_tokens: int,
    hidden: int,
    num_topk: int = 0,
    use_fp8: int = 0,
    deduplicate: int = 0,
    use_logfmt: int = 0,
) -> LowLatencyShape:
    """The shape of a call, with what follows from its sizes."""
    local = num_experts // num_ranks
    given = num_ranks, num_experts, num_max_tokens, hidden, num_topk, use_fp8, use_logfmt
    kind = DeduplicatedShape if deduplicate else LowLatencyShape
    follows = local, inverse_of(max(local, 1)), inverse_of(num_ranks)  # a hint may have fewer experts
    return kind._make((*given, *follows))


def recv_begin(num_rdma_bytes: int, half: int) -> int:
    """Where the shares of a half begin."""
    return half * quarter_bytes(num_rdma_bytes)


def share_bytes(num_rdma_bytes: int, num_ranks: int) -> int:
    """What one rank may put in a half."""
    return quarter_bytes(num_rdma_bytes) // num_ranks // ALIGNMENT_BYTES * ALIGNMENT_BYTES


def pointer_table(num_ranks: int) -> int:
    """Where the pointer table begins, counted from num_rdma_bytes."""
    return row_offset(0, num_ranks, NUM_ROWS)


def trailer_bytes(num_ranks: int) -> int:
    """What comes behind num_rdma_bytes."""
    return align_up(pointer_table(num_ranks) + 8 * num_ranks, ALIGNMENT_BYTES)
