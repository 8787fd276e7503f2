"""Buffer.dispatch inside a node: send each token once to every rank that owns one of its experts.

 counts given:   notify_dispatch --counters--> CPU sizes the outputs --> dispatch
 handle given:   cached_notify_dispatch -----------------------------> dispatch
 num_worst_tokens: as the first, but the CPU does not wait for the counters

Source: DeepEP csrc/deep_ep.cpp, Buffer::intranode_dispatch
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nbep.device.kernels.intranode.direct_dispatch import DirectSizes
from nbep.device.kernels.intranode.dispatch import DispatchOutputs, DispatchSizes, dispatch_smem_bytes
from nbep.device.kernels.intranode.dispatch import dispatch as dispatch_kernel
from nbep.device.layout.direct import CELL_WORDS, DirectShape
from nbep.device.layout.intranode import RingShape, num_ring_cell_words
from nbep.host import validate
from nbep.host.block_sizes import block_sizes
from nbep.host.calls import dispatch_call
from nbep.host.config import DISPATCH_TABLE, Config, in_node_config
from nbep.host.events import EventOverlap
from nbep.host.handles import Taken
from nbep.host.intranode import direct_dispatch
from nbep.host.intranode.direct_dispatch import Half, prepare_halves, received
from nbep.host.intranode.handle import DispatchHandle
from nbep.host.intranode.notify import Routes, prepare_counts, prepare_reset
from nbep.host.node import Node
from nbep.host.plans import CountedPlan, Plan
from nbep.host.request import DispatchRequest
from nbep.host.target.base import LATER, Array, MaybeArray, PreparedLaunch
from nbep.host.target.new_arrays import ROWS, Wanted
from nbep.host.tokens import Tokens, await_counts, check_counts, check_wait, find_counted, pair, rows_of


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
    key, plan, arguments = find_counted(memory, request)
    if plan is None:
        plan = _make_plan(memory, request)
        memory.counted_plans.keep(key, plan)
    chosen: Any = direct_dispatch.dispatch_counted if request.zero_copy else _dispatch_counted
    recv, handle, counted = chosen(memory, plan, arguments, request)
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
    config = in_node_config(
        request.config, DISPATCH_TABLE, request.num_sms, memory.num_ranks, room, sizes, memory.is_deep_eps
    )
    validate.config(config, memory.num_ranks, 32 * memory.num_ranks)
    return tokens, config


# Size, launch, return


def _dispatch_counted(
    memory: Node, plan: CountedPlan, arguments: Sequence[Any], request: DispatchRequest
) -> tuple[DispatchOutputs, DispatchHandle, list[int]]:
    """Exchange the counts, wait for the totals unless num_worst_tokens is given, then dispatch."""
    check_wait(memory, request)
    x, scales, topk_idx, topk_weights, in_rank, *counts = arguments
    like = request.x[0] if isinstance(request.x, tuple) else request.x
    num_recv_tokens = request.num_worst_tokens
    per_expert: list[int] = []
    memory.ring_shape = plan.shape
    made, addresses = memory.allocate(request, like, plan.make, (num_recv_tokens,))
    memory.compare(plan.call)
    if num_recv_tokens == 0:
        memory.counters.reset()
    of_ranks, of_channels = addresses[:2]
    plan.notify.launch(memory.stream, (of_ranks, of_channels, *plan.counters, *counts, in_rank), (made, request))
    if plan.make_counted is not None:
        num_recv_tokens, per_expert, _ = await_counts(memory, request)
        more = memory.allocate(request, like, plan.make_counted, (num_recv_tokens,))
        made += more[0]
        addresses += more[1]
    first = *addresses[2:], x, scales, topk_idx, topk_weights, in_rank, of_ranks, of_channels
    plan.launch.launch(memory.stream, first, (request, made), (num_recv_tokens,))
    recv = DispatchOutputs(*made[2:])
    routes = Routes(made[0], made[1], request.is_token_in_rank)
    _, _, src_idx, _, _, recv_channels, send_head = addresses[2:]
    taken = Taken((of_ranks, of_channels, recv_channels, src_idx, in_rank, send_head), plan.sizes, (num_recv_tokens,))
    arrays = recv.recv_channel_prefix_matrix, recv.recv_src_idx, recv.send_head
    return recv, routes.handle(memory, *arrays, taken), per_expert


def _make_plan(memory: Node, request: DispatchRequest) -> CountedPlan | direct_dispatch.DirectPlan:
    """Check what does not change, and prepare the launches."""
    tokens, config = _checked(memory, request)
    if request.zero_copy:
        return direct_dispatch.make_plan(memory, tokens, config, request)
    runtime, num_ranks, num_experts = memory.runtime, memory.num_ranks, request.num_experts
    shape = config.ring_shape(num_ranks, *tokens.ring_sizes(1))
    validate.buffer_size(shape, memory.num_nvl_bytes)
    num_channels, num_worst_tokens = shape.num_channels, request.num_worst_tokens
    call = dispatch_call(memory, tokens, num_experts, config)
    of_routes: tuple[Wanted, ...] = ((num_ranks, num_ranks), "int32"), ((num_ranks, num_channels), "int32")
    outputs: tuple[Wanted | None, ...] = (
        *rows_of(tokens.x, tokens.scales),
        ((ROWS,), "int32"),
        *rows_of(tokens.topk_idx, tokens.topk_weights),
        ((num_ranks, num_channels), "int32"),
        ((tokens.num_tokens, num_ranks), "int32"),
    )
    is_counted = num_worst_tokens == 0
    return CountedPlan(
        runtime.prepare_empty(of_routes if is_counted else of_routes + outputs, tokens.x.array),
        runtime.prepare_empty(outputs, tokens.x.array) if is_counted else None,
        prepare_counts(memory, memory.peers, num_ring_cell_words(shape), request, num_channels, call),
        memory.counters.addresses(is_counted)[:2],
        _prepare(memory, tokens, config, shape, num_worst_tokens, num_experts // num_ranks),
        (tokens.num_tokens, num_channels),
        shape,
        call,
    )


# --- With a handle: cached_notify_dispatch --> dispatch, or direct_dispatch without rings -----------------------------
#
# A training step makes such a call for each layer, and the CPU's time for it counts where the GPU's is short.


NO_LISTS = (0,) * (len(DispatchOutputs._fields) - 2)  # besides tokens and scales, a handle's dispatch gives nothing


def dispatch_cached(memory: Node, request: DispatchRequest) -> Any:
    """Dispatch again along the routes of a handle; recv_x, with its scales if x has some."""
    if request.topk_idx is not None or request.topk_weights is not None:
        validate.only_with_counts(request.topk_idx, request.topk_weights)
    x, handle, plans = request.x, request.handle, memory.cached_plans
    is_pair = isinstance(x, tuple)
    given = x if is_pair else (x, None)
    options = request.config, request.zero_copy, is_pair
    key, plan, arguments = plans.find_along(memory, handle, DispatchHandle, given, options)
    if plan is None:
        tokens = Tokens.look_at(memory, request)
        handle = validate.handle(memory, handle, request.previous_event)
        plan = _make_cached_plan(memory, tokens, handle, request)
        plans.keep(key, plan)
        arguments = memory.runtime.arguments(given)
    launch = _launch_without_rings if request.zero_copy else _launch
    return pair(*launch(memory, plan, given, arguments, handle, request))


def _make_cached_plan(memory: Node, tokens: Tokens, handle: DispatchHandle, request: DispatchRequest) -> Plan:
    """Check what does not change, and prepare the launches."""
    runtime, num_ranks, zero_copy = memory.runtime, memory.num_ranks, request.zero_copy
    num_tokens, num_sms = handle.is_token_in_rank.shape[0], 2 * handle.num_channels
    if tokens.num_tokens != num_tokens:
        validate.refuse("x", f"{tokens.num_tokens} tokens", f"{num_tokens} tokens, as in the dispatch of the handle")
    sizes = tokens.ring_sizes(0)
    room = None if zero_copy else memory.num_nvl_bytes
    config = in_node_config(request.config, DISPATCH_TABLE, num_sms, num_ranks, room, sizes, memory.is_deep_eps)
    validate.config(config, num_ranks, 32 * num_ranks)
    validate.handle_config(handle, config)
    shape: RingShape | DirectShape
    if zero_copy:
        shape = DirectShape(config.num_channels, *sizes)
        direct_sizes = DirectSizes(num_tokens, LATER, 0, 0, *tokens.scale_strides)
        launch: PreparedLaunch | tuple[Half, ...] = prepare_halves(memory, config, shape, direct_sizes)
        num_words, peers = CELL_WORDS, validate.zero_copy(memory).peers
    else:
        shape = config.ring_shape(num_ranks, *sizes)
        validate.buffer_size(shape, memory.num_nvl_bytes)
        launch = _prepare(memory, tokens, config, shape, 0, 0)
        num_words, peers = num_ring_cell_words(shape), memory.peers
    call = dispatch_call(memory, tokens, None, config, handle, zero_copy=zero_copy)
    notify = prepare_reset(memory, peers, num_words, call)
    outputs = rows_of(tokens.x, tokens.scales)
    make = outputs if zero_copy else runtime.prepare_empty(outputs, tokens.x.array)
    return Plan(make, notify, launch, shape, call)


def _prepare(
    memory: Node, tokens: Tokens, config: Config, shape: RingShape, num_worst_tokens: int, num_local_experts: int
) -> PreparedLaunch:
    """The launch of the dispatch kernel. It takes its outputs and inputs, and later how many tokens come."""
    runtime = memory.runtime
    sizes = DispatchSizes(
        tokens.num_tokens,
        LATER,
        num_worst_tokens,
        num_local_experts,
        config.num_max_nvl_chunked_send_tokens,
        *tokens.scale_strides,
        int(block_sizes(runtime).mix_roles if config.mix_roles is None else config.mix_roles),
    )
    num_threads = config.num_threads or block_sizes(runtime).ring(memory.num_ranks)
    smem_bytes = dispatch_smem_bytes(num_threads, runtime.has_tma)
    last = memory.peers, memory.bounds, shape, sizes
    return runtime.prepare(dispatch_kernel, config.num_sms, num_threads, smem_bytes, *last)


def _launch(
    memory: Node, plan: Plan, given: Sequence[Any], arguments: Sequence[Any], handle: DispatchHandle, request: Any
) -> tuple[Array, MaybeArray]:
    """Through rings."""
    of_ranks, of_channels, _, _, in_rank, _ = handle.taken(memory.runtime).arguments
    numbers = handle.taken(memory.runtime).numbers
    made, addresses = memory.allocate(request, given[0], plan.make, numbers)
    memory.compare(plan.call, handle)
    memory.ring_shape = plan.shape
    plan.notify.launch(memory.stream)
    first = *addresses, *NO_LISTS, *arguments, 0, 0, in_rank, of_ranks, of_channels
    plan.launch.launch(memory.stream, first, (given, handle, made), numbers)
    return made[0], made[1]


def _launch_without_rings(
    memory: Node, plan: Plan, given: Sequence[Any], arguments: Sequence[Any], handle: DispatchHandle, request: Any
) -> tuple[Array, MaybeArray]:
    """The outputs lie in the half of the symmetric memory that is next."""
    direct, taken = validate.zero_copy(memory), handle.taken(memory.runtime)
    launch, places = plan.launch[direct.next_half]
    num_rows = taken.numbers[0]
    if num_rows > places.num_rows:
        room = f"{direct.num_bytes} at construction, which has room for {places.num_rows} rows"
        validate.refuse("num_zero_copy_bytes", room, f"enough for {num_rows}")
    memory.allocate(request, given[0])
    memory.compare(plan.call, handle)
    lease = direct.begin_dispatch(places, plan.shape)
    recv_x, recv_x_scales = received(memory, places, plan.make, num_rows, given, lease)
    plan.notify.launch(memory.stream)
    of_ranks, of_channels, _, _, _, send_head = taken.arguments
    first = 0, *arguments, 0, 0, send_head, of_ranks, of_channels
    launch.launch(memory.stream, first, (given, handle), taken.numbers)
    return recv_x, recv_x_scales
