"""Buffer.combine inside a node: bring tokens back to their source ranks and add them up.

 cached_notify_combine --> combine, or without rings direct_combine: see fetch.py

Source: DeepEP csrc/deep_ep.cpp, Buffer::intranode_combine
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nbep.device.kernels.intranode.cached_notify import cached_notify_combine
from nbep.device.kernels.intranode.combine import CombineSizes, combine_smem_bytes
from nbep.device.kernels.intranode.combine import combine as combine_kernel
from nbep.device.kernels.intranode.direct_combine import DirectCombineSizes
from nbep.device.kernels.intranode.direct_combine import direct_combine as direct_kernel
from nbep.device.kernels.intranode.offer_rows import LayPlaces
from nbep.device.kernels.parts.calls import Call
from nbep.device.kernels.parts.fetched_sums import FetchShape, OfferCells
from nbep.device.layout.direct import NEXT_TOKEN, OFFERS
from nbep.device.layout.intranode import RingShape, num_ring_cell_words
from nbep.host.arguments import refuse
from nbep.host.block_sizes import block_sizes
from nbep.host.calls import combine_call
from nbep.host.config import COMBINE_TABLE, Config
from nbep.host.events import EventOverlap
from nbep.host.handles import DispatchHandle
from nbep.host.intranode import checks
from nbep.host.intranode.fetch import Rows, Where, prepare_fetch
from nbep.host.node import Node
from nbep.host.normal_checks import CombineGiven, CombineRequest
from nbep.host.plans import Plan
from nbep.host.target.base import Array, MaybeArray, PreparedLaunch

MIN_THREADS = 64  # one warp coordinates, the others receive


def launch(
    memory: Node, plan: Plan, arguments: Sequence[Any], request: CombineRequest, handle: DispatchHandle
) -> tuple[Array, MaybeArray, EventOverlap]:
    """Meet the other ranks, then combine."""
    of_ranks, of_channels, of_recv_channels, _, _, send_head = handle.taken(memory.runtime).arguments
    if request.zero_copy:
        rows = _find_rows(memory, plan, request, arguments)
    outputs, of_outputs = memory.allocate(request, plan.make)
    memory.compare(plan.call, handle)
    keep = request, outputs, handle
    if request.zero_copy:
        fetch, places = plan.shape
        checks.direct_of(memory).begin_combine(places)
        fetch.launch(memory, of_ranks, rows, of_outputs, (*arguments, of_channels, send_head), keep)
    else:
        memory.ring_shape = plan.shape
        plan.notify.launch(memory.stream, (send_head,), (handle,))
        first = *of_outputs, *arguments, of_ranks, of_recv_channels, send_head
        plan.launch.launch(memory.stream, first, keep)
    return outputs[0], outputs[1], memory.finish(request.async_finish)


def _find_rows(memory: Node, plan: Plan, request: CombineRequest, arguments: Sequence[Any]) -> Rows:
    """Where the rows of x are, and their weights.

    Raises: ValueError if there is no room for those that lie elsewhere
    """
    direct, num_rows, room = checks.direct_of(memory), request.x.shape[0], plan.shape[1].num_rows
    of_weights = 0 if request.topk_weights is None else direct.area.offset_of(arguments[1])
    rows = Rows(direct.area.offset_of(arguments[0]), of_weights, num_rows)
    if num_rows > room and min(rows) < 0:
        got = f"{direct.num_bytes} at construction, which has room for {room} rows that lie elsewhere"
        refuse("num_zero_copy_bytes", got, f"enough for {num_rows}")
    return rows


def make_plan(memory: Node, request: CombineRequest, given: CombineGiven, handle: DispatchHandle) -> Plan:
    """Choose the rings and prepare the launches, for arguments that are checked."""
    runtime, zero_copy, num_combined_tokens = memory.runtime, request.zero_copy, given.num_combined_tokens
    hidden, num_topk, num_sms = given.hidden, given.num_topk, 2 * handle.num_channels
    of_call = request.config, COMBINE_TABLE, num_sms, (given.hidden_bytes, num_topk, 0, 0), MIN_THREADS, True, zero_copy
    config, rings = checks.rings(memory, *of_call)
    call = combine_call(memory, hidden, num_topk, config, handle, zero_copy=zero_copy)
    prepare = _prepare_direct if zero_copy else _prepare
    notify, launch, shape = prepare(memory, num_combined_tokens, config, rings, call)
    weights = ((num_combined_tokens, num_topk), "float32") if num_topk > 0 else None
    outputs = ((num_combined_tokens, hidden), "bfloat16"), weights
    return Plan(runtime.prepare_empty(outputs, given.x.array), launch, notify, shape, call)


def _prepare(
    memory: Node, num_combined_tokens: int, config: Config, shape: RingShape, call: Call
) -> tuple[PreparedLaunch, PreparedLaunch, Any]:
    """Both launches, and the shape of a plan."""
    runtime, num_ranks = memory.runtime, memory.num_ranks
    num_threads = config.num_threads or max(MIN_THREADS, block_sizes(runtime).ring(num_ranks))
    notify = runtime.prepare(
        memory.kernel(cached_notify_combine),
        1 + shape.num_channels,
        max(block_sizes(runtime).notify, 32 * num_ranks),
        0,
        num_combined_tokens,
        shape.num_channels,
        num_ring_cell_words(shape),
        memory.peers,
        memory.bounds,
        call,
    )
    combine = runtime.prepare(
        combine_kernel,
        config.num_sms,
        num_threads,
        combine_smem_bytes(num_threads),
        memory.peers,
        memory.bounds,
        shape,
        CombineSizes(num_combined_tokens, config.num_max_nvl_chunked_send_tokens),
    )
    return notify, combine, shape


def _prepare_direct(
    memory: Node, num_combined_tokens: int, config: Config, rings: RingShape, call: Call
) -> tuple[PreparedLaunch, PreparedLaunch, Any]:
    """Without rings. rings: those that there would be"""
    direct, num_ranks = checks.direct_of(memory), memory.num_ranks
    shape = FetchShape(rings.hidden_bytes, rings.num_topk, num_combined_tokens)
    places = direct.place_rows(*shape[:2])
    cells = OfferCells(NEXT_TOKEN, OFFERS, memory.rank, num_ranks)
    where = Where(direct.peers, (), cells, LayPlaces(places.x, places.topk_weights))
    grid = config.num_sms, config.num_threads or block_sizes(memory.runtime).ring(num_ranks)
    sizes = DirectCombineSizes(config.num_channels)
    fetch = prepare_fetch(memory, direct_kernel, grid, where, shape, sizes, call)
    return fetch.offer, fetch.fetch, (fetch, places)
