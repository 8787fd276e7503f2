"""Buffer.dispatch inside a node with zero_copy: the outputs lie in the symmetric memory, and peers write them.

counts given:   notify_dispatch --counters--> CPU sizes the outputs --> direct_dispatch
                number_tokens -------------------------------------->
handle given:   cached_notify_dispatch ----------------------------> direct_dispatch
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from nbep.device.kernels.intranode.direct_dispatch import (
    DirectSizes,
    direct_dispatch,
    direct_dispatch_smem_bytes,
)
from nbep.device.kernels.intranode.number_tokens import number_tokens
from nbep.device.kernels.parts.calls import Call
from nbep.device.layout.direct import CELL_WORDS, DirectShape, HalfPlaces
from nbep.host import validate
from nbep.host.block_sizes import block_sizes
from nbep.host.calls import dispatch_call
from nbep.host.config import Config
from nbep.host.intranode.handle import DispatchHandle
from nbep.host.intranode.notify import Routes, prepare_counts
from nbep.host.node import Node
from nbep.host.request import DispatchRequest
from nbep.host.target.base import LATER, Array, MaybeArray, PreparedLaunch
from nbep.host.target.checked_arrays import Lease
from nbep.host.target.new_arrays import ROWS, Make, Wanted
from nbep.host.tokens import Tokens, await_counts, check_wait, rows_of


class Half(NamedTuple):
    """How the tokens of one half of the calls go."""

    launch: PreparedLaunch
    places: HalfPlaces


class DirectPlan(NamedTuple):
    """What depends on sizes, dtypes and options alone."""

    make: Make  # both matrices of the routes, the one of the received channels, and send_head
    notify: PreparedLaunch
    counters: tuple[int, int]
    number: PreparedLaunch
    halves: tuple[Half, ...]
    received: tuple[Wanted | None, ...]  # the fields of Received
    shape: DirectShape
    call: Call


class Received(NamedTuple):
    """What comes out, all in the symmetric memory; None where the input has no such part."""

    recv_x: Array
    recv_x_scales: MaybeArray
    recv_topk_idx: MaybeArray
    recv_topk_weights: MaybeArray
    recv_src_idx: MaybeArray


def dispatch_counted(
    memory: Node, plan: DirectPlan, arguments: Sequence[Any], request: DispatchRequest
) -> tuple[Received, DispatchHandle, list[int]]:
    """Exchange the counts, wait for the totals unless num_worst_tokens is given, then dispatch."""
    direct, num_worst_tokens = validate.zero_copy(memory), request.num_worst_tokens
    launch, places = plan.halves[direct.next_half]
    if num_worst_tokens > places.num_rows:
        allowed = f"at most {places.num_rows} with zero_copy: num_zero_copy_bytes was {direct.num_bytes}"
        validate.refuse("num_worst_tokens", num_worst_tokens, allowed)
    check_wait(memory, request)
    *tokens, in_rank, per_rank, per_expert = arguments
    x, scales = request.x if isinstance(request.x, tuple) else (request.x, None)
    made, (of_ranks, of_channels, recv_channels, send_head) = memory.allocate(request, x, plan.make)
    memory.compare(plan.call)
    lease = direct.begin_dispatch(places, plan.shape)
    if num_worst_tokens == 0:
        memory.counters.reset()
    of_notify = of_ranks, of_channels, *plan.counters, per_rank, per_expert, in_rank
    plan.notify.launch(memory.stream, of_notify, (made, request))
    plan.number.launch(memory.stream, (send_head, in_rank))
    num_recv_tokens, counted, _ = await_counts(memory, request)
    num_recv_tokens = min(num_recv_tokens, places.num_rows)  # the kernel reports it if they are too few
    like = x, scales, request.topk_idx, request.topk_weights, x
    recv = Received(*received(memory, places, plan.received, num_recv_tokens, like, lease))
    first = recv_channels, *tokens, send_head, of_ranks, of_channels
    launch.launch(memory.stream, first, (), (num_recv_tokens,))
    routes = Routes(made[0], made[1], request.is_token_in_rank)
    return recv, routes.handle(memory, made[2], recv.recv_src_idx, made[3]), counted


def received(
    memory: Node,
    places: HalfPlaces,
    wanted: Sequence[Wanted | None],
    num_rows: int,
    like: Sequence[MaybeArray],
    lease: Lease,
) -> list[MaybeArray]:
    """The arrays of a half that the caller gets, in the order of its places; None for None."""
    direct = validate.zero_copy(memory)
    made: list[MaybeArray] = []
    for place, each, array in zip(places[1:], wanted, like, strict=False):
        size: tuple[int, ...] = () if each is None else (num_rows, *each[0][1:])
        dtype = "" if each is None else each[1]
        made.append(direct.array(place, places.num_rows, size, dtype, array, lease) if size else None)
    return made


def make_plan(memory: Node, tokens: Tokens, config: Config, request: DispatchRequest) -> DirectPlan:
    """Prepare the launches, for arguments that are checked."""
    runtime, num_ranks, num_experts = memory.runtime, memory.num_ranks, request.num_experts
    num_tokens, num_channels = tokens.num_tokens, config.num_channels
    shape = DirectShape(num_channels, *tokens.ring_sizes(1))
    call = dispatch_call(memory, tokens, num_experts, config, zero_copy=True)
    of_channels = (num_ranks, num_channels), "int32"
    wanted: tuple[Wanted, ...] = ((num_ranks, num_ranks), "int32"), of_channels, of_channels
    wanted += (((num_tokens, num_ranks), "int32"),)
    sizes = DirectSizes(num_tokens, LATER, request.num_worst_tokens, num_experts // num_ranks, *tokens.scale_strides)
    peers = validate.zero_copy(memory).peers
    of_number = num_channels, min(256, 32 * num_ranks), 0, num_tokens, num_channels, num_ranks
    return DirectPlan(
        runtime.prepare_empty(wanted, tokens.x.array),
        prepare_counts(memory, peers, CELL_WORDS, request, num_channels, call),
        memory.counters.addresses(request.num_worst_tokens == 0)[:2],
        runtime.prepare(number_tokens, *of_number),
        prepare_halves(memory, config, shape, sizes),
        (*rows_of(*tokens), ((ROWS,), "int32")),
        shape,
        call,
    )


def prepare_halves(memory: Node, config: Config, shape: DirectShape, sizes: DirectSizes) -> tuple[Half, ...]:
    """The launches of the dispatch kernel, which take its outputs and inputs, and later how many tokens come."""
    runtime, direct = memory.runtime, validate.zero_copy(memory)
    num_threads = config.num_threads or block_sizes(runtime).ring(memory.num_ranks)
    smem_bytes, peers = direct_dispatch_smem_bytes(num_threads, runtime.has_tma), direct.peers
    halves = []
    for places in direct.place_halves(shape):
        last = peers, memory.bounds, places, shape, sizes
        halves.append(Half(runtime.prepare(direct_dispatch, config.num_sms, num_threads, smem_bytes, *last), places))
    return tuple(halves)
