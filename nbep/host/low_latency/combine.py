"""Buffer.low_latency_combine: rows of experts back to the tokens they belong to, added up with weights.

Source: DeepEP csrc/deep_ep.cpp, Buffer::low_latency_combine, Buffer::get_next_low_latency_combine_buffer
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from nbep.device.kernels.low_latency.combine import CombineSizes, combine_smem_bytes
from nbep.device.kernels.low_latency.combine import low_latency_combine as combine_kernel
from nbep.device.layout.low_latency import COLUMNS_PER_SCALE, NUM_HALVES, LowLatencyShape, send_offset, shape_of
from nbep.host import validate
from nbep.host.arguments import flags, refuse
from nbep.host.block_sizes import block_sizes
from nbep.host.calls import Unknown
from nbep.host.events import EventOverlap
from nbep.host.low_latency.calls import COMBINE, HOOK, NAMES_IN_HANDLE, ORIGINS, words_of
from nbep.host.low_latency.handle import LowLatencyHandle, check_choices, check_contents, checked_handle, is_ready
from nbep.host.low_latency.launch import Hook, begin_verb, check_options, run_call
from nbep.host.low_latency.memory import LowLatencyMemory, Plan
from nbep.host.node import NodeMemory
from nbep.host.target.arrays import View
from nbep.host.target.base import Array, MaybeArray, Runtime

VERB = "low_latency_combine"
GET_NEXT = "get_next_low_latency_combine_buffer"

MAX_GROUPS = 12  # groups of warps in a block


class CombineRequest(NamedTuple):
    """A combine, as Buffer.low_latency_combine was asked for it: its arrays, then its options."""

    x: Array
    topk_idx: Array
    topk_weights: Array
    out: MaybeArray
    combine_wait_recv_cost_stats: MaybeArray
    use_logfmt: bool
    zero_copy: bool
    async_finish: bool
    return_recv_hook: bool


FIRST_OUTPUT = CombineRequest._fields.index("out")
FIRST_OPTION = CombineRequest._fields.index("use_logfmt")


def low_latency_combine(
    memory: NodeMemory, given: tuple[Any, ...], options: tuple[Any, ...], handle: Any
) -> tuple[Array, EventOverlap, Hook | None]:
    """See Buffer.low_latency_combine. given, options: those of a CombineRequest"""
    runtime, mode = memory.runtime, begin_verb(memory, VERB)
    call = mode.next_call(VERB)
    of_plan: Any = None
    if is_ready(mode, handle):
        of_plan = *options, handle.sizes, handle.call.number % ORIGINS if mode.compares_calls else 0
    else:
        handle = checked_handle(mode, handle)
    plan, arguments, views = mode.combine_plans.find(given, of_plan, _check_and_plan, memory, mode, options, handle)
    use_logfmt, zero_copy, async_finish, return_recv_hook = options
    if zero_copy:
        if use_logfmt:
            refuse("zero_copy", True, "False with use_logfmt: its rows are made while they are sent")
        if mode.zero_copy_number != mode.num_calls:
            refuse(
                "zero_copy",
                "True without get_next_low_latency_combine_buffer since the last low-latency call",
                "False, or with a buffer that was got for this very call",
            )
    if views or ((arguments[3] or arguments[4]) and validate.overlap(arguments, plan.num_bytes, FIRST_OUTPUT)):
        _check_places(memory, mode, handle, zero_copy, views or [*map(runtime.view, given)])
        if validate.may_read(memory, None):
            check_choices(runtime.contents(given[1]), handle.num_experts)
            check_contents(mode, handle)
            _check_choices(runtime, handle, given[1])
            _check_weights(runtime, handle, given[2])
            if return_recv_hook:
                watched = {"topk_idx": given[1], "topk_weights": given[2]}
                call.watch = runtime.watch(VERB, "behind its hook", watched)
    x, topk_idx, topk_weights, out, stats = arguments
    shape, combined_x = plan.shape, given[3]
    if combined_x is None:
        (combined_x,), (out,) = plan.make()
    if zero_copy:
        x = mode.symmetric.address + send_offset(mode.num_rdma_bytes, call.half)
    of_handle = handle.arguments if handle.is_as_made else runtime.arguments(handle.arguments)
    memory.compare_call(VERB, _alike, return_recv_hook, shape, handle)
    mode.rdma.shape, call.words = shape, plan.words
    event, hook = run_call(
        memory,
        call,
        plan.launches,
        (out, stats, x, topk_idx, topk_weights, *of_handle),
        (given, combined_x, handle.arrays),
        async_finish,
        return_recv_hook,
    )
    return combined_x, event, hook


def _alike(return_recv_hook: bool, shape: LowLatencyShape, handle: LowLatencyHandle) -> dict[str, object]:
    """What all ranks must pass alike."""
    of_shape = {NAMES_IN_HANDLE.get(name, name): value for name, value in shape._asdict().items()}
    origin = Unknown() if handle.call is None else f"that of {handle.call}"
    return {**of_shape, HOOK: return_recv_hook, "handle": origin}


def get_next_low_latency_combine_buffer(memory: NodeMemory, handle: Any) -> Array:
    """See Buffer.get_next_low_latency_combine_buffer.

    Where messages leave from the send area, a NIC may still read there what was sent in this half before.
    """
    mode = begin_verb(memory, GET_NEXT)
    mode.check_own(GET_NEXT)
    handle = checked_handle(mode, handle)
    mode.check_size(_shape(mode, handle, False))
    num_local_experts = handle.num_experts // mode.num_ranks
    shape = (num_local_experts, mode.num_ranks * handle.num_max_dispatch_tokens_per_rank, handle.hidden)
    half = mode.num_calls % NUM_HALVES
    mode.zero_copy_number = mode.num_calls
    if mode.sends_from_buffer:
        if memory.runtime.is_capturing:
            refuse(GET_NEXT, "a call while a graph is captured", "called before")
        mode.wait_sent(memory.timeout_ms)
    dtype = memory.runtime.dtype_like("bfloat16", handle.layout_range)
    offset = send_offset(mode.num_rdma_bytes, half)
    return mode.symmetric.array(dtype, offset, shape[0] * shape[1] * shape[2]).reshape(shape)


# Validate


def _check_places(
    memory: NodeMemory, mode: LowLatencyMemory, handle: LowLatencyHandle, zero_copy: bool, views: Sequence[View]
) -> None:
    """What the call writes lies nowhere else, and nothing in the RDMA buffer, but for an x that is not read."""
    view, arrays = memory.runtime.view, dict(zip(CombineRequest._fields, views, strict=False))
    outputs = {name: arrays.pop(name) for name in CombineRequest._fields[FIRST_OUTPUT:FIRST_OPTION]}
    if zero_copy:
        del arrays["x"]
    of_handle = {f"handle.{name}": view(getattr(handle, name)) for name in ("src_info", "layout_range")}
    validate.outside(memory, arrays | outputs, mode.symmetric, mode.num_rdma_bytes)
    validate.apart(outputs, arrays | of_handle)


def _check_and_plan(
    memory: NodeMemory,
    mode: LowLatencyMemory,
    options: tuple[Any, ...],
    handle: LowLatencyHandle,
    views: Sequence[View],
) -> Plan:
    """Check everything; the plan for this call, and for later ones with such arrays and these options."""
    runtime, given = memory.runtime, CombineRequest._make((*views, *options))
    flags(use_logfmt=given.use_logfmt, zero_copy=given.zero_copy)
    plan = _plan(memory, mode, handle, given)
    shape = plan.shape
    check_options(VERB, given.async_finish, given.return_recv_hook)
    num_rows = shape.num_ranks * shape.num_max_tokens
    x_size = shape.num_experts // shape.num_ranks, num_rows, shape.hidden
    validate.array("x", given.x, "bfloat16", x_size, aligned=True)
    validate.array("topk_weights", given.topk_weights, "float32", given.topk_idx.shape)
    if not handle.is_as_made:  # else its arrays are those that dispatch made
        _check_handle(runtime, mode, handle)
    if given.out.array is not None:
        validate.output("out", given.out, "bfloat16", (given.topk_idx.shape[0], shape.hidden), aligned=True)
    cost_stats = given.combine_wait_recv_cost_stats
    if cost_stats.array is not None:
        validate.output("combine_wait_recv_cost_stats", cost_stats, "int64", (shape.num_ranks,))
    if not runtime.host_reads_arrays:  # else it is checked in each call
        _check_places(memory, mode, handle, given.zero_copy, views)
    return plan


def _shape(mode: LowLatencyMemory, handle: LowLatencyHandle, use_logfmt: bool) -> LowLatencyShape:
    deduplicate = handle.num_topk != 0
    if deduplicate and use_logfmt:
        refuse("use_logfmt", True, "False with the handle of a dispatch with deduplicate")
    shape = shape_of(
        mode.num_ranks,
        handle.num_experts,
        handle.num_max_dispatch_tokens_per_rank,
        handle.hidden,
        handle.num_topk,
        0,
        int(deduplicate),
        int(use_logfmt),
    )
    mode.check_size(shape)
    return shape


def _plan(memory: NodeMemory, mode: LowLatencyMemory, handle: LowLatencyHandle, given: CombineRequest) -> Plan:
    """given: with a View for each array"""
    runtime, topk_idx = memory.runtime, given.topk_idx
    shape = _shape(mode, handle, given.use_logfmt)
    validate.hidden_size("x", shape.hidden, COLUMNS_PER_SCALE)
    validate.array("topk_idx", topk_idx, "int64", ("num_tokens", "num_topk"))
    num_tokens, num_topk = topk_idx.shape
    validate.topk_size("topk_idx", num_topk)
    if num_tokens > shape.num_max_tokens:
        allowed = f"at most {shape.num_max_tokens} tokens, as in the dispatch of the handle"
        refuse("topk_idx", f"{num_tokens} tokens", allowed)
    _, num_threads = block_sizes(runtime).low_latency
    groups = min(-(-shape.num_experts // mode.num_blocks), MAX_GROUPS, num_threads // 32)
    sizes = CombineSizes(num_tokens, num_topk, groups)
    smem_bytes = combine_smem_bytes(shape, num_threads)
    views: tuple[Any, ...] = given[:FIRST_OPTION]
    words = words_of(COMBINE, shape, origin=mode.origin_of(handle.call))
    return Plan(
        shape,
        words,
        mode.prepare(combine_kernel, num_threads, smem_bytes, words, memory.bounds, shape, sizes),
        runtime.prepare_empty([((num_tokens, shape.hidden), "bfloat16")], given.x.array),
        tuple(view.num_bytes for view in views),
    )


def _check_handle(runtime: Runtime, mode: LowLatencyMemory, handle: LowLatencyHandle) -> None:
    num_local_experts = handle.num_experts // mode.num_ranks
    num_rows = mode.num_ranks * handle.num_max_dispatch_tokens_per_rank
    validate.array("handle.src_info", runtime.view(handle.src_info), "int32", (num_local_experts, num_rows))
    ranges = (num_local_experts, mode.num_ranks)
    validate.array("handle.layout_range", runtime.view(handle.layout_range), "int64", ranges)


def _check_choices(runtime: Runtime, handle: LowLatencyHandle, topk_idx: Array) -> None:
    """No row comes from an expert that the dispatch of the handle has not sent a token to; only if `may_read`."""
    sent = handle.call and handle.call.choices
    if sent is None:
        return
    given = runtime.contents(topk_idx)
    if len(sent) < len(given):
        refuse("topk_idx", f"{len(given)} tokens", f"at most {len(sent)}, those of the dispatch of the handle")
    is_sent = (given[:, :, None] == sent[: len(given), None, :]).any(axis=2) | (given < 0)
    if not is_sent.all():
        token, choice = (int(i[0]) for i in (~is_sent).nonzero())
        allowed = f"one of {sent[token].tolist()}, to which {handle.call} has sent the token"
        refuse(f"topk_idx[{token}, {choice}]", int(given[token, choice]), allowed)


def _check_weights(runtime: Runtime, handle: LowLatencyHandle, topk_weights: Array) -> None:
    """With deduplicate the weights went with the tokens; only if `may_read`."""
    if handle.topk_weights is None:
        return
    sent, given = runtime.contents(handle.topk_weights), runtime.contents(topk_weights)
    if sent.shape != given.shape or (sent != given).any():
        refuse("topk_weights", "others than in the dispatch with deduplicate", "those: they went with the tokens")
