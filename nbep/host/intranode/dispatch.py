"""Buffer.dispatch inside a node: send each token once to every rank that owns one of its experts.

 counts given:   notify_dispatch --counters--> CPU sizes the outputs --> dispatch
 handle given:   cached_notify_dispatch -----------------------------> dispatch
 num_worst_tokens: as the first, but the CPU does not wait for the counters

Source: DeepEP csrc/deep_ep.cpp, Buffer::intranode_dispatch
"""

from __future__ import annotations

from typing import Any, NamedTuple

from nbep.device.kernels.intranode.cached_notify_dispatch import cached_notify_dispatch
from nbep.device.kernels.intranode.dispatch import (
    DispatchInputs,
    DispatchOutputs,
    DispatchSizes,
    dispatch_smem_bytes,
)
from nbep.device.kernels.intranode.dispatch import dispatch as dispatch_kernel
from nbep.device.kernels.intranode.notify_dispatch import NotifyInputs, NotifyOutputs, NotifySizes, notify_dispatch
from nbep.device.layout.intranode import RingShape, num_ring_cell_words
from nbep.host import validate
from nbep.host.arguments import integer
from nbep.host.call_log import Arguments
from nbep.host.config import DISPATCH_TABLE, Config, fit_config, table_config
from nbep.host.events import EventOverlap
from nbep.host.intranode.handle import DispatchHandle
from nbep.host.runtime.base import Array, MaybeArray, Runtime
from nbep.host.symmetric import Empty, NodeMemory, Order


class Counts(NamedTuple):
    """What get_dispatch_layout found out."""

    num_tokens_per_rank: Array
    is_token_in_rank: Array
    num_tokens_per_expert: Array


class Tokens(NamedTuple):
    """What travels, as DispatchInputs begins. scales, topk_idx and topk_weights may be None."""

    x: Array
    scales: MaybeArray
    topk_idx: MaybeArray
    topk_weights: MaybeArray

    @property
    def num_tokens(self) -> int:
        return self.x.shape[0]

    @property
    def hidden_bytes(self) -> int:
        return self.x.shape[1] * self.x.dtype.itemsize

    @property
    def num_topk(self) -> int:
        return 0 if self.topk_idx is None else self.topk_idx.shape[1]

    @property
    def num_scales(self) -> int:
        return 0 if self.scales is None else self.scales.shape[1]


def dispatch(
    memory: NodeMemory,
    x: Any,
    handle: Any,
    counts: Counts,
    num_tokens_per_rdma_rank: MaybeArray,
    topk_idx: MaybeArray,
    topk_weights: MaybeArray,
    expert_alignment: int,
    num_worst_tokens: int,
    config: Config | None,
    num_sms: int,
    previous_event: EventOverlap | None,
    async_finish: bool,
    allocate_on_comm_stream: bool,
) -> tuple[Any, MaybeArray, MaybeArray, list[int] | None, DispatchHandle | None, EventOverlap]:
    """See Buffer.dispatch. num_sms is that of the default config."""
    runtime = memory.runtime
    memory.check_faults()
    validate.stream_options(previous_event, async_finish, allocate_on_comm_stream)
    expert_alignment = integer("expert_alignment", expert_alignment, 1)
    num_worst_tokens = integer("num_worst_tokens", num_worst_tokens, 0)
    if num_tokens_per_rdma_rank is not None:
        validate.refuse("num_tokens_per_rdma_rank", type(num_tokens_per_rdma_rank).__name__, "None inside a node")
    tokens = Tokens(*validate.payload(runtime, x), topk_idx, topk_weights)
    if handle is not None:
        handle = _check_cached(memory, tokens, handle, num_worst_tokens)
        num_sms = 2 * handle.channel_prefix_matrix.shape[1]
    else:
        may_read = validate.may_read(memory, previous_event)
        _check_counts(memory, tokens, counts, num_worst_tokens, may_read)
    # A handle knows already where the tokens were at their ranks.
    token_sizes = (tokens.hidden_bytes, tokens.num_topk, tokens.num_scales, int(handle is None))
    if config is None:
        config = fit_config(
            table_config(DISPATCH_TABLE, num_sms, memory.num_ranks),
            memory.num_nvl_bytes,
            memory.num_ranks,
            *token_sizes,
        )
    validate.config(config, memory.num_ranks, 32 * memory.num_ranks)
    if handle is not None:
        validate.handle_config(handle, config)
    shape = config.ring_shape(memory.num_ranks, *token_sizes)
    validate.buffer_size(shape, memory.num_nvl_bytes)

    memory.ring_shape = shape
    order = Order(previous_event, allocate_on_comm_stream)
    if handle is not None:
        recv = _dispatch_cached(memory, tokens, handle, config, shape, order)
        return _pair(recv.recv_x, recv.recv_x_scales), None, None, None, None, memory.finish(async_finish)
    recv, handle, counted = _dispatch_counted(
        memory, tokens, counts, expert_alignment, num_worst_tokens, config, shape, order
    )
    return (
        _pair(recv.recv_x, recv.recv_x_scales),
        recv.recv_topk_idx,
        recv.recv_topk_weights,
        counted,
        handle,
        memory.finish(async_finish),
    )


# Validate


def _check_counts(memory: NodeMemory, tokens: Tokens, counts: Counts, num_worst_tokens: int, may_read: bool) -> None:
    runtime, num_ranks = memory.runtime, memory.num_ranks
    for name, value in counts._asdict().items():
        if value is None:
            validate.refuse(name, "None", "given unless there is a handle; get_dispatch_layout returns it")
    validate.array(runtime, "num_tokens_per_rank", counts.num_tokens_per_rank, "int32", (num_ranks,))
    validate.array(runtime, "is_token_in_rank", counts.is_token_in_rank, "bool", (tokens.num_tokens, num_ranks))
    validate.array(runtime, "num_tokens_per_expert", counts.num_tokens_per_expert, "int32", ("num_experts",))
    num_experts = counts.num_tokens_per_expert.shape[0]
    validate.num_experts(num_ranks, num_experts, "size of num_tokens_per_expert")
    if (tokens.topk_idx is None) != (tokens.topk_weights is None):
        missing, given = ("topk_idx", "topk_weights") if tokens.topk_idx is None else ("topk_weights", "topk_idx")
        validate.refuse(missing, "None", f"given together with {given}")
    if tokens.topk_idx is not None:
        validate.array(runtime, "topk_idx", tokens.topk_idx, "int64", (tokens.num_tokens, "num_topk"))
        validate.topk_size("topk_idx", tokens.num_topk)
        validate.array(runtime, "topk_weights", tokens.topk_weights, "float32", (tokens.num_tokens, tokens.num_topk))
    elif num_worst_tokens > 0:
        validate.refuse("num_worst_tokens", num_worst_tokens, "0 without topk_idx and topk_weights")
    if num_worst_tokens == 0 and runtime.is_capturing:
        validate.refuse("num_worst_tokens", 0, "positive in a CUDA graph, or a handle given: the CPU cannot wait there")
    if may_read:
        validate.token_counts(counts.num_tokens_per_rank, counts.is_token_in_rank)
        if tokens.topk_idx is not None:
            validate.expert_indices(tokens.topk_idx, num_experts)
            validate.routing(tokens.topk_idx, counts.is_token_in_rank, counts.num_tokens_per_expert)
        # What the peers send is not known yet; the kernel reports if it does not fit.
        num_own = int(counts.num_tokens_per_rank[memory.rank])
        if 0 < num_worst_tokens < num_own:
            allowed = f"at least {num_own}, the tokens that this rank sends to itself, and more for what peers send"
            validate.refuse("num_worst_tokens", num_worst_tokens, allowed)


def _check_cached(memory: NodeMemory, tokens: Tokens, handle: Any, num_worst_tokens: int) -> DispatchHandle:
    handle = validate.handle(memory, handle)
    for name, value in (("topk_idx", tokens.topk_idx), ("topk_weights", tokens.topk_weights)):
        if value is not None:
            validate.refuse(name, type(value).__name__, "None together with a handle")
    if num_worst_tokens > 0:
        validate.refuse("num_worst_tokens", num_worst_tokens, "0 together with a handle, which knows the number")
    num_tokens = handle.is_token_in_rank.shape[0]
    if tokens.num_tokens != num_tokens:
        validate.refuse("x", f"{tokens.num_tokens} tokens", f"{num_tokens} tokens, as in the dispatch of the handle")
    return handle


def _must_be_alike(runtime: Runtime, tokens: Tokens, num_experts: int | None, config: Config) -> Arguments:
    """What peers read out of this rank's rings, and how they take part in its barriers; see Buffer.dispatch.

    num_experts is None with a handle.
    """
    scales, topk_idx = tokens.scales, tokens.topk_idx
    return {
        "handle": "a handle" if num_experts is None else None,
        "dtype of x": runtime.dtype_name(tokens.x),
        "hidden size of x": tokens.x.shape[1],
        "scales": None if scales is None else f"{tokens.num_scales} {runtime.dtype_name(scales)} a token",
        "topk_idx": None if topk_idx is None else f"{tokens.num_topk} choices a token",
        "size of num_tokens_per_expert": num_experts,
        "config.num_sms": config.num_sms,
        "config.num_max_nvl_chunked_recv_tokens": config.num_max_nvl_chunked_recv_tokens,
    }


# Size, launch, return


def _dispatch_counted(
    memory: NodeMemory,
    tokens: Tokens,
    counts: Counts,
    expert_alignment: int,
    num_worst_tokens: int,
    config: Config,
    shape: RingShape,
    order: Order,
) -> tuple[DispatchOutputs, DispatchHandle, list[int]]:
    """Exchange the counts, wait for the totals unless num_worst_tokens is given, then dispatch."""
    runtime, num_ranks = memory.runtime, memory.num_ranks
    num_experts = counts.num_tokens_per_expert.shape[0]
    polled = num_worst_tokens == 0
    with memory.allocations(order, tokens.x) as empty:
        rank_prefix_matrix = empty((num_ranks, num_ranks), "int32")
        channel_prefix_matrix = empty((num_ranks, shape.num_channels), "int32")
    memory.compare_call("dispatch", lambda: _must_be_alike(runtime, tokens, num_experts, config))
    if polled:
        memory.counters[:] = -1  # "not here yet"; no launch that writes this set is left
    runtime.launch(
        memory.comm_stream,
        notify_dispatch,
        1 + num_ranks,
        runtime.notify_threads,
        0,
        NotifyOutputs(rank_prefix_matrix, channel_prefix_matrix, *memory.counter_addresses(polled)),
        NotifyInputs(counts.num_tokens_per_rank, counts.num_tokens_per_expert, counts.is_token_in_rank),
        memory.peers,
        memory.bounds,
        NotifySizes(tokens.num_tokens, num_experts, shape.num_channels, num_ring_cell_words(shape), expert_alignment),
    )
    num_recv_tokens, per_expert = num_worst_tokens, []
    if polled:
        num_recv_tokens, *per_expert = _wait_counters(memory, 1 + num_experts // num_ranks)
    with memory.allocations(order, tokens.x) as empty:
        recv = _empty_outputs(runtime, empty, tokens, num_recv_tokens, num_ranks, shape.num_channels, True)
    _launch_dispatch(
        memory,
        recv,
        tokens,
        counts.is_token_in_rank,
        rank_prefix_matrix,
        channel_prefix_matrix,
        num_recv_tokens,
        num_worst_tokens,
        num_experts // num_ranks,
        config,
        shape,
    )
    handle = DispatchHandle(
        rank_prefix_matrix,
        channel_prefix_matrix,
        recv.recv_channel_prefix_matrix,
        recv.recv_src_idx,
        counts.is_token_in_rank,
        recv.send_head,
        memory.identity,
    )
    return recv, handle, per_expert


def _dispatch_cached(
    memory: NodeMemory, tokens: Tokens, handle: DispatchHandle, config: Config, shape: RingShape, order: Order
) -> DispatchOutputs:
    """Dispatch again along the same routes."""
    runtime, num_recv_tokens = memory.runtime, handle.recv_src_idx.shape[0]
    with memory.allocations(order, tokens.x) as empty:
        recv = _empty_outputs(runtime, empty, tokens, num_recv_tokens, memory.num_ranks, shape.num_channels, False)
    memory.compare_call("dispatch", lambda: _must_be_alike(runtime, tokens, None, config))
    runtime.launch(
        memory.comm_stream,
        cached_notify_dispatch,
        1,
        runtime.notify_threads,
        0,
        num_ring_cell_words(shape),
        memory.peers,
        memory.bounds,
    )
    _launch_dispatch(
        memory,
        recv,
        tokens,
        handle.is_token_in_rank,
        handle.rank_prefix_matrix,
        handle.channel_prefix_matrix,
        num_recv_tokens,
        0,
        0,
        config,
        shape,
    )
    return recv


def _launch_dispatch(
    memory: NodeMemory,
    recv: DispatchOutputs,
    tokens: Tokens,
    is_token_in_rank: Array,
    rank_prefix_matrix: Array,
    channel_prefix_matrix: Array,
    num_recv_tokens: int,
    num_worst_tokens: int,
    num_local_experts: int,
    config: Config,
    shape: RingShape,
) -> None:
    runtime, num_ranks = memory.runtime, memory.num_ranks
    num_threads = config.num_threads or runtime.ring_threads(num_ranks)
    token_stride, hidden_stride = (0, 0) if tokens.scales is None else runtime.strides(tokens.scales)
    runtime.launch(
        memory.comm_stream,
        dispatch_kernel,
        config.num_sms,
        num_threads,
        dispatch_smem_bytes(num_threads, runtime.has_tma),
        recv,
        DispatchInputs(*tokens, is_token_in_rank, rank_prefix_matrix, channel_prefix_matrix),
        memory.peers,
        memory.bounds,
        shape,
        DispatchSizes(
            tokens.num_tokens,
            num_recv_tokens,
            num_worst_tokens,
            num_local_experts,
            config.num_max_nvl_chunked_send_tokens,
            token_stride,
            hidden_stride,
            int(runtime.mix_roles if config.mix_roles is None else config.mix_roles),
        ),
    )


def _empty_outputs(
    runtime: Runtime,
    empty: Empty,
    tokens: Tokens,
    num_recv_tokens: int,
    num_ranks: int,
    num_channels: int,
    for_handle: bool,
) -> DispatchOutputs:
    """Arrays for what dispatch writes; None where the input has no such part, or if no handle will be made of it."""

    def empty_like(given: MaybeArray, *shape: int) -> MaybeArray:
        return None if given is None else empty(shape, runtime.dtype_name(given))

    def empty_index(*shape: int) -> MaybeArray:
        return empty(shape, "int32") if for_handle else None

    return DispatchOutputs(
        recv_x=empty_like(tokens.x, num_recv_tokens, tokens.x.shape[1]),
        recv_x_scales=empty_like(tokens.scales, num_recv_tokens, tokens.num_scales),
        recv_src_idx=empty_index(num_recv_tokens),
        recv_topk_idx=empty_like(tokens.topk_idx, num_recv_tokens, tokens.num_topk),
        recv_topk_weights=empty_like(tokens.topk_weights, num_recv_tokens, tokens.num_topk),
        recv_channel_prefix_matrix=empty_index(num_ranks, num_channels),
        send_head=empty_index(tokens.num_tokens, num_ranks),
    )


def _wait_counters(memory: NodeMemory, num_counters: int) -> list[int]:
    """Block the CPU until the first num_counters counters have arrived: the total, then one for each local expert."""
    counters = memory.counters[:num_counters]

    def arrived() -> bool:
        return bool((counters >= 0).all())

    # The kernel's own waits are over first, and say more.
    timeout_ns = int(2 * memory.timeout_ms * 1e6)
    memory.runtime.wait_until(
        lambda: memory.has_fault or arrived(), lambda: "moe_recv_counter: the counts of received tokens", timeout_ns
    )
    memory.check_faults()
    if not arrived():
        raise RuntimeError(
            f"rank {memory.rank}: the counts of received tokens did not arrive in {timeout_ns / 1e6:g} ms"
        )
    return [int(count) for count in counters]


def _pair(recv_x: Array, recv_x_scales: MaybeArray) -> Any:
    return recv_x if recv_x_scales is None else (recv_x, recv_x_scales)
