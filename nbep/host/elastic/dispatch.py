"""ElasticBuffer.dispatch: lay tokens out, meet, fetch what comes.

 without a handle:  elastic_publish --> elastic_notify_dispatch --counts--> CPU sizes the outputs --> elastic_dispatch
 do_cpu_sync=False: the same, with outputs for the most that may come; the CPU does not wait
 handle given:      elastic_publish --> elastic_notify_dispatch ----------------------------------> elastic_dispatch
 between nodes:     elastic_publish --> elastic_send_dispatch --> elastic_meet_dispatch, in place of notify --> the same

Source: DeepEP csrc/elastic/buffer.hpp, ElasticBuffer::dispatch
"""

from __future__ import annotations

from typing import Any, NamedTuple

from nbep.device.alignment import align_up
from nbep.device.kernels.elastic.dispatch import ElasticSizes, elastic_dispatch, elastic_dispatch_smem_bytes
from nbep.device.kernels.elastic.meet_dispatch import elastic_meet_dispatch
from nbep.device.kernels.elastic.notify_dispatch import ElasticCountSizes, elastic_notify_dispatch
from nbep.device.kernels.elastic.publish import PublishSizes, elastic_publish, publish_smem_bytes
from nbep.device.kernels.elastic.send_dispatch import (
    SEND_THREADS,
    ElasticSendSizes,
    elastic_send_dispatch,
    elastic_send_smem_bytes,
)
from nbep.device.kernels.parts.calls import Call
from nbep.device.layout.elastic import ElasticPlaces, ElasticShape
from nbep.host.block_sizes import block_sizes
from nbep.host.elastic import checks
from nbep.host.elastic.calls import dispatch_call
from nbep.host.elastic.handle import EPHandle
from nbep.host.elastic.memory import ElasticMemory
from nbep.host.elastic.request import ElasticDispatchRequest
from nbep.host.elastic.streams import blocks_for, num_threads, wait_before_epilogue
from nbep.host.events import EventOverlap
from nbep.host.node import Node
from nbep.host.target.base import LATER, Array, MaybeArray, PreparedLaunch
from nbep.host.tokens import Tokens, await_counters, pair

ROWS_OF_SCALES = 4  # a column of scales begins at a multiple of 16 bytes, as the copy engine wants it
NO_ARRAYS = (0, 0, 0, 0, 0, 0, 0)


class Plan(NamedTuple):
    """What depends on the sizes and dtypes of the arrays, on the handle's, and on the options."""

    publish: PreparedLaunch
    send: PreparedLaunch | None  # between nodes
    notify: PreparedLaunch
    fetch: PreparedLaunch
    call: Call
    places: ElasticPlaces
    shape: ElasticShape
    tokens: Tokens  # of the call that made the plan: sizes and dtypes
    num_local_experts: int


class Sizes(NamedTuple):
    """How many rows the outputs have."""

    num_recv_tokens: int
    num_expanded_tokens: int
    per_expert: list[int]


def dispatch(
    memory: Node, request: ElasticDispatchRequest, timeout_s: float
) -> tuple[Any, MaybeArray, MaybeArray, EPHandle, EventOverlap]:
    """See ElasticBuffer.dispatch. timeout_s: longest time that the CPU waits for counts"""
    memory.check_faults()
    checks.options(request)
    plan, arguments = _find_plan(memory, request)
    checks.cpu_may_wait(memory, request)
    elastic = _elastic(memory)
    x = request.x[0] if isinstance(request.x, tuple) else request.x
    known = request.handle
    num_tokens, num_topk = plan.tokens.num_tokens, plan.tokens.num_topk
    with memory.allocations(request, x) as empty:
        topk_idx = request.topk_idx
        if known is None:
            if request.do_handle_copy:
                topk_idx = empty((num_tokens, num_topk), "int64")
            slots = empty((num_tokens, num_topk), "int32")
            of_ranks = empty((memory.num_ranks,), "int32")
            ends, counted = (empty((plan.num_local_experts,), "int32") for _ in range(2))
            starts = empty((memory.num_ranks, plan.num_local_experts), "int32")
    wait_before_epilogue(memory, request.previous_event_before_epilogue)
    memory.compare(plan.call, known)
    elastic.begin_dispatch(plan.places, plan.shape)
    given = memory.runtime.arguments
    if known is None:
        if request.do_cpu_sync:
            memory.counters.reset()
        copy = topk_idx if request.do_handle_copy else None
        plan.publish.launch(memory.stream, (*given((copy, slots)), *arguments[:4]), (request, topk_idx, slots))
        if plan.send is not None:
            plan.send.launch(memory.stream)
        counts = of_ranks, ends, counted, starts, request.stats
        counters = memory.counters.addresses(request.do_cpu_sync)[:2]
        plan.notify.launch(memory.stream, (*given(counts), *counters), (counts,))
        sizes = _received(memory, request, plan, timeout_s)
    else:
        of_ranks, starts = known.psum_num_recv_tokens_per_scaleup_rank, None
        ends = known.psum_num_recv_tokens_per_expert
        plan.publish.launch(memory.stream, (0, 0, *arguments[:4]), (request,))
        if plan.send is not None:
            plan.send.launch(memory.stream)
        plan.notify.launch(memory.stream, NO_ARRAYS)
        sizes = Sizes(known.num_recv_tokens, known.num_expanded_tokens, [])
    num_rows = sizes.num_expanded_tokens if request.do_expand else sizes.num_recv_tokens
    recv, metadata = _outputs(memory, request, plan, num_rows, sizes.num_recv_tokens)
    inputs = of_ranks, ends, starts
    later = num_rows, sizes.num_recv_tokens, *_scale_strides(plan, request, num_rows)
    plan.fetch.launch(memory.stream, given((*recv, metadata, *inputs)), (recv, metadata, inputs), later)
    handle = known
    if handle is None:
        handle = EPHandle(
            request.do_expand,
            request.num_experts,
            request.expert_alignment,
            request.num_max_tokens_per_rank,
            request.num_sms,
            topk_idx,
            sizes.num_recv_tokens,
            sizes.num_expanded_tokens,
            sizes.per_expert,
            of_ranks,
            ends,
            counted,
            metadata,
            slots,
        ).owned_by(memory.identity, memory.num_dispatches)
    recv_x, recv_scales, recv_topk_idx, recv_topk_weights = recv
    return pair(recv_x, recv_scales), recv_topk_idx, recv_topk_weights, handle, memory.finish(request.async_finish)


def _elastic(memory: Node) -> ElasticMemory:
    assert memory.elastic is not None
    return memory.elastic


def _find_plan(memory: Node, request: ElasticDispatchRequest) -> tuple[Plan, list[Any]]:
    """The plan of a call, and what launches take for x, scales, topk_idx and topk_weights."""
    is_pair = isinstance(request.x, tuple)
    x = request.x if is_pair else (request.x, None)
    handle = request.handle
    arrays = (*x, request.topk_idx, request.topk_weights, request.stats)
    if isinstance(handle, EPHandle):
        arrays += tuple(handle.arrays.values())
    options = (
        *(is_pair, request.num_experts, request.num_max_tokens_per_rank, request.expert_alignment),
        *(request.num_sms, request.do_expand, request.do_zero_padding, request.use_tma_aligned_col_major_sf),
        *(handle is None, getattr(handle, "number", 0)),
    )
    if len(x) != 2 or (handle is not None and getattr(handle, "owner", None) is not memory.identity):
        key, plan, arguments = None, None, memory.runtime.look_at(arrays)[1]
    else:
        key, plan, arguments = memory.elastic_plans.find(arrays, options)
    if plan is None:
        plan = _make_plan(memory, request)
        memory.elastic_plans.keep(key, plan)
    return plan, arguments


def _make_plan(memory: Node, request: ElasticDispatchRequest) -> Plan:
    """Check what does not change, and prepare the launches."""
    runtime, num_ranks, handle = memory.runtime, memory.num_ranks, request.handle
    elastic = _elastic(memory)
    if handle is not None:
        checks.owned(memory, handle)
        if request.do_expand and not handle.do_expand:
            validate_expand(handle)
    tokens = checks.tokens(memory, request)
    num_experts, most = request.num_experts, request.num_max_tokens_per_rank
    num_local_experts = num_experts // num_ranks
    shape = ElasticShape(most, tokens.hidden_bytes, tokens.num_topk, tokens.num_scales)
    places = elastic.place(shape)
    has_weights = request.topk_weights is not None
    call = dispatch_call(memory, tokens, num_experts, most, handle, has_weights)
    does_number = int(handle is None)
    threads = num_threads(memory)
    publish = runtime.prepare(
        elastic_publish,
        blocks_for(memory, request.num_sms, does_number * (num_experts + num_ranks) + tokens.num_tokens, threads),
        threads,
        publish_smem_bytes(threads, runtime.has_tma),
        elastic.peers,
        memory.bounds,
        places,
        shape,
        PublishSizes(tokens.num_tokens, num_experts, does_number, *tokens.scale_strides),
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
        among_all = network, memory.bounds, elastic.nodes, counts, call
        notify = runtime.prepare(kernel(elastic_meet_dispatch), 1, notify_threads, 0, *among_all)
    fetch = runtime.prepare(
        elastic_dispatch,
        blocks_for(memory, request.num_sms, most * num_ranks, threads),
        threads,
        elastic_dispatch_smem_bytes(threads, runtime.has_tma),
        elastic.peers,
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
        ),
    )
    return Plan(publish, send, notify, fetch, call, places, shape, tokens, num_local_experts)


def validate_expand(handle: EPHandle) -> None:
    """Raises: ValueError"""
    checks.refuse("do_expand", True, f"False with {handle!r}: it does not know the rows of experts")


def _received(memory: Node, request: ElasticDispatchRequest, plan: Plan, timeout_s: float) -> Sizes:
    """What comes: at most everything, or what the counters of notify say, for which the CPU waits."""
    num_local_experts, alignment = plan.num_local_experts, request.expert_alignment
    if not request.do_cpu_sync:
        most = request.num_max_tokens_per_rank * memory.num_ranks
        # The kernel reports it if they are too few: where there are fewer experts here than choices, and tokens name
        # the same one twice.
        expanded = most * min(plan.tokens.num_topk, num_local_experts) + (alignment - 1) * num_local_experts
        return Sizes(most, align_up(expanded, alignment), [])

    timeout_ms = max(2 * memory.timeout_ms, 1e3 * timeout_s)
    received = await_counters(memory, num_local_experts, timeout_ms, f"{timeout_ms / 1e3:g} s")
    return Sizes(received.num_tokens, sum(received.of_experts), received.of_experts)


def _outputs(
    memory: Node, request: ElasticDispatchRequest, plan: Plan, num_rows: int, num_recv_tokens: int
) -> tuple[tuple[Array, MaybeArray, MaybeArray, MaybeArray], Array]:
    """recv_x, its scales, recv_topk_idx and recv_topk_weights; recv_src_metadata."""
    tokens, known = plan.tokens, request.handle
    x, scales = request.x if isinstance(request.x, tuple) else (request.x, None)
    with memory.allocations(request, x) as empty:
        recv_x = empty((num_rows, tokens.hidden), tokens.x.dtype_name)
        recv_scales = recv_topk_idx = recv_topk_weights = None
        if scales is not None:
            dtype = tokens.scales.dtype_name
            if request.use_tma_aligned_col_major_sf:
                columns = empty((tokens.num_scales, align_up(num_rows, ROWS_OF_SCALES)), dtype)
                recv_scales = columns.T[:num_rows]
            else:
                recv_scales = empty((num_rows, tokens.num_scales), dtype)
        if not request.do_expand:
            recv_topk_idx = empty((num_rows, tokens.num_topk), "int64")
        if request.topk_weights is not None:
            recv_topk_weights = empty((num_rows,) if request.do_expand else (num_rows, tokens.num_topk), "float32")
        metadata = known.recv_src_metadata if known else empty((num_recv_tokens, 2 + tokens.num_topk), "int32")
    return (recv_x, recv_scales, recv_topk_idx, recv_topk_weights), metadata


def _scale_strides(plan: Plan, request: ElasticDispatchRequest, num_rows: int) -> tuple[int, int]:
    """From row to row of recv_x_scales, and from column to column."""
    if request.use_tma_aligned_col_major_sf:
        return 1, align_up(num_rows, ROWS_OF_SCALES)
    return plan.tokens.num_scales, 1
