"""Buffer.combine inside a node: bring tokens back to their source ranks and add them up.

Source: DeepEP csrc/deep_ep.cpp, Buffer::intranode_combine
"""

from __future__ import annotations

from typing import Any

from nbep.device.kernels.intranode.cached_notify_combine import cached_notify_combine
from nbep.device.kernels.intranode.combine import CombineInputs, CombineOutputs, CombineSizes, combine_smem_bytes
from nbep.device.kernels.intranode.combine import combine as combine_kernel
from nbep.device.layout.intranode import num_ring_cell_words
from nbep.host import validate
from nbep.host.calls import combine_call
from nbep.host.config import COMBINE_TABLE, Config, fit_config, table_config, zero_copy_config
from nbep.host.events import EventOverlap
from nbep.host.intranode.direct_combine import combine_direct
from nbep.host.runtime.base import Array, MaybeArray
from nbep.host.symmetric import NodeMemory, Order
from nbep.host.tokens import check_combine_inputs

MIN_THREADS = 64  # one warp coordinates, the others receive


def combine(
    memory: NodeMemory,
    x: Array,
    handle: Any,
    topk_weights: MaybeArray,
    bias: Any,
    config: Config | None,
    previous_event: EventOverlap | None,
    async_finish: bool,
    allocate_on_comm_stream: bool,
    zero_copy: bool = False,
) -> tuple[Array, MaybeArray, EventOverlap]:
    """See Buffer.combine."""
    runtime, num_ranks = memory.runtime, memory.num_ranks
    memory.check_faults()
    validate.stream_options(previous_event, async_finish, allocate_on_comm_stream)
    handle = validate.handle(memory, handle, previous_event)
    num_tokens, num_combined_tokens = handle.recv_src_idx.shape[0], handle.send_head.shape[0]
    given = check_combine_inputs(runtime, x, topk_weights, bias, num_tokens, num_combined_tokens)
    hidden, num_topk = x.shape[1], given.num_topk
    token_sizes = (given.hidden_bytes, num_topk, 0, 0)
    num_sms = 2 * handle.channel_prefix_matrix.shape[1]
    if config is None and zero_copy:
        config = zero_copy_config(num_sms)
    elif config is None:
        config = fit_config(
            table_config(COMBINE_TABLE, num_sms, num_ranks),
            memory.num_nvl_bytes,
            num_ranks,
            *token_sizes,
        )
    validate.config(config, num_ranks, MIN_THREADS)
    validate.handle_config(handle, config)
    order = Order(previous_event, allocate_on_comm_stream)
    if zero_copy:
        validate.num_push_sms(config)
        outputs = combine_direct(memory, x, handle, topk_weights, given, config, order)
        return *outputs, memory.finish(async_finish)
    shape = config.ring_shape(num_ranks, *token_sizes)
    validate.buffer_size(shape, memory.num_nvl_bytes)

    with memory.allocations(order, x) as empty:
        combined_x = empty((num_combined_tokens, hidden), "bfloat16")
        combined_topk_weights: MaybeArray = None
        if topk_weights is not None:
            combined_topk_weights = empty((num_combined_tokens, num_topk), "float32")
    call = combine_call(hidden, num_topk, config)
    memory.compare(call)
    num_threads = config.num_threads or max(MIN_THREADS, runtime.ring_threads(num_ranks))

    memory.ring_shape = shape
    runtime.launch(
        memory.comm_stream,
        cached_notify_combine,
        1 + shape.num_channels,
        max(runtime.notify_threads, 32 * num_ranks),
        0,
        handle.send_head,
        num_combined_tokens,
        shape.num_channels,
        num_ring_cell_words(shape),
        memory.peers,
        memory.bounds,
        call,
    )
    runtime.launch(
        memory.comm_stream,
        combine_kernel,
        config.num_sms,
        num_threads,
        combine_smem_bytes(num_threads),
        CombineOutputs(combined_x, combined_topk_weights),
        CombineInputs(
            x,
            topk_weights,
            given.bias_0,
            given.bias_1,
            handle.rank_prefix_matrix,
            handle.recv_channel_prefix_matrix,
            handle.send_head,
        ),
        memory.peers,
        memory.bounds,
        shape,
        CombineSizes(num_combined_tokens, config.num_max_nvl_chunked_send_tokens),
    )
    return combined_x, combined_topk_weights, memory.finish(async_finish)
