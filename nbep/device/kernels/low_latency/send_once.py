"""The send phase of low-latency dispatch with deduplicate: take places, put and count. See dispatch_once.py.

 cell            written by          with                    read by      with
 slots[h, e, r]  putters             atom_add_relaxed_gpu    -            -
 counts[e, s]    counter             amo_add (-n - 1)        receivers    ld_relaxed_sys
 message         putters             put_nbi_warp            receivers    after arrivals
 arrivals[s]     putters, counters   amo_add                 receivers    ld_acquire_sys
 stage           casters             st_shared_v2, _v4       network      after a proxy fence and bar_sync
   its notes     putter              st_shared               network      the same
 histogram       counter             st_shared 0             counter      after syncwarp
                 counter             atom_add_relaxed_cta    counter      ld_shared, after syncwarp
 calls[s]        counter             amo_add                 teller       ld_relaxed_sys, see calls.py
 slots, counts, arrivals  next keeper  resets, see journal.py

All messages for a rank go through one queue, and behind each of them a TAG for the rank's arrival. Counts tell nothing
but themselves, so they need not wait for what is on its way.
"""

from typing import NamedTuple

import nbep.device.primitives as ptx
from nbep.device.jit import device_function
from nbep.device.kernels.low_latency.arguments import note_stride, stage_bytes
from nbep.device.kernels.low_latency.calls import tell_call
from nbep.device.kernels.low_latency.dispatch_sender import clear_gap, expert_of, next_stage, open_to_engine
from nbep.device.kernels.low_latency.journal import may_send, may_warp_send, slot_counter, sum_cell
from nbep.device.layout.low_latency import (
    MAX_EXPERTS,
    arrival_offset,
    count_offset,
    message_stride,
    note_bytes,
    note_offset,
    rank_of,
    recv_offset,
    send_offset,
)
from nbep.device.network.seam import amo_add, keep_message, put_nbi_warp, quiet
from nbep.device.protocols.arrivals import TAG, completion, tell
from nbep.device.protocols.reduce import warp_sum_s32

QUEUE = 0
# Words of a note
SRC_IDX = 0
ENTRIES = 4  # for each choice: local expert or -1, place, weight
NOBODY = -1


class Choice(NamedTuple):
    """What lane k of a putter knows of choice k of a token."""

    peer: int  # the rank of its expert, NOBODY if it is unused
    local_expert: int
    place: int  # among the tokens for the expert
    weight: float
    is_first: bool  # of those of the token that are on this rank
    slot: int  # of the message for the rank, in the lane that is first; -1 if nothing may be put


@device_function
def take_places(inputs, network, work, bounds, call, shape, token, lane):
    """Take places at the experts of a token, and a slot for its message at each of their ranks; one warp."""
    expert = -1
    weight = ptx.f32(0)
    if lane < shape.num_topk:
        weight = ptx.ld_na_f32(inputs.topk_weights + 4 * (token * shape.num_topk + lane))
        expert = expert_of(inputs, bounds, shape, shape.num_topk, token, lane)
    peer = NOBODY
    place = local_expert = 0
    if expert >= 0:
        peer, local_expert = rank_of(shape, expert)
        place = ptx.atom_add_relaxed_gpu_s32(slot_counter(work, call, expert), 1)
    same = ptx.match_any_s32(ptx.FULL_MASK, peer)
    is_first = peer != NOBODY and same & ((1 << lane) - 1) == 0
    slot = -1
    if is_first:
        slot = ptx.atom_add_relaxed_gpu_s32(slot_counter(work, call, MAX_EXPERTS + peer), 1)
        if not may_send(network, work, bounds, call, peer):
            slot = -1
    return Choice(peer, local_expert, place, weight, is_first, slot)


@device_function
def write_notes(notes, shape, token, choice, lane):
    """Write the notes for all ranks of a token; one warp."""
    left = ptx.vote_ballot(ptx.FULL_MASK, choice.is_first)
    while left != 0:
        peer = ptx.shfl_idx_s32(ptx.FULL_MASK, choice.peer, ptx.ffs_u32(left) - 1)
        note = notes + peer * note_stride(shape)
        if lane < shape.num_topk:
            entry = note + 4 * ENTRIES + 12 * lane
            ptx.st_shared_s32(entry, choice.local_expert if choice.peer == peer else -1)
            ptx.st_shared_s32(entry + 4, choice.place)
            ptx.st_shared_f32(entry + 8, choice.weight)
        if lane < ENTRIES:
            ptx.st_shared_s32(note + 4 * lane, token if lane == SRC_IDX else 0)
        if lane < shape.num_topk & 3:  # three words for each choice, and padding to a multiple of NOTE_ALIGNMENT
            ptx.st_shared_s32(note + 4 * ENTRIES + 12 * shape.num_topk + 4 * lane, 0)
        left &= left - 1


@device_function
def put_message(network, call, shape, stage, note, token, peer, slot, lane):
    """Start to put the values in the stage and a note into a slot of a rank; one warp."""
    stride = message_stride(shape)
    dst = recv_offset(call, network.rank) + slot * stride
    src = send_offset(call.num_rdma_bytes, call.half) + (token * shape.num_ranks + peer) * stride
    at = note_offset(shape)
    keep_message(network, src, stage, at, lane)
    put_nbi_warp(network, dst, src, stage, at, peer, QUEUE, lane)
    keep_message(network, src + at, note, note_bytes(shape), lane)
    put_nbi_warp(network, dst + at, src + at, note, note_bytes(shape), peer, QUEUE, lane)


@device_function
def add_to_arrival(network, work, call, peer, value, is_behind):
    """Add to what a rank is told of this rank's messages; one thread. is_behind: see amo_add"""
    cell = arrival_offset(call.num_rdma_bytes, call.half, network.rank)
    tell(network, sum_cell(work, call, MAX_EXPERTS + peer), cell, value, peer, QUEUE, is_behind)


@device_function
def put_token_once(network, work, call, shape, stage, notes, token, choice, lane):
    """Putter: put the message in the stage to all ranks of the token, then tell them."""
    left = ptx.vote_ballot(ptx.FULL_MASK, choice.slot >= 0)
    while left != 0:
        source = ptx.ffs_u32(left) - 1
        peer = ptx.shfl_idx_s32(ptx.FULL_MASK, choice.peer, source)
        slot = ptx.shfl_idx_s32(ptx.FULL_MASK, choice.slot, source)
        put_message(network, call, shape, stage, notes + peer * note_stride(shape), token, peer, slot, lane)
        left &= left - 1
    quiet(network, lane)
    if choice.slot >= 0:
        add_to_arrival(network, work, call, choice.peer, TAG, True)


@device_function
def put_messages_once(inputs, network, work, bounds, call, shape, sizes, lane):
    """Putter: all tokens of this block, one after the other."""
    stage = ptx.smem_base()
    token = ptx.block_idx()
    while token < sizes.num_tokens:
        notes = stage + message_stride(shape)
        choice = take_places(inputs, network, work, bounds, call, shape, token, lane)
        write_notes(notes, shape, token, choice, lane)
        clear_gap(stage, shape, lane)
        open_to_engine()
        put_token_once(network, work, call, shape, stage, notes, token, choice, lane)
        token += ptx.grid_dim()
        stage = next_stage(shape, stage)


@device_function
def local_choice(inputs, shape, token, choice, first):
    """The local expert of a choice on the rank whose experts begin at `first`; -1 if it is on another.

    It loads in any case: behind a branch a load waits for the one before.
    """
    index = token * shape.num_topk + min(choice, shape.num_topk - 1)
    expert = ptx.ld_nc_s64(inputs.topk_idx + 8 * index) - first
    is_here = choice < shape.num_topk and 0 <= expert < shape.num_local_experts
    return expert if is_here else -1


@device_function
def count_choice(histogram, local_expert):
    """Count a choice that is here; one thread. Returns 1 if it is."""
    if local_expert < 0:
        return 0
    ptx.atom_add_relaxed_cta_shared_s32(histogram + 4 * local_expert, 1)
    return 1


@device_function
def count_token(inputs, shape, token, first, histogram):
    """Count the choices of a token that are on a rank, in the histogram. Returns how many there are; one thread."""
    num_chosen = 0
    for choice in range(0, shape.num_topk, 8):
        # Eight loads in flight: the counter must be done before the messages are.
        a = local_choice(inputs, shape, token, choice, first)
        b = local_choice(inputs, shape, token, choice + 1, first)
        c = local_choice(inputs, shape, token, choice + 2, first)
        d = local_choice(inputs, shape, token, choice + 3, first)
        e = local_choice(inputs, shape, token, choice + 4, first)
        f = local_choice(inputs, shape, token, choice + 5, first)
        g = local_choice(inputs, shape, token, choice + 6, first)
        h = local_choice(inputs, shape, token, choice + 7, first)
        num_chosen += count_choice(histogram, a) + count_choice(histogram, b)
        num_chosen += count_choice(histogram, c) + count_choice(histogram, d)
        num_chosen += count_choice(histogram, e) + count_choice(histogram, f)
        num_chosen += count_choice(histogram, g) + count_choice(histogram, h)
    return num_chosen


@device_function
def tell_counts(network, work, bounds, call, shape, histogram, num_messages, peer, lane):
    """Tell a rank how many tokens each of its experts gets from here, and how many messages there are; one warp."""
    if may_warp_send(network, work, bounds, call, peer, lane):
        if lane == 0:
            tell_call(network, call, peer)
            add_to_arrival(network, work, call, peer, completion(num_messages), False)
        for i in range(lane, shape.num_local_experts, 32):
            cell = count_offset(call.num_rdma_bytes, call.half, network.rank, i)
            amo_add(network, cell, completion(0) - ptx.ld_shared_s32(histogram + 4 * i), peer, QUEUE, False)
    ptx.syncwarp(ptx.FULL_MASK)


@device_function
def count_ranks(inputs, network, work, bounds, call, shape, sizes, lane):
    """Counter: tell every grid_dim()-th rank how many tokens its experts get, then count its messages; one warp."""
    num_local_experts = shape.num_local_experts
    histogram = ptx.smem_base() + 2 * stage_bytes(shape)
    # The blocks before the last one, which has the keeper: if they have no token to send, their SMs have nothing on the
    # way that loads would wait behind.
    peer = ptx.u32_mod(2 * ptx.grid_dim() - 2 - ptx.block_idx(), ptx.grid_dim())
    while peer < shape.num_ranks:
        for i in range(lane, num_local_experts, 32):
            ptx.st_shared_s32(histogram + 4 * i, 0)
        ptx.syncwarp(ptx.FULL_MASK)
        num_messages = 0
        for token in range(lane, sizes.num_tokens, 32):
            is_here = count_token(inputs, shape, token, peer * num_local_experts, histogram) != 0
            num_messages += 1 if is_here else 0
        ptx.syncwarp(ptx.FULL_MASK)
        num_messages = warp_sum_s32(ptx.FULL_MASK, num_messages)
        tell_counts(network, work, bounds, call, shape, histogram, num_messages, peer, lane)
        peer += ptx.grid_dim()
