"""The send phase of low-latency dispatch: cast a token, put it to each of its experts, count. See dispatch.py.

 cell            written by          with                    read by           with
 slots[h, e]     putters             atom_add_relaxed_gpu    -                 -
 stage           casters             st_shared_v2, _v4       network           after a proxy fence and bar_sync
 counts[e, s]    putters, counters   amo_add                 receivers         ld_acquire_sys
 calls[s]        counters            amo_add                 teller            ld_relaxed_sys, see calls.py
 slots, counts   next keeper         resets, see journal.py

The warps of a block, in this order: a putter, casters, a counter. While the casters cast, the putter takes slots and
looks at credits. It adds the tags of a token's messages all at once, when all of them are quiet: a fence waits for
whatever its SM has on the way, so a fence for each message would cost as much as the last one every time.

The two stages of a block take turns. The putter comes to the barrier of a token only when the token before is quiet, so
a stage that is filled again has been read.
"""

import nbep.device.primitives as ptx
from nbep.device.jit import device_function
from nbep.device.kernels.low_latency.arguments import stage_bytes
from nbep.device.kernels.low_latency.calls import tell_call
from nbep.device.kernels.low_latency.journal import may_send, slot_counter, sum_cell
from nbep.device.layout.low_latency import (
    NOTE_ALIGNMENT,
    count_offset,
    message_stride,
    note_offset,
    num_scales,
    payload_bytes,
    rank_of,
    recv_offset,
    send_offset,
)
from nbep.device.network.seam import keep_message, put_nbi_warp, quiet
from nbep.device.protocols.arrivals import TAG, completion, tell
from nbep.device.protocols.fp8 import abs_max8, fp8_scales, to_e4m3x8
from nbep.device.protocols.reduce import half_warp_max_f32, unpack_bf16x8, warp_sum_s32
from nbep.device.protocols.waits import LOW_LATENCY_CHOICE, report_fault

SENDER_BARRIER = 1
PUTTER = 0  # its warp
NUM_OTHERS = 2  # warps that do not cast: the putter and the counter
COLUMNS = 256  # of a token that a warp casts at once, eight a lane


@device_function
def expert_of(inputs, bounds, shape, num_topk, token, choice):
    """The expert of a choice; -1 if it is unused. One that is not there is reported, and counts as unused."""
    expert = ptx.ld_nc_s64(inputs.topk_idx + 8 * (token * num_topk + choice))
    if expert < -1 or expert >= shape.num_experts:
        report_fault(bounds, LOW_LATENCY_CHOICE, -1, token, choice, expert)
        return -1
    return expert


@device_function
def take_slot(inputs, network, work, bounds, call, shape, num_topk, token, choice):
    """Take a slot for a choice; one thread. Returns its expert, -1 if unused, and the slot, -1 if nothing can go."""
    expert = -1
    slot = -1
    if choice < num_topk:
        expert = expert_of(inputs, bounds, shape, num_topk, token, choice)
    if expert >= 0:
        slot = ptx.atom_add_relaxed_gpu_s32(slot_counter(work, call, expert), 1)
        peer, _ = rank_of(shape, expert)
        if not may_send(network, work, bounds, call, peer):
            slot = -1
        elif slot >= shape.num_max_tokens:
            report_fault(bounds, LOW_LATENCY_CHOICE, -1, token, choice, expert)
            slot = -1
    return expert, slot


@device_function
def cast_columns(stage, words, column, shape, round_scale, lane):
    """Cast 256 columns of a token into its message: e4m3 with two scales. Past the end of a row words are zeros."""
    values = unpack_bf16x8(words)
    scale, scale_inv = fp8_scales(half_warp_max_f32(ptx.FULL_MASK, abs_max8(values)), round_scale)
    if column < shape.hidden:
        ptx.st_shared_v2(stage + column, to_e4m3x8(values, scale))
        if lane % 16 == 0:
            ptx.st_shared_f32(stage + shape.hidden + column // 32, scale_inv)


@device_function
def load_columns(row, column, shape):
    """Eight columns of a token, zeros past its end."""
    nothing = (0, 0, 0, 0)
    return ptx.ld_nc_v4(row + 2 * column) if column < shape.hidden else nothing


@device_function
def fill_message(stage, row, shape, round_scale, caster, num_casters, lane):
    """Casters: write the values and scales of a token into its message; each warp some of its columns."""
    step = COLUMNS * num_casters
    column = COLUMNS * caster + 8 * lane
    while column - 8 * lane < shape.hidden:
        next_column = column + step
        words = load_columns(row, column, shape)
        next_words = load_columns(row, next_column, shape)
        if shape.use_fp8 != 0:
            cast_columns(stage, words, column, shape, round_scale, lane)
            if next_column - 8 * lane < shape.hidden:
                cast_columns(stage, next_words, next_column, shape, round_scale, lane)
        else:
            if column < shape.hidden:
                ptx.st_shared_v4(stage + 2 * column, words)
            if next_column < shape.hidden:
                ptx.st_shared_v4(stage + 2 * next_column, next_words)
        column = next_column + step


@device_function
def clear_gap(stage, shape, lane):
    """Write what may be padding between the scales and the note of a message."""
    if lane < -num_scales(shape) & 3:  # words; the note begins at a multiple of NOTE_ALIGNMENT
        ptx.st_shared_s32(stage + payload_bytes(shape) + 4 * num_scales(shape) + 4 * lane, 0)


@device_function
def open_to_engine():
    """The stage is written, and the copy engine and the putter may read it: casters and putter meet."""
    if ptx.has_tma():
        ptx.fence_proxy_async_shared()
    ptx.bar_sync(SENDER_BARRIER, ptx.block_dim() - 32)


@device_function
def message_bytes(shape):
    return note_offset(shape) + NOTE_ALIGNMENT


@device_function
def message_offset(call, shape, token):
    """Where this rank keeps the message of a token, if it leaves from the buffer."""
    return send_offset(call.num_rdma_bytes, call.half) + token * message_stride(shape)


@device_function
def put_choice(network, call, shape, stage, token, expert, slot, lane):
    """Start to put the message in the stage into a slot of an expert; one warp."""
    peer, local_expert = rank_of(shape, expert)
    stride = message_stride(shape)
    dst = recv_offset(call, network.rank)
    dst += (local_expert * shape.num_max_tokens + slot) * stride
    src = message_offset(call, shape, token)
    put_nbi_warp(network, dst, src, stage, message_bytes(shape), peer, local_expert, lane)


@device_function
def add_to_count(network, work, call, shape, expert, value, is_behind):
    """Add to what an expert's rank is told of its messages; one thread. is_behind: see amo_add"""
    peer, local_expert = rank_of(shape, expert)
    cell = count_offset(call.num_rdma_bytes, call.half, network.rank, local_expert)
    tell(network, sum_cell(work, call, expert), cell, value, peer, local_expert, is_behind)


@device_function
def put_token(network, work, call, shape, stage, token, expert, slot, lane):
    """Putter: put the message in the stage to all experts, then tell them.

    expert, slot: in lane k those of choice k; a slot is -1 if nothing goes there
    """
    chosen = ptx.vote_ballot(ptx.FULL_MASK, slot >= 0)
    left = chosen
    if chosen != 0:
        keep_message(network, message_offset(call, shape, token), stage, message_bytes(shape), lane)
    while left != 0:
        choice = ptx.ffs_u32(left) - 1
        goal = ptx.shfl_idx_s32(ptx.FULL_MASK, expert, choice)
        put_choice(network, call, shape, stage, token, goal, ptx.shfl_idx_s32(ptx.FULL_MASK, slot, choice), lane)
        left &= left - 1
    quiet(network, lane)
    if slot >= 0:
        add_to_count(network, work, call, shape, expert, TAG, True)


@device_function
def next_stage(shape, stage):
    """The other one of the two stages."""
    return 2 * ptx.smem_base() + stage_bytes(shape) - stage


@device_function
def cast_messages(inputs, shape, sizes, warp, lane):
    """Casters: all tokens of this block, one after the other; with deduplicate, too."""
    num_casters = ptx.block_dim() // 32 - NUM_OTHERS
    stage = ptx.smem_base()
    token = ptx.block_idx()
    while token < sizes.num_tokens:
        row = inputs.x + 2 * token * shape.hidden
        fill_message(stage, row, shape, sizes.round_scale, warp - 1, num_casters, lane)
        open_to_engine()
        token += ptx.grid_dim()
        stage = next_stage(shape, stage)


@device_function
def put_messages(inputs, network, work, bounds, call, shape, sizes, lane):
    """Putter: all tokens of this block, one after the other."""
    stage = ptx.smem_base()
    token = ptx.block_idx()
    while token < sizes.num_tokens:
        expert, slot = take_slot(inputs, network, work, bounds, call, shape, sizes.num_topk, token, lane)
        clear_gap(stage, shape, lane)
        if lane == 0:
            ptx.st_shared_v4(stage + note_offset(shape), (token, 0, 0, 0))
        open_to_engine()
        put_token(network, work, call, shape, stage, token, expert, slot, lane)
        token += ptx.grid_dim()
        stage = next_stage(shape, stage)


@device_function
def load_choice(inputs, index, num_entries):
    """A choice; -1 past the last. It loads in any case: behind a branch a load waits for the one before."""
    chosen = ptx.ld_nc_s64(inputs.topk_idx + 8 * min(index, num_entries - 1))
    return chosen if index < num_entries else -1


@device_function
def count_four(inputs, num_entries, expert, step, lane):
    """How many choices are one of four experts, `step` apart; in each lane its share, for each of them."""
    a = b = c = d = 0
    first = lane
    while first < num_entries:
        # Four loads in flight: the counters must be done before the messages are.
        p = load_choice(inputs, first, num_entries)
        q = load_choice(inputs, first + 32, num_entries)
        r = load_choice(inputs, first + 64, num_entries)
        s = load_choice(inputs, first + 96, num_entries)
        a += matches(p, q, r, s, expert)
        b += matches(p, q, r, s, expert + step)
        c += matches(p, q, r, s, expert + 2 * step)
        d += matches(p, q, r, s, expert + 3 * step)
        first += 128
    return a, b, c, d


@device_function
def matches(p, q, r, s, expert):
    return (1 if p == expert else 0) + (1 if q == expert else 0) + (1 if r == expert else 0) + (1 if s == expert else 0)


@device_function
def count_choices(inputs, network, work, bounds, call, shape, sizes, lane):
    """Counter: count the choices of every grid_dim()-th expert, four at a time, and tell their ranks; one warp."""
    step = ptx.grid_dim()
    expert = ptx.block_idx()
    while expert < shape.num_experts:
        a, b, c, d = count_four(inputs, sizes.num_tokens * sizes.num_topk, expert, step, lane)
        a = warp_sum_s32(ptx.FULL_MASK, a)
        b = warp_sum_s32(ptx.FULL_MASK, b)
        c = warp_sum_s32(ptx.FULL_MASK, c)
        d = warp_sum_s32(ptx.FULL_MASK, d)
        num_chosen = a if lane == 0 else b if lane == 1 else c if lane == 2 else d
        goal = expert + lane * step
        if lane < 4 and goal < shape.num_experts:
            peer, local_expert = rank_of(shape, goal)
            if may_send(network, work, bounds, call, peer):
                if local_expert == 0:
                    tell_call(network, call, peer)
                add_to_count(network, work, call, shape, goal, completion(num_chosen), False)
        ptx.syncwarp(ptx.FULL_MASK)
        expert += 4 * step
