"""Buffer.dispatch inside a node: send each token once to every rank that owns one of its experts.

 counts given:   notify_dispatch --counters--> CPU sizes the outputs --> dispatch
 handle given:   cached_notify_dispatch -----------------------------> dispatch
 num_worst_tokens: as the first, but the CPU does not wait for the counters

Source: DeepEP csrc/deep_ep.cpp, Buffer::intranode_dispatch
"""

from __future__ import annotations

from typing import Any

from nbep.device.kernels.intranode.dispatch import (
    DispatchInputs,
    DispatchOutputs,
    DispatchSizes,
    dispatch_smem_bytes,
)
from nbep.device.kernels.intranode.dispatch import dispatch as dispatch_kernel
from nbep.device.layout.intranode import RingShape, num_ring_cell_words
from nbep.host import validate
from nbep.host.arguments import integer
from nbep.host.calls import dispatch_call
from nbep.host.config import DISPATCH_TABLE, Config, fit_config, table_config, zero_copy_config
from nbep.host.events import EventOverlap
from nbep.host.intranode import direct_dispatch
from nbep.host.intranode.cached_dispatch import dispatch_cached
from nbep.host.intranode.handle import DispatchHandle
from nbep.host.intranode.notify import exchange_counts
from nbep.host.node import Empty, Node, Order
from nbep.host.target.base import Array, MaybeArray, Runtime
from nbep.host.tokens import Counts, Tokens, check_counts, empty_rows, pair, wait_counters


def dispatch(
    memory: Node,
    x: Any,
    handle: Any,
    counts: Counts,
    num_tokens_per_rdma_rank: MaybeArray,
    topk_idx: MaybeArray,
    topk_weights: MaybeArray,
    expert_alignment: int,
    num_worst_tokens: int,
    config: Config | None,
    num_sms: int,
    previous_event: EventOverlap | None,
    async_finish: bool,
    allocate_on_comm_stream: bool,
    zero_copy: bool = False,
) -> tuple[Any, MaybeArray, MaybeArray, list[int] | None, DispatchHandle | None, EventOverlap]:
    """See Buffer.dispatch. num_sms is that of the default config; num_tokens_per_rdma_rank is not looked at."""
    runtime = memory.runtime
    memory.check_faults()
    validate.stream_options(previous_event, async_finish, allocate_on_comm_stream)
    expert_alignment = integer("expert_alignment", expert_alignment, 1)
    num_worst_tokens = integer("num_worst_tokens", num_worst_tokens, 0)
    order = Order(previous_event, allocate_on_comm_stream)
    if handle is not None:
        recv_x = dispatch_cached(memory, x, handle, topk_idx, topk_weights, config, order, zero_copy)
        return recv_x, None, None, None, None, memory.finish(async_finish)
    tokens = Tokens(*validate.payload(runtime, x), topk_idx, topk_weights)
    check_counts(memory, tokens, counts, num_worst_tokens, validate.may_read(memory, previous_event))
    token_sizes = (tokens.hidden_bytes, tokens.num_topk, tokens.num_scales, 1)
    if zero_copy:
        validate.zero_copy(memory)
    if config is None and zero_copy:
        config = zero_copy_config(num_sms)
    elif config is None:
        config = fit_config(
            table_config(DISPATCH_TABLE, num_sms, memory.num_ranks),
            memory.num_nvl_bytes,
            memory.num_ranks,
            *token_sizes,
        )
    validate.config(config, memory.num_ranks, 32 * memory.num_ranks)
    recv: DispatchOutputs | direct_dispatch.Received
    if zero_copy:
        recv, handle, counted = direct_dispatch.dispatch_counted(
            memory, tokens, counts, expert_alignment, num_worst_tokens, config, order
        )
    else:
        shape = config.ring_shape(memory.num_ranks, *token_sizes)
        validate.buffer_size(shape, memory.num_nvl_bytes)
        memory.ring_shape = shape
        recv, handle, counted = _dispatch_counted(
            memory, tokens, counts, expert_alignment, num_worst_tokens, config, shape, order
        )
    return (
        pair(recv.recv_x, recv.recv_x_scales),
        recv.recv_topk_idx,
        recv.recv_topk_weights,
        counted,
        handle,
        memory.finish(async_finish),
    )


# Size, launch, return


def _dispatch_counted(
    memory: Node,
    tokens: Tokens,
    counts: Counts,
    expert_alignment: int,
    num_worst_tokens: int,
    config: Config,
    shape: RingShape,
    order: Order,
) -> tuple[DispatchOutputs, DispatchHandle, list[int]]:
    """Exchange the counts, wait for the totals unless num_worst_tokens is given, then dispatch."""
    runtime, num_ranks = memory.runtime, memory.num_ranks
    num_experts = counts.num_tokens_per_expert.shape[0]
    polled = num_worst_tokens == 0
    with memory.allocations(order, tokens.x) as empty:
        rank_prefix_matrix = empty((num_ranks, num_ranks), "int32")
        channel_prefix_matrix = empty((num_ranks, shape.num_channels), "int32")
    call = dispatch_call(memory, tokens, num_experts, config)
    memory.compare(call)
    exchange_counts(
        memory,
        memory.peers,
        num_ring_cell_words(shape),
        counts,
        expert_alignment,
        polled,
        rank_prefix_matrix,
        channel_prefix_matrix,
        call,
    )
    num_recv_tokens = num_worst_tokens
    per_expert: list[int] = []
    if polled:
        num_recv_tokens, per_expert, _ = wait_counters(memory, num_experts // num_ranks)
    with memory.allocations(order, tokens.x) as empty:
        recv = _empty_outputs(runtime, empty, tokens, num_recv_tokens, num_ranks, shape.num_channels, True)
    _launch_dispatch(
        memory,
        recv,
        tokens,
        counts.is_token_in_rank,
        rank_prefix_matrix,
        channel_prefix_matrix,
        num_recv_tokens,
        num_worst_tokens,
        num_experts // num_ranks,
        config,
        shape,
    )
    handle = DispatchHandle(
        rank_prefix_matrix,
        channel_prefix_matrix,
        recv.recv_channel_prefix_matrix,
        recv.recv_src_idx,
        counts.is_token_in_rank,
        recv.send_head,
    ).owned_by(memory.identity)
    return recv, handle, per_expert


def _launch_dispatch(
    memory: Node,
    recv: DispatchOutputs,
    tokens: Tokens,
    is_token_in_rank: Array,
    rank_prefix_matrix: Array,
    channel_prefix_matrix: Array,
    num_recv_tokens: int,
    num_worst_tokens: int,
    num_local_experts: int,
    config: Config,
    shape: RingShape,
) -> None:
    runtime, num_ranks = memory.runtime, memory.num_ranks
    num_threads = config.num_threads or runtime.ring_threads(num_ranks)
    token_stride, hidden_stride = (0, 0) if tokens.scales is None else runtime.strides(tokens.scales)
    runtime.launch(
        memory.comm_stream,
        dispatch_kernel,
        config.num_sms,
        num_threads,
        dispatch_smem_bytes(num_threads, runtime.has_tma),
        recv,
        DispatchInputs(*tokens, is_token_in_rank, rank_prefix_matrix, channel_prefix_matrix),
        memory.peers,
        memory.bounds,
        shape,
        DispatchSizes(
            tokens.num_tokens,
            num_recv_tokens,
            num_worst_tokens,
            num_local_experts,
            config.num_max_nvl_chunked_send_tokens,
            token_stride,
            hidden_stride,
            int(runtime.mix_roles if config.mix_roles is None else config.mix_roles),
        ),
    )


def _empty_outputs(
    runtime: Runtime,
    empty: Empty,
    tokens: Tokens,
    num_recv_tokens: int,
    num_ranks: int,
    num_channels: int,
    for_handle: bool,
) -> DispatchOutputs:
    """Arrays for what dispatch writes; None where the input has no such part, or if no handle will be made of it."""

    def empty_index(*shape: int) -> MaybeArray:
        return empty(shape, "int32") if for_handle else None

    return DispatchOutputs(
        **empty_rows(runtime, empty, tokens, num_recv_tokens),
        recv_src_idx=empty_index(num_recv_tokens),
        recv_channel_prefix_matrix=empty_index(num_ranks, num_channels),
        send_head=empty_index(tokens.num_tokens, num_ranks),
    )
