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
relayed[k]      (d, l)            st_weak (2)       (d, k), or its host     see parts.calls
called          block 0           (the kernel)      (next notify)           -

(1) A word and 1 more, to a cell that was 0: each says itself that it has come. Only where calls differ, and once.
(2) If calls differ, a rank gets the other's words from the ranks of its node and of its place. The latter relay them,
    so all ranks get them: in the same kernel, where the nodes meet before the ranks of a node do; where both meet at
    the same time, by the host, when a later wait times out.
"""

import nbep.device.primitives as ptx
from nbep.device.jit import device_function
from nbep.device.kernels.internode.arguments import rank_at
from nbep.device.kernels.parts.calls import TOLD_WORDS, report_difference, say_words, tell_call
from nbep.device.layout.internode import arrived_offset, call_offset
from nbep.device.layout.intranode import CALL_BYTES, RELAYED_WORDS
from nbep.device.network.seam import amo_add, own_ptr
from nbep.device.protocols.peers import DIGEST_BITS, ONE, barrier_signals_of
from nbep.device.protocols.waits import Waiter, has_timed_out, is_set, report_fault, site, wait_or_report, wait_until

INTERNODE_NOTIFY = site(20, "internode notify", "arrived", "the peer's arrival, and its counts if it sends some")
NODE_CALL = site(36, "internode notify", "call", "the peer to say what it has called: something else than this rank")


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
def words_from(ctx, node):
    """The address of the words of a call that the rank of a node has sent."""
    return own_ptr(ctx.network, call_offset(ctx.sizes.cells, ctx.here.num_rdma_ranks, node))


@device_function
def add_word(to, cell, word):
    """Say a word of a call to a rank of another node: add it to a cell that was 0."""
    network, peer = to
    amo_add(network, cell, word, peer, 0, False)


@device_function
def wait_node(ctx, called):
    """Thread n waits for (n, own place). Returns whether that rank has come with another call."""
    node = ptx.thread_idx()
    is_other = False
    if node < ctx.here.num_rdma_ranks:
        cell = own_ptr(ctx.network, arrived_offset(ctx.sizes.cells, node))
        ahead = wait_arrived(cell, ptx.s32(called + ctx.call.signal), ctx.bounds, rank_at(ctx, node))
        is_other = ahead != 0 and ahead < ONE
    return is_other


@device_function
def ask_node(ctx, is_other):
    """Exchange words with a rank that has come with another call. Returns whether its words are here."""
    has_words = is_other
    if is_other:
        node = ptx.thread_idx()
        own_row = call_offset(ctx.sizes.cells, ctx.here.num_rdma_ranks, ctx.here.rdma_rank)
        say_words(add_word, (ctx.network, rank_at(ctx, node)), own_row, ctx.call)
        row = words_from(ctx, node)
        for i in range(TOLD_WORDS):
            if not wait_node_call(row + 4 * i, ctx.bounds, rank_at(ctx, node)):
                has_words = False
    return has_words


@device_function
def report_node(ctx, has_words):
    """Report what a rank of another node has called, if its words are here."""
    if has_words and not has_timed_out(ctx.bounds):
        report_difference(ctx.call, words_from(ctx, ptx.thread_idx()), ctx.bounds)


@device_function
def meet_nodes(ctx, called):
    """Wait for the ranks of other nodes. Returns to all threads whether all that have come call the same."""
    is_other = wait_node(ctx, called)
    is_same = ptx.bar_red_and(0, ptx.block_dim(), not is_other)
    if not is_same:
        has_words = ask_node(ctx, is_other)
        ptx.syncthreads()  # a report ends all waits that have not begun
        report_node(ctx, has_words)
        ptx.syncthreads()
    return is_same


@device_function
def relay_call(ctx, is_same):
    """Write the call of another node's rank where the peers of this node read it, and the own one behind it.

    All threads of the block call it. is_same: whether this thread's peer calls the same as this rank, for all that is
    known; else both have exchanged words. Returns whether there is a call to pass on.
    """
    found = -1
    for node in range(ctx.here.num_rdma_ranks):
        if ptx.ld_relaxed_sys_s32(words_from(ctx, node)) != 0:
            found = node
    peer = ptx.thread_idx()
    if found >= 0 and peer < ctx.here.num_nvl_ranks and is_same:
        row = words_from(ctx, found)
        relayed = barrier_signals_of(ctx.peers, peer) + RELAYED_WORDS + CALL_BYTES * ctx.here.nvl_rank
        for i in range(TOLD_WORDS):
            ptx.st_weak_s32(relayed + 4 * i, ptx.ld_relaxed_sys_s32(row + 4 * i))
        tell_call(ctx.call, ctx.peers, peer)
    return found >= 0


@device_function
def wait_node_call(cell, bounds, peer):
    """Wait until a rank of another node has said a word of its call. Returns whether it has.

    The load is relaxed: the word is the message itself, and nothing else is published by it.
    """
    return wait_or_report(ptx.ld_relaxed_sys_s32, cell, is_set, 1, bounds, Waiter(NODE_CALL, peer, -1))[1]
