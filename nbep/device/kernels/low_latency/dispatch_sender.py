"""The send phase of low-latency dispatch: cast a token, send it to each of its experts, count. See dispatch.py.

 cell            written by          with                    read by           with
 slots[e]        senders             atom_add_relaxed_gpu    who finishes e    ld_relaxed_gpu, after finished
                 who finishes e      st_relaxed_gpu (0)      -                 the next call
 finished[e]     senders, counters   atom_add_acq_rel_gpu    who finishes e    the same
                 who finishes e      st_relaxed_gpu (0)      -                 the next call
 stage           senders             st_shared_v2, _v4       copy engine       after a proxy fence and bar_sync

The two stages of a block take turns. A sender comes to the barrier of a token only when its own sends of the token
before are quiet, so a stage that is filled again has been read.
"""

from nbep.device.jit import device_function
from nbep.device.layout.low_latency import (
    count_offset,
    credit_offset,
    message_stride,
    note_offset,
    num_scales,
    payload_bytes,
    recv_offset,
    send_offset,
)
from nbep.device.network import amo_add, own_ptr, put_nbi_warp, quiet
from nbep.device.primitives import (
    FULL_MASK,
    atom_add_acq_rel_gpu_s32,
    atom_add_relaxed_gpu_s32,
    bar_sync,
    block_dim,
    block_idx,
    fence_proxy_async_shared,
    grid_dim,
    has_tma,
    ld_nc_s64,
    ld_nc_v4,
    ld_relaxed_gpu_s32,
    shfl_idx_s32,
    smem_base,
    st_relaxed_gpu_s32,
    st_shared_f32,
    st_shared_s32,
    st_shared_v2,
    st_shared_v4,
    u32_div,
)
from nbep.device.protocols.arrivals import is_masked, wait_credit
from nbep.device.protocols.fp8 import abs_max8, fp8_scales, to_e4m3x8, unpack_bf16x8
from nbep.device.protocols.reduce import half_warp_max_f32, warp_sum_s32
from nbep.device.protocols.waits import LOW_LATENCY_CHOICE, report_fault

COUNTED = 1 << 20
SENDER_BARRIER = 1
COLUMNS = 256  # of a token that a warp casts at once, eight a lane


@device_function
def expert_of(inputs, bounds, shape, num_topk, token, choice):
    """The expert of a choice; -1 if it is unused. One that is not there is reported, and counts as unused."""
    expert = ld_nc_s64(inputs.topk_idx + 8 * (token * num_topk + choice))
    if expert < -1 or expert >= shape.num_experts:
        report_fault(bounds, LOW_LATENCY_CHOICE, -1, token, choice, expert)
        return -1
    return expert


@device_function
def may_send(network, work, bounds, call, peer):
    """Whether the peer is there and its half of the buffer is free; one thread."""
    credit = own_ptr(network, credit_offset(call.num_rdma_bytes, call.half, peer))
    return wait_credit(credit, bounds, work.mask, peer, call.half)


@device_function
def reserve_slot(inputs, network, work, bounds, call, shape, sizes, token, choice, lane):
    """Take a slot for a choice; the same in every lane. Returns its expert, -1 if unused, and the slot, -1 if none.

    It comes before the cast, which hides how long it takes.
    """
    expert = -1
    slot = -1
    if choice < sizes.num_topk:
        expert = expert_of(inputs, bounds, shape, sizes.num_topk, token, choice)
        if lane == 0 and expert >= 0:
            peer = u32_div(expert, u32_div(shape.num_experts, shape.num_ranks))
            slot = atom_add_relaxed_gpu_s32(work.slots + 4 * expert, 1)
            if not may_send(network, work, bounds, call, peer):
                slot = -1
            elif slot >= shape.num_max_tokens:
                report_fault(bounds, LOW_LATENCY_CHOICE, -1, token, choice, expert)
                slot = -1
        slot = shfl_idx_s32(FULL_MASK, slot, 0)
    return expert, slot


@device_function
def cast_columns(stage, words, column, shape, round_scale, lane):
    """Cast 256 columns of a token into its message: e4m3 with two scales. Past the end of a row words are zeros."""
    values = unpack_bf16x8(words)
    scale, scale_inv = fp8_scales(half_warp_max_f32(FULL_MASK, abs_max8(values)), round_scale)
    if column < shape.hidden:
        st_shared_v2(stage + column, to_e4m3x8(values, scale))
        if lane % 16 == 0:
            st_shared_f32(stage + shape.hidden + column // 32, scale_inv)


@device_function
def fill_message(stage, inputs, token, shape, round_scale, warp, num_warps, lane):
    """Senders: write the values and scales of a token into its message; each warp some of its columns."""
    row = inputs.x + 2 * token * shape.hidden
    nothing = (0, 0, 0, 0)
    step = COLUMNS * num_warps
    column = COLUMNS * warp + 8 * lane
    while column - 8 * lane < shape.hidden:
        next_column = column + step
        words = ld_nc_v4(row + 2 * column) if column < shape.hidden else nothing
        next_words = ld_nc_v4(row + 2 * next_column) if next_column < shape.hidden else nothing
        if shape.use_fp8 != 0:
            cast_columns(stage, words, column, shape, round_scale, lane)
            if next_column - 8 * lane < shape.hidden:
                cast_columns(stage, next_words, next_column, shape, round_scale, lane)
        else:
            if column < shape.hidden:
                st_shared_v4(stage + 2 * column, words)
            if next_column < shape.hidden:
                st_shared_v4(stage + 2 * next_column, next_words)
        column += 2 * step


@device_function
def clear_gap(stage, shape, lane):
    """Write what may be padding between the scales and the note of a message."""
    gap = payload_bytes(shape) + 4 * num_scales(shape)
    if gap + 4 * lane < note_offset(shape):
        st_shared_s32(stage + gap + 4 * lane, 0)


@device_function
def open_to_engine():
    """All senders have written the stage, and the copy engine and the lanes of all of them may read it."""
    if has_tma():
        fence_proxy_async_shared()
    bar_sync(SENDER_BARRIER, block_dim() - 32)


@device_function
def finish_expert(network, work, call, shape, expert, value):
    """Count what is done for an expert; one thread. Who completes it tells the expert's rank."""
    done = atom_add_acq_rel_gpu_s32(work.finished + 4 * expert, value) + value  # PAIR low-latency-finished (both ends)
    if done == COUNTED:
        num_local_experts = u32_div(shape.num_experts, shape.num_ranks)
        peer = u32_div(expert, num_local_experts)
        local_expert = expert - peer * num_local_experts
        num_sent = ld_relaxed_gpu_s32(work.slots + 4 * expert)
        if not is_masked(work.mask, peer):
            index = local_expert * shape.num_ranks + network.rank
            count = count_offset(call.num_rdma_bytes, call.half, index)
            amo_add(network, count, -num_sent - 1, peer, local_expert)
        st_relaxed_gpu_s32(work.slots + 4 * expert, 0)
        st_relaxed_gpu_s32(work.finished + 4 * expert, 0)


@device_function
def send_choice(network, work, call, shape, stage, token, expert, slot, lane):
    """Put the message in the stage into a slot of an expert; one warp. -1: send nothing, the rank is masked or late.

    What a late rank does not get is not counted either, so that it is never told of it.
    """
    if slot >= 0:
        num_local_experts = u32_div(shape.num_experts, shape.num_ranks)
        peer = u32_div(expert, num_local_experts)
        local_expert = expert - peer * num_local_experts
        stride = message_stride(shape)
        place = (local_expert * shape.num_ranks + network.rank) * shape.num_max_tokens + slot
        dst = recv_offset(call.num_rdma_bytes, call.half) + place * stride
        src = send_offset(call.num_rdma_bytes, call.half) + token * stride
        num_bytes = note_offset(shape) + 16
        put_nbi_warp(network, dst, src, stage, num_bytes, peer, local_expert, lane)
        quiet(network, peer, local_expert, lane)
    if lane == 0 and (slot >= 0 or work.mask != 0):
        finish_expert(network, work, call, shape, expert, 1)


@device_function
def send_messages(inputs, network, work, bounds, call, shape, sizes, warp, lane):
    """Sender: all tokens of this block, one after the other; a warp for each choice."""
    num_senders = block_dim() // 32 - 1
    stride = message_stride(shape)
    stage = smem_base()
    token = block_idx()
    while token < sizes.num_tokens:
        expert, slot = reserve_slot(inputs, network, work, bounds, call, shape, sizes, token, warp, lane)
        fill_message(stage, inputs, token, shape, sizes.round_scale, warp, num_senders, lane)
        if warp == 0:
            clear_gap(stage, shape, lane)
            if lane == 0:
                st_shared_v4(stage + note_offset(shape), (token, 0, 0, 0))
        open_to_engine()
        choice = warp
        while choice < sizes.num_topk:
            if expert >= 0:
                send_choice(network, work, call, shape, stage, token, expert, slot, lane)
            choice += num_senders
            expert, slot = reserve_slot(inputs, network, work, bounds, call, shape, sizes, token, choice, lane)
        token += grid_dim()
        stage = 2 * smem_base() + stride - stage  # the other one


@device_function
def count_four(inputs, num_entries, expert, step, lane):
    """How many choices are one of four experts, `step` apart; in each lane its share, for each of them."""
    a = b = c = d = 0
    first = lane
    while first < num_entries:
        # Four loads in flight: the counters must be done before the messages are.
        p = ld_nc_s64(inputs.topk_idx + 8 * first)
        q = ld_nc_s64(inputs.topk_idx + 8 * (first + 32)) if first + 32 < num_entries else -1
        r = ld_nc_s64(inputs.topk_idx + 8 * (first + 64)) if first + 64 < num_entries else -1
        s = ld_nc_s64(inputs.topk_idx + 8 * (first + 96)) if first + 96 < num_entries else -1
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
    """Counter: count the choices of every grid_dim()-th expert, four at a time, a lane finishes each; one warp.

    It waits for the credit too: an expert that nobody has chosen has no sender that does.
    """
    step = grid_dim()
    expert = block_idx()
    while expert < shape.num_experts:
        a, b, c, d = count_four(inputs, sizes.num_tokens * sizes.num_topk, expert, step, lane)
        a = warp_sum_s32(FULL_MASK, a)
        b = warp_sum_s32(FULL_MASK, b)
        c = warp_sum_s32(FULL_MASK, c)
        d = warp_sum_s32(FULL_MASK, d)
        num_chosen = a if lane == 0 else b if lane == 1 else c if lane == 2 else d
        own_expert = expert + lane * step
        if lane < 4 and own_expert < shape.num_experts:
            peer = u32_div(own_expert, u32_div(shape.num_experts, shape.num_ranks))
            if may_send(network, work, bounds, call, peer) or work.mask != 0:
                finish_expert(network, work, call, shape, own_expert, COUNTED - num_chosen)
        expert += 4 * step
