"""Add sums: what elastic_combine ends with, by itself. Between nodes all that is added up is here when it begins.

 rank s: slots (place, t) --sum over places--> combined_x[t]

 cells: see combine.py; landed says yes for all since elastic_meet_combine, so no warp waits

Source: DeepEP deep_ep/include/deep_ep/impls/combine_reduce_epilogue.cuh
Break it: records/faults.md, `elastic.combine.sum_token: fence_proxy_async_global`: race
"""

from nbep.device.jit import kernel
from nbep.device.kernels.elastic.combine import (
    ElasticCombineSizes,
    ElasticRows,
    ElasticSums,
    open_context,
    receive_tokens,
)
from nbep.device.kernels.parts.staged_sums import open_sum_stage
from nbep.device.layout.elastic import THREADS_BEFORE_SM90, ElasticNodes, ElasticSlots
from nbep.device.protocols.peers import Bounds, Peers


@kernel(max_threads=768, max_threads_before_sm90=THREADS_BEFORE_SM90)
def elastic_add_sums(
    out: ElasticSums,
    inputs: ElasticRows,
    peers: Peers,
    bounds: Bounds,
    shape: ElasticSlots,
    nodes: ElasticNodes,
    sizes: ElasticCombineSizes,
):
    """Grid: any. Block: a multiple of 32. Shared memory: `sums_smem_bytes`."""
    ctx = open_context(peers, bounds, shape, nodes, sizes)
    receive_tokens(ctx, out, inputs, open_sum_stage(ctx.team.num_warps, ctx.team.warp, ctx.team.lane))
