"""Buffer.dispatch inside a node with zero_copy: the outputs lie in the symmetric memory, and peers write them.

counts given:   notify_dispatch --counters--> CPU sizes the outputs --> direct_dispatch
                number_tokens -------------------------------------->
handle given:   cached_notify_dispatch ----------------------------> direct_dispatch
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from nbep.device.kernels.intranode.direct_dispatch import DirectSizes, direct_dispatch, direct_dispatch_smem_bytes
from nbep.device.kernels.intranode.notify_dispatch import NotifySizes
from nbep.device.kernels.intranode.number_tokens import number_tokens
from nbep.device.kernels.parts.calls import Call
from nbep.device.layout.direct import CELL_WORDS, DirectShape, HalfPlaces
from nbep.host.arguments import refuse
from nbep.host.handles import DispatchHandle, DispatchTuple
from nbep.host.intranode.checks import direct_of
from nbep.host.intranode.notify import prepare_counts, prepare_reset
from nbep.host.node import NodeMemory
from nbep.host.normal_checks import Dispatched, DispatchRequest, Tokens, pair
from nbep.host.target.base import LATER, PreparedLaunch
from nbep.host.target.new_arrays import ROWS, Make, Wanted


class Half(NamedTuple):
    """How the tokens of one half of the calls go."""

    launch: PreparedLaunch
    places: HalfPlaces


class DirectPlan(NamedTuple):
    """What depends on sizes, dtypes and options alone; with a handle without what comes behind notify."""

    halves: tuple[Half, ...]
    received: tuple[Wanted | None, ...]  # in the order of a half's places
    shape: DirectShape
    call: Call
    notify: PreparedLaunch
    num_local_experts: int = 0
    counters: tuple[int, ...] = ()
    number: Any = None  # the launch of number_tokens
    make: Make | None = None  # both matrices of the routes, the one of the received channels, and send_head


def make_plan(
    memory: NodeMemory,
    request: DispatchRequest,
    tokens: Tokens,
    num_channels: int,
    num_threads: int,
    call: Call,
    of_token: Sequence[int],
) -> DirectPlan:
    """Prepare the launches, for arguments that are checked. of_token: see checks.rings"""
    runtime, direct, num_ranks, num_tokens = memory.runtime, direct_of(memory), memory.num_ranks, tokens.num_tokens
    has_counts, num_local_experts = request.handle is None, tokens.num_experts // num_ranks
    num_worst_tokens = request.num_worst_tokens if has_counts else 0
    shape = DirectShape(num_channels, *of_token)
    sizes = DirectSizes(num_tokens, LATER, num_worst_tokens, num_local_experts, *tokens.scale_strides)
    smem_bytes = direct_dispatch_smem_bytes(num_threads, runtime.has_tma)
    of_launch = direct_dispatch, 2 * num_channels, num_threads, smem_bytes, direct.peers, memory.bounds
    places_of_halves = direct.place_halves(shape)
    halves = tuple(Half(runtime.prepare(*of_launch, each, shape, sizes), each) for each in places_of_halves)
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


def launch_without_rings(
    memory: NodeMemory,
    plan: DirectPlan,
    arguments: Sequence[Any],
    request: DispatchRequest,
    handle: DispatchHandle | None,
) -> Dispatched:
    """Without a handle exchange the counts, and wait for the totals unless num_worst_tokens is given; then dispatch.

    The outputs lie in the half of the symmetric memory that is next.
    """
    direct, num_worst_tokens = direct_of(memory), request.num_worst_tokens
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
        direct.begin_lease(memory.latest_event)
    if handle is not None:
        return pair(*recv), None, None, None, None, event
    recv_x, recv_x_scales, recv_topk_idx, recv_topk_weights, recv_src_idx = recv
    kind = DispatchTuple if memory.is_deep_eps else DispatchHandle
    routes = *made[:3], recv_src_idx, request.is_token_in_rank, made[3]
    handle = kind.made(routes, memory.identity, memory.num_dispatches)
    return pair(recv_x, recv_x_scales), recv_topk_idx, recv_topk_weights, counted, handle, event
