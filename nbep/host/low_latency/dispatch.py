"""Buffer.low_latency_dispatch: every choice of every token to its expert, packed by expert.

Source: DeepEP csrc/deep_ep.cpp, Buffer::low_latency_dispatch
"""

from __future__ import annotations

from typing import Any, NamedTuple

from nbep.device.kernels.low_latency.arguments import (
    DispatchInputs,
    DispatchOutputs,
    DispatchSizes,
    dispatch_smem_bytes,
    num_groups,
)
from nbep.device.kernels.low_latency.dispatch import low_latency_dispatch as dispatch_kernel
from nbep.device.kernels.low_latency.sum_first import COLUMNS as SUM_COLUMNS
from nbep.device.layout.low_latency import COLUMNS_PER_SCALE, LowLatencyShape
from nbep.device.protocols.arrivals import MAX_TAGS
from nbep.host import validate
from nbep.host.arguments import flags, integer, refuse
from nbep.host.events import EventOverlap
from nbep.host.low_latency import checks, digest
from nbep.host.low_latency.handle import (
    LAYOUT_RANGE,
    MESSAGE_WEIGHTS,
    NUM_MESSAGES,
    SRC_INFO,
    LowLatencyHandle,
)
from nbep.host.low_latency.launch import Hook, check_options, run_call
from nbep.host.low_latency.memory import LowLatencyMemory
from nbep.host.runtime.base import Array, MaybeArray, PartsLayout, PreparedLaunch, Runtime
from nbep.host.symmetric import NodeMemory

VERB = "low_latency_dispatch"
NO_MESSAGES: tuple[Any, ...] = (None, None, None, None)
COLUMNS_PER_WORD = 4 * COLUMNS_PER_SCALE  # of packed scales


class Options(NamedTuple):
    """What a dispatch is asked for, besides its arrays."""

    num_max_tokens: int
    num_experts: int
    use_fp8: bool
    round_scale: bool
    use_ue8m0: bool
    deduplicate: bool


class Plan(NamedTuple):
    """What depends on sizes and options alone."""

    shape: LowLatencyShape
    kernel: PreparedLaunch
    recv_x: tuple[tuple[int, ...], str]  # shape and dtype
    recv_count: tuple[int]  # shape
    parts: PartsLayout
    scales: tuple[tuple[int, int, int], str] | None  # of recv_x_scales


def low_latency_dispatch(
    memory: NodeMemory,
    x: Array,
    topk_idx: Array,
    options: Options,
    cumulative_local_expert_recv_stats: MaybeArray,
    dispatch_wait_recv_cost_stats: MaybeArray,
    async_finish: bool,
    return_recv_hook: bool,
    topk_weights: MaybeArray,
) -> tuple[Any, Array, LowLatencyHandle, EventOverlap, Hook | None]:
    """See Buffer.low_latency_dispatch."""
    runtime, mode = memory.runtime, checks.mode_of(memory, VERB)
    memory.check_faults()
    call = mode.next_call(VERB)
    integer("num_max_dispatch_tokens_per_rank", options.num_max_tokens, 1)  # 4.0 would find the plan of 4
    checks.num_experts(mode, options.num_experts)
    flags(
        use_fp8=options.use_fp8,
        round_scale=options.round_scale,
        use_ue8m0=options.use_ue8m0,
        deduplicate=options.deduplicate,
    )
    x_size: Any = getattr(x, "shape", None)
    choices_size: Any = getattr(topk_idx, "shape", None)
    plan = mode.plan((VERB, x_size, choices_size, *options), lambda: _plan(memory, mode, x, topk_idx, options))
    shape = plan.shape
    validate.array(runtime, "x", x, "bfloat16", x_size)
    validate.row_alignment(runtime, "x", x)
    validate.array(runtime, "topk_idx", topk_idx, "int64", choices_size)
    check_options(VERB, async_finish, return_recv_hook)
    if cumulative_local_expert_recv_stats is not None:
        size = (shape.num_experts // shape.num_ranks,)
        name = "cumulative_local_expert_recv_stats"
        validate.array(runtime, name, cumulative_local_expert_recv_stats, "int32", size)
    if dispatch_wait_recv_cost_stats is not None:
        validate.array(
            runtime, "dispatch_wait_recv_cost_stats", dispatch_wait_recv_cost_stats, "int64", (shape.num_ranks,)
        )
    if options.deduplicate or topk_weights is not None:
        _check_weights(runtime, options.deduplicate, topk_weights, choices_size)
    if validate.may_read(memory, None):
        checks.choices(runtime.contents(topk_idx), shape.num_experts)

    recv_x = runtime.empty(*plan.recv_x, x)
    recv_x_scales: MaybeArray = None
    if plan.scales is not None:
        recv_x_scales = runtime.empty_by_columns(*plan.scales, x)
    recv_count = runtime.empty(plan.recv_count, "int32", x)
    parts = runtime.empty_parts(plan.parts, x)
    messages = NO_MESSAGES
    if options.deduplicate:
        messages = tuple(parts.argument(i) for i in range(NUM_MESSAGES, MESSAGE_WEIGHTS + 1))
    outputs = DispatchOutputs(
        recv_x,
        recv_x_scales,
        parts.argument(SRC_INFO),
        parts.argument(LAYOUT_RANGE),
        recv_count,
        cumulative_local_expert_recv_stats,
        dispatch_wait_recv_cost_stats,
        *messages,
    )
    inputs = DispatchInputs(x, topk_idx, topk_weights)

    memory.compare_call(VERB, lambda: {**options._asdict(), "hidden": shape.hidden, "hook": return_recv_hook})
    mode.shape = shape
    event, hook = run_call(memory, call, plan.kernel, outputs, inputs, async_finish, return_recv_hook)
    handle = LowLatencyHandle(
        parts, shape.num_max_tokens, shape.hidden, shape.num_experts, call, shape.num_topk, topk_weights
    ).seal()
    received = recv_x if recv_x_scales is None else (recv_x, recv_x_scales)
    return received, recv_count, handle, event, hook


# Validate


def _plan(memory: NodeMemory, mode: LowLatencyMemory, x: Array, topk_idx: Array, options: Options) -> Plan:
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
    shape = LowLatencyShape(
        mode.num_ranks,
        num_experts,
        num_max_tokens,
        hidden,
        num_topk if options.deduplicate else 0,
        int(options.use_fp8),
        int(options.deduplicate),
        0,
    )
    shape = digest.for_dispatch(shape, options.round_scale)
    mode.check_size(shape)
    num_parts = num_max_tokens * -(-hidden // SUM_COLUMNS)
    if options.deduplicate and num_parts > MAX_TAGS:
        most = MAX_TAGS // -(-hidden // SUM_COLUMNS)
        refuse("num_max_dispatch_tokens_per_rank", num_max_tokens, f"at most {most} with deduplicate")
    num_threads, _ = runtime.low_latency_threads
    smem_bytes = dispatch_smem_bytes(shape, num_threads, runtime.has_tma)
    if smem_bytes > runtime.max_smem_bytes:
        refuse("hidden size of x", hidden, f"so small that two tokens fit into {runtime.max_smem_bytes} bytes")
    groups = num_groups(num_experts, mode.num_blocks, num_threads)
    sizes = DispatchSizes(num_tokens, num_topk, groups, int(options.round_scale), int(options.use_ue8m0))
    args = mode.network, mode.work, memory.bounds, shape, sizes
    kernel = runtime.prepare(mode.kernel(dispatch_kernel), mode.num_blocks, num_threads, smem_bytes, *args)
    rows = (num_experts // mode.num_ranks, mode.num_ranks * num_max_tokens, hidden)
    recv_x = (rows, "float8_e4m3fn" if options.use_fp8 else "bfloat16")
    return Plan(shape, kernel, recv_x, rows[:1], _parts(shape), _scales(shape, options))


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


def _scales(shape: LowLatencyShape, options: Options) -> tuple[tuple[int, int, int], str] | None:
    if not options.use_fp8:
        return None
    columns, dtype = (COLUMNS_PER_WORD, "int32") if options.use_ue8m0 else (COLUMNS_PER_SCALE, "float32")
    return (
        shape.num_experts // shape.num_ranks,
        shape.num_ranks * shape.num_max_tokens,
        shape.hidden // columns,
    ), dtype


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
