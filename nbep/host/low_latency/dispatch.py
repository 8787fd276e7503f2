"""Buffer.low_latency_dispatch: every choice of every token to its expert, packed by expert.

 first call with such arrays and options:  check all, size, prepare --> a plan, kept by the buffer
 each call:                                look at the arrays, find the plan, allocate, launch

Source: DeepEP csrc/deep_ep.cpp, Buffer::low_latency_dispatch
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from nbep.device.alignment import inverse_of
from nbep.device.kernels.low_latency.deduplicated_combine import COLUMNS as SUM_COLUMNS
from nbep.device.kernels.low_latency.dispatch import DispatchSizes, dispatch_smem_bytes
from nbep.device.kernels.low_latency.dispatch import low_latency_dispatch as dispatch_kernel
from nbep.device.kernels.parts.arrivals import MAX_TAGS
from nbep.device.layout.low_latency import COLUMNS_PER_SCALE, LowLatencyShape, header_offset, message_stride, shape_of
from nbep.host import validate
from nbep.host.arguments import flags, integer, refuse
from nbep.host.block_sizes import block_sizes
from nbep.host.events import EventOverlap
from nbep.host.low_latency.calls import DISPATCH, HOOK, MAX_TOKENS, words_of
from nbep.host.low_latency.handle import (
    NO_MESSAGES,
    LowLatencyHandle,
    LowLatencyTuple,
    check_choices,
    checked_num_experts,
)
from nbep.host.low_latency.launch import Hook, begin_verb, check_options, run_call
from nbep.host.low_latency.memory import LowLatencyMemory, Plan
from nbep.host.node import NodeMemory
from nbep.host.target.arrays import ByColumns, PartsLayout, View, Wanted
from nbep.host.target.base import Array, MaybeArray

VERB = "low_latency_dispatch"
COLUMNS_PER_WORD = 4 * COLUMNS_PER_SCALE  # of packed scales


class DispatchRequest(NamedTuple):
    """A dispatch, as Buffer.low_latency_dispatch was asked for it: its arrays, then its options.

    What comes before async_finish is the same on all ranks.
    """

    x: Array
    topk_idx: Array
    topk_weights: MaybeArray
    cumulative_local_expert_recv_stats: MaybeArray
    dispatch_wait_recv_cost_stats: MaybeArray
    num_max_tokens: int
    num_experts: int
    use_fp8: bool
    round_scale: bool
    use_ue8m0: bool
    deduplicate: bool
    async_finish: bool
    return_recv_hook: bool


FIRST_OPTION = DispatchRequest._fields.index("num_max_tokens")
FIRST_OUTPUT = DispatchRequest._fields.index("cumulative_local_expert_recv_stats")
END_OF_ALIKE = DispatchRequest._fields.index("async_finish")


def low_latency_dispatch(
    memory: NodeMemory, given: tuple[Any, ...], options: tuple[Any, ...]
) -> tuple[Any, Array, LowLatencyHandle, EventOverlap, Hook | None]:
    """See Buffer.low_latency_dispatch. given, options: those of a DispatchRequest"""
    runtime, mode = memory.runtime, begin_verb(memory, VERB)
    call = mode.next_call(VERB)
    plan, arguments, views = mode.dispatch_plans.find(given, options, _check_and_plan, memory, mode, options)
    if views or ((arguments[3] or arguments[4]) and validate.overlap(arguments, plan.num_bytes, FIRST_OUTPUT)):
        _check_places(memory, mode, views or [*map(runtime.view, given)])
        if validate.may_read(memory, None):
            check_choices(runtime.contents(given[1]), plan.shape.num_experts)
            call.choices = runtime.contents(given[1]).copy()
    arrays, (rows, count, of_handle, scales) = plan.make()
    recv_x, recv_count, parts, recv_x_scales = arrays
    if recv_x_scales is not None:
        recv_x = recv_x, recv_x_scales
    x, topk_idx, weights, recv_stats, cost_stats = arguments
    if not plan.shape.deduplicate:
        of_handle += NO_MESSAGES
    memory.compare_call(VERB, _alike, options, plan.shape.hidden)
    mode.rdma.shape, call.words = plan.shape, plan.words
    event, hook = run_call(
        memory,
        call,
        plan.launches,
        (rows, scales, *of_handle[:2], count, recv_stats, cost_stats, *of_handle[2:], x, topk_idx, weights),
        (given, arrays),
        *options[-2:],
    )
    kind = LowLatencyTuple if memory.is_deep_eps else LowLatencyHandle
    return recv_x, recv_count, kind(parts, plan.handle_sizes, call, given[2], of_handle), event, hook


def _alike(options: tuple[Any, ...], hidden: int) -> dict[str, object]:
    """What all ranks must pass alike."""
    names = MAX_TOKENS, *DispatchRequest._fields[FIRST_OPTION + 1 : END_OF_ALIKE]
    return {**dict(zip(names, options, strict=False)), "hidden size of x": hidden, HOOK: options[-1]}


# Validate


def _check_places(memory: NodeMemory, mode: LowLatencyMemory, views: Sequence[View]) -> None:
    """What the call writes lies nowhere else, and nothing in the RDMA buffer."""
    arrays = dict(zip(DispatchRequest._fields, views, strict=False))
    outputs = {name: arrays.pop(name) for name in DispatchRequest._fields[FIRST_OUTPUT:FIRST_OPTION]}
    validate.outside(memory, arrays | outputs, mode.symmetric, mode.num_rdma_bytes)
    validate.apart(outputs, arrays)


def _check_and_plan(
    memory: NodeMemory, mode: LowLatencyMemory, options: tuple[Any, ...], views: Sequence[View]
) -> Plan:
    """Check everything; the plan for this call, and for later ones with such arrays and these options."""
    given = DispatchRequest._make((*views, *options))
    integer("num_max_dispatch_tokens_per_rank", given.num_max_tokens, 1)
    checked_num_experts(mode, given.num_experts)
    flags(
        use_fp8=given.use_fp8,
        round_scale=given.round_scale,
        use_ue8m0=given.use_ue8m0,
        deduplicate=given.deduplicate,
    )
    plan = _plan(memory, mode, given)
    shape = plan.shape
    check_options(VERB, given.async_finish, given.return_recv_hook)
    recv_stats, cost_stats = given.cumulative_local_expert_recv_stats, given.dispatch_wait_recv_cost_stats
    if recv_stats.array is not None:
        size = (shape.num_experts // shape.num_ranks,)
        validate.output("cumulative_local_expert_recv_stats", recv_stats, "int32", size)
    if cost_stats.array is not None:
        validate.output("dispatch_wait_recv_cost_stats", cost_stats, "int64", (shape.num_ranks,))
    if given.deduplicate or given.topk_weights.array is not None:
        _check_weights(given.deduplicate, given.topk_weights, given.topk_idx.shape)
    return plan


def _plan(memory: NodeMemory, mode: LowLatencyMemory, given: DispatchRequest) -> Plan:
    """given: with a View for each array"""
    runtime, x, topk_idx = memory.runtime, given.x, given.topk_idx
    num_max_tokens, num_experts = int(given.num_max_tokens), int(given.num_experts)
    validate.array("x", x, "bfloat16", ("num_tokens", "hidden"), aligned=True)
    num_tokens, hidden = x.shape
    validate.hidden_size("x", hidden, COLUMNS_PER_SCALE)
    if num_max_tokens > MAX_TAGS:
        refuse("num_max_dispatch_tokens_per_rank", num_max_tokens, f"at most {MAX_TAGS}, what a count can count")
    if num_tokens > num_max_tokens:
        refuse("x", f"{num_tokens} tokens", f"at most num_max_dispatch_tokens_per_rank ({num_max_tokens}) tokens")
    validate.array("topk_idx", topk_idx, "int64", (num_tokens, "num_topk"))
    num_topk = topk_idx.shape[1]
    validate.topk_size("topk_idx", num_topk)
    if given.round_scale and not given.use_fp8:
        refuse("round_scale", True, "False without use_fp8")
    if given.use_ue8m0 and not given.round_scale:
        refuse("use_ue8m0", True, "False without round_scale: only powers of two have such a scale")
    if given.use_ue8m0 and hidden % COLUMNS_PER_WORD != 0:
        refuse("hidden size of x", hidden, f"a multiple of {COLUMNS_PER_WORD} with use_ue8m0")
    shape = shape_of(
        mode.num_ranks,
        num_experts,
        num_max_tokens,
        hidden,
        num_topk if given.deduplicate else 0,
        int(given.use_fp8),
        int(given.deduplicate),
        0,
    )
    mode.check_size(shape)
    num_parts = num_max_tokens * -(-hidden // SUM_COLUMNS)
    if given.deduplicate and num_parts > MAX_TAGS:
        most = MAX_TAGS // -(-hidden // SUM_COLUMNS)
        refuse("num_max_dispatch_tokens_per_rank", num_max_tokens, f"at most {most} with deduplicate")
    num_threads, _ = block_sizes(runtime).low_latency
    smem_bytes = dispatch_smem_bytes(shape, num_threads, runtime.has_tma)
    if smem_bytes > runtime.max_smem_bytes:
        refuse("hidden size of x", hidden, f"so small that two tokens fit into {runtime.max_smem_bytes} bytes")
    of_teams = teams(num_experts, num_max_tokens, mode.num_blocks, num_threads)
    places = message_stride(shape), header_offset(shape)
    flags_of_scales = int(given.round_scale), int(given.use_ue8m0)
    sizes = DispatchSizes(num_tokens, num_topk, *of_teams, *places, *flags_of_scales)
    words = words_of(DISPATCH, shape, given.round_scale)
    launches = mode.prepare(dispatch_kernel, num_threads, smem_bytes, words, memory.bounds, shape, sizes)
    rows = (num_experts // mode.num_ranks, mode.num_ranks * num_max_tokens, hidden)
    recv_x = (rows, "float8_e4m3fn" if given.use_fp8 else "bfloat16")
    wanted: tuple[Wanted | ByColumns | PartsLayout | None, ...]
    wanted = recv_x, (rows[:1], "int32"), _parts(shape), _scales(shape, given)
    make = runtime.prepare_empty(wanted, given.x.array)
    views: tuple[Any, ...] = given[:FIRST_OPTION]
    handle_sizes: tuple[int, ...] = num_max_tokens, hidden, num_experts
    if given.deduplicate:
        handle_sizes += (num_topk,)
    return Plan(shape, words, launches, make, tuple(view.num_bytes for view in views), handle_sizes)


def teams(num_experts: int, num_max_tokens: int, num_blocks: int, num_threads: int) -> tuple[int, int, int]:
    """Warps of a team, teams, and what to divide by to find a warp's team.

    All warps are shared out to the pairs of a local expert and a source.
    """
    num_warps = num_blocks * (num_threads // 32)
    team_warps = min(max(num_warps // num_experts, 1), num_max_tokens)
    return team_warps, num_warps // team_warps, inverse_of(team_warps)


def _parts(shape: LowLatencyShape) -> PartsLayout:
    """The arrays of handle.SRC_INFO and its neighbours."""
    num_local_experts = shape.num_experts // shape.num_ranks
    parts: tuple[tuple[tuple[int, ...], str], ...] = (
        ((num_local_experts, shape.num_ranks * shape.num_max_tokens), "int32"),
        ((num_local_experts, shape.num_ranks), "int64"),
    )
    if shape.deduplicate:
        each = (shape.num_ranks, shape.num_max_tokens)
        choices = (*each, shape.num_topk)
        parts += ((shape.num_ranks,), "int32"), (each, "int32"), (choices, "int32"), (choices, "float32")
    return PartsLayout.of(*parts)


def _scales(shape: LowLatencyShape, options: DispatchRequest) -> ByColumns | None:
    if not options.use_fp8:
        return None
    columns, dtype = (COLUMNS_PER_WORD, "int32") if options.use_ue8m0 else (COLUMNS_PER_SCALE, "float32")
    num_rows = shape.num_ranks * shape.num_max_tokens
    return ByColumns((shape.num_experts // shape.num_ranks, num_rows, shape.hidden // columns), dtype)


def _check_weights(deduplicate: bool, topk_weights: View, shape: tuple[int, ...]) -> None:
    if not deduplicate:
        refuse("topk_weights", type(topk_weights.array).__name__, "None without deduplicate: combine takes them")
    if topk_weights.array is None:
        refuse("topk_weights", "None", "given with deduplicate: they travel with the tokens")
    validate.array("topk_weights", topk_weights, "float32", shape)
