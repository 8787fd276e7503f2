"""Buffer.dispatch between nodes: send each token once to every node, and there once to every rank that wants it.

 counts given:   internode_notify_dispatch --counters--> CPU sizes the outputs --> internode_dispatch
 handle given:   internode_cached_notify ---------------------------------------> internode_dispatch
 num_worst_tokens: as the first, but the CPU does not wait for the counters

Source: DeepEP csrc/deep_ep.cpp, Buffer::internode_dispatch
"""

from __future__ import annotations

from typing import Any

from nbep.device.kernels.internode.cached_notify import CachedHeads, CachedSizes, internode_cached_notify
from nbep.device.kernels.internode.dispatch import (
    InternodeDispatchOutputs,
    InternodeDispatchSizes,
    dispatch_smem_bytes,
    internode_dispatch,
)
from nbep.device.kernels.internode.notify_dispatch import (
    InternodeNotifySizes,
    internode_notify_dispatch,
    notify_smem_bytes,
)
from nbep.device.kernels.parts.calls import Call
from nbep.device.layout.intranode import num_ring_cell_words
from nbep.host import validate
from nbep.host.block_sizes import block_sizes
from nbep.host.calls import dispatch_call
from nbep.host.config import DISPATCH_TABLE, Config, fit_rings, nodes_config
from nbep.host.events import EventOverlap
from nbep.host.handles import Taken
from nbep.host.internode import checks
from nbep.host.internode.handle import InternodeHandle, InternodeTuple
from nbep.host.internode.rdma_buffer_turns import check_turn, take_turn
from nbep.host.internode.rings import Rings, check_rings, dispatch_rings
from nbep.host.node import Node
from nbep.host.plans import CountedPlan, Plan
from nbep.host.request import DispatchRequest
from nbep.host.target.base import LATER, MaybeArray, PreparedLaunch
from nbep.host.target.new_arrays import PASSED, ROWS, Wanted
from nbep.host.tokens import Tokens, await_counts, check_counts, check_wait, find_counted, pair, rows_of

NUM_PREFIXES = 6  # arrays that notify writes, as InternodeNotifyOutputs begins
NO_HEADS = CachedHeads(0, 0, 0, 0)  # before a dispatch
NO_LISTS = (0,) * (len(InternodeDispatchOutputs._fields) - 2)  # besides tokens and scales, a handle's dispatch has none


def dispatch(
    memory: Node, request: DispatchRequest
) -> tuple[Any, MaybeArray, MaybeArray, list[int] | None, InternodeHandle | None, EventOverlap]:
    """See Buffer.dispatch."""
    memory.check_faults()
    check_turn(memory, "dispatch")
    validate.stream_options(request.previous_event, request.async_finish, request.allocate_on_comm_stream)
    if request.handle is not None:
        recv_x = _dispatch_cached(memory, request)
        return recv_x, None, None, None, None, memory.finish(request.async_finish)
    return _dispatch_counted(memory, request)


def _chosen(
    memory: Node, tokens: Tokens, request: DispatchRequest, handle: InternodeHandle | None
) -> tuple[Config, Rings]:
    """The config, and its rings, for which there is room."""
    mode, config = checks.mode_of(memory), request.config
    num_sms = request.num_sms if handle is None else 2 * handle.num_channels

    def rings_of(config: Config) -> Rings:
        sizes = tokens.hidden_bytes, tokens.num_topk, tokens.num_scales
        return dispatch_rings(config, mode.num_rdma_ranks, mode.num_nvl_ranks, *sizes)

    num_bytes = memory.num_nvl_bytes, mode.rdma.num_rdma_bytes
    if config is None:
        default = nodes_config(DISPATCH_TABLE, num_sms, mode.num_rdma_ranks, mode.num_nvl_ranks)
        config = fit_rings(default, rings_of, *num_bytes, 1)
    checks.config(memory, config)
    if handle is not None:
        checks.handle_config(handle, config)
    rings = rings_of(config)
    check_rings(rings, *num_bytes)
    mode.rdma.transport.check_message(rings.rdma.hidden_bytes)
    return config, rings


def _dispatch_cached(memory: Node, request: DispatchRequest) -> Any:
    """Dispatch again along the routes of a handle; recv_x, with its scales if x has some."""
    mode, handle, plans = checks.mode_of(memory), request.handle, memory.cached_plans
    validate.only_with_counts(request.topk_idx, request.topk_weights)
    is_pair = isinstance(request.x, tuple)
    given = request.x if is_pair else (request.x, None)
    key, plan, arguments = plans.find_along(memory, handle, InternodeHandle, given, (request.config, is_pair))
    if plan is None:
        tokens = Tokens.look_at(memory, request)
        handle = checks.cached(memory, tokens, request)
        plan = _make_plan(memory, tokens, handle, request)
        plans.keep(key, plan)
        arguments = memory.runtime.arguments(given)
    (in_rank, prefix, _, *prefixes), _, numbers = handle.taken(memory.runtime)
    made, addresses = memory.allocate(request, given[0], plan.make, numbers)
    memory.ring_shape, mode.rdma.shape = plan.shape.nvl, plan.shape.rdma
    memory.compare(plan.call, handle)
    take_turn(memory, "dispatch")
    plan.notify.launch(memory.stream)
    first = *addresses, *NO_LISTS, *arguments, 0, 0, in_rank, prefix, *prefixes[:4]
    plan.launch.launch(memory.stream, first, (given, handle, made), numbers)
    return pair(made[0], made[1])


def _make_plan(memory: Node, tokens: Tokens, handle: InternodeHandle, request: DispatchRequest) -> Plan:
    """Check what does not change, and prepare both launches."""
    config, rings = _chosen(memory, tokens, request, handle)
    call = dispatch_call(memory, tokens, None, config, handle, between_nodes=True)
    launch = _prepare(memory, tokens, config, rings, 0, memory.num_ranks)
    make = memory.runtime.prepare_empty(rows_of(tokens.x, tokens.scales), tokens.x.array)
    return Plan(make, prepare_cached_notify(memory, rings, None, call), launch, rings, call)


def _dispatch_counted(memory: Node, request: DispatchRequest) -> tuple[Any, ...]:
    """Exchange the counts, wait for the totals unless num_worst_tokens is given, then dispatch."""
    mode = checks.mode_of(memory)
    key, plan, arguments = find_counted(memory, request)
    if plan is None:
        plan = _make_counted_plan(memory, request)
        memory.counted_plans.keep(key, plan)
    check_wait(memory, request)
    x, scales, topk_idx, topk_weights, in_rank, _, per_expert, _ = arguments
    like = request.x[0] if isinstance(request.x, tuple) else request.x
    num_worst_tokens = request.num_worst_tokens
    numbers = num_worst_tokens, num_worst_tokens * memory.num_nvl_peers  # see await_counts
    counted: list[int] = []
    memory.ring_shape, mode.rdma.shape = plan.shape.nvl, plan.shape.rdma
    made, addresses = memory.allocate(request, like, plan.make, numbers)
    memory.compare(plan.call)
    take_turn(memory, "dispatch")
    if num_worst_tokens == 0:
        memory.counters.reset()
    prefixes = addresses[:NUM_PREFIXES]
    plan.notify.launch(memory.stream, (*prefixes, *plan.counters, per_expert, in_rank), (made, request))
    if plan.make_counted is not None:
        num_recv_tokens, counted, num_passed = await_counts(memory, request)
        numbers = num_recv_tokens, num_passed
        more = memory.allocate(request, like, plan.make_counted, numbers)
        made += more[0]
        addresses += more[1]
    outputs = addresses[NUM_PREFIXES:]
    first = *outputs, x, scales, topk_idx, topk_weights, in_rank, prefixes[0], *prefixes[2:]
    plan.launch.launch(memory.stream, first, (request, made), numbers)
    recv = InternodeDispatchOutputs(*made[NUM_PREFIXES:])
    arrays = *made[:NUM_PREFIXES], recv.recv_src_meta, recv.send_rdma_head, recv.send_nvl_head
    taken = Taken((in_rank, *prefixes, outputs[2], *outputs[5:]), plan.sizes, numbers)
    kind = InternodeTuple if memory.is_deep_eps else InternodeHandle
    handle = kind.made((request.is_token_in_rank, *arrays), memory.identity, memory.num_dispatches, taken)
    event = memory.finish(request.async_finish)
    return pair(recv.recv_x, recv.recv_x_scales), recv.recv_topk_idx, recv.recv_topk_weights, counted, handle, event


def _make_counted_plan(memory: Node, request: DispatchRequest) -> CountedPlan:
    """Check what does not change, and prepare both launches."""
    runtime, mode, num_ranks = memory.runtime, checks.mode_of(memory), memory.num_ranks
    tokens, may_read = Tokens.look_at(memory, request), validate.may_read(memory, request.previous_event)
    check_counts(memory, tokens, request, may_read)
    checks.node_counts(memory, request, may_read)
    config, rings = _chosen(memory, tokens, request, None)
    num_experts, num_channels, num_nodes = request.num_experts, config.num_channels, mode.num_rdma_ranks
    call = dispatch_call(memory, tokens, num_experts, config, between_nodes=True)
    of_nodes, of_ranks = ((num_nodes, num_channels), "int32"), ((num_ranks, num_channels), "int32")
    prefixes: tuple[Wanted, ...] = of_nodes, of_ranks, of_nodes, ((num_nodes,), "int32"), of_ranks
    prefixes += (((num_ranks,), "int32"),)
    outputs: tuple[Wanted | None, ...] = (
        *rows_of(tokens.x, tokens.scales),
        ((ROWS, rings.nvl.num_src_idx), "int32"),
        *rows_of(tokens.topk_idx, tokens.topk_weights),
        ((tokens.num_tokens, num_nodes), "int32"),
        ((PASSED, mode.num_nvl_ranks), "int32"),
    )
    num_threads = block_sizes(runtime).notify
    of_rings = num_ring_cell_words(rings.nvl), request.expert_alignment, mode.cells
    notify = runtime.prepare(
        mode.kernel(internode_notify_dispatch),
        1 + num_ranks + num_nodes,
        num_threads,
        notify_smem_bytes(num_threads),
        mode.network,
        memory.peers,
        mode.progress,
        memory.bounds,
        InternodeNotifySizes(tokens.num_tokens, num_experts, num_channels, *of_rings),
        call,
    )
    is_counted = request.num_worst_tokens == 0
    moe_recv_counter, moe_recv_expert_counter, moe_recv_rdma_counter = memory.counters.addresses(is_counted)
    return CountedPlan(
        runtime.prepare_empty(prefixes if is_counted else prefixes + outputs, tokens.x.array),
        runtime.prepare_empty(outputs, tokens.x.array) if is_counted else None,
        notify,
        (moe_recv_counter, moe_recv_rdma_counter, moe_recv_expert_counter),
        _prepare(memory, tokens, config, rings, request.num_worst_tokens, num_experts),
        (tokens.num_tokens, num_channels),
        rings,
        call,
    )


def _prepare(
    memory: Node, tokens: Tokens, config: Config, rings: Rings, num_worst_tokens: int, num_experts: int
) -> PreparedLaunch:
    """The launch of the dispatch kernel. It takes its outputs and inputs, and later the numbers of a handle."""
    mode = checks.mode_of(memory)
    num_warps = mode.num_warps(config.num_threads)
    return memory.runtime.prepare(
        mode.kernel(internode_dispatch),
        config.num_sms,
        32 * num_warps,
        dispatch_smem_bytes(32 * num_warps),
        mode.network,
        memory.peers,
        mode.progress,
        memory.bounds,
        rings.nvl,
        rings.rdma,
        InternodeDispatchSizes(
            tokens.num_tokens,
            LATER,
            LATER,
            num_worst_tokens,
            num_experts,
            config.num_max_nvl_chunked_send_tokens,
            config.num_max_rdma_chunked_send_tokens,
            mode.num_nvl_receivers(num_warps),
            *tokens.scale_strides,
            mode.cells,
        ),
    )


def prepare_cached_notify(memory: Node, rings: Rings, num_combined_tokens: Any, call: Call) -> PreparedLaunch:
    """Before a dispatch along known routes, or before a combine: come together with all ranks.

    num_combined_tokens: None before a dispatch. A combine's launch takes CachedHeads, and later how many tokens have
    passed through this rank
    """
    runtime, mode = memory.runtime, checks.mode_of(memory)
    num_channels = rings.nvl.num_channels
    is_dispatch = num_combined_tokens is None
    numbers = (0, 0) if is_dispatch else (num_combined_tokens, LATER)
    sizes = *numbers, num_channels, num_ring_cell_words(rings.nvl), mode.cells
    return runtime.prepare(
        mode.kernel(internode_cached_notify),
        1 if is_dispatch else 1 + num_channels,
        block_sizes(runtime).notify,
        0,
        *((NO_HEADS,) if is_dispatch else ()),
        mode.network,
        memory.peers,
        mode.progress,
        memory.bounds,
        CachedSizes(*sizes),
        call,
    )
