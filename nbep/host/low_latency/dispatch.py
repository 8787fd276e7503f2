"""Buffer.low_latency_dispatch: every choice of every token to its expert, packed by expert.

 first call with such arrays and options:  check all, size, prepare --> a plan, kept by the buffer
 each call:                                look at the arrays, find the plan, allocate, launch

Source: DeepEP csrc/deep_ep.cpp, Buffer::low_latency_dispatch
"""

from __future__ import annotations

from typing import Any, NamedTuple

from nbep.device.kernels.low_latency.arguments import DispatchSizes, dispatch_smem_bytes, teams
from nbep.device.kernels.low_latency.deduplicated_combine import COLUMNS as SUM_COLUMNS
from nbep.device.kernels.low_latency.dispatch import low_latency_dispatch as dispatch_kernel
from nbep.device.layout.low_latency import COLUMNS_PER_SCALE, LowLatencyShape, message_stride, note_offset
from nbep.device.protocols.arrivals import MAX_TAGS
from nbep.host import validate
from nbep.host.arguments import flags, integer, refuse
from nbep.host.events import EventOverlap
from nbep.host.low_latency import checks
from nbep.host.low_latency.calls import DISPATCH, Words, words_of
from nbep.host.low_latency.clean import begin_verb
from nbep.host.low_latency.handle import NO_MESSAGES, LowLatencyHandle
from nbep.host.low_latency.launch import Hook, check_options, run_call
from nbep.host.low_latency.memory import MAX_PLANS, Launches, LowLatencyMemory
from nbep.host.node import Node
from nbep.host.plans import find_plan, keep_plan
from nbep.host.target.base import Array, MaybeArray, Runtime
from nbep.host.target.new_arrays import ByColumns, Make, PartsLayout, Wanted

VERB = "low_latency_dispatch"
COLUMNS_PER_WORD = 4 * COLUMNS_PER_SCALE  # of packed scales
OPTIONS_OF_PLAN = 6  # of Options


class Options(NamedTuple):
    """What a dispatch is asked for, besides its arrays."""

    num_max_tokens: int
    num_experts: int
    use_fp8: bool
    round_scale: bool
    use_ue8m0: bool
    deduplicate: bool
    async_finish: bool
    return_recv_hook: bool


class Given(NamedTuple):
    """The arrays of a dispatch."""

    x: Array
    topk_idx: Array
    topk_weights: MaybeArray
    cumulative_local_expert_recv_stats: MaybeArray
    dispatch_wait_recv_cost_stats: MaybeArray


class Plan(NamedTuple):
    """What depends on sizes and options alone."""

    shape: LowLatencyShape
    words: Words
    launches: Launches
    make: Make  # recv_x, recv_count, parts and, with FP8, recv_x_scales
    handle_sizes: tuple[int, int, int]


def low_latency_dispatch(
    memory: Node, given: tuple[Any, ...], options: tuple[Any, ...]
) -> tuple[Any, Array, LowLatencyHandle, EventOverlap, Hook | None]:
    """See Buffer.low_latency_dispatch; given and options as in Given and Options."""
    runtime, mode = memory.runtime, begin_verb(memory, VERB)
    call = mode.next_call(VERB)
    seen, key, plan = find_plan(runtime, mode.dispatch_plans, given, options)
    if plan is None:
        plan = _checked_plan(memory, mode, Given(*given), Options(*options))
        keep_plan(mode.dispatch_plans, key, plan, MAX_PLANS)
    x, topk_idx, weights, recv_stats, cost_stats = seen or runtime.arguments(given)

    shape = plan.shape
    arrays, (rows, count, of_handle, *scale_rows) = plan.make(given[0])
    recv_x, recv_count, parts, *scales = arrays
    if not shape.deduplicate:
        of_handle += NO_MESSAGES
    src_info, layout_range, *messages = of_handle
    outputs = rows, scale_rows[0] if scales else 0, src_info, layout_range, count, recv_stats, cost_stats, *messages
    if scales:
        recv_x = recv_x, scales[0]
    memory.compare_call(VERB, lambda: _alike(Options(*options), shape.hidden))
    mode.rdma.shape, call.words = shape, plan.words
    if runtime.host_reads_arrays and validate.may_read(memory, None):
        call.choices = runtime.contents(given[1]).copy()
    event, hook = run_call(
        memory, call, plan.launches, (*outputs, x, topk_idx, weights), (given, arrays), options[-2], options[-1]
    )
    handle = LowLatencyHandle.of_dispatch(parts, of_handle, plan.handle_sizes, call, shape.num_topk, given[2])
    return recv_x, recv_count, handle, event, hook


def _alike(options: Options, hidden: int) -> dict[str, object]:
    """What all ranks must pass alike."""
    of_plan = dict(zip(options._fields, options[:OPTIONS_OF_PLAN], strict=False))
    return {**of_plan, "hidden": hidden, "hook": options.return_recv_hook}


# Validate


def _checked_plan(memory: Node, mode: LowLatencyMemory, given: Given, options: Options) -> Plan:
    """Check everything; the plan for this call, and for later ones with such arrays and these options."""
    runtime = memory.runtime
    x, topk_idx, topk_weights, cumulative_local_expert_recv_stats, dispatch_wait_recv_cost_stats = given
    integer("num_max_dispatch_tokens_per_rank", options.num_max_tokens, 1)
    checks.num_experts(mode, options.num_experts)
    flags(
        use_fp8=options.use_fp8,
        round_scale=options.round_scale,
        use_ue8m0=options.use_ue8m0,
        deduplicate=options.deduplicate,
    )
    plan = _plan(memory, mode, x, topk_idx, options)
    shape = plan.shape
    validate.row_alignment(runtime, "x", x)
    check_options(VERB, options.async_finish, options.return_recv_hook)
    if cumulative_local_expert_recv_stats is not None:
        size = (shape.num_experts // shape.num_ranks,)
        name = "cumulative_local_expert_recv_stats"
        validate.output(runtime, name, cumulative_local_expert_recv_stats, "int32", size)
    if dispatch_wait_recv_cost_stats is not None:
        validate.output(
            runtime, "dispatch_wait_recv_cost_stats", dispatch_wait_recv_cost_stats, "int64", (shape.num_ranks,)
        )
    if options.deduplicate or topk_weights is not None:
        _check_weights(runtime, options.deduplicate, topk_weights, topk_idx.shape)
    if validate.may_read(memory, None):
        checks.choices(runtime.contents(topk_idx), shape.num_experts)
    return plan


def _plan(memory: Node, mode: LowLatencyMemory, x: Array, topk_idx: Array, options: Options) -> Plan:
    runtime = memory.runtime
    num_max_tokens, num_experts = int(options.num_max_tokens), int(options.num_experts)
    validate.array(runtime, "x", x, "bfloat16", ("num_tokens", "hidden"))
    num_tokens, hidden = x.shape
    validate.hidden_size("x", hidden, COLUMNS_PER_SCALE)
    if num_max_tokens > MAX_TAGS:
        refuse("num_max_dispatch_tokens_per_rank", num_max_tokens, f"at most {MAX_TAGS}, what a count can count")
    if num_tokens > num_max_tokens:
        refuse("x", f"{num_tokens} tokens", f"at most num_max_dispatch_tokens_per_rank ({num_max_tokens}) tokens")
    validate.array(runtime, "topk_idx", topk_idx, "int64", (num_tokens, "num_topk"))
    num_topk = topk_idx.shape[1]
    validate.topk_size("topk_idx", num_topk)
    _check_scales(options, hidden)
    shape = LowLatencyShape.of(
        mode.num_ranks,
        num_experts,
        num_max_tokens,
        hidden,
        num_topk if options.deduplicate else 0,
        int(options.use_fp8),
        int(options.deduplicate),
        0,
    )
    mode.check_size(shape)
    num_parts = num_max_tokens * -(-hidden // SUM_COLUMNS)
    if options.deduplicate and num_parts > MAX_TAGS:
        most = MAX_TAGS // -(-hidden // SUM_COLUMNS)
        refuse("num_max_dispatch_tokens_per_rank", num_max_tokens, f"at most {most} with deduplicate")
    num_threads, _ = runtime.low_latency_threads
    smem_bytes = dispatch_smem_bytes(shape, num_threads, runtime.has_tma)
    if smem_bytes > runtime.max_smem_bytes:
        refuse("hidden size of x", hidden, f"so small that two tokens fit into {runtime.max_smem_bytes} bytes")
    of_teams = teams(num_experts, num_max_tokens, mode.num_blocks, num_threads)
    places = message_stride(shape), note_offset(shape)
    flags_of_scales = int(options.round_scale), int(options.use_ue8m0)
    sizes = DispatchSizes(num_tokens, num_topk, *of_teams, *places, *flags_of_scales)
    words = words_of(DISPATCH, shape, options.round_scale)
    launches = mode.prepare(dispatch_kernel, num_threads, smem_bytes, words, memory.bounds, shape, sizes)
    rows = (num_experts // mode.num_ranks, mode.num_ranks * num_max_tokens, hidden)
    recv_x = (rows, "float8_e4m3fn" if options.use_fp8 else "bfloat16")
    wanted: tuple[Wanted | ByColumns | PartsLayout, ...]
    wanted = recv_x, (rows[:1], "int32"), _parts(shape), *_scales(shape, options)
    return Plan(shape, words, launches, runtime.prepare_empty(wanted, x), (num_max_tokens, hidden, num_experts))


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


def _scales(shape: LowLatencyShape, options: Options) -> tuple[ByColumns, ...]:
    if not options.use_fp8:
        return ()
    columns, dtype = (COLUMNS_PER_WORD, "int32") if options.use_ue8m0 else (COLUMNS_PER_SCALE, "float32")
    num_rows = shape.num_ranks * shape.num_max_tokens
    return (ByColumns((shape.num_experts // shape.num_ranks, num_rows, shape.hidden // columns), dtype),)


def _check_scales(options: Options, hidden: int) -> None:
    if options.round_scale and not options.use_fp8:
        refuse("round_scale", True, "False without use_fp8")
    if options.use_ue8m0 and not options.round_scale:
        refuse("use_ue8m0", True, "False without round_scale: only powers of two have such a scale")
    if options.use_ue8m0 and hidden % COLUMNS_PER_WORD != 0:
        refuse("hidden size of x", hidden, f"a multiple of {COLUMNS_PER_WORD} with use_ue8m0")


def _check_weights(runtime: Runtime, deduplicate: bool, topk_weights: MaybeArray, shape: tuple[int, ...]) -> None:
    if not deduplicate:
        refuse("topk_weights", type(topk_weights).__name__, "None without deduplicate: combine takes them")
    if topk_weights is None:
        refuse("topk_weights", "None", "given with deduplicate: they travel with the tokens")
    validate.array(runtime, "topk_weights", topk_weights, "float32", shape)
