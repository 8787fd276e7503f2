"""Buffer.dispatch between nodes: send each token once to every node, and there once to every rank that wants it.

 counts given:   internode_notify_dispatch --counters--> CPU sizes the outputs --> internode_dispatch
 handle given:   internode_cached_notify ---------------------------------------> internode_dispatch
 num_worst_tokens: as the first, but the CPU does not wait for the counters

Source: DeepEP csrc/deep_ep.cpp, Buffer::internode_dispatch
"""

from __future__ import annotations

from typing import Any, NamedTuple

from nbep.device.kernels.internode.cached_notify import CachedHeads, CachedSizes, internode_cached_notify
from nbep.device.kernels.internode.dispatch import (
    InternodeDispatchInputs,
    InternodeDispatchOutputs,
    InternodeDispatchSizes,
    dispatch_smem_bytes,
    internode_dispatch,
)
from nbep.device.kernels.internode.notify_dispatch import (
    InternodeNotifyInputs,
    InternodeNotifyOutputs,
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
from nbep.host.internode import checks
from nbep.host.internode.handle import InternodeHandle
from nbep.host.internode.rdma_buffer_turns import check_turn, take_turn
from nbep.host.internode.rings import Rings, check_rings, dispatch_rings
from nbep.host.node import Node
from nbep.host.request import DispatchRequest
from nbep.host.target.base import Array, MaybeArray, PreparedLaunch
from nbep.host.target.new_arrays import Make
from nbep.host.tokens import Tokens, await_counts, check_counts, check_wait, empty_rows, pair

NO_HEADS = CachedHeads(0, 0, 0, 0)  # before a dispatch
NO_LISTS = (0,) * (len(InternodeDispatchOutputs._fields) - 2)  # besides tokens and scales, a handle's dispatch has none
DISPATCH = "dispatch"  # in the key of a plan: a handle keeps those of combines, too


class Prefixes(NamedTuple):
    """The prefix sums that the notify kernel writes: the first fields of InternodeNotifyOutputs.

    They are never None, even if no token comes.
    """

    rdma_channel_prefix_matrix: Array
    gbl_channel_prefix_matrix: Array
    recv_rdma_channel_prefix_matrix: Array
    recv_rdma_rank_prefix_sum: Array
    recv_gbl_channel_prefix_matrix: Array
    recv_gbl_rank_prefix_sum: Array


class Known(NamedTuple):
    """What is known before dispatch: routes, sizes of outputs."""

    is_token_in_rank: Array
    prefixes: Prefixes
    num_recv_tokens: int
    num_rdma_recv_tokens: int
    num_worst_tokens: int
    num_experts: int


class Plan(NamedTuple):
    """What depends on the handle, on the sizes and dtypes of the tokens, and on the config."""

    make: Make  # recv_x, and its scales if there are some
    notify: PreparedLaunch
    launch: PreparedLaunch
    rings: Rings
    call: Call


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
    mode, tokens = checks.mode_of(memory), Tokens.look_at(memory, request)
    may_read = validate.may_read(memory, request.previous_event)
    check_counts(memory, tokens, request, may_read)
    checks.node_counts(memory, request, may_read)
    check_wait(memory, request)
    config, rings = _chosen(memory, tokens, request, None)
    memory.ring_shape, mode.rdma.shape = rings.nvl, rings.rdma
    known, counted = _notify(memory, tokens, request, config, rings)
    recv = _launch(memory, tokens, known, config, rings, request)
    made = InternodeHandle(
        known.is_token_in_rank,
        *known.prefixes,
        recv.recv_src_meta,
        recv.send_rdma_head,
        recv.send_nvl_head,
    ).owned_by(memory.identity, memory.num_dispatches)
    event = memory.finish(request.async_finish)
    return pair(recv.recv_x, recv.recv_x_scales), recv.recv_topk_idx, recv.recv_topk_weights, counted, made, event


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
    mode, handle = checks.mode_of(memory), request.handle
    validate.only_with_counts(request.topk_idx, request.topk_weights)
    is_pair = isinstance(request.x, tuple)
    x = request.x if is_pair else (request.x, None)
    kinds, arguments = memory.runtime.look_at(x)
    key, plan = None, None
    if type(handle) is InternodeHandle and handle.owner is memory.identity and len(x) == 2:
        key, plan = handle.plans.find(kinds, (DISPATCH, request.config, is_pair))
    if plan is None:
        tokens = Tokens.look_at(memory, request)
        handle = checks.cached(memory, tokens, request)
        plan = _make_plan(memory, tokens, handle, request)
        handle.plans.keep(key, plan)
    (recv_x, *scales), (rows, *scale_rows) = memory.allocate(request, x[0], plan.make)
    memory.ring_shape, mode.rdma.shape = plan.rings.nvl, plan.rings.rdma
    memory.compare(plan.call, handle)
    take_turn(memory, "dispatch")
    plan.notify.launch(memory.stream)
    outputs = rows, scale_rows[0] if scales else 0, *NO_LISTS
    plan.launch.launch(memory.stream, (*outputs, *arguments, 0, 0), (x, handle, recv_x, *scales))
    return (recv_x, scales[0]) if scales else recv_x


def _make_plan(memory: Node, tokens: Tokens, handle: InternodeHandle, request: DispatchRequest) -> Plan:
    """Check what does not change, and prepare both launches."""
    runtime, mode = memory.runtime, checks.mode_of(memory)
    config, rings = _chosen(memory, tokens, request, handle)
    call = dispatch_call(memory, tokens, None, config, handle, between_nodes=True)
    num_recv_tokens, num_rdma_recv_tokens = handle.recv_src_meta.shape[0], handle.send_nvl_head.shape[0]
    _, prefix, _, *prefixes = tuple(handle)[:7]
    num_warps = mode.num_warps(config.num_threads)
    sizes = InternodeDispatchSizes(
        tokens.num_tokens,
        num_recv_tokens,
        num_rdma_recv_tokens,
        0,
        memory.num_ranks,
        config.num_max_nvl_chunked_send_tokens,
        config.num_max_rdma_chunked_send_tokens,
        mode.num_nvl_receivers(num_warps),
        *tokens.scale_strides,
        mode.cells,
    )
    launch = runtime.prepare(
        mode.kernel(internode_dispatch),
        config.num_sms,
        32 * num_warps,
        dispatch_smem_bytes(32 * num_warps),
        (handle.is_token_in_rank, prefix, *prefixes),
        mode.network,
        memory.peers,
        mode.progress,
        memory.bounds,
        rings.nvl,
        rings.rdma,
        sizes,
    )
    wanted = [((num_recv_tokens, *view.shape[1:]), view.dtype_name) for view in tokens[:2] if view.is_array]
    make = runtime.prepare_empty(wanted, tokens.x.array)
    return Plan(make, prepare_cached_notify(memory, rings, NO_HEADS, 0, 0, call), launch, rings, call)


def _notify(
    memory: Node, tokens: Tokens, request: DispatchRequest, config: Config, rings: Rings
) -> tuple[Known, list[int]]:
    """Exchange the counts; wait for the totals unless num_worst_tokens is given."""
    runtime, mode, num_ranks = memory.runtime, checks.mode_of(memory), memory.num_ranks
    num_experts, num_worst_tokens = request.num_experts, request.num_worst_tokens
    num_channels, num_nodes = config.num_channels, mode.num_rdma_ranks
    polled = num_worst_tokens == 0
    with memory.allocations(request, tokens.x.array) as empty:
        prefixes = Prefixes(
            empty((num_nodes, num_channels), "int32"),
            empty((num_ranks, num_channels), "int32"),
            empty((num_nodes, num_channels), "int32"),
            empty((num_nodes,), "int32"),
            empty((num_ranks, num_channels), "int32"),
            empty((num_ranks,), "int32"),
        )
    call = dispatch_call(memory, tokens, num_experts, config, between_nodes=True)
    memory.compare(call)
    take_turn(memory, "dispatch")
    if polled:
        memory.counters.reset()
    moe_recv_counter, moe_recv_expert_counter, moe_recv_rdma_counter = memory.counters.addresses(polled)
    counters = moe_recv_counter, moe_recv_rdma_counter, moe_recv_expert_counter
    num_threads = block_sizes(runtime).notify
    runtime.launch(
        memory.stream,
        mode.kernel(internode_notify_dispatch),
        1 + num_ranks + num_nodes,
        num_threads,
        notify_smem_bytes(num_threads),
        InternodeNotifyOutputs(*prefixes, *counters),
        InternodeNotifyInputs(request.num_tokens_per_expert, request.is_token_in_rank),
        mode.network,
        memory.peers,
        mode.progress,
        memory.bounds,
        InternodeNotifySizes(
            tokens.num_tokens,
            num_experts,
            num_channels,
            num_ring_cell_words(rings.nvl),
            request.expert_alignment,
            mode.cells,
        ),
        call,
    )
    num_recv_tokens, per_expert, num_rdma_recv_tokens = await_counts(memory, request)
    sizes = num_recv_tokens, num_rdma_recv_tokens, num_worst_tokens, num_experts
    return Known(request.is_token_in_rank, prefixes, *sizes), per_expert


def prepare_cached_notify(
    memory: Node,
    rings: Rings,
    heads: CachedHeads,
    num_combined_tokens: int,
    num_rdma_recv_tokens: int,
    call: Call,
) -> PreparedLaunch:
    """Before a dispatch along known routes, or with heads before a combine: come together with all ranks."""
    runtime, mode = memory.runtime, checks.mode_of(memory)
    num_channels = rings.nvl.num_channels
    sizes = num_combined_tokens, num_rdma_recv_tokens, num_channels, num_ring_cell_words(rings.nvl), mode.cells
    return runtime.prepare(
        mode.kernel(internode_cached_notify),
        1 if heads is NO_HEADS else 1 + num_channels,
        block_sizes(runtime).notify,
        0,
        heads,
        mode.network,
        memory.peers,
        mode.progress,
        memory.bounds,
        CachedSizes(*sizes),
        call,
    )


def _launch(
    memory: Node, tokens: Tokens, known: Known, config: Config, rings: Rings, request: DispatchRequest
) -> InternodeDispatchOutputs:
    runtime, mode = memory.runtime, checks.mode_of(memory)
    num_recv = known.num_recv_tokens
    with memory.allocations(request, tokens.x.array) as empty:
        recv = InternodeDispatchOutputs(
            **empty_rows(empty, tokens, num_recv),
            recv_src_meta=empty((num_recv, rings.nvl.num_src_idx), "int32"),
            send_rdma_head=empty((tokens.num_tokens, mode.num_rdma_ranks), "int32"),
            send_nvl_head=empty((known.num_rdma_recv_tokens, mode.num_nvl_ranks), "int32"),
        )
    num_warps = mode.num_warps(config.num_threads)
    prefixes = known.prefixes
    runtime.launch(
        memory.stream,
        mode.kernel(internode_dispatch),
        config.num_sms,
        32 * num_warps,
        dispatch_smem_bytes(32 * num_warps),
        recv,
        InternodeDispatchInputs(
            *tokens.arrays, known.is_token_in_rank, prefixes.rdma_channel_prefix_matrix, *prefixes[2:]
        ),
        mode.network,
        memory.peers,
        mode.progress,
        memory.bounds,
        rings.nvl,
        rings.rdma,
        InternodeDispatchSizes(
            tokens.num_tokens,
            num_recv,
            known.num_rdma_recv_tokens,
            known.num_worst_tokens,
            known.num_experts,
            config.num_max_nvl_chunked_send_tokens,
            config.num_max_rdma_chunked_send_tokens,
            mode.num_nvl_receivers(num_warps),
            *tokens.scale_strides,
            mode.cells,
        ),
    )
    return recv
