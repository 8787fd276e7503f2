"""A barrier between the ranks of a node that compares what they call: the digest of a call travels in its signal.

 rank a: signal[a][b] += ONE + digest of its call      rank b: signal[a][b] -= ONE + digest of its call

 signal[a][b]      says to rank a
 ONE or more       b has not come
 0                 b has come, with the same call
 -ONE or less      b has come, and is one barrier ahead: in this one its call was the same (1)
 any other         b has come, with another call: each tells the other its words, and reports the first that differs

 cell              written by        with                    read by    with
 signal[a][b]      rank a (+)        atom_add_relaxed_sys    -          -
                   rank b (-)        atom_add_release_sys    rank a     ld_acquire_sys
 call[a][b]        rank b            st_weak                 rank a     ld_relaxed_sys, behind told[a][b]
 relayed[a][b]     rank b            st_weak (2)             rank a     ld_relaxed_sys, behind told[a][b]
 told[a][b]        rank b            st_release_sys          rank a     ld_acquire_sys

 (1) Who finds another call stays until the peer has told its words, and so until the peer has found it too.
 (2) Between nodes: the words of a rank of another node, where its call is the one that differs. Then b comes with
     another signal, although its own words are those of a. See kernels.internode.meet_nodes.

Where all calls are the same this is `barrier_block` with another number: no message, no access to memory more. Where
the buffers are in the host's memory nobody adds, see host_barrier.py; what is left is the same, and so is the rest. The
words are written only where calls differ, once: such a buffer is of no use any more.

A digest is that of `nbep.host.calls`: calls that differ in one word never have the same, others one time in 16 million.
"""

from typing import NamedTuple

import nbep.device.primitives as ptx
from nbep.device.jit import device_function
from nbep.device.layout.intranode import CALL_BYTES, CALL_WORDS, RELAYED_WORDS, TOLD
from nbep.device.protocols.barriers import meet_peer
from nbep.device.protocols.peers import ONE, barrier_signals_of
from nbep.device.protocols.waits import Waiter, has_timed_out, is_set, report_fault, site, wait_or_report
from nbep.device.types import I32

CALL_TOLD = site(
    34, "notify", "told", "the peer to say what it has called: something else than this rank", of_node=True
)
CALLS_DIFFER = site(35, "notify", "call", "the same call on all ranks")

RANK_WORD = 13  # behind the words that are compared
TOLD_WORDS = 14
WORDS_OF_VERB = 16  # a report's channel is the word that differs, and so often the verb


class Call(NamedTuple):
    """A collective call: what arrives for it, whose it is, and the words of which that is the digest.

    See nbep.host.calls.
    """

    signal: I32  # ONE + digest
    rank: I32  # among all
    verb: I32
    handle: I32
    zero_copy: I32
    dtype: I32
    hidden: I32
    scales: I32
    num_topk: I32
    num_experts: I32
    num_sms: I32
    chunk: I32
    slots: I32
    rdma_chunk: I32
    rdma_slots: I32


@device_function
def say_words(say, to, row, call):
    """Say all words of a call, each and 1 more, to somebody who reads them from a row: say(to, cell, word)."""
    say(to, row, call.verb + 1)
    say(to, row + 4, call.handle + 1)
    say(to, row + 8, call.zero_copy + 1)
    say(to, row + 12, call.dtype + 1)
    say(to, row + 16, call.hidden + 1)
    say(to, row + 20, call.scales + 1)
    say(to, row + 24, call.num_topk + 1)
    say(to, row + 28, call.num_experts + 1)
    say(to, row + 32, call.num_sms + 1)
    say(to, row + 36, call.chunk + 1)
    say(to, row + 40, call.slots + 1)
    say(to, row + 44, call.rdma_chunk + 1)
    say(to, row + 48, call.rdma_slots + 1)
    say(to, row + 4 * RANK_WORD, call.rank + 1)


@device_function
def store_word(to, cell, word):
    """Say a word to a peer whose memory is mapped; told follows."""
    ptx.st_weak_s32(cell, word)


@device_function
def tell_call(call, peers, peer):
    """Write this rank's words where a peer reads them."""
    signals = barrier_signals_of(peers, peer)
    say_words(store_word, peer, signals + CALL_WORDS + CALL_BYTES * peers.rank, call)
    ptx.st_release_sys_s32(signals + TOLD + 4 * peers.rank, 1)  # PAIR call-told


@device_function
def first_difference(found, row, index, word):
    """(index, word, seen) of the first word that differs so far; index -1 if none does."""
    seen = ptx.ld_relaxed_sys_s32(row + 4 * index) - 1
    if found[0] < 0 and seen != word:
        return index, word, seen
    return found


@device_function
def report_difference(call, row, bounds):
    """Report the first word in which a call differs that has been told. Returns whether there is one."""
    found = (-1, 0, 0)
    found = first_difference(found, row, 0, call.verb)
    found = first_difference(found, row, 1, call.handle)
    found = first_difference(found, row, 2, call.zero_copy)
    found = first_difference(found, row, 3, call.dtype)
    found = first_difference(found, row, 4, call.hidden)
    found = first_difference(found, row, 5, call.scales)
    found = first_difference(found, row, 6, call.num_topk)
    found = first_difference(found, row, 7, call.num_experts)
    found = first_difference(found, row, 8, call.num_sms)
    found = first_difference(found, row, 9, call.chunk)
    found = first_difference(found, row, 10, call.slots)
    found = first_difference(found, row, 11, call.rdma_chunk)
    found = first_difference(found, row, 12, call.rdma_slots)
    if found[0] >= 0:
        channel = WORDS_OF_VERB * call.verb + found[0]
        rank = ptx.ld_relaxed_sys_s32(row + 4 * RANK_WORD) - 1
        report_fault(bounds, CALLS_DIFFER, rank, channel, found[1], found[2])
    return found[0] >= 0


@device_function
def wait_peer(peers, bounds, signal, has_told):
    """Thread `peer` signals that peer and waits for it. Returns whether the peer has come with another call.

    A rank that has failed before meets nobody: its peers would go on with what it has not written. has_told: unless it
    meets them to tell them why
    """
    left = meet_peer(peers, bounds, signal, has_told or not has_timed_out(bounds))
    return left != 0 and left > -ONE


@device_function
def wait_told(cell, bounds, peer):
    """Wait until a peer has said what it has called. Returns whether it has."""
    waiter = Waiter(CALL_TOLD, peer, -1)
    return wait_or_report(ptx.ld_acquire_sys_s32, cell, is_set, 1, bounds, waiter)[1]  # PAIR call-told


@device_function
def ask_peer(call, peers, bounds, is_other, has_told):
    """Exchange words with a peer that has come with another call. Returns whether its words are here."""
    told = False
    if is_other:
        peer = ptx.thread_idx()
        if not has_told:
            tell_call(call, peers, peer)
        told = wait_told(barrier_signals_of(peers, peers.rank) + TOLD + 4 * peer, bounds, peer)
    return told


@device_function
def report_peer(call, peers, bounds, told):
    """Report what a peer has called, if its words are here.

    Who has failed before does not read: what it has queued may meet words that are written anew.
    """
    if told and not has_timed_out(bounds):
        own_signals = barrier_signals_of(peers, peers.rank)
        row = CALL_BYTES * ptx.thread_idx()
        if not report_difference(call, own_signals + CALL_WORDS + row, bounds):
            report_difference(call, own_signals + RELAYED_WORDS + row, bounds)


@device_function
def meet_block(peers, bounds, call):
    """As `barrier_block`, and compare calls. Returns whether all peers that have come called the same.

    It returns the same to all threads of the block. If it is False, this rank has reported a difference.
    """
    return meet_with(peers, bounds, call, call.signal, False)


@device_function
def meet_with(peers, bounds, call, signal, has_told):
    """As `meet_block`; a rank that has relayed a call to its peers comes with another signal than its call's.

    It has told them its own words, too: it has reported what it knows, and does not wait for them any more.
    """
    is_other = wait_peer(peers, bounds, signal, has_told)
    is_same = ptx.bar_red_and(0, ptx.block_dim(), not is_other)
    if not is_same:
        told = ask_peer(call, peers, bounds, is_other, has_told)
        ptx.syncthreads()  # a report ends all waits that have not begun
        report_peer(call, peers, bounds, told)
        ptx.syncthreads()
    return is_same
