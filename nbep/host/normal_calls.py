"""Buffer.dispatch and Buffer.combine, inside a node and between nodes: what both have in common.

 look at each argument --> find the plan, or check everything and make it --> launch

Where the host reads arrays, where they lie and what is in them is checked before the launch, in each call.

Source: DeepEP csrc/deep_ep.cpp, Buffer::get_dispatch_layout
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from nbep.device.kernels.get_dispatch_layout import (
    LayoutSizes,
    num_counters,
)
from nbep.device.kernels.get_dispatch_layout import get_dispatch_layout as layout_kernel
from nbep.host import validate
from nbep.host.arguments import refuse
from nbep.host.block_sizes import block_sizes
from nbep.host.comm_work import Order
from nbep.host.events import EventOverlap
from nbep.host.handles import ArraysHandle
from nbep.host.node import NodeMemory
from nbep.host.normal_checks import (
    A_PAIR,
    CombineRequest,
    Dispatched,
    DispatchRequest,
    check_combine,
    check_counts,
    check_dispatch,
    check_overlaps,
    outside_rings,
)
from nbep.host.plans import Plan
from nbep.host.target.arrays import View
from nbep.host.target.base import Array, MaybeArray


class Mode(NamedTuple):
    """Inside a node, or between nodes: the class of the handles, and the modules of that folder.

    checks: `handle`, that one is of the mode, for this buffer; `contents` of its arrays
    dispatch, combine: `make_plan` and `launch`
    """

    kind: type[ArraysHandle]
    checks: Any
    dispatch: Any
    combine: Any


def dispatch(memory: NodeMemory, request: DispatchRequest, mode: Mode) -> Dispatched:
    """See Buffer.dispatch."""
    x, handle, runtime = request.x, request.handle, memory.runtime
    is_pair = isinstance(x, tuple)
    if is_pair and len(x) != 2:
        refuse("x", f"a tuple of {len(x)}", A_PAIR)
    given: tuple[Any, ...] = x if is_pair else (x, None)
    options: tuple[Any, ...] | None
    if handle is None:
        if request.num_worst_tokens == 0 and runtime.is_capturing:
            refuse("num_worst_tokens", 0, "positive in a CUDA graph, or a handle given: the CPU cannot wait there")
        given += request.topk_idx, request.topk_weights, request.is_token_in_rank, request.num_tokens_per_rank
        given += (request.num_tokens_per_expert,)
        if memory.internode is not None:
            given += (request.num_tokens_per_rdma_rank,)
        plans = memory.counted_plans
        options = request.expert_alignment, request.num_worst_tokens, request.config, request.num_sms
        options += is_pair, request.zero_copy
    else:
        if request.topk_idx is not None or request.topk_weights is not None:
            name = "topk_weights" if request.topk_idx is None else "topk_idx"
            refuse(name, type(getattr(request, name)).__name__, "None together with a handle")
        plans = memory.cached_plans
        handle, options = _along(memory, handle, mode, (request.config, request.zero_copy, is_pair))
    plan, arguments, views = plans.find(given, options, _plan_dispatch, memory, request, handle, mode)
    if runtime.host_reads_arrays:
        if not request.zero_copy:
            outside_rings(memory, dict(zip(("x", "scales", "topk_idx", "topk_weights"), views, strict=False)))
        if validate.may_read(memory, request.previous_event):
            if handle is None:
                check_counts(memory, request)
            else:
                mode.checks.contents(memory, handle)
    return mode.dispatch.launch(memory, plan, arguments, request, handle)


def _plan_dispatch(memory: NodeMemory, request: DispatchRequest, handle: Any, mode: Mode, views: Sequence[View]) -> Any:
    return mode.dispatch.make_plan(memory, request, check_dispatch(memory, request, handle, views), handle)


def combine(memory: NodeMemory, request: CombineRequest, mode: Mode) -> tuple[Array, MaybeArray, EventOverlap]:
    """See Buffer.combine."""
    bias, runtime = request.bias, memory.runtime
    given = request.x, request.topk_weights, *(bias if isinstance(bias, tuple) else (bias, None))
    handle, options = _along(memory, request.handle, mode, (request.config, request.zero_copy))
    if len(given) != 4:
        refuse("bias", f"a tuple of {len(given) - 2}", "an array, a tuple of two, or None")
    plan, arguments, views = memory.combine_plans.find(given, options, _plan_combine, memory, request, handle, mode)
    num_rows = handle.taken(runtime).numbers[0]  # which the plan does not know
    for array in given[:2]:
        if array is not None and array.shape[0] != num_rows:
            check_combine(request, [*map(runtime.view, given)], handle.taken(runtime))
    if runtime.host_reads_arrays:
        if not request.zero_copy:
            check_overlaps(memory, handle, views)
        if validate.may_read(memory, request.previous_event):
            mode.checks.contents(memory, handle)
    return mode.combine.launch(memory, plan, arguments, request, handle)


def _plan_combine(memory: NodeMemory, request: CombineRequest, handle: Any, mode: Mode, views: Sequence[View]) -> Any:
    of_call = check_combine(request, views, handle.taken(memory.runtime))
    if not request.zero_copy and not handle.is_as_made:
        check_overlaps(memory, handle, views)
    return mode.combine.make_plan(memory, request, of_call, handle)


def _along(memory: NodeMemory, handle: Any, mode: Mode, options: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...] | None]:
    """A handle, and the options of a call along its routes with what a plan has to know of it.

    None, so that all is checked, with any other handle than that of a dispatch of this buffer as it was made.
    """
    if not isinstance(handle, mode.kind) or not handle.is_as_made or handle.owner is not memory.identity:
        return mode.checks.handle(memory, handle), None
    number = handle.number if memory.compares_handles else 0
    return handle, (*options, handle.taken(memory.runtime).sizes, number)


# --- Buffer.get_dispatch_layout


LAYOUT_MAX_BLOCKS = 32


def get_dispatch_layout(
    memory: NodeMemory,
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


def _check_and_plan(memory: NodeMemory, num_experts: int, views: Sequence[View]) -> Plan:
    """The plan for this call, and for later ones with as many tokens, choices and experts."""
    runtime, num_ranks, topk_idx = memory.runtime, memory.num_ranks, views[0]
    num_experts = validate.num_experts(num_ranks, num_experts)
    validate.array("topk_idx", topk_idx, "int64", ("num_tokens", "num_topk"))
    num_tokens, num_topk = topk_idx.shape
    validate.topk_size("topk_idx", num_topk)
    sizes = LayoutSizes(num_tokens, num_topk, num_ranks, memory.num_nvl_peers, num_experts)
    block = block_sizes(runtime).layout
    grid = max(1, min(LAYOUT_MAX_BLOCKS, -(-num_tokens // block)))
    # Where all ranks are peers, a count of the node would say nothing new.
    of_nodes = ((memory.num_nodes,), "int32") if memory.num_nodes > 1 else None
    outputs = ((num_ranks,), "int32"), of_nodes, ((num_experts,), "int32"), ((num_tokens, num_ranks), "bool")
    launch = runtime.prepare(layout_kernel, grid, block, 4 * (num_counters(sizes) + 1), memory.layout_workspace, sizes)
    return Plan(runtime.prepare_empty(outputs, topk_idx.array), launch)
