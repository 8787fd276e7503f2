"""The send phase of low-latency dispatch with deduplicate: a token goes to each rank of its experts once.

 rank s: x[t] --sender: cast--> stage --put_nbi_warp--> message[s, j] of rank r --receiver--> recv_x[e, i] for each e
         note: for each choice its local expert, its place among those from s, its weight

 cell            written by          with                    read by           with
 slots[e], [r]   senders             atom_add_relaxed_gpu    who finishes r    ld_relaxed_gpu, after finished
                 who finishes r      st_relaxed_gpu (0)      -                 the next call
 finished[r]     senders, counters   atom_add_acq_rel_gpu    who finishes r    the same
 counts[e, s]    counter             amo_add (-n - 1)        receivers         after arrivals
 message         senders             put_nbi_warp            receivers         after arrivals
 arrivals[s]     who finishes r      amo_add (-n - 1)        receivers         ld_acquire_sys
 stage, notes    senders             st_shared               copy engine       after a proxy fence and bar_sync
 histogram       counter             atom_add_relaxed_cta    counter           ld_shared, after syncwarp

Everything for a rank goes through one queue: the counts of its experts, its messages, and behind them all its arrival,
which says how many messages there are. slots and finished of rank r stand behind those of the experts.
"""

from nbep.device.jit import device_function
from nbep.device.kernels.low_latency.arguments import note_stride, stage_bytes
from nbep.device.kernels.low_latency.dispatch_sender import (
    COUNTED,
    clear_gap,
    expert_of,
    fill_message,
    may_send,
    open_to_engine,
)
from nbep.device.layout.low_latency import (
    MAX_EXPERTS,
    arrival_offset,
    count_offset,
    message_stride,
    note_bytes,
    note_offset,
    recv_offset,
    send_offset,
)
from nbep.device.network import amo_add, put_nbi_warp, quiet
from nbep.device.primitives import (
    FULL_MASK,
    atom_add_acq_rel_gpu_s32,
    atom_add_relaxed_cta_shared_s32,
    atom_add_relaxed_gpu_s32,
    block_dim,
    block_idx,
    f32_bits_u32,
    grid_dim,
    ld_na_f32,
    ld_nc_s64,
    ld_relaxed_gpu_s32,
    ld_shared_s32,
    smem_base,
    st_relaxed_gpu_s32,
    st_shared_s32,
    syncwarp,
    u32_div,
    vote_any,
)
from nbep.device.protocols.arrivals import is_masked
from nbep.device.protocols.reduce import warp_sum_s32

QUEUE = 0
# Words of a note
SRC_IDX = 0
SLOT = 1  # of the message; the sender's own, -1 if there is nothing to send
ENTRIES = 4  # for each choice: local expert or -1, place, weight
NOT_SENT = -2  # the slot of a message for a rank that is masked, or late; it counts only if the rank is masked


@device_function
def write_note(note, inputs, network, work, bounds, call, shape, token, peer, lane):
    """Take places for the choices of a token that are on a peer, and one for its message; write them down. A warp."""
    num_local_experts = u32_div(shape.num_experts, shape.num_ranks)
    expert = -1
    place = 0
    weight = 0
    if lane < shape.num_topk:
        chosen = expert_of(inputs, bounds, shape, shape.num_topk, token, lane)
        if chosen >= 0 and u32_div(chosen, num_local_experts) == peer:
            expert = chosen - peer * num_local_experts
            place = atom_add_relaxed_gpu_s32(work.slots + 4 * chosen, 1)
            weight = f32_bits_u32(ld_na_f32(inputs.topk_weights + 4 * (token * shape.num_topk + lane)))
        entry = note + 4 * ENTRIES + 12 * lane
        st_shared_s32(entry, expert)
        st_shared_s32(entry + 4, place)
        st_shared_s32(entry + 8, weight)
    is_chosen = vote_any(FULL_MASK, expert >= 0)
    if lane < ENTRIES:
        st_shared_s32(note + 4 * lane, token if lane == SRC_IDX else -1)
    padding = 4 * ENTRIES + 12 * shape.num_topk + 4 * lane
    if padding < note_bytes(shape):
        st_shared_s32(note + padding, 0)
    syncwarp(FULL_MASK)
    if lane == 0 and is_chosen:
        slot = atom_add_relaxed_gpu_s32(work.slots + 4 * (MAX_EXPERTS + peer), 1)
        if not may_send(network, work, bounds, call, peer):
            slot = NOT_SENT
        st_shared_s32(note + 4 * SLOT, slot)


@device_function
def finish_rank(network, work, call, shape, peer, value):
    """Count what is done for a rank; one thread. Who completes it tells the rank."""
    unit = MAX_EXPERTS + peer
    done = atom_add_acq_rel_gpu_s32(work.finished + 4 * unit, value) + value  # PAIR low-latency-finished (both ends)
    if done == COUNTED:
        num_sent = ld_relaxed_gpu_s32(work.slots + 4 * unit)
        if not is_masked(work.mask, peer):
            arrival = arrival_offset(call.num_rdma_bytes, call.half, network.rank)
            amo_add(network, arrival, -num_sent - 1, peer, QUEUE)
        num_local_experts = u32_div(shape.num_experts, shape.num_ranks)
        for i in range(num_local_experts):
            st_relaxed_gpu_s32(work.slots + 4 * (peer * num_local_experts + i), 0)
        st_relaxed_gpu_s32(work.slots + 4 * unit, 0)
        st_relaxed_gpu_s32(work.finished + 4 * unit, 0)


@device_function
def send_to_rank(network, work, call, shape, stage, note, token, peer, lane):
    """Put the values in the stage and the note for a peer into its next slot; one warp."""
    slot = ld_shared_s32(note + 4 * SLOT)
    syncwarp(FULL_MASK)
    if slot >= 0:
        stride = message_stride(shape)
        place = network.rank * shape.num_max_tokens + slot
        dst = recv_offset(call.num_rdma_bytes, call.half) + place * stride
        src = send_offset(call.num_rdma_bytes, call.half) + (token * shape.num_ranks + peer) * stride
        put_nbi_warp(network, dst, src, stage, note_offset(shape), peer, QUEUE, lane)
        put_nbi_warp(
            network,
            dst + note_offset(shape),
            src + note_offset(shape),
            note,
            note_bytes(shape),
            peer,
            QUEUE,
            lane,
        )
        quiet(network, peer, QUEUE, lane)
    if lane == 0 and (slot >= 0 or (slot == NOT_SENT and work.mask != 0)):
        finish_rank(network, work, call, shape, peer, 1)


@device_function
def send_messages_once(inputs, network, work, bounds, call, shape, sizes, warp, lane):
    """Sender: all tokens of this block, one after the other; a warp for each rank."""
    num_senders = block_dim() // 32 - 1
    stage = smem_base()
    token = block_idx()
    while token < sizes.num_tokens:
        notes = stage + message_stride(shape)
        peer = warp
        while peer < shape.num_ranks:
            write_note(notes + peer * note_stride(shape), inputs, network, work, bounds, call, shape, token, peer, lane)
            peer += num_senders
        fill_message(stage, inputs, token, shape, sizes.round_scale, warp, num_senders, lane)
        if warp == 0:
            clear_gap(stage, shape, lane)
        open_to_engine()
        peer = warp
        while peer < shape.num_ranks:
            note = notes + peer * note_stride(shape)
            send_to_rank(network, work, call, shape, stage, note, token, peer, lane)
            peer += num_senders
        token += grid_dim()
        stage = 2 * smem_base() + stage_bytes(shape) - stage  # the other one


@device_function
def local_choice(inputs, shape, token, choice, first):
    """The local expert of a choice on the rank whose experts begin at `first`; -1 if it is on another."""
    if choice >= shape.num_topk:
        return -1
    expert = ld_nc_s64(inputs.topk_idx + 8 * (token * shape.num_topk + choice)) - first
    return expert if 0 <= expert < u32_div(shape.num_experts, shape.num_ranks) else -1


@device_function
def count_token(inputs, shape, token, first, histogram):
    """Count the choices of a token that are on a rank, in the histogram. Returns whether there are any; one thread."""
    is_chosen = 0
    for choice in range(0, shape.num_topk, 4):
        # Four loads in flight: the counter must be done before the messages are.
        a = local_choice(inputs, shape, token, choice, first)
        b = local_choice(inputs, shape, token, choice + 1, first)
        c = local_choice(inputs, shape, token, choice + 2, first)
        d = local_choice(inputs, shape, token, choice + 3, first)
        if a >= 0:
            atom_add_relaxed_cta_shared_s32(histogram + 4 * a, 1)
        if b >= 0:
            atom_add_relaxed_cta_shared_s32(histogram + 4 * b, 1)
        if c >= 0:
            atom_add_relaxed_cta_shared_s32(histogram + 4 * c, 1)
        if d >= 0:
            atom_add_relaxed_cta_shared_s32(histogram + 4 * d, 1)
        is_chosen = 1 if a >= 0 or b >= 0 or c >= 0 or d >= 0 else is_chosen
    return is_chosen


@device_function
def count_ranks(inputs, network, work, bounds, call, shape, sizes, lane):
    """Counter: tell every grid_dim()-th rank how many tokens its experts get, then count its messages; one warp."""
    num_local_experts = u32_div(shape.num_experts, shape.num_ranks)
    histogram = smem_base() + 2 * stage_bytes(shape)
    peer = block_idx()
    while peer < shape.num_ranks:
        for i in range(lane, num_local_experts, 32):
            st_shared_s32(histogram + 4 * i, 0)
        syncwarp(FULL_MASK)
        num_messages = 0
        for token in range(lane, sizes.num_tokens, 32):
            num_messages += count_token(inputs, shape, token, peer * num_local_experts, histogram)
        syncwarp(FULL_MASK)
        is_free = may_send(network, work, bounds, call, peer)  # each lane for what it adds
        for i in range(lane, num_local_experts, 32):
            num_chosen = ld_shared_s32(histogram + 4 * i)
            if is_free:
                count = count_offset(call.num_rdma_bytes, call.half, i * shape.num_ranks + network.rank)
                amo_add(network, count, -num_chosen - 1, peer, QUEUE)
        num_messages = warp_sum_s32(FULL_MASK, num_messages)
        syncwarp(FULL_MASK)
        if lane == 0 and (is_free or work.mask != 0):
            finish_rank(network, work, call, shape, peer, COUNTED - num_messages)
        peer += grid_dim()
