"""Buffer.combine between nodes: bring tokens back to their source ranks, and add them up in each node and there.

Source: DeepEP csrc/deep_ep.cpp, Buffer::internode_combine
"""

from __future__ import annotations

from nbep.device.kernels.internode.cached_notify import CachedHeads
from nbep.device.kernels.internode.combine import (
    InternodeCombineInputs,
    InternodeCombineOutputs,
    InternodeCombineSizes,
    combine_smem_bytes,
)
from nbep.host import validate
from nbep.host.calls import combine_call
from nbep.host.config import COMBINE_TABLE, Config, fit_rings, nodes_config
from nbep.host.events import EventOverlap
from nbep.host.internode import checks
from nbep.host.internode.dispatch import launch_cached_notify
from nbep.host.internode.rings import Rings, check_chunk, check_rings, combine_rings
from nbep.host.internode.turns import check_turn, take_turn
from nbep.host.node import Node
from nbep.host.request import CombineRequest
from nbep.host.target.base import Array, MaybeArray
from nbep.host.tokens import check_combine_inputs


def combine(memory: Node, request: CombineRequest) -> tuple[Array, MaybeArray, EventOverlap]:
    """See Buffer.combine."""
    runtime, mode, config = memory.runtime, checks.mode_of(memory), request.config
    memory.check_faults()
    check_turn(memory, "combine")
    validate.stream_options(request.previous_event, request.async_finish, request.allocate_on_comm_stream)
    handle = checks.handle(memory, request.handle, request.previous_event)
    num_tokens, num_combined_tokens = handle.recv_src_meta.shape[0], handle.send_rdma_head.shape[0]
    given = check_combine_inputs(memory, request, handle, num_tokens, num_combined_tokens)

    def rings_of(config: Config) -> Rings:
        return combine_rings(config, mode.num_rdma_ranks, mode.num_nvl_ranks, given.hidden_bytes, given.num_topk)

    num_bytes = memory.num_nvl_bytes, mode.rdma.num_rdma_bytes
    if config is None:
        default = nodes_config(COMBINE_TABLE, 2 * handle.num_channels, mode.num_rdma_ranks, mode.num_nvl_ranks)
        config = fit_rings(default, rings_of, *num_bytes, mode.num_rdma_ranks)
    checks.config(memory, config, mode.most_combine_warps)
    checks.handle_config(handle, config)
    rings = rings_of(config)
    check_chunk(config, rings)
    check_rings(rings, *num_bytes)
    mode.rdma.transport.check_message(rings.rdma.hidden_bytes)

    with memory.allocations(request, request.x) as empty:
        combined_x = empty((num_combined_tokens, given.hidden), "bfloat16")
        combined_topk_weights: MaybeArray = None
        if request.topk_weights is not None:
            combined_topk_weights = empty((num_combined_tokens, given.num_topk), "float32")
    call = combine_call(memory, given.hidden, given.num_topk, config, handle, between_nodes=True)
    memory.compare(call, handle)
    take_turn(memory, "combine")
    memory.ring_shape, mode.rdma.shape = rings.nvl, rings.rdma
    heads = CachedHeads(
        handle.send_rdma_head,
        handle.send_nvl_head,
        handle.recv_rdma_channel_prefix_matrix,
        handle.recv_rdma_rank_prefix_sum,
    )
    launch_cached_notify(memory, rings, heads, num_combined_tokens, handle.send_nvl_head.shape[0], call)
    num_warps = mode.num_warps(config.num_threads, mode.most_combine_warps)
    runtime.launch(
        memory.stream,
        mode.kernel(mode.combine_kernel),
        config.num_sms,
        32 * num_warps,
        combine_smem_bytes(32 * num_warps),
        InternodeCombineOutputs(combined_x, combined_topk_weights),
        InternodeCombineInputs(
            request.x,
            request.topk_weights,
            given.bias_0,
            given.bias_1,
            handle.send_rdma_head,
            handle.send_nvl_head,
            handle.rdma_channel_prefix_matrix,
            handle.recv_rdma_channel_prefix_matrix,
            handle.recv_rdma_rank_prefix_sum,
            handle.recv_gbl_channel_prefix_matrix,
            handle.recv_gbl_rank_prefix_sum,
        ),
        mode.network,
        memory.peers,
        mode.progress,
        memory.bounds,
        rings.nvl,
        rings.rdma,
        InternodeCombineSizes(
            num_combined_tokens,
            config.num_max_nvl_chunked_send_tokens,
            config.num_max_rdma_chunked_send_tokens,
            mode.num_rdma_receivers(num_warps),
            mode.cells,
        ),
    )
    return combined_x, combined_topk_weights, memory.finish(request.async_finish)
