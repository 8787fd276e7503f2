"""What ranks call, compared where they meet anyway: the digest of a call travels in the signal of the barrier.

 rank a: signal[a][b] += ONE + digest of its call      rank b: signal[a][b] -= ONE + digest of its call

 signal[a][b]      says to rank a
 ONE or more       b has not come
 0                 b has come, with the same call
 -ONE or less      b has come, and is one barrier ahead: in this one its call was the same (1)
 any other         b has come, with another call

 cell              written by        with                    read by    with
 signal[a][b]      rank a (+)        atom_add_relaxed_sys    -          -
                   rank b (-)        atom_add_release_sys    rank a     ld_acquire_sys
 call[a][b]        rank b            st_relaxed_sys (2)      the host   once a kernel has reported

 (1) A rank that finds another call reports it, and meets no peer any more: see wait_peer.
 (2) Only where calls differ, and once: such a buffer is of no use any more. A word is never 0, so each needs no flag.

Kernels compare digests and nothing else. A rank that finds another call sends its own words to all ranks, and reports.
Its host waits for the words of the others and finds out who differs, and in what: see nbep.host.calls.

Where all calls are the same this is `barrier_block` with another number: no message, no access to memory more. Where
the buffers are in the host's memory no rank adds, see host_barrier.py; what is left is the same, and so is the rest.

Between nodes digests travel in arrivals, too, and words through the network: see kernels.internode.meet_nodes.
Low-latency kernels have no such meeting. There each rank sends all words in every call: see kernels.low_latency.calls.

A digest is that of `nbep.host.calls`: calls that differ in one word never have the same, others one time in 16 million.
"""

from typing import NamedTuple

import nbep.device.primitives as ptx
from nbep.device.jit import device_function
from nbep.device.layout.intranode import CALL_BYTES, CALL_ROWS
from nbep.device.protocols.barriers import meet_peer
from nbep.device.protocols.peers import ONE, barrier_signals_of
from nbep.device.protocols.waits import has_timed_out, report_fault, site
from nbep.device.types import I32

CALLS_DIFFER = site(35, "notify", "call", "the peer to say what it has called: something else than this rank")


class Call(NamedTuple):
    """A collective call: what arrives for it, and the words of which that is the digest; see nbep.host.calls."""

    signal: I32  # ONE + digest
    verb: I32
    word_1: I32
    word_2: I32
    word_3: I32
    word_4: I32
    word_5: I32
    word_6: I32
    word_7: I32
    word_8: I32
    word_9: I32
    word_10: I32
    word_11: I32
    word_12: I32


NUM_WORDS = len(Call._fields) - 1


@device_function
def send_call(send, to, row, call):
    """Send all words of a call, each and 1 more, to a row of cells: send(to, cell, word)."""
    for index in range(NUM_WORDS):
        send(to, row + 4 * index, call[1 + index] + 1)


@device_function
def store_word(to, cell, word):
    """Send a word to a peer whose memory is mapped."""
    ptx.st_relaxed_sys_s32(cell, word)


@device_function
def wait_peer(peers, bounds, signal):
    """Thread `peer` signals that peer and waits for it. Returns whether the peer has come with another call.

    A rank that has failed before meets no peer: its peers would go on with what it has not written.
    """
    left = meet_peer(peers, bounds, signal, not has_timed_out(bounds))
    return left != 0 and left > -ONE


@device_function
def report_other(bounds, peer):
    """Report that a peer calls something else. The host waits for its words."""
    report_fault(bounds, CALLS_DIFFER, peer, -1, 1, 0)


@device_function
def meet_block(peers, bounds, call):
    """As `barrier_block`, and compare calls. Returns whether all peers that have come called the same.

    It returns the same to all threads of the block. If it is False, this rank has reported it.
    """
    peer = ptx.thread_idx()
    is_other = wait_peer(peers, bounds, call.signal)
    is_same = ptx.bar_red_and(0, ptx.block_dim(), not is_other)
    if not is_same and peer < peers.num_ranks:
        send_call(store_word, peer, barrier_signals_of(peers, peer) + CALL_ROWS + CALL_BYTES * peers.rank, call)
        if is_other:
            report_other(bounds, peer)
    return is_same
