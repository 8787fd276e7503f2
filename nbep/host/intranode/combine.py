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
from nbep.host.call_log import Arguments
from nbep.host.config import COMBINE_TABLE, Config, fit_config, table_config
from nbep.host.events import EventOverlap
from nbep.host.runtime.base import Array, MaybeArray
from nbep.host.symmetric import NodeMemory, Order

BF16_BYTES = 2
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
) -> tuple[Array, MaybeArray, EventOverlap]:
    """See Buffer.combine."""
    runtime, num_ranks = memory.runtime, memory.num_ranks
    memory.check_faults()
    validate.stream_options(previous_event, async_finish, allocate_on_comm_stream)
    handle = validate.handle(memory, handle)
    num_tokens, num_combined_tokens = handle.recv_src_idx.shape[0], handle.send_head.shape[0]
    validate.array(runtime, "x", x, "bfloat16", (num_tokens, "hidden"))
    hidden = x.shape[1]
    validate.hidden_size("x", hidden, 8)
    validate.row_alignment(runtime, "x", x)
    num_topk = 0
    if topk_weights is not None:
        validate.array(runtime, "topk_weights", topk_weights, "float32", (num_tokens, "num_topk"))
        num_topk = topk_weights.shape[1]
        validate.topk_size("topk_weights", num_topk)
    bias_0, bias_1 = unpack_bias(bias)
    for name, value in (("bias_0", bias_0), ("bias_1", bias_1)):
        if value is not None:
            validate.array(runtime, name, value, "bfloat16", (num_combined_tokens, hidden))
            validate.row_alignment(runtime, name, value)
    token_sizes = (hidden * BF16_BYTES, num_topk, 0, 0)
    if config is None:
        num_sms = 2 * handle.channel_prefix_matrix.shape[1]
        config = fit_config(
            table_config(COMBINE_TABLE, num_sms, num_ranks),
            memory.num_nvl_bytes,
            num_ranks,
            *token_sizes,
        )
    validate.config(config, num_ranks, MIN_THREADS)
    validate.handle_config(handle, config)
    shape = config.ring_shape(num_ranks, *token_sizes)
    validate.buffer_size(shape, memory.num_nvl_bytes)

    with memory.allocations(Order(previous_event, allocate_on_comm_stream), x) as empty:
        combined_x = empty((num_combined_tokens, hidden), "bfloat16")
        combined_topk_weights: MaybeArray = None
        if topk_weights is not None:
            combined_topk_weights = empty((num_combined_tokens, num_topk), "float32")
    memory.compare_call("combine", lambda: _must_be_alike(hidden, num_topk, config))
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
            bias_0,
            bias_1,
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


def unpack_bias(bias: Any) -> tuple[MaybeArray, MaybeArray]:
    """No bias, one, or a tuple of two."""
    if not isinstance(bias, tuple):
        return bias, None
    if len(bias) != 2:
        raise ValueError(f"bias: got a tuple of {len(bias)}; must be an array, a tuple of two, or None")
    return bias


def _must_be_alike(hidden: int, num_topk: int, config: Config) -> Arguments:
    """What peers read out of this rank's rings, and how they take part in its barriers; see Buffer.combine."""
    return {
        "hidden size of x": hidden,
        "topk_weights": f"{num_topk} choices a token" if num_topk else None,
        "config.num_sms": config.num_sms,
        "config.num_max_nvl_chunked_recv_tokens": config.num_max_nvl_chunked_recv_tokens,
    }
