"""Buffer.low_latency_dispatch: every choice of every token to its expert, packed by expert.

Source: DeepEP csrc/deep_ep.cpp, Buffer::low_latency_dispatch
"""

from __future__ import annotations

from typing import Any

from nbep.device.kernels.low_latency.arguments import (
    MAX_GROUPS,
    DispatchInputs,
    DispatchOutputs,
    DispatchSizes,
    dispatch_smem_bytes,
)
from nbep.device.kernels.low_latency.dispatch import low_latency_dispatch as dispatch_kernel
from nbep.device.kernels.low_latency.journal import Call
from nbep.device.layout.low_latency import COLUMNS_PER_SCALE, LowLatencyShape
from nbep.host import validate
from nbep.host.arguments import integer, refuse
from nbep.host.events import EventOverlap
from nbep.host.low_latency import checks
from nbep.host.low_latency.handle import LowLatencyHandle, Messages
from nbep.host.low_latency.launch import Hook, check_options, run_call
from nbep.host.low_latency.memory import LowLatencyMemory
from nbep.host.runtime.base import Array, MaybeArray, Stream
from nbep.host.symmetric import NodeMemory

VERB = "low_latency_dispatch"
COLUMNS_PER_WORD = 4 * COLUMNS_PER_SCALE  # of packed scales


def low_latency_dispatch(
    memory: NodeMemory,
    x: Array,
    topk_idx: Array,
    num_max_dispatch_tokens_per_rank: int,
    num_experts: int,
    cumulative_local_expert_recv_stats: MaybeArray,
    dispatch_wait_recv_cost_stats: MaybeArray,
    use_fp8: bool,
    round_scale: bool,
    use_ue8m0: bool,
    async_finish: bool,
    return_recv_hook: bool,
    deduplicate: bool,
    topk_weights: MaybeArray,
) -> tuple[Any, Array, LowLatencyHandle, EventOverlap, Hook | None]:
    """See Buffer.low_latency_dispatch."""
    runtime, mode = memory.runtime, checks.mode_of(memory, VERB)
    memory.check_faults()
    call = mode.next_call(VERB)
    shape = _check(memory, mode, x, topk_idx, num_max_dispatch_tokens_per_rank, num_experts, use_fp8, deduplicate)
    check_options(VERB, async_finish, return_recv_hook)
    _check_scales(shape, round_scale, use_ue8m0)
    num_tokens, num_topk = topk_idx.shape
    num_ranks, num_local_experts = mode.num_ranks, num_experts // mode.num_ranks
    checks.stats(
        runtime, "cumulative_local_expert_recv_stats", cumulative_local_expert_recv_stats, "int32", num_local_experts
    )
    checks.stats(runtime, "dispatch_wait_recv_cost_stats", dispatch_wait_recv_cost_stats, "int64", num_ranks)
    _check_weights(memory, deduplicate, topk_weights, (num_tokens, num_topk))
    if validate.may_read(memory, None):
        checks.choices(topk_idx, num_experts)

    def empty(shape: tuple[int, ...], dtype: str) -> Array:
        return runtime.empty(shape, dtype, x)

    num_rows = num_ranks * shape.num_max_tokens
    recv_x = empty((num_local_experts, num_rows, shape.hidden), "float8_e4m3fn" if use_fp8 else "bfloat16")
    recv_x_scales: MaybeArray = None
    if use_fp8:
        columns = COLUMNS_PER_WORD if use_ue8m0 else COLUMNS_PER_SCALE
        recv_x_scales = empty(
            (num_local_experts, shape.hidden // columns, num_rows), "int32" if use_ue8m0 else "float32"
        )
    src_info = empty((num_local_experts, num_rows), "int32")
    layout_range = empty((num_local_experts, num_ranks), "int64")
    recv_count = empty((num_local_experts,), "int32")
    messages = Messages()
    if deduplicate:
        each = (num_ranks, shape.num_max_tokens)
        messages = Messages(
            empty((num_ranks,), "int32"),
            empty(each, "int32"),
            empty((*each, num_topk), "int32"),
            empty((*each, num_topk), "float32"),
        )
    outputs = DispatchOutputs(
        recv_x,
        recv_x_scales,
        src_info,
        layout_range,
        recv_count,
        cumulative_local_expert_recv_stats,
        dispatch_wait_recv_cost_stats,
        *messages,
    )
    inputs = DispatchInputs(x, topk_idx, topk_weights)
    num_groups = min(-(-num_experts // mode.num_blocks), MAX_GROUPS, mode.num_threads // 32)
    sizes = DispatchSizes(num_tokens, num_topk, num_groups, int(round_scale), int(use_ue8m0))

    def launch(stream: Stream, phases: Call) -> None:
        mode.shape = shape
        runtime.launch(
            stream,
            dispatch_kernel,
            mode.num_blocks,
            mode.num_threads,
            dispatch_smem_bytes(shape, mode.num_threads, runtime.has_tma),
            outputs,
            inputs,
            mode.network,
            mode.work,
            memory.bounds,
            phases,
            shape,
            sizes,
        )

    memory.compare_call(VERB, lambda: {**shape._asdict(), "round_scale": round_scale, "hook": return_recv_hook})
    event, hook = run_call(memory, call, launch, async_finish, return_recv_hook)
    handle = LowLatencyHandle(
        src_info,
        layout_range,
        shape.num_max_tokens,
        shape.hidden,
        num_experts,
        messages if deduplicate else None,
        topk_weights,
        call,
    )
    if recv_x_scales is None:
        return recv_x, recv_count, handle, event, hook
    return (recv_x, runtime.swap_last(recv_x_scales)), recv_count, handle, event, hook


# Validate


def _check(
    memory: NodeMemory,
    mode: LowLatencyMemory,
    x: Array,
    topk_idx: Array,
    num_max_dispatch_tokens_per_rank: int,
    num_experts: int,
    use_fp8: bool,
    deduplicate: bool,
) -> LowLatencyShape:
    runtime = memory.runtime
    num_max_tokens = integer("num_max_dispatch_tokens_per_rank", num_max_dispatch_tokens_per_rank, 1)
    num_experts = checks.num_experts(mode, num_experts)
    validate.array(runtime, "x", x, "bfloat16", ("num_tokens", "hidden"))
    num_tokens, hidden = x.shape
    validate.hidden_size("x", hidden, COLUMNS_PER_SCALE)
    validate.row_alignment(runtime, "x", x)
    if num_tokens > num_max_tokens:
        refuse("x", f"{num_tokens} tokens", f"at most num_max_dispatch_tokens_per_rank ({num_max_tokens}) tokens")
    validate.array(runtime, "topk_idx", topk_idx, "int64", (num_tokens, "num_topk"))
    num_topk = topk_idx.shape[1]
    validate.topk_size("topk_idx", num_topk)
    shape = LowLatencyShape(
        mode.num_ranks,
        num_experts,
        num_max_tokens,
        hidden,
        num_topk if deduplicate else 0,
        int(use_fp8),
        int(deduplicate),
        0,
    )
    mode.check_size(shape)
    smem_bytes = dispatch_smem_bytes(shape, mode.num_threads, runtime.has_tma)
    if smem_bytes > runtime.max_smem_bytes:
        refuse("hidden size of x", hidden, f"so small that two tokens fit into {runtime.max_smem_bytes} bytes")
    return shape


def _check_scales(shape: LowLatencyShape, round_scale: bool, use_ue8m0: bool) -> None:
    if use_ue8m0 and not round_scale:
        refuse("round_scale", False, "True with use_ue8m0: only powers of two have such a scale")
    if use_ue8m0 and not shape.use_fp8:
        refuse("use_ue8m0", True, "False without use_fp8")
    if round_scale and not shape.use_fp8:
        refuse("round_scale", True, "False without use_fp8")
    if use_ue8m0 and shape.hidden % COLUMNS_PER_WORD != 0:
        refuse("hidden size of x", shape.hidden, f"a multiple of {COLUMNS_PER_WORD} with use_ue8m0")


def _check_weights(memory: NodeMemory, deduplicate: bool, topk_weights: MaybeArray, shape: tuple[int, int]) -> None:
    if deduplicate and topk_weights is None:
        refuse("topk_weights", "None", "given with deduplicate: they travel with the tokens")
    if not deduplicate and topk_weights is not None:
        refuse("topk_weights", type(topk_weights).__name__, "None without deduplicate: combine takes them")
    if deduplicate:
        validate.array(memory.runtime, "topk_weights", topk_weights, "float32", shape)
