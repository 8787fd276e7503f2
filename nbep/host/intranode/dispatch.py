"""Buffer.dispatch inside a node: send each token once to every rank that owns one of its experts.

 counts given:   notify_dispatch --counters--> CPU sizes the outputs --> dispatch
 handle given:   cached_notify_dispatch -----------------------------> dispatch
 num_worst_tokens: as the first, but the CPU does not wait for the counters

Source: DeepEP csrc/deep_ep.cpp, Buffer::intranode_dispatch
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from nbep.device.kernels.intranode.dispatch import (
    DispatchOutputs,
    DispatchSizes,
    dispatch_smem_bytes,
)
from nbep.device.kernels.intranode.dispatch import dispatch as dispatch_kernel
from nbep.device.kernels.parts.calls import Call
from nbep.device.layout.intranode import RingShape, num_ring_cell_words
from nbep.host import validate
from nbep.host.block_sizes import block_sizes
from nbep.host.calls import dispatch_call
from nbep.host.config import DISPATCH_TABLE, Config, in_node_config
from nbep.host.events import EventOverlap
from nbep.host.intranode import direct_dispatch
from nbep.host.intranode.cached_dispatch import dispatch_cached
from nbep.host.intranode.handle import DispatchHandle
from nbep.host.intranode.notify import Routes, prepare_counts
from nbep.host.node import Node
from nbep.host.request import DispatchRequest
from nbep.host.target.base import LATER, MaybeArray, PreparedLaunch
from nbep.host.target.new_arrays import ROWS, Make, Wanted
from nbep.host.tokens import Tokens, await_counts, check_counts, check_wait, find_counted, pair, rows_of


class Plan(NamedTuple):
    """What depends on sizes, dtypes and options alone: rows that come are counted in every call."""

    make_routes: Make
    notify: PreparedLaunch
    counters: tuple[int, int]
    make: Make  # those of DispatchOutputs that there are
    launch: PreparedLaunch
    shape: RingShape
    call: Call


def dispatch(
    memory: Node, request: DispatchRequest
) -> tuple[Any, MaybeArray, MaybeArray, list[int] | None, DispatchHandle | None, EventOverlap]:
    """See Buffer.dispatch. num_tokens_per_rdma_rank is not looked at."""
    memory.check_faults()
    validate.stream_options(request.previous_event, request.async_finish, request.allocate_on_comm_stream)
    if request.handle is not None:
        recv_x = dispatch_cached(memory, request)
        return recv_x, None, None, None, None, _finish(memory, request)
    recv: DispatchOutputs | direct_dispatch.Received
    chosen: Any = _without_rings if request.zero_copy else _dispatch_counted
    recv, handle, counted = chosen(memory, request)
    return (
        pair(recv.recv_x, recv.recv_x_scales),
        recv.recv_topk_idx,
        recv.recv_topk_weights,
        counted,
        handle,
        _finish(memory, request),
    )


def _finish(memory: Node, request: DispatchRequest) -> EventOverlap:
    event = memory.finish(request.async_finish)
    if request.zero_copy and request.async_finish and memory.runtime.host_reads_arrays:
        validate.zero_copy(memory).begin_lease(memory.latest_event)
    return event


# Validate


def _checked(memory: Node, request: DispatchRequest) -> tuple[Tokens, Config]:
    """The tokens, and with how many SMs and slots they go."""
    tokens = Tokens.look_at(memory, request)
    check_counts(memory, tokens, request, validate.may_read(memory, request.previous_event))
    room = None if request.zero_copy else memory.num_nvl_bytes
    if request.zero_copy:
        validate.zero_copy(memory)
    sizes = tokens.ring_sizes(1)
    config = in_node_config(request.config, DISPATCH_TABLE, request.num_sms, memory.num_ranks, room, sizes)
    validate.config(config, memory.num_ranks, 32 * memory.num_ranks)
    return tokens, config


# Size, launch, return


def _without_rings(
    memory: Node, request: DispatchRequest
) -> tuple[direct_dispatch.Received, DispatchHandle, list[int]]:
    tokens, config = _checked(memory, request)
    check_wait(memory, request)
    return direct_dispatch.dispatch_counted(memory, tokens, request, config)


def _dispatch_counted(memory: Node, request: DispatchRequest) -> tuple[DispatchOutputs, DispatchHandle, list[int]]:
    """Exchange the counts, wait for the totals unless num_worst_tokens is given, then dispatch."""
    key, plan, arguments = find_counted(memory, request)
    if plan is None:
        plan = _make_plan(memory, request)
        memory.plans.keep(key, plan)
    check_wait(memory, request)
    x, like = request.x, request.x[0] if isinstance(request.x, tuple) else request.x
    tokens, in_rank = arguments[:4], arguments[4]
    memory.ring_shape = plan.shape
    routes, of_routes = memory.allocate(request, like, plan.make_routes)
    memory.compare(plan.call)
    if request.num_worst_tokens == 0:
        memory.counters.reset()
    of_notify = (*of_routes, *plan.counters, *arguments[5:], in_rank)
    plan.notify.launch(memory.stream, of_notify, (routes, request))
    num_recv_tokens, per_expert, _ = await_counts(memory, request)
    made, addresses = memory.allocate(request, like, plan.make, num_recv_tokens)
    given = x if isinstance(x, tuple) else (x, None)
    is_there = given[1] is not None, True, *(request.topk_idx is not None,) * 2, True, True
    recv = DispatchOutputs(made[0], *spread(made[1:], is_there, None))
    outputs = addresses[0], *spread(addresses[1:], is_there, 0)
    first = *outputs, *tokens, in_rank, *of_routes
    plan.launch.launch(memory.stream, first, (request, routes, made), (num_recv_tokens,))
    of_handle = recv.recv_channel_prefix_matrix, recv.recv_src_idx, recv.send_head
    return recv, Routes(routes[0], routes[1], request.is_token_in_rank).handle(memory, *of_handle), per_expert


def spread(values: Sequence[Any], is_there: Sequence[bool], nothing: Any) -> list[Any]:
    """The values, and nothing in the places of those that are not there."""
    rest = iter(values)
    return [next(rest) if here else nothing for here in is_there]


def _make_plan(memory: Node, request: DispatchRequest) -> Plan:
    """Check what does not change, and prepare both launches."""
    tokens, config = _checked(memory, request)
    runtime, num_ranks, num_experts = memory.runtime, memory.num_ranks, request.num_experts
    shape = config.ring_shape(num_ranks, *tokens.ring_sizes(1))
    validate.buffer_size(shape, memory.num_nvl_bytes)
    num_channels, num_worst_tokens = shape.num_channels, request.num_worst_tokens
    call = dispatch_call(memory, tokens, num_experts, config)
    of_routes: tuple[Wanted, ...] = ((num_ranks, num_ranks), "int32"), ((num_ranks, num_channels), "int32")
    outputs = (
        *rows_of(tokens.x, tokens.scales),
        ((ROWS,), "int32"),
        *rows_of(tokens.topk_idx, tokens.topk_weights),
        ((num_ranks, num_channels), "int32"),
        ((tokens.num_tokens, num_ranks), "int32"),
    )
    num_threads = config.num_threads or block_sizes(runtime).ring(num_ranks)
    sizes = DispatchSizes(
        tokens.num_tokens,
        LATER,
        num_worst_tokens,
        num_experts // num_ranks,
        config.num_max_nvl_chunked_send_tokens,
        *tokens.scale_strides,
        int(block_sizes(runtime).mix_roles if config.mix_roles is None else config.mix_roles),
    )
    smem_bytes = dispatch_smem_bytes(num_threads, runtime.has_tma)
    last = memory.peers, memory.bounds, shape, sizes
    return Plan(
        runtime.prepare_empty(of_routes, tokens.x.array),
        prepare_counts(memory, memory.peers, num_ring_cell_words(shape), request, num_channels, call),
        memory.counters.addresses(num_worst_tokens == 0)[:2],
        runtime.prepare_empty(outputs, tokens.x.array),
        runtime.prepare(dispatch_kernel, config.num_sms, num_threads, smem_bytes, *last),
        shape,
        call,
    )
