"""Buffer.get_dispatch_layout: how many tokens go where, before any of them moves.

Source: DeepEP csrc/deep_ep.cpp, Buffer::get_dispatch_layout
"""

from __future__ import annotations

from nbep.device.kernels.get_dispatch_layout import (
    LayoutOutputs,
    LayoutSizes,
    LayoutWorkspace,
    num_counters,
)
from nbep.device.kernels.get_dispatch_layout import get_dispatch_layout as layout_kernel
from nbep.host import validate
from nbep.host.events import EventOverlap
from nbep.host.node import Node, Order
from nbep.host.target.base import Array, MaybeArray

LAYOUT_MAX_BLOCKS = 32


def get_dispatch_layout(
    memory: Node,
    topk_idx: Array,
    num_experts: int,
    previous_event: EventOverlap | None,
    async_finish: bool,
    allocate_on_comm_stream: bool,
) -> tuple[Array, MaybeArray, Array, Array, EventOverlap]:
    """See Buffer.get_dispatch_layout."""
    runtime = memory.runtime
    memory.check_faults()
    validate.stream_options(previous_event, async_finish, allocate_on_comm_stream)
    num_experts = validate.num_experts(memory.num_ranks, num_experts)
    validate.array("topk_idx", runtime.view(topk_idx), "int64", ("num_tokens", "num_topk"))
    num_tokens, num_topk = topk_idx.shape
    validate.topk_size("topk_idx", num_topk)
    if validate.may_read(memory, previous_event):
        validate.expert_indices(runtime.contents(topk_idx), num_experts)

    sizes = LayoutSizes(num_tokens, num_topk, memory.num_ranks, memory.num_nvl_peers, num_experts)
    block = runtime.layout_threads
    grid = max(1, min(LAYOUT_MAX_BLOCKS, -(-num_tokens // block)))
    with memory.allocations(Order(previous_event, allocate_on_comm_stream), topk_idx) as empty:
        num_tokens_per_rank = empty((memory.num_ranks,), "int32")
        # One node: all ranks are peers, so a count per node would say nothing new.
        num_tokens_per_rdma_rank: MaybeArray = empty((memory.num_nodes,), "int32") if memory.num_nodes > 1 else None
        num_tokens_per_expert = empty((num_experts,), "int32")
        is_token_in_rank = empty((num_tokens, memory.num_ranks), "bool")
    runtime.launch(
        memory.comm_stream,
        layout_kernel,
        grid,
        block,
        4 * (num_counters(sizes) + 1),
        LayoutOutputs(num_tokens_per_rank, num_tokens_per_rdma_rank, num_tokens_per_expert, is_token_in_rank),
        topk_idx,
        LayoutWorkspace(memory.layout_totals, memory.layout_arrivals),
        sizes,
    )
    event = memory.finish(async_finish)
    return num_tokens_per_rank, num_tokens_per_rdma_rank, num_tokens_per_expert, is_token_in_rank, event
