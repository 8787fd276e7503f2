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
from nbep.host.block_sizes import block_sizes
from nbep.host.calls import dispatch_call
from nbep.host.config import Config
from nbep.host.intranode.direct import DirectMemory
from nbep.host.intranode.handle import DispatchHandle
from nbep.host.intranode.notify import Routes, exchange_counts
from nbep.host.node import Node
from nbep.host.request import DispatchRequest
from nbep.host.target.base import Array, MaybeArray
from nbep.host.target.lent import Lease
from nbep.host.target.views import View
from nbep.host.tokens import Tokens, await_counts


class Received(NamedTuple):
    """What comes out, all in the symmetric memory; None where the input has no such part."""

    recv_x: Array
    recv_x_scales: MaybeArray
    recv_topk_idx: MaybeArray
    recv_topk_weights: MaybeArray
    recv_src_idx: MaybeArray


def dispatch_counted(
    memory: Node, tokens: Tokens, request: DispatchRequest, config: Config
) -> tuple[Received, DispatchHandle, list[int]]:
    """Exchange the counts, wait for the totals unless num_worst_tokens is given, then dispatch."""
    runtime, num_ranks, direct = memory.runtime, memory.num_ranks, validate.zero_copy(memory)
    num_channels, num_worst_tokens = config.num_channels, request.num_worst_tokens
    shape = DirectShape(num_channels, *tokens.ring_sizes(1))
    places = direct.place_halves(shape)[direct.next_half]
    if num_worst_tokens > places.num_rows:
        allowed = f"at most {places.num_rows} with zero_copy: num_zero_copy_bytes was {direct.num_bytes}"
        validate.refuse("num_worst_tokens", num_worst_tokens, allowed)
    with memory.allocations(request, tokens.x.array) as empty:
        routes = Routes.of(empty, num_ranks, num_channels, request.is_token_in_rank)
        recv_channel_prefix_matrix = empty((num_ranks, num_channels), "int32")
        send_head = empty((tokens.num_tokens, num_ranks), "int32")
    call = dispatch_call(memory, tokens, request.num_experts, config, zero_copy=True)
    memory.compare(call)
    lease = direct.begin_dispatch(places, shape)
    exchange_counts(memory, direct.peers, CELL_WORDS, request, routes, call)
    runtime.launch(
        memory.stream,
        number_tokens,
        num_channels,
        min(256, 32 * num_ranks),
        0,
        send_head,
        routes.is_token_in_rank,
        tokens.num_tokens,
        num_channels,
        num_ranks,
    )
    num_recv_tokens, per_expert, _ = await_counts(memory, request)
    num_recv_tokens = min(num_recv_tokens, places.num_rows)  # the kernel reports it if they are too few
    recv = _received(direct, tokens, places, num_recv_tokens, lease)
    handle = routes.handle(memory, recv_channel_prefix_matrix, recv.recv_src_idx, send_head)
    num_threads = config.num_threads or block_sizes(runtime).ring(num_ranks)
    sizes = tokens.num_tokens, num_recv_tokens, num_worst_tokens, request.num_experts // num_ranks
    runtime.launch(
        memory.stream,
        dispatch_kernel,
        config.num_sms,
        num_threads,
        direct_dispatch_smem_bytes(num_threads, runtime.has_tma),
        DirectOutputs(recv_channel_prefix_matrix),
        DirectInputs(*tokens.arrays, send_head, routes.rank_prefix_matrix, routes.channel_prefix_matrix),
        direct.peers,
        memory.bounds,
        places,
        shape,
        DirectSizes(*sizes, *tokens.scale_strides),
    )
    return recv, handle, per_expert


def _received(direct: DirectMemory, tokens: Tokens, places: HalfPlaces, num_recv_tokens: int, lease: Lease) -> Received:
    """The arrays of a half that the caller gets."""

    def like(view: View, place: int) -> MaybeArray:
        if not view.is_array:
            return None
        size = num_recv_tokens, view.shape[1]
        return direct.array(place, places.num_rows, size, view.dtype_name, view.array, lease)

    size = (num_recv_tokens,)
    return Received(
        like(tokens.x, places.x),
        like(tokens.scales, places.scales),
        like(tokens.topk_idx, places.topk_idx),
        like(tokens.topk_weights, places.topk_weights),
        direct.array(places.src_idx, places.num_rows, size, "int32", tokens.x.array, lease),
    )
