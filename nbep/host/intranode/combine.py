"""Buffer.combine inside a node: bring tokens back to their source ranks and add them up.

 cached_notify_combine --> combine

Without rings, and in combines of an ElasticBuffer whose x lies in shared rows, ranks fetch: rows are laid out, unless
they lie where peers can read them, and offered.

 lay_out_rows, if x or topk_weights lie elsewhere --> offer_rows: meet the others --> fetch --> meet the others

Source: DeepEP csrc/deep_ep.cpp, Buffer::intranode_combine
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from nbep.device.kernels.intranode.cached_notify import cached_notify_combine
from nbep.device.kernels.intranode.combine import CombineSizes, combine_smem_bytes
from nbep.device.kernels.intranode.combine import combine as combine_kernel
from nbep.device.kernels.intranode.direct_combine import DirectCombineSizes
from nbep.device.kernels.intranode.direct_combine import direct_combine as direct_kernel
from nbep.device.kernels.intranode.offer_rows import (
    Begins,
    LayPlaces,
    LaySizes,
    lay_out_rows,
    lay_out_smem_bytes,
    offer_rows,
)
from nbep.device.kernels.parts.calls import Call
from nbep.device.kernels.parts.fetched_sums import FetchShape, OfferCells
from nbep.device.kernels.parts.staged_sums import sums_smem_bytes
from nbep.device.layout.direct import NEXT_TOKEN, OFFERS, place_rows
from nbep.device.layout.intranode import RingShape, num_ring_cell_words
from nbep.device.protocols.peers import Peers
from nbep.device.protocols.staging import VEC_BYTES
from nbep.host.arguments import refuse
from nbep.host.block_sizes import block_sizes
from nbep.host.config import COMBINE_TABLE, Config
from nbep.host.events import EventOverlap
from nbep.host.handles import DispatchHandle
from nbep.host.intranode import checks
from nbep.host.intranode.dispatch import prepare_reset
from nbep.host.node import NodeMemory
from nbep.host.normal_checks import CombineGiven, CombineRequest, combine_call
from nbep.host.plans import Plan
from nbep.host.target.base import LATER, Array, Kernel, MaybeArray, PreparedLaunch

MIN_THREADS = 64  # one warp coordinates, the others receive


def launch(
    memory: NodeMemory, plan: Plan, arguments: Sequence[Any], request: CombineRequest, handle: DispatchHandle
) -> tuple[Array, MaybeArray, EventOverlap]:
    """Meet the other ranks, then combine."""
    of_ranks, of_channels, of_recv_channels, _, _, send_head = handle.taken(memory.runtime).arguments
    if request.zero_copy:
        direct, num_rows, room = checks.direct_of(memory), request.x.shape[0], plan.shape[1].num_rows
        of_weights = 0 if request.topk_weights is None else direct.area.offset_of(arguments[1])
        rows = Rows(direct.area.offset_of(arguments[0]), of_weights, num_rows)
        if num_rows > room and min(rows) < 0:
            got = f"{direct.num_bytes} at construction, which has room for {room} rows that lie elsewhere"
            refuse("num_zero_copy_bytes", got, f"enough for {num_rows}")
    outputs, of_outputs = memory.allocate(request, plan.make)
    memory.compare(plan.call, handle)
    keep = request, outputs, handle
    if request.zero_copy:
        fetch, places = plan.shape
        direct.rows = places
        fetch.launch(memory, of_ranks, rows, of_outputs, (*arguments, of_channels, send_head), keep)
    else:
        memory.ring_shape = plan.shape
        plan.notify.launch(memory.stream, (send_head,), (handle,))
        first = *of_outputs, *arguments, of_ranks, of_recv_channels, send_head
        plan.launch.launch(memory.stream, first, keep)
    return outputs[0], outputs[1], memory.finish(request.async_finish)


def make_plan(memory: NodeMemory, request: CombineRequest, given: CombineGiven, handle: DispatchHandle) -> Plan:
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
    memory: NodeMemory, num_combined_tokens: int, config: Config, shape: RingShape, call: Call
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
    memory: NodeMemory, num_combined_tokens: int, config: Config, rings: RingShape, call: Call
) -> tuple[PreparedLaunch, PreparedLaunch, Any]:
    """Without rings. rings: those that there would be"""
    direct, num_ranks = checks.direct_of(memory), memory.num_ranks
    shape = FetchShape(rings.hidden_bytes, rings.num_topk, num_combined_tokens)
    places = place_rows(direct.num_bytes, *shape[:2])
    cells = OfferCells(NEXT_TOKEN, OFFERS, memory.rank, num_ranks)
    where = Where(direct.peers, (), cells, LayPlaces(places.x, places.topk_weights))
    grid = config.num_sms, config.num_threads or block_sizes(memory.runtime).ring(num_ranks)
    sizes = DirectCombineSizes(config.num_channels)
    fetch = prepare_fetch(memory, direct_kernel, grid, where, shape, sizes, call)
    return fetch.offer, fetch.fetch, (fetch, places)


# What combines share whose ranks fetch


class Where(NamedTuple):
    """Where a combine finds what it fetches.

    peers: of the buffers, which have the cells; of_rows: of the memories of rows, if those are others; places: of rows
    that are laid out
    """

    peers: Peers
    of_rows: tuple[Peers, ...]
    cells: OfferCells
    places: LayPlaces


class Rows(NamedTuple):
    """Where x and topk_weights begin in the memory that peers map, in bytes; negative if they lie elsewhere.

    topk_weights: 0 if there are none
    """

    x: int
    topk_weights: int
    num_rows: int


class Fetch(NamedTuple):
    """The launches. places: of rows that are laid out"""

    lay_out: PreparedLaunch
    offer: PreparedLaunch
    fetch: PreparedLaunch
    leave: PreparedLaunch
    places: LayPlaces

    def launch(
        self, memory: NodeMemory, prefix: Any, rows: Rows, outputs: Any, inputs: Any, keep: tuple[Any, ...]
    ) -> None:
        """outputs, inputs: arguments of `fetch`, in which x and topk_weights come first"""
        x, topk_weights = inputs[:2]
        if rows.x < 0 or rows.topk_weights < 0:
            away = x if rows.x < 0 else 0, topk_weights if rows.topk_weights < 0 else 0
            self.lay_out.launch(memory.stream, (*away, prefix), keep, (rows.num_rows,))
        of_x = rows.x if rows.x >= 0 else self.places.x
        of_weights = rows.topk_weights if rows.topk_weights >= 0 else self.places.topk_weights
        self.offer.launch(memory.stream, (prefix,), keep, (of_x // VEC_BYTES, of_weights // VEC_BYTES, rows.num_rows))
        self.fetch.launch(memory.stream, (*outputs, *inputs), keep)
        self.leave.launch(memory.stream)


def prepare_fetch(
    memory: NodeMemory,
    kernel: Kernel,
    grid: tuple[int, int],
    where: Where,
    shape: FetchShape,
    sizes: NamedTuple,
    call: Call,
) -> Fetch:
    """grid: blocks of the kernels that move rows, and threads of a block"""
    runtime, bounds, (peers, of_rows, cells, places) = memory.runtime, memory.bounds, where
    has_tma, threads = runtime.has_tma, grid[1]
    laid = places, (*of_rows, peers)[0], cells, LaySizes(shape.hidden_bytes, shape.num_topk, LATER)
    meeting = Begins(LATER, LATER, LATER), peers, bounds, cells, call
    last = peers, *of_rows, bounds, cells, shape, sizes
    return Fetch(
        runtime.prepare(lay_out_rows, *grid, lay_out_smem_bytes(threads, has_tma), *laid),
        runtime.prepare(memory.kernel(offer_rows), 1, block_sizes(runtime).notify, 0, *meeting),
        runtime.prepare(kernel, *grid, sums_smem_bytes(threads, has_tma), *last),
        prepare_reset(memory, peers, 0, call),
        places,
    )
