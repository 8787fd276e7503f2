"""Buffer.dispatch between nodes: send each token once to every node, and there once to every rank that wants it.

 counts given:   internode_notify_dispatch --counters--> CPU sizes the outputs --> internode_dispatch
 handle given:   internode_cached_notify ---------------------------------------> internode_dispatch
 num_worst_tokens: as the first, but the CPU does not wait for the counters

Source: DeepEP csrc/deep_ep.cpp, Buffer::internode_dispatch
"""

from __future__ import annotations

from collections.abc import Sequence
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
from nbep.host.block_sizes import block_sizes
from nbep.host.config import DISPATCH_TABLE, Config, Rings, dispatch_rings
from nbep.host.handles import InternodeHandle, InternodeTuple, Taken
from nbep.host.internode import checks
from nbep.host.low_latency.launch import take_turn
from nbep.host.node import NodeMemory
from nbep.host.normal_checks import Dispatched, DispatchRequest, Tokens, dispatch_call, pair
from nbep.host.plans import Plan
from nbep.host.target.arrays import PASSED, ROWS, Wanted
from nbep.host.target.base import LATER, PreparedLaunch

NUM_PREFIXES = 6  # arrays that notify writes, as InternodeNotifyOutputs begins
NO_HEADS = CachedHeads(0, 0, 0, 0)  # before a dispatch
NO_LISTS = (0,) * (len(InternodeDispatchOutputs._fields) - 2)  # besides tokens and scales, a handle's dispatch has none


def make_plan(memory: NodeMemory, request: DispatchRequest, tokens: Tokens, handle: InternodeHandle | None) -> Plan:
    """Choose the rings and prepare both launches, for arrays that are checked."""
    runtime, mode, num_ranks, num_tokens = memory.runtime, checks.mode_of(memory), memory.num_ranks, tokens.num_tokens
    num_experts, num_worst_tokens, num_sms = tokens.num_experts, request.num_worst_tokens, request.num_sms
    if handle is not None:
        num_worst_tokens, num_sms = 0, 2 * handle.num_channels

    def rings_of(config: Config) -> Rings:
        sizes = tokens.hidden_bytes, tokens.num_topk, tokens.num_scales
        return dispatch_rings(config, mode.num_rdma_ranks, mode.num_nvl_ranks, *sizes)

    of_handle = handle is not None
    config, rings = checks.rings(memory, request.config, DISPATCH_TABLE, num_sms, rings_of, of_handle)
    call = dispatch_call(memory, tokens, config, handle, between_nodes=True)
    num_warps = mode.num_warps(config.num_threads)
    launch = runtime.prepare(
        mode.rdma.kernel(internode_dispatch),
        config.num_sms,
        32 * num_warps,
        dispatch_smem_bytes(32 * num_warps),
        mode.rdma.network,
        memory.peers,
        mode.progress,
        memory.bounds,
        rings.nvl,
        rings.rdma,
        InternodeDispatchSizes(
            num_tokens,
            LATER,
            LATER,
            num_worst_tokens,
            num_experts or num_ranks,
            config.num_max_nvl_chunked_send_tokens,
            config.num_max_rdma_chunked_send_tokens,
            mode.num_nvl_receivers(num_warps),
            *tokens.scale_strides,
            mode.rdma.cells,
        ),
    )
    if handle is not None:
        make = runtime.prepare_empty(tokens.received, tokens.x.array)
        return Plan(make, launch, prepare_cached_notify(memory, rings, None, call), rings, call)
    num_channels, num_nodes = config.num_channels, mode.num_rdma_ranks
    of_nodes, of_ranks = ((num_nodes, num_channels), "int32"), ((num_ranks, num_channels), "int32")
    prefixes: tuple[Wanted, ...] = of_nodes, of_ranks, of_nodes, ((num_nodes,), "int32"), of_ranks
    prefixes += (((num_ranks,), "int32"),)
    outputs: tuple[Wanted | None, ...] = (
        *tokens.received,
        ((ROWS, rings.nvl.num_src_idx), "int32"),
        *tokens.received_topk,
        ((num_tokens, num_nodes), "int32"),
        ((PASSED, mode.num_nvl_ranks), "int32"),
    )
    num_threads = block_sizes(runtime).notify
    of_rings = num_ring_cell_words(rings.nvl), request.expert_alignment, mode.rdma.cells
    notify = runtime.prepare(
        mode.rdma.kernel(internode_notify_dispatch),
        1 + num_ranks + num_nodes,
        num_threads,
        notify_smem_bytes(num_threads),
        mode.rdma.network,
        memory.peers,
        mode.progress,
        memory.bounds,
        InternodeNotifySizes(num_tokens, num_experts, num_channels, *of_rings),
        call,
    )
    waits = num_worst_tokens == 0
    moe_recv_counter, moe_recv_expert_counter, moe_recv_rdma_counter = memory.counters.addresses(waits)
    return Plan(
        runtime.prepare_empty(prefixes if waits else prefixes + outputs, tokens.x.array),
        launch,
        notify,
        rings,
        call,
        runtime.prepare_empty(outputs, tokens.x.array) if waits else None,
        (moe_recv_counter, moe_recv_rdma_counter, moe_recv_expert_counter),
        (num_tokens, num_channels),
        num_experts // num_ranks,
    )


def launch(
    memory: NodeMemory, plan: Plan, arguments: Sequence[Any], request: DispatchRequest, handle: InternodeHandle | None
) -> Dispatched:
    """Exchange the counts and wait for the totals, unless num_worst_tokens or a handle says them; then dispatch."""
    mode, num_worst_tokens = checks.mode_of(memory), request.num_worst_tokens
    # Each token that passes through this rank is one of those that come to a rank of its node.
    numbers: tuple[int, ...] = num_worst_tokens, num_worst_tokens * memory.num_nvl_peers
    if handle is not None:
        numbers = handle.taken(memory.runtime).numbers
    made, addresses = memory.allocate(request, plan.make, numbers)
    memory.compare(plan.call, handle)
    memory.ring_shape, mode.rdma.shape = plan.shape.nvl, plan.shape.rdma
    take_turn(memory, "dispatch")
    counted: list[int] = []
    if handle is None:
        *tokens, in_rank, _, per_expert, _ = arguments
        prefixes, outputs = addresses[:NUM_PREFIXES], addresses[NUM_PREFIXES:]
        if plan.make_counted is not None:
            memory.counters.reset()
        plan.notify.launch(memory.stream, (*prefixes, *plan.counters, per_expert, in_rank), (made, request))
        if plan.make_counted is not None:
            num_recv_tokens, counted, num_passed = memory.await_counts(plan.num_local_experts)
            numbers = num_recv_tokens, num_passed
            more, outputs = memory.allocate(request, plan.make_counted, numbers)
            made = made + more
    else:
        in_rank, *prefixes = handle.taken(memory.runtime).arguments[: 1 + NUM_PREFIXES]
        plan.notify.launch(memory.stream)
        outputs, tokens = [*addresses, *NO_LISTS], [*arguments, 0, 0]
    first = *outputs, *tokens, in_rank, prefixes[0], *prefixes[2:]
    plan.launch.launch(memory.stream, first, (request, made), numbers)
    if handle is not None:
        return pair(*made), None, None, None, None, memory.finish(request.async_finish)
    recv = InternodeDispatchOutputs(*made[NUM_PREFIXES:])
    arrays = *made[:NUM_PREFIXES], recv.recv_src_meta, recv.send_rdma_head, recv.send_nvl_head
    taken = Taken((in_rank, *prefixes, outputs[2], *outputs[5:]), plan.sizes, numbers)
    kind = InternodeTuple if memory.is_deep_eps else InternodeHandle
    handle = kind.made((request.is_token_in_rank, *arrays), memory.identity, memory.num_dispatches, taken)
    event = memory.finish(request.async_finish)
    return pair(recv.recv_x, recv.recv_x_scales), recv.recv_topk_idx, recv.recv_topk_weights, counted, handle, event


def prepare_cached_notify(memory: NodeMemory, rings: Rings, num_combined_tokens: Any, call: Call) -> PreparedLaunch:
    """Before a dispatch along known routes, or before a combine: come together with all ranks.

    num_combined_tokens: None before a dispatch. A combine's launch takes CachedHeads, and later how many tokens have
    passed through this rank
    """
    runtime, mode = memory.runtime, checks.mode_of(memory)
    num_channels = rings.nvl.num_channels
    is_dispatch = num_combined_tokens is None
    numbers = (0, 0) if is_dispatch else (num_combined_tokens, LATER)
    sizes = *numbers, num_channels, num_ring_cell_words(rings.nvl), mode.rdma.cells
    return runtime.prepare(
        mode.rdma.kernel(internode_cached_notify),
        1 if is_dispatch else 1 + num_channels,
        block_sizes(runtime).notify,
        0,
        *((NO_HEADS,) if is_dispatch else ()),
        mode.rdma.network,
        memory.peers,
        mode.progress,
        memory.bounds,
        CachedSizes(*sizes),
        call,
    )
