"""Buffer.combine between nodes: bring tokens back to their source ranks, and add them up in each node and there.

Source: DeepEP csrc/deep_ep.cpp, Buffer::internode_combine
"""

from __future__ import annotations

from nbep.device.kernels.internode.combine import InternodeCombineSizes, combine_smem_bytes
from nbep.host.calls import combine_call
from nbep.host.config import COMBINE_TABLE, Config
from nbep.host.events import EventOverlap
from nbep.host.internode import checks
from nbep.host.internode.dispatch import prepare_cached_notify
from nbep.host.internode.handle import InternodeHandle
from nbep.host.internode.rdma_buffer_turns import check_turn, take_turn
from nbep.host.internode.rings import Rings, combine_rings
from nbep.host.node import Node
from nbep.host.plans import Plan, find_combine
from nbep.host.request import CombineRequest
from nbep.host.target.base import Array, MaybeArray
from nbep.host.tokens import check_combine_inputs


def combine(memory: Node, request: CombineRequest) -> tuple[Array, MaybeArray, EventOverlap]:
    """See Buffer.combine."""
    mode, handle, given = checks.mode_of(memory), request.handle, request.arrays
    check_turn(memory, "combine")
    key, plan, arguments = find_combine(memory, handle, InternodeHandle, given, (request.config,))
    if plan is None:
        handle = checks.handle(memory, handle, request.previous_event)
        plan = _make_plan(memory, request, handle)
        memory.combine_plans.keep(key, plan)
    (_, prefix, _, recv_prefix, recv_sum, *of_gbl, _, rdma_head, nvl_head), _, numbers = handle.taken(memory.runtime)
    outputs, of_outputs = memory.allocate(request, request.x, plan.make)
    memory.compare(plan.call, handle)
    take_turn(memory, "combine")
    memory.ring_shape, mode.rdma.shape = plan.shape.nvl, plan.shape.rdma
    heads = rdma_head, nvl_head, recv_prefix, recv_sum
    plan.notify.launch(memory.stream, heads, (handle,), numbers[1:])
    first = *of_outputs, *arguments, rdma_head, nvl_head, prefix, recv_prefix, recv_sum, *of_gbl
    plan.launch.launch(memory.stream, first, (given, outputs, handle))
    return outputs[0], outputs[1], memory.finish(request.async_finish)


def _make_plan(memory: Node, request: CombineRequest, handle: InternodeHandle) -> Plan:
    """Check what does not change, and prepare both launches."""
    runtime, mode, num_sms = memory.runtime, checks.mode_of(memory), 2 * handle.num_channels
    num_tokens, num_combined_tokens = handle.recv_src_meta.shape[0], handle.send_rdma_head.shape[0]
    given = check_combine_inputs(memory, request, handle, num_tokens, num_combined_tokens)

    def rings_of(config: Config) -> Rings:
        return combine_rings(config, mode.num_rdma_ranks, mode.num_nvl_ranks, given.hidden_bytes, given.num_topk)

    of_kernel = mode.most_combine_warps, mode.num_rdma_ranks
    config, rings = checks.rings(memory, request.config, COMBINE_TABLE, num_sms, rings_of, True, *of_kernel)
    call = combine_call(memory, given.hidden, given.num_topk, config, handle, between_nodes=True)
    num_warps = mode.num_warps(config.num_threads, mode.most_combine_warps)
    launch = runtime.prepare(
        mode.kernel(mode.combine_kernel),
        config.num_sms,
        32 * num_warps,
        combine_smem_bytes(32 * num_warps),
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
    weights = ((num_combined_tokens, given.num_topk), "float32") if given.num_topk > 0 else None
    outputs = ((num_combined_tokens, given.hidden), "bfloat16"), weights
    notify = prepare_cached_notify(memory, rings, num_combined_tokens, call)
    return Plan(runtime.prepare_empty(outputs, request.x), notify, launch, rings, call)
