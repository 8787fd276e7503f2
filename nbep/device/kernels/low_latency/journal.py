"""What every low-latency launch begins with: it ends the calls before it, on this rank and for its peers.

 cell              written by        with                  read by            with
 journal           keeper            st_weak               the next keeper    ld_weak
 slots[h]          senders           atom_add_relaxed_gpu  -                  -
                   keeper            st_weak (0) (3)       senders            of a later launch
 counts, arrivals  peers             amo_add               receivers          ld_acquire_sys
                   keeper            st_weak (1) (3)       peers' next use    behind the credit
 calls[h, peer]    peer's teller     amo_add               teller             ld_relaxed_sys
                   keeper            st_relaxed_sys        peers' next use    behind the credit
   of a masked     keeper            atom_exch_acq_rel_sys (ABSENT): it gets no credit, and may still add
   rank: counts
   and arrivals
 slots, counts     a clean (3)       st_na 0               senders            behind its barrier
   and sums
 credit[h, peer]   peer's keeper     amo_add               senders            ld_acquire_sys
 credit[h, own]    keeper            amo_add               receivers (2)      ld_acquire_sys

 (1) The receive phase that read the cells is a launch that has ended, and the peer adds to them again only after it has
     the credit, which the keeper adds behind its stores.
 (2) Of a launch that sends, too: two calls may be received in either order, so the launch before may have read the same
     cells. One thread of each block waits, a bar_sync tells the others.
 (3) clean_low_latency_buffer and update_mask_buffer use the same code.

A credit counts how often the peer has freed the half. It is never counted down: only the network writes it. The journal
says how often this rank has filled the half, and a call may, once the credits are ahead of that.

The keeper is the last warp of the last block, which has the least other work where that does not divide evenly. The
journal says which half the launch before has sent in and which it has received in. It lies on the device, so that a
CUDA graph replays the right steps.

 send phase in half h    takes the credits of h, one of each peer        the next launch counts the use of h,
                         and slots of h                                  and zeroes the slots
 receive phase in half h empties the counts of h                         the next launch zeroes them and gives a credit

DeepEP zeroes the counts of the other half in every send phase. That is enough as long as a rank receives each call
before it sends the next: what it allows. With credits two calls may be on their way, one in each half.

Source: DeepEP csrc/kernels/internode_ll.cu ("The first SM is also responsible for cleaning the next buffer")
"""

from typing import NamedTuple

import nbep.device.primitives as ptx
from nbep.device.jit import device_function
from nbep.device.layout.low_latency import (
    MAX_EXPERTS,
    MAX_LOCAL_EXPERTS,
    MAX_RANKS,
    NUM_HALVES,
    WORDS_OF_CALL,
    arrival_offset,
    call_offset,
    count_offset,
    credit_offset,
)
from nbep.device.network.seam import amo_add, own_ptr, sends_from_buffer
from nbep.device.protocols.arrivals import empty_cell, empty_word, is_masked, wait_credit
from nbep.device.protocols.waits import LOW_LATENCY_HALF, report_fault
from nbep.device.types import I32, I64, Sym

SEND_PHASE = 1
RECV_PHASE = 2
BOTH_PHASES = SEND_PHASE | RECV_PHASE

# Words of the journal
SENT_HALF = 0  # one more than the half that the launch before has sent in; 0 if it has not
RECEIVED_HALF = 1  # the same for its receive phase
NUM_SLOTS = 2  # of experts, in the call that was sent
NUM_COUNTS = 3  # of each rank, in the call that was received
NEXT_HALF = 4  # that the next send phase takes; UNCLEAN if clean_low_latency_buffer has to come first
USES = 5  # of each half: send phases that have ended
JOURNAL_WORDS = 7
UNCLEAN = NUM_HALVES
SLOT_WORDS = MAX_EXPERTS + MAX_RANKS  # of a half


class Workspace(NamedTuple):
    """Memory of this rank alone, all zeros at first. mask is 0 without enable_shrink.

    slots  [NUM_HALVES, MAX_EXPERTS + MAX_RANKS] s32: how many tokens have a place, for each expert and then each rank
    sums   of the same shape: what counts and arrivals are told, as far as it is known; see arrivals.tell
    barriers  [MAX_RANKS] s32: the latest barrier of `barrier_network` that each rank was told of, which for this rank
              itself is the latest of all
    """

    slots: Sym
    journal: Sym
    mask: Sym
    sums: Sym
    barriers: Sym


class Call(NamedTuple):
    """Which half a call uses, and which of its phases a launch runs: SEND_PHASE, RECV_PHASE or both."""

    num_rdma_bytes: I64
    share_bytes: I64  # of them, for what one rank puts in a half
    recv_begin: I64  # where the shares of this half begin
    half: I32
    phases: I32
    word_0: I32  # what all ranks must pass alike; see calls.py
    word_1: I32


@device_function
def slot_counter(work, call, unit):
    """The slot counter of an expert, or of rank r as unit MAX_EXPERTS + r."""
    return work.slots + 4 * (call.half * SLOT_WORDS + unit)


@device_function
def sum_cell(work, call, unit):
    """Where the parts of what an expert's count is told are added up, or those of rank r as unit MAX_EXPERTS + r."""
    return work.sums + 4 * (call.half * SLOT_WORDS + unit)


@device_function
def clear_words(address, num_words, lane):
    for i in range(lane, num_words, 32):
        ptx.st_weak_s32(address + 4 * i, 0)


@device_function
def clear_vectors(address, num_vectors):
    """Zero 16 bytes at a time; a whole block."""
    for i in range(ptx.thread_idx(), num_vectors, ptx.block_dim()):
        ptx.st_na_v4(address + 16 * i, (0, 0, 0, 0))


@device_function
def empty_rank(network, num_rdma_bytes, rank, is_absent):
    """Empty all cells of a rank, in both halves; a whole block."""
    for half in range(NUM_HALVES):
        counts = own_ptr(network, count_offset(num_rdma_bytes, half, rank, 0))
        if is_absent:
            for i in range(ptx.thread_idx(), MAX_LOCAL_EXPERTS, ptx.block_dim()):
                empty_cell(counts + 4 * i, True)
        else:
            clear_vectors(counts, MAX_LOCAL_EXPERTS // 4)
        if ptx.thread_idx() == 0:
            empty_cell(own_ptr(network, arrival_offset(num_rdma_bytes, half, rank)), is_absent)
            for index in range(WORDS_OF_CALL):
                empty_word(own_ptr(network, call_offset(num_rdma_bytes, half, rank, index)), is_absent)


@device_function
def is_last_block():
    return ptx.block_idx() == ptx.grid_dim() - 1


@device_function
def is_keeper():
    """Whether this is the keeper's warp, in the last block."""
    return ptx.thread_idx() // 32 == ptx.block_dim() // 32 - 1


@device_function
def end_earlier_calls(network, work, call, bounds, shape, lane):
    """Keeper: take and give the credits of the launch before, and write down what this one does. The whole warp."""
    # All loads begin before the first of them is used.
    sent = ptx.ld_weak_s32(work.journal + 4 * SENT_HALF)
    received = ptx.ld_weak_s32(work.journal + 4 * RECEIVED_HALF)
    num_slots = ptx.ld_weak_s32(work.journal + 4 * NUM_SLOTS)
    num_counts = ptx.ld_weak_s32(work.journal + 4 * NUM_COUNTS)
    uses_0 = ptx.ld_weak_s32(work.journal + 4 * USES) if lane == 0 else 0
    uses_1 = ptx.ld_weak_s32(work.journal + 4 * (USES + 1)) if lane == 0 else 0
    if sent != 0:
        if lane == 0:
            ptx.st_weak_s32(work.journal + 4 * (USES + sent - 1), ptx.s32((uses_0 if sent == 1 else uses_1) + 1))
        slots = work.slots + 4 * (sent - 1) * SLOT_WORDS
        clear_words(slots, num_slots, lane)
        clear_words(slots + 4 * MAX_EXPERTS, MAX_RANKS, lane)
    if received != 0:
        empty_half(network, work, call, received - 1, num_counts, lane)
    ptx.syncwarp(ptx.FULL_MASK)
    if lane == 0:
        write_journal(work, call, bounds, shape)


@device_function
def empty_half(network, work, call, half, num_counts, lane):
    """Keeper: empty the cells of the call that was received in a half, then give a credit to all who may send again."""
    masked = ptx.vote_ballot(ptx.FULL_MASK, lane < network.num_ranks and is_masked(work.mask, lane))
    for rank in range(network.num_ranks):
        is_absent = masked & (1 << rank) != 0
        counts = own_ptr(network, count_offset(call.num_rdma_bytes, half, rank, 0))
        for i in range(lane, num_counts, 32):
            empty_cell(counts + 4 * i, is_absent)
    is_absent = masked & (1 << lane) != 0
    if lane < network.num_ranks:
        empty_cell(own_ptr(network, arrival_offset(call.num_rdma_bytes, half, lane)), is_absent)
        for index in range(WORDS_OF_CALL):
            empty_word(own_ptr(network, call_offset(call.num_rdma_bytes, half, lane, index)), is_absent)
    ptx.syncwarp(ptx.FULL_MASK)
    if lane < network.num_ranks and not is_absent:
        amo_add(network, credit_offset(call.num_rdma_bytes, half, network.rank), 1, lane, 0, True)


@device_function
def may_send(network, work, bounds, call, peer):
    """Whether the peer is there and its half of the buffer is free; one thread."""
    uses = ptx.ld_weak_s32(work.journal + 4 * (USES + call.half))
    if sends_from_buffer(network):  # what has left in this half before may still be read, whomever it was for
        for rank in range(network.num_ranks):
            other = own_ptr(network, credit_offset(call.num_rdma_bytes, call.half, rank))
            wait_credit(other, uses, bounds, work.mask, rank, call.half)
    credit = own_ptr(network, credit_offset(call.num_rdma_bytes, call.half, peer))
    return wait_credit(credit, uses, bounds, work.mask, peer, call.half)


@device_function
def may_warp_send(network, work, bounds, call, peer, lane):
    """The same for all lanes of a warp, which then know what the peer has done before it gave the credit."""
    is_free = ptx.vote_any(ptx.FULL_MASK, lane == 0 and may_send(network, work, bounds, call, peer))
    ptx.syncwarp(ptx.FULL_MASK)
    return is_free


@device_function
def wait_keeper(network, work, bounds, call):
    """Wait until the counts of this half are empty, which the launch before may have read; one thread.

    The keeper gives its own rank a credit behind its stores, too.
    """
    may_send(network, work, bounds, call, network.rank)


@device_function
def end_send_phase(network, work, bounds, call):
    """The block has sent all it has to. If it receives next, it waits for its keeper before. A whole block."""
    if ptx.thread_idx() == ptx.block_dim() - 32 and call.phases & RECV_PHASE != 0:
        wait_keeper(network, work, bounds, call)
    ptx.syncthreads()


@device_function
def write_journal(work, call, bounds, shape):
    """Keeper: for the keeper of the next launch; one thread."""
    sends = call.phases & SEND_PHASE != 0
    receives = call.phases & RECV_PHASE != 0
    ptx.st_weak_s32(work.journal + 4 * SENT_HALF, call.half + 1 if sends else 0)
    ptx.st_weak_s32(work.journal + 4 * RECEIVED_HALF, call.half + 1 if receives else 0)
    if receives:
        ptx.st_weak_s32(work.journal + 4 * NUM_COUNTS, shape.num_local_experts)
    if sends:
        ptx.st_weak_s32(work.journal + 4 * NUM_SLOTS, shape.num_experts)
        expected = ptx.ld_weak_s32(work.journal + 4 * NEXT_HALF)
        if expected != call.half:
            report_fault(bounds, LOW_LATENCY_HALF, -1, -1, expected, call.half)
        ptx.st_weak_s32(work.journal + 4 * NEXT_HALF, 1 - call.half)
