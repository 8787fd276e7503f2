"""ElasticBuffer.dispatch: lay tokens out, meet, fetch what comes.

 without a handle:  elastic_publish --> elastic_notify_dispatch --counts--> CPU sizes the outputs --> elastic_dispatch
 do_cpu_sync=False: the same, with outputs for the most that may come; the CPU does not wait
 handle given:      elastic_publish --> elastic_notify_dispatch ----------------------------------> elastic_dispatch
 between nodes:     elastic_publish --> elastic_send_dispatch --> elastic_meet_dispatch, in place of notify --> the same

Source: DeepEP csrc/elastic/buffer.hpp, ElasticBuffer::dispatch
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from nbep.device.alignment import align_up
from nbep.device.kernels.elastic.dispatch import ElasticSizes, elastic_dispatch, elastic_dispatch_smem_bytes
from nbep.device.kernels.elastic.meet import elastic_meet_dispatch
from nbep.device.kernels.elastic.notify import ElasticCountSizes, elastic_notify_dispatch
from nbep.device.kernels.elastic.publish import PublishSizes, elastic_publish, publish_smem_bytes
from nbep.device.kernels.elastic.send_dispatch import (
    SEND_THREADS,
    ElasticSendSizes,
    elastic_send_dispatch,
    elastic_send_smem_bytes,
)
from nbep.device.kernels.parts.calls import Call
from nbep.device.layout.elastic import ElasticPlaces, ElasticShape
from nbep.device.protocols.staging import VEC_BYTES
from nbep.host.arguments import refuse
from nbep.host.block_sizes import block_sizes
from nbep.host.calls import ELASTIC_DISPATCH, make_call
from nbep.host.elastic import checks
from nbep.host.elastic.checks import FIRST_OPTION, ElasticDispatchRequest
from nbep.host.elastic.handle import EPHandle, OfHandle
from nbep.host.elastic.memory import ElasticMemory
from nbep.host.elastic.streams import blocks_for, num_threads, wait_before_epilogue
from nbep.host.events import EventOverlap
from nbep.host.intranode.dispatch import prepare_reset
from nbep.host.node import NodeMemory
from nbep.host.normal_checks import A_PAIR, Tokens, handle_word, pair, words_of_x
from nbep.host.target.arrays import ROWS, Make, View, Wanted
from nbep.host.target.base import LATER, Array, MaybeArray, PreparedLaunch

ROWS_OF_SCALES = 4  # a column of scales begins at a multiple of 16 bytes, as the copy engine wants it
NO_ARRAYS = (0, 0, 0, 0, 0, 0, 0, 0)
TOKENS, SCALES = ROWS - 1, ROWS - 2  # as ROWS, of the second and the third of `_numbers`
NUM_ROUTES = 7
NUMBERING = 2  # blocks of publish that number choices and list tokens


class Plan(NamedTuple):
    """What depends on the sizes and dtypes of the arrays, on the handle's, and on the options."""

    make: Make  # Routes, unless there is a handle; and Outputs, unless the CPU waits for how many rows they have
    make_counted: Make | None  # Outputs, if so
    publish: PreparedLaunch
    send: PreparedLaunch | None  # between nodes
    notify: PreparedLaunch
    fetch: PreparedLaunch
    leave: PreparedLaunch | None  # the meeting behind a dispatch whose x lies in shared rows
    call: Call
    places: ElasticPlaces
    shape: ElasticShape
    num_topk: int
    num_local_experts: int


class Routes(NamedTuple):
    """What a dispatch without a handle makes for one, before rows move; or what launches take for that."""

    topk_idx: MaybeArray  # the handle's copy, if it is to have one
    slots: Array  # dst_buffer_slot_idx
    of_ranks: Array  # psum_of_ranks
    ends: Array  # psum_num_recv_tokens_per_expert
    counted: Array  # num_unaligned_recv_tokens_per_expert
    starts: Array  # where the rows of each (rank, expert) begin
    of_locals: MaybeArray  # psum_num_recv_tokens_per_scaleup_rank where that is not of_ranks


class Outputs(NamedTuple):
    """Where rows go; or what launches take for that."""

    recv_x: Array
    scales: MaybeArray
    topk_idx: MaybeArray
    topk_weights: MaybeArray
    metadata: MaybeArray  # recv_src_metadata; a handle has it


class Sizes(NamedTuple):
    """How many rows the outputs have."""

    num_recv_tokens: int
    num_expanded_tokens: int
    per_expert: list[int]


def dispatch(
    memory: NodeMemory, request: ElasticDispatchRequest, timeout_s: float
) -> tuple[Any, MaybeArray, MaybeArray, EPHandle, EventOverlap]:
    """See ElasticBuffer.dispatch. timeout_s: longest time that the CPU waits for counts"""
    memory.check_faults()
    elastic, handle, x = _elastic(memory), request.handle, request.x
    is_pair = isinstance(x, tuple)
    if is_pair and len(x) != 2:
        refuse("x", f"a tuple of {len(x)}", A_PAIR)
    # No array twice, or torch does not recognize them.
    given: tuple[Any, ...] = x if is_pair else (x, None)
    where: tuple[int, ...] = 0, 0
    if elastic.rows is not None:
        where = tuple(0 if each is None else 1 + elastic.rows.offset_of(each) // VEC_BYTES for each in given)
        where = where if where[0] > 0 else (0, 0)
    is_shared = sum(each > 0 for each in where)
    given += request.topk_idx if handle is None else None, request.topk_weights, request.stats
    options: Any = is_pair, is_shared, handle is None, *request[FIRST_OPTION:]
    if handle is not None:
        given += handle.arrays
        options = (*options, handle.form, handle.number) if handle.owner is memory.identity else None
    plan, arguments, views = memory.elastic_plans.find(given, options, _check_and_plan, memory, request, is_shared)
    checks.each_dispatch(memory, request, views)
    return _launch(memory, plan, arguments, request, where, timeout_s)


def _launch(
    memory: NodeMemory,
    plan: Plan,
    arguments: list[Any],
    request: ElasticDispatchRequest,
    where: tuple[int, ...],
    timeout_s: float,
) -> tuple[Any, MaybeArray, MaybeArray, EPHandle, EventOverlap]:
    """where: of x and of its scales 0, or 1 + where they begin in the shared rows, in 16 bytes"""
    handle, of_rows = request.handle, (request.do_expand, plan.shape.num_scales)
    sizes: Sizes | None = None
    numbers: tuple[int, ...] = ()
    if not request.do_cpu_sync:
        sizes = _known_sizes(memory, request, plan)
        numbers = _numbers(sizes, *of_rows)
    made, addresses = memory.allocate(request, plan.make, numbers)
    wait_before_epilogue(memory, request.previous_event_before_epilogue)
    memory.compare(plan.call, handle)
    elastic = _elastic(memory)
    elastic.dispatched, elastic.combined = (plan.places, plan.shape), None
    x, scales, topk_idx, topk_weights, stats, *of_handle = arguments
    of_notify: tuple[Any, ...] = NO_ARRAYS
    if handle is None:
        of_launch = Routes(*addresses[:NUM_ROUTES])
        of_notify = *of_launch[2:], stats, *memory.counters.addresses(request.do_cpu_sync)[:2]
        if request.do_cpu_sync:
            memory.counters.reset()
    else:
        known = OfHandle(*of_handle)
        of_launch, topk_idx = Routes(0, 0, known.of_ranks, known.ends, 0, 0, 0), known.topk_idx
    of_publish = of_launch.topk_idx, of_launch.slots, x, scales, topk_idx, topk_weights
    plan.publish.launch(memory.stream, of_publish, (request, made), where)
    if plan.send is not None:
        plan.send.launch(memory.stream)
    plan.notify.launch(memory.stream, of_notify, (request, made))
    if sizes is None:
        sizes = _received(memory, plan, timeout_s)
        numbers = _numbers(sizes, *of_rows)
        more = memory.allocate(request, plan.make_counted, numbers)
        made, addresses = made + more[0], addresses + more[1]
    num_routes = 0 if handle is not None else NUM_ROUTES
    outputs, of_outputs = Outputs(*made[num_routes:]), Outputs(*addresses[num_routes:])
    if handle is not None:
        of_outputs = of_outputs._replace(metadata=known.metadata)
    num_rows, num_recv_tokens, _ = numbers
    recv_scales, strides = outputs.scales, (plan.shape.num_scales, 1)
    if request.use_tma_aligned_col_major_sf:
        strides = 1, align_up(num_rows, ROWS_OF_SCALES)
        if recv_scales is not None:
            recv_scales = recv_scales.reshape(plan.shape.num_scales, strides[1]).T[:num_rows]
    first = *of_outputs, of_launch.of_ranks, of_launch.ends, of_launch.starts
    plan.fetch.launch(memory.stream, first, (made, handle), (num_rows, num_recv_tokens, *strides))
    if plan.leave is not None:
        plan.leave.launch(memory.stream)
    if handle is None:
        routes = Routes(*made[:NUM_ROUTES])
        handle = EPHandle(
            request.do_expand,
            request.num_experts,
            request.expert_alignment,
            request.num_max_tokens_per_rank,
            request.num_sms,
            request.topk_idx if routes.topk_idx is None else routes.topk_idx,
            sizes.num_recv_tokens,
            sizes.num_expanded_tokens,
            sizes.per_expert,
            routes.of_ranks if routes.of_locals is None else routes.of_locals,
            routes.ends,
            routes.counted,
            outputs.metadata,
            routes.slots,
            None if routes.of_locals is None else routes.of_ranks,
        ).owned_by(memory.identity, memory.num_dispatches)
        memory.runtime.after_launch(partial(handle.keep_contents, memory.runtime.contents))
    event = memory.finish(request.async_finish)
    if plan.leave is not None and request.async_finish:
        rows: Any = _elastic(memory).rows
        rows.take(request.x, memory.latest_event)
    return pair(outputs.recv_x, recv_scales), outputs.topk_idx, outputs.topk_weights, handle, event


def _elastic(memory: NodeMemory) -> ElasticMemory:
    assert memory.elastic is not None
    return memory.elastic


def _check_and_plan(memory: NodeMemory, request: ElasticDispatchRequest, is_shared: int, views: Sequence[View]) -> Plan:
    """Check what does not change, and prepare the launches. is_shared: see ElasticSizes"""
    runtime, num_ranks, handle = memory.runtime, memory.num_ranks, request.handle
    elastic = _elastic(memory)
    checks.options(request)
    of_tokens = [*views[:5]]
    if handle is not None:
        checks.owned(memory, handle, views[5:])
        of_tokens[2] = views[5]
        if request.do_expand and not handle.do_expand:
            refuse("do_expand", True, f"False with {handle!r}: it does not know the rows of experts")
    tokens = checks.tokens(memory, request, of_tokens)
    if is_shared > 1 and not views[1].is_contiguous:
        refuse("x[1]", "strided scales in shared rows", "row-major without gaps, as like makes them")
    num_experts, most = request.num_experts, request.num_max_tokens_per_rank
    num_local_experts = num_experts // num_ranks
    shape = ElasticShape(most, tokens.hidden_bytes, tokens.num_topk, tokens.num_scales)
    places = elastic.place(shape)
    has_weights = request.topk_weights is not None
    # What the others read out of this rank's half. Whether and how rows are expanded is each rank's own affair.
    words = handle_word(memory, handle), int(has_weights), *words_of_x(tokens), tokens.num_topk
    call = make_call(ELASTIC_DISPATCH, *words, num_experts, most, is_shared)
    does_number = int(handle is None)
    threads = num_threads(memory)
    publish = runtime.prepare(
        elastic_publish,
        blocks_for(memory, request.num_sms, NUMBERING * does_number + tokens.num_tokens, threads),
        threads,
        publish_smem_bytes(threads, runtime.has_tma),
        elastic.peers,
        memory.bounds,
        places,
        shape,
        PublishSizes(tokens.num_tokens, num_experts, does_number, *tokens.scale_strides, LATER, LATER),
    )
    counts = ElasticCountSizes(num_local_experts, request.expert_alignment, int(request.do_expand))
    notify_threads = block_sizes(runtime).notify
    send = None
    if elastic.rdma is None:
        meeting = elastic.peers, memory.bounds, counts, call
        notify = runtime.prepare(elastic_notify_dispatch, 1, notify_threads, 0, *meeting)
    else:
        network, kernel = elastic.rdma.network, elastic.rdma.kernel
        send = runtime.prepare(
            kernel(elastic_send_dispatch),
            blocks_for(memory, request.num_sms, num_ranks + tokens.num_tokens, threads),
            min(threads, SEND_THREADS),
            elastic_send_smem_bytes(min(threads, SEND_THREADS)),
            network,
            memory.bounds,
            places,
            shape,
            elastic.nodes,
            ElasticSendSizes(tokens.num_tokens, num_experts, int(has_weights), does_number),
        )
        among_all = network, memory.peers, memory.bounds, elastic.nodes, counts, call
        notify = runtime.prepare(kernel(elastic_meet_dispatch), 1, notify_threads, 0, *among_all)
    fetch = runtime.prepare(
        elastic_dispatch,
        blocks_for(memory, request.num_sms, most * num_ranks, threads),
        threads,
        elastic_dispatch_smem_bytes(threads, runtime.has_tma),
        elastic.sources,
        elastic.sources if elastic.rows is None else elastic.rows.memory.peers,
        memory.bounds,
        places,
        shape,
        ElasticSizes(
            LATER,
            LATER,
            num_local_experts,
            request.expert_alignment,
            LATER,
            LATER,
            int(request.do_expand),
            int(request.do_zero_padding),
            int(handle is not None),
            is_shared,
        ),
    )
    leave = prepare_reset(memory, memory.peers, 0, call) if is_shared else None
    routes, outputs = _wanted(request, tokens, num_ranks, elastic.num_scaleup_ranks)
    return Plan(
        runtime.prepare_empty(routes if request.do_cpu_sync else routes + outputs, tokens.x.array),
        runtime.prepare_empty(outputs, tokens.x.array) if request.do_cpu_sync else None,
        publish,
        send,
        notify,
        fetch,
        leave,
        call,
        places,
        shape,
        tokens.num_topk,
        num_local_experts,
    )


def _wanted(
    request: ElasticDispatchRequest, tokens: Tokens, num_ranks: int, num_scaleup_ranks: int
) -> tuple[tuple[Wanted | None, ...], tuple[Wanted | None, ...]]:
    """What becomes `Routes`, unless there is a handle, and what becomes `Outputs`."""
    num_topk, scales = tokens.num_topk, tokens.scales
    choices = tokens.num_tokens, num_topk
    num_local_experts = request.num_experts // num_ranks
    routes: tuple[Wanted | None, ...] = (
        (choices, "int64") if request.do_handle_copy else None,
        (choices, "int32"),
        ((num_ranks,), "int32"),
        ((num_local_experts,), "int32"),
        ((num_local_experts,), "int32"),
        ((num_ranks, num_local_experts), "int32"),
        None if num_scaleup_ranks == num_ranks else ((num_scaleup_ranks,), "int32"),
    )
    of_scales: Wanted | None = None
    if scales.is_array:
        shape = (SCALES,) if request.use_tma_aligned_col_major_sf else (ROWS, tokens.num_scales)
        of_scales = shape, scales.dtype_name
    weights: Wanted = ((ROWS,) if request.do_expand else (ROWS, num_topk)), "float32"
    outputs = (
        ((ROWS, tokens.hidden), tokens.x.dtype_name),
        of_scales,
        None if request.do_expand else ((ROWS, num_topk), "int64"),
        None if request.topk_weights is None else weights,
        None if request.handle is not None else ((TOKENS, 2 + num_topk), "int32"),
    )
    return routes if request.handle is None else (), outputs


def _numbers(sizes: Sizes, do_expand: bool, num_scales: int) -> tuple[int, int, int]:
    """Those of rows, of received tokens, and of scales that lie by column."""
    num_rows = sizes.num_expanded_tokens if do_expand else sizes.num_recv_tokens
    return num_rows, sizes.num_recv_tokens, align_up(num_rows, ROWS_OF_SCALES) * num_scales


def _known_sizes(memory: NodeMemory, request: ElasticDispatchRequest, plan: Plan) -> Sizes:
    """Those of the handle; without one, of the most that may come."""
    known, num_local_experts, alignment = request.handle, plan.num_local_experts, request.expert_alignment
    if known is not None:
        return Sizes(known.num_recv_tokens, known.num_expanded_tokens, [])
    most = request.num_max_tokens_per_rank * memory.num_ranks
    # The kernel reports it if they are too few: where there are fewer experts here than choices, and tokens name
    # the same one twice.
    expanded = most * min(plan.num_topk, num_local_experts) + (alignment - 1) * num_local_experts
    return Sizes(most, align_up(expanded, alignment), [])


def _received(memory: NodeMemory, plan: Plan, timeout_s: float) -> Sizes:
    """What comes, as the counters of notify say, for which the CPU waits."""
    timeout_ms = max(2 * memory.timeout_ms, 1e3 * timeout_s)
    received = memory.await_counts(plan.num_local_experts, timeout_ms, f"{timeout_ms / 1e3:g} s")
    return Sizes(received.num_tokens, sum(received.of_experts), received.of_experts)
