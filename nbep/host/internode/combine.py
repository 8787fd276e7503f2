"""Buffer.combine between nodes: bring tokens back to their source ranks, and add them up in each node and there.

Source: DeepEP csrc/deep_ep.cpp, Buffer::internode_combine
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nbep.device.kernels.internode.combine import InternodeCombineSizes, combine_smem_bytes
from nbep.host.config import COMBINE_TABLE, Config, Rings, combine_rings
from nbep.host.events import EventOverlap
from nbep.host.handles import InternodeHandle
from nbep.host.internode import checks
from nbep.host.internode.dispatch import prepare_cached_notify
from nbep.host.low_latency.launch import take_turn
from nbep.host.node import NodeMemory
from nbep.host.normal_checks import CombineGiven, CombineRequest, combine_call
from nbep.host.plans import Plan
from nbep.host.target.base import Array, MaybeArray


def launch(
    memory: NodeMemory, plan: Plan, arguments: Sequence[Any], request: CombineRequest, handle: InternodeHandle
) -> tuple[Array, MaybeArray, EventOverlap]:
    """Meet the other ranks, then combine."""
    mode = checks.mode_of(memory)
    (_, prefix, _, recv_prefix, recv_sum, *of_gbl, _, rdma_head, nvl_head), _, numbers = handle.taken(memory.runtime)
    outputs, of_outputs = memory.allocate(request, plan.make)
    memory.compare(plan.call, handle)
    take_turn(memory, "combine")
    memory.ring_shape, mode.rdma.shape = plan.shape.nvl, plan.shape.rdma
    heads = rdma_head, nvl_head, recv_prefix, recv_sum
    plan.notify.launch(memory.stream, heads, (handle,), numbers[1:])
    first = *of_outputs, *arguments, rdma_head, nvl_head, prefix, recv_prefix, recv_sum, *of_gbl
    plan.launch.launch(memory.stream, first, (request, outputs, handle))
    return outputs[0], outputs[1], memory.finish(request.async_finish)


def make_plan(memory: NodeMemory, request: CombineRequest, given: CombineGiven, handle: InternodeHandle) -> Plan:
    """Choose the rings and prepare both launches, for arguments that are checked."""
    runtime, mode, num_sms = memory.runtime, checks.mode_of(memory), 2 * handle.num_channels
    num_combined_tokens = given.num_combined_tokens

    def rings_of(config: Config) -> Rings:
        return combine_rings(config, mode.num_rdma_ranks, mode.num_nvl_ranks, given.hidden_bytes, given.num_topk)

    of_kernel = mode.most_combine_warps, mode.num_rdma_ranks
    config, rings = checks.rings(memory, request.config, COMBINE_TABLE, num_sms, rings_of, True, *of_kernel)
    call = combine_call(memory, given.hidden, given.num_topk, config, handle, between_nodes=True)
    num_warps = mode.num_warps(config.num_threads, mode.most_combine_warps)
    launch = runtime.prepare(
        mode.rdma.kernel(mode.combine_kernel),
        config.num_sms,
        32 * num_warps,
        combine_smem_bytes(32 * num_warps),
        mode.rdma.network,
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
            mode.rdma.cells,
        ),
    )
    weights = ((num_combined_tokens, given.num_topk), "float32") if given.num_topk > 0 else None
    outputs = ((num_combined_tokens, given.hidden), "bfloat16"), weights
    notify = prepare_cached_notify(memory, rings, num_combined_tokens, call)
    return Plan(runtime.prepare_empty(outputs, given.x.array), launch, notify, rings, call)
