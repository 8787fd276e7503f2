"""Meet: the notify kernels between nodes. All ranks meet over the network; before a dispatch each adds up what comes.

 rank s: behind all that it has sent, arrived[s] += its call, at every rank
 rank r: waits for arrived[s] of all s; sums of counts as in notify.py

 cell                        written by      with              read by             with
 arrived[s]                  rank s          amo_add           thread s            ld_acquire_sys, see meet_nodes
 called                      thread 0        st_weak           all threads         ld_weak
 turn                        thread 0        st_weak           all threads         ld_weak
 rank_counts[half, s]        rank s          see send_dispatch.py all threads      ld_na, after the meeting
 expert_counts[half, s]      rank s          see send_dispatch.py all threads      ld_na, after the meeting
 num_unaligned_recv_         thread e        st_weak           all threads         ld_weak, after syncthreads
 psum_ arrays, row_starts    thread e        st_weak           (dispatch)          -
 moe_recv_counter            thread 0        st_relaxed_sys    the CPU             polls until >= 0
 moe_recv_expert_counter[e]  thread e        st_relaxed_sys    the CPU             polls until >= 0
 cumulative_local_expert_    thread e        st_weak           thread e            ld_weak
 landed, next_token          the owner       st_weak           (combine)           -

An arrival goes to a rank on the queue of what was sent to it, and behind that. So who has met a rank has all that it
has sent. It also frees memory: a rank comes to a meeting behind the kernels that read what the others had sent before
the last one. See layout.elastic.

A combine meets twice: before it pushes or sends, when nothing lands (no chunks), as at a barrier of an
`ElasticBuffer`; and behind what ranks have pushed and sent, when landed = 1. No rank resets landed: who adds up comes
behind the second meeting, where all is here.

In hybrid mode a rank reads what came to others of its node, too. So these meet behind the arrivals.

The arrivals, and what is reported where calls differ, are those of kernels.internode.meet_nodes, but that each rank has
a cell of its own at all others, with whose calls it compares its own.

Source: DeepEP deep_ep/include/deep_ep/impls/dispatch.cuh (notify warps); csrc/kernels/elastic/combine.hpp
Break it: records/faults.md, `elastic.meet.meet_ranks: wait_arrived`: race
"""

import nbep.device.primitives as ptx
from nbep.device.jit import device_function, kernel
from nbep.device.kernels.elastic.notify import ElasticCounts, ElasticCountSizes, count_tokens
from nbep.device.kernels.internode.meet_nodes import is_other_call, send_words, wait_arrived
from nbep.device.kernels.parts.calls import Call, report_other, wait_peer
from nbep.device.layout.elastic import CALLED, NEXT_TOKEN, TURN, ElasticNodes, landed_cell, rank_count
from nbep.device.layout.internode import arrived_offset, call_offset
from nbep.device.network.seam import Network, amo_add, own_ptr
from nbep.device.protocols.peers import Bounds, Peers
from nbep.device.protocols.waits import has_fault, has_timed_out
from nbep.device.types import I32


@device_function
def meet_ranks(network, bounds, nodes, call, may_meet):
    """Wait for all ranks; a block. Returns to all threads whether they came, and called the same.

    What a rank has sent before, on the queue of this one, is here then. may_meet: whether this rank has done its part
    """
    ptx.syncthreads()  # thread r speaks for the block
    called = ptx.ld_weak_s32(own_ptr(network, CALLED))
    if ptx.thread_idx() < network.num_ranks and may_meet:
        amo_add(network, arrived_offset(nodes.cells, network.rank), call.signal, ptx.thread_idx(), 0, True)
    is_other = False
    if ptx.thread_idx() < network.num_ranks:
        cell = own_ptr(network, arrived_offset(nodes.cells, ptx.thread_idx()))
        ahead = wait_arrived(cell, ptx.s32(called + call.signal), bounds, ptx.thread_idx())
        is_other = may_meet and is_other_call(ahead)
    is_same = ptx.bar_red_and(0, ptx.block_dim(), not is_other)
    if not is_same:
        send_words(network, call_offset(nodes.cells, network.num_ranks, network.rank), call)
        ptx.syncthreads()  # a report ends all waits that have not begun
        if is_other:
            report_other(bounds, ptx.thread_idx())
    has_met = ptx.bar_red_and(0, ptx.block_dim(), is_same and may_meet and not has_timed_out(bounds))
    if ptx.thread_idx() == 0:
        ptx.st_weak_s32(own_ptr(network, CALLED), ptx.s32(called + call.signal))
    return has_met


@device_function
def sum_local_counts(out, buffer, number, nodes, num_ranks, has_met):
    """Prefix sums of the tokens from the ranks of all nodes that have a local index; thread i those up to index i."""
    index = ptx.thread_idx()
    if out.psum_of_locals != 0 and index < nodes.num_nvl_ranks:
        total = 0
        for src in range(num_ranks if has_met else 0):
            if ptx.u32_mod(src, nodes.num_nvl_ranks) <= index:
                total += ptx.ld_na_s32(buffer + rank_count(number, src))
        ptx.st_weak_s32(out.psum_of_locals + 4 * index, total)


@kernel(max_threads=128)
def elastic_meet_dispatch(
    out: ElasticCounts,
    network: Network,
    of_node: Peers,
    bounds: Bounds,
    nodes: ElasticNodes,
    sizes: ElasticCountSizes,
    call: Call,
):
    """Grid: 1 block. Block: 128 threads, or any multiple of 32."""
    buffer = own_ptr(network, 0)
    number = ptx.ld_weak_s32(buffer + TURN)
    has_met = meet_ranks(network, bounds, nodes, call, not has_timed_out(bounds))
    if nodes.num_sharing > 1:
        is_other = wait_peer(of_node, bounds, call.signal)  # after meet_ranks no rank is
        has_met = ptx.bar_red_and(0, ptx.block_dim(), has_met and not is_other and not has_timed_out(bounds))
    sum_local_counts(out, buffer, number, nodes, network.num_ranks, has_met)
    count_tokens(out, buffer, number, network.num_ranks, sizes, has_met)


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
