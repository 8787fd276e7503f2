"""Buffer.dispatch inside a node: send each token once to every rank that owns one of its experts.

 counts given:   notify_dispatch --counters--> CPU sizes the outputs --> dispatch
 handle given:   cached_notify_dispatch -----------------------------> dispatch
 num_worst_tokens: as the first, but the CPU does not wait for the counters

With zero_copy the outputs lie in the symmetric memory, and peers write them:

 counts given:   notify_dispatch --counters--> CPU sizes the outputs --> direct_dispatch
                 number_tokens -------------------------------------->
 handle given:   cached_notify_dispatch ----------------------------> direct_dispatch

Source: DeepEP csrc/deep_ep.cpp, Buffer::intranode_dispatch
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from nbep.device.kernels.intranode.cached_notify import cached_notify_dispatch
from nbep.device.kernels.intranode.direct_dispatch import DirectSizes, direct_dispatch, direct_dispatch_smem_bytes
from nbep.device.kernels.intranode.dispatch import DispatchOutputs, DispatchSizes, dispatch_smem_bytes
from nbep.device.kernels.intranode.dispatch import dispatch as dispatch_kernel
from nbep.device.kernels.intranode.notify_dispatch import NotifySizes, notify_dispatch
from nbep.device.kernels.intranode.number_tokens import number_tokens
from nbep.device.kernels.parts.calls import Call
from nbep.device.layout.direct import CELL_WORDS, DirectShape, HalfPlaces
from nbep.device.layout.intranode import num_ring_cell_words
from nbep.device.protocols.peers import Peers
from nbep.host.arguments import refuse
from nbep.host.block_sizes import block_sizes
from nbep.host.config import DISPATCH_TABLE
from nbep.host.handles import DispatchHandle, DispatchTuple, Taken
from nbep.host.intranode import checks
from nbep.host.node import NodeMemory
from nbep.host.normal_checks import Dispatched, DispatchRequest, Tokens, dispatch_call, pair
from nbep.host.plans import Plan
from nbep.host.target.arrays import ROWS, Make, Wanted
from nbep.host.target.base import LATER, PreparedLaunch


def prepare_counts(memory: NodeMemory, peers: Peers, sizes: NotifySizes, call: Call) -> PreparedLaunch:
    """The launch of the kernel that exchanges counts, compares the ranks' calls, and resets cells.

    It takes the fields of NotifyOutputs and NotifyInputs.
    """
    grid, threads = 1 + memory.num_ranks, block_sizes(memory.runtime).notify
    return memory.runtime.prepare(memory.kernel(notify_dispatch), grid, threads, 0, peers, memory.bounds, sizes, call)


def prepare_reset(memory: NodeMemory, peers: Peers, num_cell_words: int, call: Call) -> PreparedLaunch:
    """The launch of the kernel that resets so many words and meets the peers, whose calls it compares."""
    runtime = memory.runtime
    threads = block_sizes(runtime).notify
    kernel = memory.kernel(cached_notify_dispatch)
    return runtime.prepare(kernel, 1, threads, 0, num_cell_words, peers, memory.bounds, call)


# Through rings


NO_LISTS = (0,) * (len(DispatchOutputs._fields) - 2)  # besides tokens and scales, a handle's dispatch gives nothing


def make_plan(
    memory: NodeMemory, request: DispatchRequest, tokens: Tokens, handle: DispatchHandle | None
) -> Plan | DirectPlan:
    """Choose the rings and prepare the launches, for arrays that are checked."""
    runtime, num_ranks, num_tokens, zero_copy = memory.runtime, memory.num_ranks, tokens.num_tokens, request.zero_copy
    num_experts, num_worst_tokens, num_sms = tokens.num_experts, request.num_worst_tokens, request.num_sms
    if handle is not None:
        num_worst_tokens, num_sms = 0, 2 * handle.num_channels
    of_handle = handle is not None
    # A handle knows where the tokens were: their places do not travel.
    sizes = tokens.hidden_bytes, tokens.num_topk, tokens.num_scales, int(not of_handle)
    of_call = request.config, DISPATCH_TABLE, num_sms, sizes, 32 * num_ranks, of_handle, zero_copy
    config, shape = checks.rings(memory, *of_call)
    call = dispatch_call(memory, tokens, config, handle, zero_copy=zero_copy)
    num_channels, blocks = config.num_channels, block_sizes(runtime)
    num_threads = config.num_threads or blocks.ring(num_ranks)
    if zero_copy:
        return _plan_without_rings(memory, request, tokens, num_channels, num_threads, call, sizes)
    launch = runtime.prepare(
        dispatch_kernel,
        config.num_sms,
        num_threads,
        dispatch_smem_bytes(num_threads, runtime.has_tma),
        memory.peers,
        memory.bounds,
        shape,
        DispatchSizes(
            num_tokens,
            LATER,
            num_worst_tokens,
            num_experts // num_ranks,
            config.num_max_nvl_chunked_send_tokens,
            *tokens.scale_strides,
            int(blocks.mix_roles if config.mix_roles is None else config.mix_roles),
        ),
    )
    num_cell_words = num_ring_cell_words(shape)
    if handle is not None:
        notify = prepare_reset(memory, memory.peers, num_cell_words, call)
        return Plan(runtime.prepare_empty(tokens.received, tokens.x.array), launch, notify, shape, call)
    counts = NotifySizes(num_tokens, num_experts, num_channels, num_cell_words, request.expert_alignment)
    of_channels = (num_ranks, num_channels), "int32"
    routes: tuple[Wanted, ...] = ((num_ranks, num_ranks), "int32"), of_channels
    outputs: tuple[Wanted | None, ...] = (
        *tokens.received,
        ((ROWS,), "int32"),
        *tokens.received_topk,
        of_channels,
        ((num_tokens, num_ranks), "int32"),
    )
    waits = num_worst_tokens == 0
    return Plan(
        runtime.prepare_empty(routes if waits else routes + outputs, tokens.x.array),
        launch,
        prepare_counts(memory, memory.peers, counts, call),
        shape,
        call,
        runtime.prepare_empty(outputs, tokens.x.array) if waits else None,
        memory.counters.addresses(waits)[:2],
        (num_tokens, num_channels),
        num_experts // num_ranks,
    )


def launch(
    memory: NodeMemory, plan: Any, arguments: Sequence[Any], request: DispatchRequest, handle: DispatchHandle | None
) -> Dispatched:
    """Exchange the counts and wait for the totals, unless num_worst_tokens or a handle says them; then dispatch."""
    if request.zero_copy:
        return _launch_without_rings(memory, plan, arguments, request, handle)
    known = None if handle is None else handle.taken(memory.runtime)
    numbers: Any = (request.num_worst_tokens,) if known is None else known.numbers
    made, addresses = memory.allocate(request, plan.make, numbers)
    memory.compare(plan.call, handle)
    memory.ring_shape = plan.shape
    per_expert: list[int] = []
    if known is None:
        *tokens, in_rank, per_rank, experts = arguments
        of_ranks, of_channels, *outputs = addresses
        of_notify = of_ranks, of_channels, *plan.counters, per_rank, experts, in_rank
        if plan.make_counted is not None:
            memory.counters.reset()
        plan.notify.launch(memory.stream, of_notify, (made, request))
        if plan.make_counted is not None:
            num_recv_tokens, per_expert, _ = memory.await_counts(plan.num_local_experts)
            numbers = (num_recv_tokens,)
            more, outputs = memory.allocate(request, plan.make_counted, numbers)
            made = made + more
    else:  # a training step makes such a call for each layer: the CPU's time counts where the GPU's is short
        of_ranks, of_channels, _, _, in_rank, _ = known.arguments
        plan.notify.launch(memory.stream)
        outputs, tokens = [*addresses, *NO_LISTS], [*arguments, 0, 0]
    first = *outputs, *tokens, in_rank, of_ranks, of_channels
    plan.launch.launch(memory.stream, first, (request, made), numbers)
    if handle is not None:
        return pair(*made), None, None, None, None, memory.finish(request.async_finish)
    recv = DispatchOutputs(*made[2:])
    _, _, src_idx, _, _, recv_channels, send_head = outputs
    taken = Taken((of_ranks, of_channels, recv_channels, src_idx, in_rank, send_head), plan.sizes, numbers)
    routes = *made[:2], recv.recv_channel_prefix_matrix, recv.recv_src_idx, request.is_token_in_rank, recv.send_head
    kind = DispatchTuple if memory.is_deep_eps else DispatchHandle
    handle = kind.made(routes, memory.identity, memory.num_dispatches, taken)
    event = memory.finish(request.async_finish)
    return pair(recv.recv_x, recv.recv_x_scales), recv.recv_topk_idx, recv.recv_topk_weights, per_expert, handle, event


# Without rings


class DirectPlan(NamedTuple):
    """What depends on sizes, dtypes and options alone; with a handle without what comes behind notify."""

    halves: tuple[tuple[PreparedLaunch, HalfPlaces], ...]  # how the tokens of either half of the calls go
    received: tuple[Wanted | None, ...]  # in the order of a half's places
    shape: DirectShape
    call: Call
    notify: PreparedLaunch
    num_local_experts: int = 0
    counters: tuple[int, ...] = ()
    number: Any = None  # the launch of number_tokens
    make: Make | None = None  # both matrices of the routes, the one of the received channels, and send_head


def _plan_without_rings(
    memory: NodeMemory,
    request: DispatchRequest,
    tokens: Tokens,
    num_channels: int,
    num_threads: int,
    call: Call,
    of_token: Sequence[int],
) -> DirectPlan:
    """Prepare the launches, for arguments that are checked. of_token: see checks.rings"""
    runtime, direct, num_ranks, num_tokens = (
        memory.runtime,
        checks.direct_of(memory),
        memory.num_ranks,
        tokens.num_tokens,
    )
    has_counts, num_local_experts = request.handle is None, tokens.num_experts // num_ranks
    num_worst_tokens = request.num_worst_tokens if has_counts else 0
    shape = DirectShape(num_channels, *of_token)
    sizes = DirectSizes(num_tokens, LATER, num_worst_tokens, num_local_experts, *tokens.scale_strides)
    smem_bytes = direct_dispatch_smem_bytes(num_threads, runtime.has_tma)
    of_launch = direct_dispatch, 2 * num_channels, num_threads, smem_bytes, direct.peers, memory.bounds
    places_of_halves = direct.place_halves(shape)
    halves = tuple((runtime.prepare(*of_launch, each, shape, sizes), each) for each in places_of_halves)
    if not has_counts:
        notify = prepare_reset(memory, direct.peers, CELL_WORDS, call)
        return DirectPlan(halves, tokens.received, shape, call, notify)
    counts = NotifySizes(num_tokens, tokens.num_experts, num_channels, CELL_WORDS, request.expert_alignment)
    of_channels = (num_ranks, num_channels), "int32"
    routes = ((num_ranks, num_ranks), "int32"), of_channels, of_channels, ((num_tokens, num_ranks), "int32")
    of_number = num_channels, min(256, 32 * num_ranks), 0, num_tokens, num_channels, num_ranks
    return DirectPlan(
        halves,
        (*tokens.received, *tokens.received_topk, ((ROWS,), "int32")),
        shape,
        call,
        prepare_counts(memory, direct.peers, counts, call),
        num_local_experts,
        memory.counters.addresses(num_worst_tokens == 0)[:2],
        runtime.prepare(number_tokens, *of_number),
        runtime.prepare_empty(routes, tokens.x.array),
    )


def _launch_without_rings(
    memory: NodeMemory,
    plan: DirectPlan,
    arguments: Sequence[Any],
    request: DispatchRequest,
    handle: DispatchHandle | None,
) -> Dispatched:
    """Without a handle exchange the counts, and wait for the totals unless num_worst_tokens is given; then dispatch.

    The outputs lie in the half of the symmetric memory that is next.
    """
    direct, num_worst_tokens = checks.direct_of(memory), request.num_worst_tokens
    kernel, places = plan.halves[direct.next_half]
    if handle is None:
        num_rows = num_worst_tokens
        if num_rows > places.num_rows:
            allowed = f"at most {places.num_rows} with zero_copy: num_zero_copy_bytes was {direct.num_bytes}"
            refuse("num_worst_tokens", num_rows, allowed)
    else:
        (of_ranks, of_channels, _, _, _, send_head), _, (num_rows,) = handle.taken(memory.runtime)
        if num_rows > places.num_rows:
            room = f"{direct.num_bytes} at construction, which has room for {places.num_rows} rows"
            refuse("num_zero_copy_bytes", room, f"enough for {num_rows}")
    x, scales = request.x if isinstance(request.x, tuple) else (request.x, None)
    made, addresses = memory.allocate(request, plan.make)
    memory.compare(plan.call, handle)
    lease = direct.begin_dispatch(places, plan.shape)
    if handle is None:
        *tokens, in_rank, per_rank, per_expert = arguments
        of_ranks, of_channels, recv_channels, send_head = addresses
        counted: list[int] = []
        if num_worst_tokens == 0:
            memory.counters.reset()
        of_notify = of_ranks, of_channels, *plan.counters, per_rank, per_expert, in_rank
        plan.notify.launch(memory.stream, of_notify, (made, request))
        plan.number.launch(memory.stream, (send_head, in_rank))
        if num_worst_tokens == 0:
            num_recv_tokens, counted, _ = memory.await_counts(plan.num_local_experts)
            num_rows = min(num_recv_tokens, places.num_rows)  # the kernel reports it if they are too few
        first = recv_channels, *tokens, send_head, of_ranks, of_channels
    else:
        plan.notify.launch(memory.stream)
        first = 0, *arguments, 0, 0, send_head, of_ranks, of_channels
    like = x, scales, request.topk_idx, request.topk_weights, x
    recv = [
        None if each is None else direct.array(place, places.num_rows, (num_rows, *each[0][1:]), each[1], array, lease)
        for place, each, array in zip(places[1:], plan.received, like, strict=False)
    ]
    kernel.launch(memory.stream, first, (request, made), (num_rows,))
    event = memory.finish(request.async_finish)
    if request.async_finish and memory.runtime.host_reads_arrays:
        lease.begins_with = memory.latest_event
    if handle is not None:
        return pair(*recv), None, None, None, None, event
    recv_x, recv_x_scales, recv_topk_idx, recv_topk_weights, recv_src_idx = recv
    kind = DispatchTuple if memory.is_deep_eps else DispatchHandle
    routes = *made[:3], recv_src_idx, request.is_token_in_rank, made[3]
    handle = kind.made(routes, memory.identity, memory.num_dispatches)
    return pair(recv_x, recv_x_scales), recv_topk_idx, recv_topk_weights, counted, handle, event
