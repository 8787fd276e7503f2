"""Buffer.dispatch and Buffer.combine, inside a node and between nodes: what both have in common.

 look at each argument --> find the plan, or check everything and make it --> launch

Where the host reads arrays, what is in them is checked before the launch, in each call.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from nbep.host import validate
from nbep.host.arguments import refuse
from nbep.host.events import EventOverlap
from nbep.host.node import Node
from nbep.host.request import CombineRequest, Dispatched, DispatchRequest
from nbep.host.target.base import Array, MaybeArray
from nbep.host.tokens import A_PAIR, check_combine, check_counts, check_dispatch, check_overlaps, outside_rings


class Mode(NamedTuple):
    """Inside a node, or between nodes: the class of the handles, and the modules of that folder."""

    kind: type[Any]
    checks: Any
    dispatch: Any
    combine: Any


def dispatch(memory: Node, request: DispatchRequest, mode: Mode) -> Dispatched:
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
        options = _along(memory, handle, mode, (request.config, request.zero_copy, is_pair))
    key, plan, arguments, views = plans.find(given, options)
    if plan is None:
        if handle is not None:
            handle = mode.checks.handle(memory, handle)
        tokens = check_dispatch(memory, request, handle, views or [*map(runtime.view, given)])
    if runtime.host_reads_arrays:
        if not request.zero_copy:
            outside_rings(memory, dict(zip(("x", "scales", "topk_idx", "topk_weights"), views, strict=False)))
        if validate.may_read(memory, request.previous_event):
            if handle is None:
                check_counts(memory, request)
            else:
                mode.checks.contents(memory, handle)
    if plan is None:
        plan = mode.dispatch.make_plan(memory, request, tokens, handle)
        plans.keep(key, plan)
    if handle is None:
        return mode.dispatch.launch_counted(memory, plan, arguments, request)
    return mode.dispatch.launch_cached(memory, plan, arguments, request, handle)


def combine(memory: Node, request: CombineRequest, mode: Mode) -> tuple[Array, MaybeArray, EventOverlap]:
    """See Buffer.combine."""
    handle, bias, runtime = request.handle, request.bias, memory.runtime
    given = request.x, request.topk_weights, *(bias if isinstance(bias, tuple) else (bias, None))
    options = _along(memory, handle, mode, (request.config, request.zero_copy)) if len(given) == 4 else None
    key, plan, arguments, views = memory.combine_plans.find(given, options)
    if plan is not None:
        num_rows = handle.taken(runtime).numbers[0]  # which the plan does not know
        for array in given[:2]:
            if array is not None and array.shape[0] != num_rows:
                key, plan = None, None
    if plan is None:
        views = views or [*map(runtime.view, given)]
        handle = mode.checks.handle(memory, handle)
        of_call = check_combine(request, views, handle.taken(runtime))
    if not request.zero_copy and (runtime.host_reads_arrays or not handle.is_as_made):
        check_overlaps(memory, handle, views)
    if runtime.host_reads_arrays and validate.may_read(memory, request.previous_event):
        mode.checks.contents(memory, handle)
    if plan is None:
        plan = mode.combine.make_plan(memory, request, of_call, handle)
        memory.combine_plans.keep(key, plan)
    return mode.combine.launch(memory, plan, arguments, request, handle)


def _along(memory: Node, handle: Any, mode: Mode, options: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """The options of a call along the routes of a handle, and what a plan has to know of that.

    None, so that all is checked, for any other handle than that of a dispatch of this buffer as it was made.
    """
    if not isinstance(handle, mode.kind) or not handle.is_as_made or handle.owner is not memory.identity:
        return None
    return *options, handle.taken(memory.runtime).sizes, handle.number if memory.compares_handles else 0
