"""Buffer.combine inside a node with zero_copy: rows go straight to a place of their own at their source, which adds up.

cached_notify_dispatch: meet the peers --> direct_combine
"""

from __future__ import annotations

from nbep.device.kernels.intranode.direct_combine import (
    DirectCombineInputs,
    DirectCombineOutputs,
    DirectCombineSizes,
    direct_combine_smem_bytes,
)
from nbep.device.kernels.intranode.direct_combine import direct_combine as combine_kernel
from nbep.device.layout.direct import CELL_WORDS, SlotShape, num_landed_words
from nbep.host import validate
from nbep.host.calls import combine_call
from nbep.host.config import Config
from nbep.host.intranode.handle import DispatchHandle
from nbep.host.intranode.notify import reset_cells
from nbep.host.runtime.base import Array, MaybeArray
from nbep.host.symmetric import NodeMemory, Order
from nbep.host.tokens import CombineGiven


def num_push_sms(config: Config) -> int:
    """How many of the SMs begin as pushers: pushing takes an SM longer than adding up what has come."""
    return config.num_push_sms or max(1, config.num_sms * 5 // 8)


def combine_direct(
    memory: NodeMemory,
    x: Array,
    handle: DispatchHandle,
    topk_weights: MaybeArray,
    given: CombineGiven,
    config: Config,
    order: Order,
) -> tuple[Array, MaybeArray]:
    """Of arguments that are checked."""
    runtime, num_ranks, direct = memory.runtime, memory.num_ranks, validate.zero_copy(memory)
    num_tokens, hidden = handle.send_head.shape[0], x.shape[1]
    chunk = config.num_max_nvl_chunked_send_tokens
    shape = SlotShape(num_ranks, config.num_channels, given.hidden_bytes, given.num_topk, chunk)
    places = direct.place_slots(shape, num_tokens)
    with memory.allocations(order, x) as empty:
        combined_x = empty((num_tokens, hidden), "bfloat16")
        combined_topk_weights: MaybeArray = None
        if topk_weights is not None:
            combined_topk_weights = empty((num_tokens, given.num_topk), "float32")
    call = combine_call(hidden, given.num_topk, config, zero_copy=True)
    memory.compare(call)
    direct.begin_combine(places, shape)
    num_words = CELL_WORDS + num_landed_words(num_tokens * (num_ranks - 1), num_ranks, chunk)
    reset_cells(memory, direct.peers, num_words, call)
    num_threads = config.num_threads or runtime.ring_threads(num_ranks)
    runtime.launch(
        memory.comm_stream,
        combine_kernel,
        config.num_sms,
        num_threads,
        direct_combine_smem_bytes(num_threads, runtime.has_tma),
        DirectCombineOutputs(combined_x, combined_topk_weights),
        DirectCombineInputs(
            x,
            topk_weights,
            given.bias_0,
            given.bias_1,
            handle.rank_prefix_matrix,
            handle.channel_prefix_matrix,
            handle.send_head,
        ),
        direct.peers,
        memory.bounds,
        places,
        shape,
        DirectCombineSizes(num_tokens, num_push_sms(config)),
    )
    return combined_x, combined_topk_weights
