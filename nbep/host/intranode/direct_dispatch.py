"""Buffer.dispatch inside a node with zero_copy: the outputs lie in the symmetric memory, and peers write them.

counts given:   notify_dispatch --counters--> CPU sizes the outputs --> direct_dispatch
                number_tokens -------------------------------------->
handle given:   cached_notify_dispatch ----------------------------> direct_dispatch
"""

from __future__ import annotations

from typing import NamedTuple

from nbep.device.kernels.intranode.direct_dispatch import (
    DirectInputs,
    DirectOutputs,
    DirectSizes,
    direct_dispatch_smem_bytes,
)
from nbep.device.kernels.intranode.direct_dispatch import direct_dispatch as dispatch_kernel
from nbep.device.kernels.intranode.number_tokens import number_tokens
from nbep.device.layout.direct import CELL_WORDS, DirectShape, HalfPlaces
from nbep.host import validate
from nbep.host.calls import dispatch_call
from nbep.host.config import Config
from nbep.host.intranode.direct import DirectMemory
from nbep.host.intranode.handle import DispatchHandle
from nbep.host.intranode.notify import exchange_counts
from nbep.host.node import Node, Order
from nbep.host.target.base import Array, MaybeArray
from nbep.host.target.lent import Lease
from nbep.host.tokens import Counts, Tokens, wait_counters


class Received(NamedTuple):
    """What comes out, all in the symmetric memory; None where the input has no such part."""

    recv_x: Array
    recv_x_scales: MaybeArray
    recv_topk_idx: MaybeArray
    recv_topk_weights: MaybeArray
    recv_src_idx: MaybeArray


def dispatch_counted(
    memory: Node,
    tokens: Tokens,
    counts: Counts,
    expert_alignment: int,
    num_worst_tokens: int,
    config: Config,
    order: Order,
) -> tuple[Received, DispatchHandle, list[int]]:
    """Exchange the counts, wait for the totals unless num_worst_tokens is given, then dispatch."""
    runtime, num_ranks, direct = memory.runtime, memory.num_ranks, validate.zero_copy(memory)
    num_channels = config.num_channels
    num_experts = counts.num_tokens_per_expert.shape[0]
    shape = DirectShape(num_channels, tokens.hidden_bytes, tokens.num_topk, tokens.num_scales, 1)
    places = direct.place_halves(shape)[direct.next_half]
    if num_worst_tokens > places.num_rows:
        allowed = f"at most {places.num_rows} with zero_copy: num_zero_copy_bytes was {direct.num_bytes}"
        validate.refuse("num_worst_tokens", num_worst_tokens, allowed)
    with memory.allocations(order, tokens.x) as empty:
        rank_prefix_matrix = empty((num_ranks, num_ranks), "int32")
        channel_prefix_matrix = empty((num_ranks, num_channels), "int32")
        recv_channel_prefix_matrix = empty((num_ranks, num_channels), "int32")
        send_head = empty((tokens.num_tokens, num_ranks), "int32")
    call = dispatch_call(memory, tokens, num_experts, config, zero_copy=True)
    memory.compare(call)
    lease = direct.begin_dispatch(places, shape)
    polled = num_worst_tokens == 0
    exchange_counts(
        memory,
        direct.peers,
        CELL_WORDS,
        counts,
        expert_alignment,
        polled,
        rank_prefix_matrix,
        channel_prefix_matrix,
        call,
    )
    runtime.launch(
        memory.comm_stream,
        number_tokens,
        num_channels,
        min(256, 32 * num_ranks),
        0,
        send_head,
        counts.is_token_in_rank,
        tokens.num_tokens,
        num_channels,
        num_ranks,
    )
    num_recv_tokens = num_worst_tokens
    per_expert: list[int] = []
    if polled:
        num_recv_tokens, per_expert, _ = wait_counters(memory, num_experts // num_ranks)
        num_recv_tokens = min(num_recv_tokens, places.num_rows)  # the kernel reports it if they are too few
    recv = _received(memory, direct, tokens, places, num_recv_tokens, True, lease)
    handle = DispatchHandle(
        rank_prefix_matrix,
        channel_prefix_matrix,
        recv_channel_prefix_matrix,
        recv.recv_src_idx,
        counts.is_token_in_rank,
        send_head,
    ).owned_by(memory.identity)
    _launch_dispatch(
        memory,
        direct,
        tokens,
        handle,
        recv_channel_prefix_matrix,
        places,
        shape,
        DirectSizes(
            tokens.num_tokens,
            num_recv_tokens,
            num_worst_tokens,
            num_experts // num_ranks,
            *_scale_strides(memory, tokens),
        ),
        config,
    )
    return recv, handle, per_expert


def _launch_dispatch(
    memory: Node,
    direct: DirectMemory,
    tokens: Tokens,
    handle: DispatchHandle,
    recv_channel_prefix_matrix: MaybeArray,
    places: HalfPlaces,
    shape: DirectShape,
    sizes: DirectSizes,
    config: Config,
) -> None:
    runtime = memory.runtime
    num_threads = config.num_threads or runtime.ring_threads(memory.num_ranks)
    runtime.launch(
        memory.comm_stream,
        dispatch_kernel,
        config.num_sms,
        num_threads,
        direct_dispatch_smem_bytes(num_threads, runtime.has_tma),
        DirectOutputs(recv_channel_prefix_matrix),
        DirectInputs(*tokens, handle.send_head, handle.rank_prefix_matrix, handle.channel_prefix_matrix),
        direct.peers,
        memory.bounds,
        places,
        shape,
        sizes,
    )


def _scale_strides(memory: Node, tokens: Tokens) -> tuple[int, int]:
    if tokens.scales is None:
        return 0, 0
    token_stride, hidden_stride = memory.runtime.strides(tokens.scales)
    return token_stride, hidden_stride


def _received(
    memory: Node,
    direct: DirectMemory,
    tokens: Tokens,
    places: HalfPlaces,
    num_recv_tokens: int,
    for_handle: bool,
    lease: Lease,
) -> Received:
    """The arrays of a half that the caller gets."""
    runtime = memory.runtime

    def like(given: MaybeArray, place: int, *size: int) -> MaybeArray:
        if given is None:
            return None
        dtype = runtime.dtype_name(given)
        return direct.array(place, places.num_rows, (num_recv_tokens, *size), dtype, given, lease)

    src_idx = None
    if for_handle:
        src_idx = direct.array(places.src_idx, places.num_rows, (num_recv_tokens,), "int32", tokens.x, lease)
    return Received(
        like(tokens.x, places.x, tokens.x.shape[1]),
        like(tokens.scales, places.scales, tokens.num_scales),
        like(tokens.topk_idx, places.topk_idx, tokens.num_topk),
        like(tokens.topk_weights, places.topk_weights, tokens.num_topk),
        src_idx,
    )
