"""Meet combine: what a combine between nodes begins with, and what comes between its sums and theirs at other nodes.

 begin    all ranks meet: before that no rank pushes or sends
 end      all ranks meet behind what they have pushed and sent; landed = 1; next_token = 0

 cell                written by    with                       read by       with
 arrived[s]          rank s        amo_add                    thread s      ld_acquire_sys, see meet_nodes
 called              thread 0      st_weak                    all threads   ld_weak
 landed, next_token  the owner     st_weak                    (combine)     -

At the beginning nothing lands (no chunks), and so at a barrier of an `ElasticBuffer`. No rank resets landed: who adds
up comes behind the end, where all is here.

Source: DeepEP csrc/kernels/elastic/combine.hpp
Break it: records/faults.md, `elastic.meet_combine.elastic_meet_combine: meet_ranks`: race
"""

import nbep.device.primitives as ptx
from nbep.device.jit import kernel
from nbep.device.kernels.elastic.meet_dispatch import meet_ranks
from nbep.device.kernels.parts.calls import Call
from nbep.device.layout.elastic import NEXT_TOKEN, ElasticNodes, landed_cell
from nbep.device.network.seam import Network, own_ptr
from nbep.device.protocols.peers import Bounds
from nbep.device.protocols.waits import has_fault
from nbep.device.types import I32


@kernel(max_threads=128)
def elastic_meet_combine(num_chunks: I32, network: Network, bounds: Bounds, nodes: ElasticNodes, call: Call):
    """Grid: 1 block. Block: 128 threads, or any multiple of 32. num_chunks: that land, of each rank"""
    buffer = own_ptr(network, 0)
    if ptx.thread_idx() == 0:
        ptx.st_weak_s32(buffer + NEXT_TOKEN, 0)
    if meet_ranks(network, bounds, nodes, call, not has_fault(bounds)):
        for rank in range(network.num_ranks):
            for chunk in range(ptx.thread_idx(), num_chunks, ptx.block_dim()):
                ptx.st_weak_s32(buffer + landed_cell(rank, chunk), 1)
