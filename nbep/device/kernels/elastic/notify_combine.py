"""Notify combine: reset the cells of a combine, and meet all ranks. Before that no rank sends, after it no rank
reads what an earlier dispatch has laid out in the same memory.

 landed = 0, next_token = 0; barrier

 cell                written by    with               read by       with
 landed, next_token  the owner     st_weak 0, barrier (combine)     -

Source: DeepEP csrc/kernels/elastic/combine.hpp
Break it: records/faults.md, `elastic.notify_combine.elastic_notify_combine: meet_block`: race
"""

import nbep.device.primitives as ptx
from nbep.device.jit import kernel
from nbep.device.kernels.parts.calls import Call, meet_block
from nbep.device.layout.elastic import NEXT_TOKEN, landed_cell
from nbep.device.protocols.peers import Bounds, Peers, buffer_of
from nbep.device.types import I32


@kernel(max_threads=128)
def elastic_notify_combine(num_chunks: I32, peers: Peers, bounds: Bounds, call: Call):
    """Grid: 1 block. Block: 128 threads, or any multiple of 32. num_chunks: of each rank"""
    buffer = buffer_of(peers, peers.rank)
    for rank in range(peers.num_ranks):
        for chunk in range(ptx.thread_idx(), num_chunks, ptx.block_dim()):
            ptx.st_weak_s32(buffer + landed_cell(rank, chunk), 0)
    if ptx.thread_idx() == 0:
        ptx.st_weak_s32(buffer + NEXT_TOKEN, 0)
    meet_block(peers, bounds, call)
