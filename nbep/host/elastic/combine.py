"""ElasticBuffer.combine: bring tokens back to their source ranks and add them up.

 elastic_notify_combine: meet the others --> elastic_combine
 between nodes:  elastic_meet_combine --> elastic_push_sums --> elastic_send_combine --> elastic_meet_combine
                 --> elastic_add_sums
 in hybrid mode  before elastic_send_combine the ranks of the node meet --> elastic_gather_combine
 x in shared rows, inside a node and compact: elastic_fetch_combine, see intranode.combine

Source: DeepEP csrc/elastic/buffer.hpp, ElasticBuffer::combine
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from nbep.device.kernels.elastic.combine import (
    ElasticCombineSizes,
    elastic_add_sums,
    elastic_combine,
    elastic_push_sums,
)
from nbep.device.kernels.elastic.fetch_combine import ElasticFetchSizes, elastic_fetch_combine
from nbep.device.kernels.elastic.gather_combine import ElasticGatherSizes, elastic_gather_combine
from nbep.device.kernels.elastic.notify import elastic_notify_combine
from nbep.device.kernels.elastic.send_combine import ElasticReturnSizes, elastic_send_combine
from nbep.device.kernels.elastic.send_dispatch import SEND_THREADS, elastic_send_smem_bytes
from nbep.device.kernels.parts.calls import Call
from nbep.device.kernels.parts.fetched_sums import FetchShape, OfferCells
from nbep.device.kernels.parts.staged_sums import sums_smem_bytes
from nbep.device.layout.elastic import NEXT_TOKEN, OFFERS, ElasticSlots
from nbep.host.arguments import refuse
from nbep.host.block_sizes import block_sizes
from nbep.host.calls import ELASTIC_COMBINE, make_call
from nbep.host.elastic import checks
from nbep.host.elastic.checks import ElasticCombineRequest
from nbep.host.elastic.handle import OfHandle
from nbep.host.elastic.streams import blocks_for, num_threads, prepare_meeting, wait_before_epilogue
from nbep.host.events import EventOverlap
from nbep.host.intranode.combine import Fetch, Rows, Where, prepare_fetch
from nbep.host.intranode.dispatch import prepare_reset
from nbep.host.node import NodeMemory
from nbep.host.normal_checks import BF16_BYTES, handle_word
from nbep.host.target.arrays import Make, View, Wanted
from nbep.host.target.base import Array, Kernel, MaybeArray, PreparedLaunch

FEW_SMS = 12  # up to here more warps add up than push, in compact form


class Away(NamedTuple):
    """What comes before elastic_add_sums between nodes."""

    push: PreparedLaunch
    gather: tuple[PreparedLaunch, ...]  # in hybrid mode: the meeting of the node, and the sums of it
    send: PreparedLaunch
    meet: PreparedLaunch


class Plan(NamedTuple):
    """What depends on the sizes of the arrays, on the handle's, and on the options."""

    make: Make  # combined_x and combined_topk_weights
    notify: PreparedLaunch | None
    away: Away | None
    combine: PreparedLaunch | Fetch
    call: Call
    slots: ElasticSlots


def combine(
    memory: NodeMemory, request: ElasticCombineRequest, reduces: bool
) -> tuple[Array, MaybeArray, EventOverlap]:
    """See ElasticBuffer.combine. reduces: whether a rank may add up the rows of a token before it sends"""
    memory.check_faults()
    handle, bias = request.handle, request.bias
    given = request.x, request.topk_weights, *(bias if isinstance(bias, tuple) else (bias, None))
    if len(given) != 4:
        refuse("bias", f"a tuple of {len(given) - 2}", "an array, a tuple of two, or None")
    assert memory.elastic is not None
    shared = memory.elastic.rows
    begin = -1 if shared is None else shared.offset_of(request.x)
    if begin >= 0 and handle.do_expand:
        allowed = "an array elsewhere: a rank sends one sum of a token's rows, so no rank would fetch from there"
        refuse("x", "expanded rows in shared rows", allowed)
    options: tuple[Any, ...] | None = None
    if handle.owner is memory.identity:
        options = request.num_sms, begin >= 0, request.async_finish, request.allocate_on_comm_stream
        options += *handle.form, handle.number
    arrays, of = given + handle.arrays, (memory, request, reduces, begin >= 0)
    plan, arguments, _ = memory.elastic_combine_plans.find(arrays, options, _check_and_plan, *of)
    checks.contents_of_handle(memory, request, reduces)
    made, addresses = memory.allocate(request, plan.make)
    wait_before_epilogue(memory, request.previous_event_before_epilogue)
    memory.compare(plan.call, handle)
    memory.elastic.combined = plan.slots
    of_handle, keep = OfHandle(*arguments[4:]), (made, request)
    if isinstance(plan.combine, Fetch):
        assert shared is not None
        rows = Rows(begin, 0 if request.topk_weights is None else -1, request.x.shape[0])
        wanted = *arguments[:4], of_handle.topk_idx, of_handle.slots
        plan.combine.launch(memory, of_handle.of_ranks, rows, addresses, wanted, keep)
        event = memory.finish(request.async_finish)
        if request.async_finish:
            shared.take(request.x, memory.latest_event)
        return made[0], made[1], event
    assert plan.notify is not None
    plan.notify.launch(memory.stream)
    routes = of_handle.of_ranks, of_handle.metadata
    first = *addresses, *arguments[:4], *routes, of_handle.topk_idx, of_handle.slots
    if plan.away is not None:
        plan.away.push.launch(memory.stream, first[2:], keep)  # without outputs
        for launch in plan.away.gather:
            launch.launch(memory.stream)
        plan.away.send.launch(memory.stream, routes, (request,))
        plan.away.meet.launch(memory.stream)
    plan.combine.launch(memory.stream, first, keep)
    return made[0], made[1], memory.finish(request.async_finish)


def _check_and_plan(
    memory: NodeMemory, request: ElasticCombineRequest, reduces: bool, is_fetched: bool, views: Sequence[View]
) -> Plan:
    """Check what does not change, and prepare the launches."""
    checks.options(request)
    runtime, handle = memory.runtime, request.handle
    checks.owned(memory, handle, views[4:])
    hidden = checks.rows(request, views[:4])
    num_tokens, num_topk = handle.topk_idx.shape
    one_each = handle.do_expand and not reduces
    most = handle.num_max_tokens_per_rank
    assert memory.elastic is not None
    slots = memory.elastic.slots(most, hidden * BF16_BYTES, num_topk, one_each)
    has_weights = request.topk_weights is not None
    # Where this rank's rows come to lie at the others. one_each: see kernels.elastic.combine
    words = handle_word(memory, handle), int(has_weights), hidden, num_topk, handle.num_experts
    call = make_call(ELASTIC_COMBINE, *words, most, int(one_each), int(is_fetched))
    threads = num_threads(memory)
    num_warps = threads // 32
    elastic = memory.elastic
    sizes = ElasticCombineSizes(
        num_tokens,
        handle.recv_src_metadata.shape[0],
        request.x.shape[0],
        handle.num_experts // memory.num_ranks,
        # What is pushed of expanded rows is a sum, too, and most of the work: who adds up would wait for it.
        num_warps if handle.do_expand else max(1, num_warps // (3 if request.num_sms <= FEW_SMS else 2)),
        int(handle.do_expand),
        int(one_each),
        *elastic.node,
    )
    num_blocks = blocks_for(memory, request.num_sms, most * memory.num_ranks, threads)
    smem_bytes = sums_smem_bytes(threads, runtime.has_tma)
    num_chunks, notify_threads = -(-most // slots.chunk), block_sizes(runtime).notify
    nodes = elastic.nodes if reduces else elastic.nodes._replace(num_sharing=1)
    where = elastic.peers, memory.bounds, slots, nodes

    weights: Wanted | None = None if request.topk_weights is None else ((num_tokens, num_topk), "float32")
    make = runtime.prepare_empty((((num_tokens, hidden), "bfloat16"), weights), request.x)

    def launch_of(kernel: Kernel, sizes: ElasticCombineSizes = sizes) -> PreparedLaunch:
        return runtime.prepare(kernel, num_blocks, threads, smem_bytes, *where, sizes)

    if is_fetched:
        assert elastic.rows is not None
        cells = OfferCells(NEXT_TOKEN, OFFERS, 0, 1)
        where_rows = Where(elastic.peers, (elastic.rows.memory.peers,), cells, elastic.rows.places)
        shape = FetchShape(hidden * BF16_BYTES, num_topk, num_tokens)
        fetch_sizes = ElasticFetchSizes(sizes.num_local_experts)
        grid = num_blocks, threads
        fetch = prepare_fetch(memory, elastic_fetch_combine, grid, where_rows, shape, fetch_sizes, call)
        return Plan(make, None, None, fetch, call, slots)
    if elastic.rdma is None:
        meeting = num_chunks, elastic.peers, memory.bounds, call
        notify = runtime.prepare(elastic_notify_combine, 1, notify_threads, 0, *meeting)
        return Plan(make, notify, None, launch_of(elastic_combine), call, slots)
    among_all = elastic.rdma.network, memory.bounds
    begin, end = (prepare_meeting(memory, landing, call) for landing in (0, num_chunks))
    send = runtime.prepare(
        elastic.rdma.kernel(elastic_send_combine),
        num_blocks,
        min(threads, SEND_THREADS),
        elastic_send_smem_bytes(min(threads, SEND_THREADS)),
        *among_all,
        slots,
        nodes,
        ElasticReturnSizes(sizes.num_recv_tokens, int(has_weights), int(one_each)),
    )
    gather: tuple[PreparedLaunch, ...] = ()
    if nodes.num_sharing > 1:
        sums = num_blocks, threads, smem_bytes, *where, ElasticGatherSizes(int(has_weights))
        gather = prepare_reset(memory, memory.peers, 0, call), runtime.prepare(elastic_gather_combine, *sums)
    push = launch_of(elastic_push_sums, sizes._replace(num_push_warps=num_warps))
    return Plan(make, begin, Away(push, gather, send, end), launch_of(elastic_add_sums), call, slots)
