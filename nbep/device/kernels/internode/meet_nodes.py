"""Ranks of different nodes wait for each other and compare what they call: the digest of a call travels in its arrival.

(n, l):  arrived[n] += ONE + digest of its call, at every (d, l)
(d, l):  called = the sum of what its own calls have added so far

arrived[n] - called  says to (d, l)
-ONE or less         (n, l) has not come
0                    it has come, with the same call
ONE or more          it has come, and is one notify ahead: in this one its call was the same
any other            it has come, with another call: (d, l) sends its words to all ranks, and reports it

cell            written by        with              read by                 with
arrived[n]      (n, l)            amo_add           block 0, thread n       ld_acquire_sys
call[r, i]      rank r            amo_add (1)       the host                once a kernel has reported
called          block 0           (the kernel)      (next notify)           -

(1) A word and 1 more, to a cell that was 0. Only where calls differ, and once: see parts.calls.

A rank that calls something else meets those of its node and of its local rank, and so these know at once. The others
get its words, too: their hosts look when a later wait times out.
"""

import nbep.device.primitives as ptx
from nbep.device.jit import device_function
from nbep.device.kernels.internode.arguments import neighbor_at, rank_at
from nbep.device.kernels.parts.calls import report_other, send_call
from nbep.device.layout.internode import arrived_offset, call_offset
from nbep.device.network.seam import amo_add, own_ptr
from nbep.device.protocols.peers import DIGEST_BITS, ONE
from nbep.device.protocols.waits import report_fault, site, wait_until

INTERNODE_NOTIFY = site(20, "internode notify", "arrived", "the peer's arrival, and its counts if it sends some")


@device_function
def has_come(seen, wanted):
    """Whether a peer has added its call, which this rank expects to be ONE and the digest of its own."""
    return ptx.s32(seen - wanted) > -ONE


@device_function
def wait_arrived(cell, wanted, bounds, peer):
    """Wait until a peer has added its call to a cell. Returns how far that is past wanted; 0 if it never came.

    All that the peer had put before is there.
    """
    load = ptx.ld_acquire_sys_s32  # PAIR network-amo
    seen, came = wait_until(load, cell, has_come, wanted, bounds, ptx.wait_expired)
    ahead = ptx.s32(seen - wanted)
    if not came:
        report_fault(bounds, INTERNODE_NOTIFY, peer, -1, 1, (ahead >> DIGEST_BITS) + 2)  # arrivals for this call
    return ahead if came else 0


@device_function
def is_other_call(ahead):
    """Whether a peer that is so far ahead has come with another call."""
    return ahead != 0 and ahead < ONE


@device_function
def wait_node(ctx, called, has_met):
    """Thread n waits for (n, own local rank). Returns whether that rank has come with another call.

    has_met: whether this rank has sent its own arrivals. A rank that has failed before compares nothing
    """
    node = ptx.thread_idx()
    is_other = False
    if node < ctx.here.num_rdma_ranks:
        cell = own_ptr(ctx.network, arrived_offset(ctx.sizes.cells, node))
        ahead = wait_arrived(cell, ptx.s32(called + ctx.call.signal), ctx.bounds, rank_at(ctx, node))
        is_other = has_met and is_other_call(ahead)
    return is_other


@device_function
def add_word(to, cell, word):
    """Send a word of a call through the network: add it to a cell that was 0."""
    network, peer = to
    amo_add(network, cell, word, peer, 0, False)


@device_function
def send_words(network, row, call):
    """Send this rank's words to all ranks; a block. row: where its cells are there"""
    for rank in range(ptx.thread_idx(), network.num_ranks, ptx.block_dim()):
        send_call(add_word, (network, rank), row, call)


@device_function
def send_to_ranks(ctx, is_other_node, is_other_peer):
    """Send this rank's words to all ranks, and report that calls differ; a block.

    is_other_node, is_other_peer: whether that rank calls something else for which this thread has waited
    """
    send_words(ctx.network, call_offset(ctx.sizes.cells, ctx.here.num_rdma_ranks, ctx.network.rank), ctx.call)
    ptx.syncthreads()  # a report ends all waits that have not begun
    if is_other_node:
        report_other(ctx.bounds, rank_at(ctx, ptx.thread_idx()))
    if is_other_peer:
        report_other(ctx.bounds, neighbor_at(ctx, ptx.thread_idx()))
