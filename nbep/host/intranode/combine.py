"""Buffer.combine inside a node: bring tokens back to their source ranks and add them up.

 cached_notify_combine --> combine, or without rings cached_notify_dispatch --> direct_combine

Source: DeepEP csrc/deep_ep.cpp, Buffer::intranode_combine
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nbep.device.kernels.intranode.cached_notify_combine import cached_notify_combine
from nbep.device.kernels.intranode.combine import CombineSizes, combine_smem_bytes
from nbep.device.kernels.intranode.combine import combine as combine_kernel
from nbep.device.kernels.intranode.direct_combine import DirectCombineSizes, direct_combine_smem_bytes
from nbep.device.kernels.intranode.direct_combine import direct_combine as direct_kernel
from nbep.device.kernels.parts.calls import Call
from nbep.device.layout.direct import CELL_WORDS, SlotShape, num_landed_words
from nbep.device.layout.intranode import RingShape, num_ring_cell_words
from nbep.host.arguments import refuse
from nbep.host.block_sizes import block_sizes
from nbep.host.calls import combine_call
from nbep.host.config import COMBINE_TABLE, Config
from nbep.host.events import EventOverlap
from nbep.host.intranode import checks
from nbep.host.intranode.handle import DispatchHandle
from nbep.host.intranode.notify import prepare_reset
from nbep.host.node import Node
from nbep.host.plans import Plan
from nbep.host.request import CombineRequest
from nbep.host.target.base import Array, MaybeArray, PreparedLaunch
from nbep.host.tokens import CombineGiven

MIN_THREADS = 64  # one warp coordinates, the others receive


def launch(
    memory: Node, plan: Plan, arguments: Sequence[Any], request: CombineRequest, handle: DispatchHandle
) -> tuple[Array, MaybeArray, EventOverlap]:
    """Meet the other ranks, then combine."""
    of_ranks, of_channels, of_recv_channels, _, _, send_head = handle.taken(memory.runtime).arguments
    outputs, of_outputs = memory.allocate(request, plan.make)
    memory.compare(plan.call, handle)
    stream = memory.stream
    if request.zero_copy:
        checks.direct_of(memory).begin_combine(*plan.shape)
        plan.notify.launch(stream)
    else:
        memory.ring_shape = plan.shape
        plan.notify.launch(stream, (send_head,), (handle,))
        of_channels = of_recv_channels
    first = *of_outputs, *arguments, of_ranks, of_channels, send_head
    plan.launch.launch(stream, first, (request, outputs, handle))
    return outputs[0], outputs[1], memory.finish(request.async_finish)


def make_plan(memory: Node, request: CombineRequest, given: CombineGiven, handle: DispatchHandle) -> Plan:
    """Choose the rings and prepare the launches, for arguments that are checked."""
    runtime, zero_copy, num_combined_tokens = memory.runtime, request.zero_copy, given.num_combined_tokens
    hidden, num_topk, num_sms = given.hidden, given.num_topk, 2 * handle.num_channels
    of_call = request.config, COMBINE_TABLE, num_sms, (given.hidden_bytes, num_topk, 0, 0), MIN_THREADS, True, zero_copy
    config, rings = checks.rings(memory, *of_call)
    call = combine_call(memory, hidden, num_topk, config, handle, zero_copy=zero_copy)
    prepare = _prepare_direct if zero_copy else _prepare
    notify, launch, shape = prepare(memory, num_combined_tokens, config, rings, call)
    weights = ((num_combined_tokens, num_topk), "float32") if num_topk > 0 else None
    outputs = ((num_combined_tokens, hidden), "bfloat16"), weights
    return Plan(runtime.prepare_empty(outputs, given.x.array), notify, launch, shape, call)


def _prepare(
    memory: Node, num_combined_tokens: int, config: Config, shape: RingShape, call: Call
) -> tuple[PreparedLaunch, PreparedLaunch, Any]:
    """Both launches, and the shape of a plan."""
    runtime, num_ranks = memory.runtime, memory.num_ranks
    num_threads = config.num_threads or max(MIN_THREADS, block_sizes(runtime).ring(num_ranks))
    notify = runtime.prepare(
        memory.kernel(cached_notify_combine),
        1 + shape.num_channels,
        max(block_sizes(runtime).notify, 32 * num_ranks),
        0,
        num_combined_tokens,
        shape.num_channels,
        num_ring_cell_words(shape),
        memory.peers,
        memory.bounds,
        call,
    )
    combine = runtime.prepare(
        combine_kernel,
        config.num_sms,
        num_threads,
        combine_smem_bytes(num_threads),
        memory.peers,
        memory.bounds,
        shape,
        CombineSizes(num_combined_tokens, config.num_max_nvl_chunked_send_tokens),
    )
    return notify, combine, shape


def _prepare_direct(
    memory: Node, num_combined_tokens: int, config: Config, rings: RingShape, call: Call
) -> tuple[PreparedLaunch, PreparedLaunch, Any]:
    """Without rings. rings: those that there would be"""
    runtime, num_ranks, direct = memory.runtime, memory.num_ranks, checks.direct_of(memory)
    chunk = config.num_max_nvl_chunked_send_tokens
    shape = SlotShape(num_ranks, config.num_channels, rings.hidden_bytes, rings.num_topk, chunk)
    places = direct.place_slots(shape, num_combined_tokens)
    num_words = CELL_WORDS + num_landed_words(num_combined_tokens * (num_ranks - 1), num_ranks, chunk)
    num_threads = config.num_threads or block_sizes(runtime).ring(num_ranks)
    num_warps = num_threads // 32
    if config.num_push_warps is not None and config.num_push_warps > num_warps:
        refuse("config.num_push_warps", config.num_push_warps, f"at most the warps of a block, {num_warps}")
    # Enough begin as senders to fill the way out of an SM, the others keep its way in busy.
    num_push_warps = config.num_push_warps or max(1, num_warps // (3 if config.num_sms <= 12 else 2))
    combine = runtime.prepare(
        direct_kernel,
        config.num_sms,
        num_threads,
        direct_combine_smem_bytes(num_threads, runtime.has_tma),
        direct.peers,
        memory.bounds,
        places,
        shape,
        DirectCombineSizes(num_combined_tokens, num_push_warps),
    )
    return prepare_reset(memory, direct.peers, num_words, call), combine, (places, shape)
