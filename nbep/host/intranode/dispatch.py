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
from nbep.device.layout.intranode import num_ring_cell_words
from nbep.host import validate
from nbep.host.calls import dispatch_call
from nbep.host.config import DISPATCH_TABLE, Config, in_node_config
from nbep.host.events import EventOverlap
from nbep.host.intranode import direct_dispatch
from nbep.host.intranode.cached_dispatch import dispatch_cached
from nbep.host.intranode.handle import DispatchHandle
from nbep.host.intranode.notify import Routes, exchange_counts
from nbep.host.node import Node
from nbep.host.request import DispatchRequest
from nbep.host.target.base import MaybeArray
from nbep.host.tokens import Tokens, await_counts, check_counts, empty_rows, pair


def dispatch(
    memory: Node, request: DispatchRequest
) -> tuple[Any, MaybeArray, MaybeArray, list[int] | None, DispatchHandle | None, EventOverlap]:
    """See Buffer.dispatch. num_tokens_per_rdma_rank is not looked at."""
    memory.check_faults()
    validate.stream_options(request.previous_event, request.async_finish, request.allocate_on_comm_stream)
    if request.handle is not None:
        recv_x = dispatch_cached(memory, request)
        return recv_x, None, None, None, None, memory.finish(request.async_finish)
    tokens = Tokens.look_at(memory, request)
    check_counts(memory, tokens, request, validate.may_read(memory, request.previous_event))
    if request.zero_copy:
        validate.zero_copy(memory)
    room = None if request.zero_copy else memory.num_nvl_bytes
    sizes = tokens.ring_sizes(1)
    config = in_node_config(request.config, DISPATCH_TABLE, request.num_sms, memory.num_ranks, room, sizes)
    validate.config(config, memory.num_ranks, 32 * memory.num_ranks)
    recv: DispatchOutputs | direct_dispatch.Received
    chosen = direct_dispatch.dispatch_counted if request.zero_copy else _dispatch_counted
    recv, handle, counted = chosen(memory, tokens, request, config)
    return (
        pair(recv.recv_x, recv.recv_x_scales),
        recv.recv_topk_idx,
        recv.recv_topk_weights,
        counted,
        handle,
        memory.finish(request.async_finish),
    )


# Size, launch, return


def _dispatch_counted(
    memory: Node, tokens: Tokens, request: DispatchRequest, config: Config
) -> tuple[DispatchOutputs, DispatchHandle, list[int]]:
    """Exchange the counts, wait for the totals unless num_worst_tokens is given, then dispatch."""
    num_ranks = memory.num_ranks
    shape = config.ring_shape(num_ranks, *tokens.ring_sizes(1))
    validate.buffer_size(shape, memory.num_nvl_bytes)
    memory.ring_shape = shape
    with memory.allocations(request, tokens.x.array) as empty:
        routes = Routes.of(empty, num_ranks, shape.num_channels, request.is_token_in_rank)
    call = dispatch_call(memory, tokens, request.num_experts, config)
    memory.compare(call)
    exchange_counts(memory, memory.peers, num_ring_cell_words(shape), request, routes, call)
    num_recv_tokens, per_expert, _ = await_counts(memory, request)
    with memory.allocations(request, tokens.x.array) as empty:
        recv = DispatchOutputs(
            **empty_rows(empty, tokens, num_recv_tokens),
            recv_src_idx=empty((num_recv_tokens,), "int32"),
            recv_channel_prefix_matrix=empty((num_ranks, shape.num_channels), "int32"),
            send_head=empty((tokens.num_tokens, num_ranks), "int32"),
        )
    runtime = memory.runtime
    num_threads = config.num_threads or runtime.ring_threads(num_ranks)
    runtime.launch(
        memory.stream,
        dispatch_kernel,
        config.num_sms,
        num_threads,
        dispatch_smem_bytes(num_threads, runtime.has_tma),
        recv,
        DispatchInputs(
            *tokens.arrays, routes.is_token_in_rank, routes.rank_prefix_matrix, routes.channel_prefix_matrix
        ),
        memory.peers,
        memory.bounds,
        shape,
        DispatchSizes(
            tokens.num_tokens,
            num_recv_tokens,
            request.num_worst_tokens,
            request.num_experts // num_ranks,
            config.num_max_nvl_chunked_send_tokens,
            *tokens.scale_strides,
            int(runtime.mix_roles if config.mix_roles is None else config.mix_roles),
        ),
    )
    handle = routes.handle(memory, recv.recv_channel_prefix_matrix, recv.recv_src_idx, recv.send_head)
    return recv, handle, per_expert
