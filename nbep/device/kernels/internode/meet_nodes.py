"""Ranks of different nodes wait for each other and compare what they call: the digest of a call travels in its arrival.

(n, l):  arrived[n] += ONE + digest of its call, at every (d, l)
(d, l):  called = the sum of what its own calls have added so far

arrived[n] - called  says to (d, l)
-ONE or less         (n, l) has not come
0                    it has come, with the same call
ONE or more          it has come, and is one notify ahead: in this one its call was the same
any other            it has come, with another call: each tells the other its words, and reports the first that differs

cell            written by        with              read by                 with
arrived[n]      (n, l)            amo_add           block 0, thread n       ld_acquire_sys
call[n, i]      (n, l)            amo_add (1)       block 0, thread n       ld_relaxed_sys, until it is not 0
relayed[k]      (d, l)            st_weak (2)       (d, k), or its host     see protocols.calls
called          block 0           (the kernel)      (next notify)           -

(1) A word and 1 more, to a cell that was 0: each says itself that it has come. Only where calls differ, and once.
(2) A rank is told of a call that differs by those of its node and of its place. Those of its place hand it on, and so
    all ranks are told: where the nodes meet before the ranks of a node do, in the same kernel; where both meet at the
    same time, by the host, when a later wait is over time.
"""

import nbep.device.primitives as ptx
from nbep.device.jit import device_function
from nbep.device.layout.internode import arrived_offset, call_offset
from nbep.device.layout.intranode import CALL_BYTES, RELAYED_WORDS
from nbep.device.network.seam import amo_add, own_ptr
from nbep.device.protocols.calls import TOLD_WORDS, report_difference, tell_call
from nbep.device.protocols.peers import barrier_signals_of
from nbep.device.protocols.totals import wait_arrived
from nbep.device.protocols.waits import ONE, has_timed_out, wait_node_call


@device_function
def tell_node(network, cells, num_rdma_ranks, own, peer, call):
    """Add this rank's words, each and 1 more, to those that a rank of another node has of it; one thread."""
    row = call_offset(cells, num_rdma_ranks, own)
    amo_add(network, row, call.verb + 1, peer, 0, False)
    amo_add(network, row + 4, call.handle + 1, peer, 0, False)
    amo_add(network, row + 8, call.zero_copy + 1, peer, 0, False)
    amo_add(network, row + 12, call.dtype + 1, peer, 0, False)
    amo_add(network, row + 16, call.hidden + 1, peer, 0, False)
    amo_add(network, row + 20, call.scales + 1, peer, 0, False)
    amo_add(network, row + 24, call.num_topk + 1, peer, 0, False)
    amo_add(network, row + 28, call.num_experts + 1, peer, 0, False)
    amo_add(network, row + 32, call.num_sms + 1, peer, 0, False)
    amo_add(network, row + 36, call.chunk + 1, peer, 0, False)
    amo_add(network, row + 40, call.slots + 1, peer, 0, False)
    amo_add(network, row + 44, call.rdma_chunk + 1, peer, 0, False)
    amo_add(network, row + 48, call.rdma_slots + 1, peer, 0, False)
    amo_add(network, row + 52, call.rank + 1, peer, 0, False)


@device_function
def wait_node(network, peers, bounds, cells, call, called):
    """Thread n waits for (n, own place). Returns whether that rank has come with another call."""
    num_rdma_ranks = ptx.u32_div(network.num_ranks, peers.num_ranks)
    node = ptx.thread_idx()
    is_other = False
    if node < num_rdma_ranks:
        cell = own_ptr(network, arrived_offset(cells, node))
        ahead = wait_arrived(cell, ptx.s32(called + call.signal), bounds, node * peers.num_ranks + peers.rank)
        is_other = ahead != 0 and ahead < ONE
    return is_other


@device_function
def ask_node(network, peers, bounds, cells, call, is_other):
    """Exchange words with a rank that has come with another call. Returns whether its words are here."""
    told = is_other
    if is_other:
        num_rdma_ranks = ptx.u32_div(network.num_ranks, peers.num_ranks)
        node = ptx.thread_idx()
        peer = node * peers.num_ranks + peers.rank
        tell_node(network, cells, num_rdma_ranks, ptx.u32_div(network.rank, peers.num_ranks), peer, call)
        row = own_ptr(network, call_offset(cells, num_rdma_ranks, node))
        for i in range(TOLD_WORDS):
            if not wait_node_call(row + 4 * i, bounds, peer):
                told = False
    return told


@device_function
def report_node(network, peers, bounds, cells, call, told):
    """Report what a rank of another node has called, if its words are here."""
    if told and not has_timed_out(bounds):
        num_rdma_ranks = ptx.u32_div(network.num_ranks, peers.num_ranks)
        report_difference(call, own_ptr(network, call_offset(cells, num_rdma_ranks, ptx.thread_idx())), bounds)


@device_function
def meet_nodes(network, peers, bounds, cells, call, called):
    """Wait for the ranks of other nodes. Returns to all threads whether all that have come call the same."""
    is_other = wait_node(network, peers, bounds, cells, call, called)
    is_same = ptx.bar_red_and(0, ptx.block_dim(), not is_other)
    if not is_same:
        told = ask_node(network, peers, bounds, cells, call, is_other)
        ptx.syncthreads()  # a report ends all waits that have not begun
        report_node(network, peers, bounds, cells, call, told)
        ptx.syncthreads()
    return is_same


@device_function
def relay_call(network, peers, cells, call, is_same):
    """Write a call that another node's rank has told where the peers of this node read it, and the own one behind it.

    All threads of the block call it. is_same: whether this thread's peer calls the same as this rank, for all that is
    known; else both have told each other. Returns whether there is a call to pass on.
    """
    num_rdma_ranks = ptx.u32_div(network.num_ranks, peers.num_ranks)
    found = -1
    for node in range(num_rdma_ranks):
        if ptx.ld_relaxed_sys_s32(own_ptr(network, call_offset(cells, num_rdma_ranks, node))) != 0:
            found = node
    peer = ptx.thread_idx()
    if found >= 0 and peer < peers.num_ranks and is_same:
        row = own_ptr(network, call_offset(cells, num_rdma_ranks, found))
        relayed = barrier_signals_of(peers, peer) + RELAYED_WORDS + CALL_BYTES * peers.rank
        for i in range(TOLD_WORDS):
            ptx.st_weak_s32(relayed + 4 * i, ptx.ld_relaxed_sys_s32(row + 4 * i))
        tell_call(call, peers, peer)
    return found >= 0
