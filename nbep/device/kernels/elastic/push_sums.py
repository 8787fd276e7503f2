"""Push sums: what elastic_combine begins with, by itself. Between nodes a sum lies in an outbox until it is sent.

 rank d: x[i], or the sum of its rows --all warps--> slot (place, t) at a rank of the node, or of the outbox of a rank

 cells: see combine.py

Source: DeepEP deep_ep/include/deep_ep/impls/combine.cuh
Break it: records/faults.md, `staged_sums.list_row: syncwarp`: memory check
"""

import nbep.device.primitives as ptx
from nbep.device.jit import kernel
from nbep.device.kernels.elastic.combine import ElasticCombineSizes, ElasticRows, open_context, push_tokens
from nbep.device.kernels.parts.staged_sums import open_sum_stage
from nbep.device.layout.elastic import THREADS_BEFORE_SM90, ElasticNodes, ElasticSlots
from nbep.device.protocols.peers import Bounds, Peers
from nbep.device.protocols.waits import has_fault


@kernel(max_threads=768, max_threads_before_sm90=THREADS_BEFORE_SM90)
def elastic_push_sums(
    inputs: ElasticRows,
    peers: Peers,
    bounds: Bounds,
    shape: ElasticSlots,
    nodes: ElasticNodes,
    sizes: ElasticCombineSizes,
):
    """Grid: any. Block: a multiple of 32. Shared memory: `sums_smem_bytes`."""
    ctx = open_context(peers, bounds, shape, nodes, sizes)
    stage = open_sum_stage(ctx.team.num_warps, ctx.team.warp, ctx.team.lane)
    if ptx.vote_all(ptx.FULL_MASK, not has_fault(bounds)):
        push_tokens(ctx, inputs, stage)
