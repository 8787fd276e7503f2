"""Buffer.get_dispatch_layout: how many tokens go where, before any of them moves.

Source: DeepEP csrc/deep_ep.cpp, Buffer::get_dispatch_layout
"""

from __future__ import annotations

from collections.abc import Sequence

from nbep.device.kernels.get_dispatch_layout import (
    LayoutSizes,
    LayoutWorkspace,
    num_counters,
)
from nbep.device.kernels.get_dispatch_layout import get_dispatch_layout as layout_kernel
from nbep.host import validate
from nbep.host.block_sizes import block_sizes
from nbep.host.events import EventOverlap
from nbep.host.node import Node, Order
from nbep.host.plans import Plan
from nbep.host.target.base import Array, MaybeArray
from nbep.host.target.views import View

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
    memory.check_faults()
    validate.stream_options(previous_event, async_finish, allocate_on_comm_stream)
    plan, arguments, _ = memory.layout_plans.find((topk_idx,), (num_experts,), _check_and_plan, memory, num_experts)
    if validate.may_read(memory, previous_event):
        validate.expert_indices(memory.runtime.contents(topk_idx), num_experts)
    order = Order(previous_event, async_finish, allocate_on_comm_stream)
    arrays, addresses = memory.allocate(order, plan.make)
    plan.launch.launch(memory.stream, (*addresses, *arguments), (topk_idx, *arrays))
    return (*arrays, memory.finish(async_finish))


def _check_and_plan(memory: Node, num_experts: int, views: Sequence[View]) -> Plan:
    """The plan for this call, and for later ones with as many tokens, choices and experts."""
    runtime, num_ranks, topk_idx = memory.runtime, memory.num_ranks, views[0]
    num_experts = validate.num_experts(num_ranks, num_experts)
    validate.array("topk_idx", topk_idx, "int64", ("num_tokens", "num_topk"))
    num_tokens, num_topk = topk_idx.shape
    validate.topk_size("topk_idx", num_topk)
    sizes = LayoutSizes(num_tokens, num_topk, num_ranks, memory.num_nvl_peers, num_experts)
    block = block_sizes(runtime).layout
    grid = max(1, min(LAYOUT_MAX_BLOCKS, -(-num_tokens // block)))
    workspace = LayoutWorkspace(memory.layout_totals, memory.layout_arrivals)
    # Where all ranks are peers, a count of the node would say nothing new.
    of_nodes = ((memory.num_nodes,), "int32") if memory.num_nodes > 1 else None
    outputs = ((num_ranks,), "int32"), of_nodes, ((num_experts,), "int32"), ((num_tokens, num_ranks), "bool")
    launch = runtime.prepare(layout_kernel, grid, block, 4 * (num_counters(sizes) + 1), workspace, sizes)
    return Plan(runtime.prepare_empty(outputs, topk_idx.array), launch)
