"""What the kernels compute, in plain NumPy loops: the living definition of dispatch and combine.

Every function sees all ranks at once: a list holds one item per rank.

Arrays: x [num_tokens, hidden] bf16; topk_idx [num_tokens, num_topk] int64, -1 = unused; topk_weights
[num_tokens, num_topk] float32.
"""

from nbep.reference.elastic import ElasticDispatched, elastic_combine, elastic_dispatch
from nbep.reference.fp8 import (
    AMAX_FLOOR,
    BF16,
    COLUMNS_PER_SCALE,
    E4M3,
    E4M3_MAX,
    calc_diff,
    pack_ue8m0,
    per_token_cast_back,
    per_token_cast_to_fp8,
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
    channel_task_range,
    combine,
    dispatch,
    encode_send_head,
    get_dispatch_layout,
)
from nbep.reference.logfmt import decode_logfmt, encode_logfmt, logfmt_scale, through_logfmt
from nbep.reference.low_latency import (
    LowLatencyDispatched,
    low_latency_combine,
    low_latency_dispatch,
)
from nbep.reference.moe import expert_layer, gate, moe_layer

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
