"""The send phase of low-latency dispatch: cast a token, put it to each of its experts, count. See dispatch.py.

The warps of a block, in this order: a sender, casters, a counter. While the casters cast, the sender takes slots and
looks at credits. It adds the tags of a token's messages all at once, when all of them are quiet: a fence waits for
whatever its SM has on the way, so a fence for each message would cost as much as the last one every time.

The two stages of a block take turns. The sender comes to the barrier of a token only when the token before is quiet, so
a stage that is filled again has been read.
"""

import nbep.device.layout.low_latency as layout
import nbep.device.primitives as ptx
from nbep.device.alignment import ALIGNMENT_BYTES, align_up
from nbep.device.jit import by_type, device_function
from nbep.device.kernels.low_latency.arguments import count_of_call, slot_counter, sum_cell
from nbep.device.kernels.low_latency.coordinator import may_send, notify_call, wait_send_area
from nbep.device.kernels.parts.arrivals import TAG, completion, notify
from nbep.device.network.seam import Place, keep_message, put_nbi_warp, quiet
from nbep.device.protocols.fp8 import fp8_scales, to_e4m3x8
from nbep.device.protocols.reduce import abs_max8, half_warp_max_f32, unpack_bf16x8, warp_sum_s32
from nbep.device.protocols.waits import report_fault, site

LOW_LATENCY_CHOICE = site(
    14, "low-latency dispatch sender", "topk_idx", "experts that are there, each once for a token"
)

SENDER_BARRIER = 1
SENDER = 0  # its warp
NUM_OTHERS = 2  # warps that do not cast: the sender and the counter
COLUMNS = 256  # of a token that a warp casts at once, eight a lane


@device_function
def header_stride(shape):
    """From the header for one rank to that for the next, in shared memory."""
    return align_up(layout.header_bytes(shape), ALIGNMENT_BYTES)


@device_function
def stage_bytes(shape):
    """One token in shared memory: its message and, with deduplicate, a header for each rank that it goes to."""
    return layout.message_stride(shape) + (shape.num_topk * header_stride(shape) if layout.deduplicates(shape) else 0)


@device_function
def expert_of(ctx, inputs, token, choice):
    """The expert of a choice; -1 if it is unused. One that is not there is reported, and counts as unused."""
    expert = ptx.ld_nc_s64(inputs.topk_idx + 8 * (token * ctx.sizes.num_topk + choice))
    if expert < -1 or expert >= ctx.shape.num_experts:
        report_fault(ctx.bounds, LOW_LATENCY_CHOICE, -1, token, choice, expert)
        return -1
    return expert


@device_function
def take_slot(ctx, inputs, token, choice):
    """Take a slot for a choice; one thread. Returns its expert, -1 if unused, and the slot, -1 if nothing can go."""
    expert = -1
    slot = -1
    if choice < ctx.sizes.num_topk:
        expert = expert_of(ctx, inputs, token, choice)
    if expert >= 0:
        slot = ptx.atom_add_relaxed_gpu_s32(slot_counter(ctx, expert), 1)
        peer, _ = layout.rank_of(ctx.shape, expert)
        if not may_send(ctx, peer):
            slot = -1
        elif slot >= ctx.shape.num_max_tokens:
            report_fault(ctx.bounds, LOW_LATENCY_CHOICE, -1, token, choice, expert)
            slot = -1
    return expert, slot


@device_function
def cast_columns(ctx, stage, words, column):
    """Cast 256 columns of a token into its message: e4m3 with two scales. Past the end of a row words are zeros."""
    values = unpack_bf16x8(words)
    scale, scale_inv = fp8_scales(half_warp_max_f32(ptx.FULL_MASK, abs_max8(values)), ctx.sizes.round_scale)
    if column < ctx.shape.hidden:
        ptx.st_shared_v2(stage + column, to_e4m3x8(values, scale))
        if ctx.lane % 16 == 0:
            ptx.st_shared_f32(stage + ctx.shape.hidden + column // 32, scale_inv)


@device_function
def load_columns(row, column, shape):
    """Eight columns of a token, zeros past its end."""
    nothing = (0, 0, 0, 0)
    return ptx.ld_nc_v4(row + 2 * column) if column < shape.hidden else nothing


@device_function
def fill_message(ctx, stage, row, caster, num_casters):
    """Casters: write the values and scales of a token into its message; each warp some of its columns."""
    step = COLUMNS * num_casters
    column = COLUMNS * caster + 8 * ctx.lane
    while column - 8 * ctx.lane < ctx.shape.hidden:
        next_column = column + step
        words = load_columns(row, column, ctx.shape)
        next_words = load_columns(row, next_column, ctx.shape)
        if ctx.shape.use_fp8 != 0:
            cast_columns(ctx, stage, words, column)
            if next_column - 8 * ctx.lane < ctx.shape.hidden:
                cast_columns(ctx, stage, next_words, next_column)
        else:
            if column < ctx.shape.hidden:
                ptx.st_shared_v4(stage + 2 * column, words)
            if next_column < ctx.shape.hidden:
                ptx.st_shared_v4(stage + 2 * next_column, next_words)
        column = next_column + step


@device_function
def clear_gap(ctx, stage):
    """Write what may be padding between the scales and the header of a message."""
    if ctx.lane < -layout.num_scales(ctx.shape) & 3:  # words; the header begins at a multiple of HEADER_ALIGNMENT
        ptx.st_shared_s32(stage + layout.payload_bytes(ctx.shape) + 4 * layout.num_scales(ctx.shape) + 4 * ctx.lane, 0)


@device_function
def open_to_engine():
    """The stage is written, and the copy engine and the sender may read it: casters and sender meet."""
    if ptx.has_tma():
        ptx.fence_proxy_async_shared()
    ptx.bar_sync(SENDER_BARRIER, ptx.block_dim() - 32)


@device_function
def message_bytes(shape):
    return layout.header_offset(shape) + layout.HEADER_ALIGNMENT


@device_function
def message_offset(ctx, token):
    """Where this rank keeps the message of a token, if it leaves from the buffer."""
    return layout.send_offset(ctx.call.num_rdma_bytes, ctx.call.half) + token * layout.message_stride(ctx.shape)


@device_function
def put_choice(ctx, stage, token, expert, slot):
    """Start to put the message in the stage into a slot of an expert; one warp."""
    peer, local_expert = layout.rank_of(ctx.shape, expert)
    stride = ctx.sizes.message_stride
    dst = layout.recv_offset(ctx.call, ctx.network.rank)
    dst += (local_expert * ctx.shape.num_max_tokens + slot) * stride
    src = message_offset(ctx, token)
    num_bytes = ctx.sizes.header_offset + layout.HEADER_ALIGNMENT
    put_nbi_warp(ctx.network, Place(dst, src, peer, local_expert), stage, num_bytes, ctx.lane)


@device_function
def add_to_count(ctx, expert, value, is_behind):
    """Add to the count of messages at an expert's rank; one thread. is_behind: see amo_add"""
    peer, local_expert = layout.rank_of(ctx.shape, expert)
    place = Place(count_of_call(ctx, ctx.network.rank, local_expert), 0, peer, local_expert)
    notify(ctx.network, place, sum_cell(ctx, expert), value, is_behind)


@device_function
def put_token(ctx, stage, token, expert, slot):
    """Sender: put the message in the stage to all experts, then notify them.

    expert, slot: in lane k those of choice k; a slot is -1 if nothing goes there
    """
    chosen = ptx.vote_ballot(ptx.FULL_MASK, slot >= 0)
    left = chosen
    if chosen != 0:
        keep_message(ctx.network, message_offset(ctx, token), stage, message_bytes(ctx.shape), ctx.lane)
    while left != 0:
        choice = ptx.ffs_u32(left) - 1
        dst_expert = ptx.shfl_idx_s32(ptx.FULL_MASK, expert, choice)
        put_choice(ctx, stage, token, dst_expert, ptx.shfl_idx_s32(ptx.FULL_MASK, slot, choice))
        left &= left - 1
    quiet(ctx.network, ctx.lane)
    if slot >= 0:
        add_to_count(ctx, expert, TAG, True)


@device_function
def next_stage(shape, stage):
    """The other one of the two stages."""
    return 2 * ptx.smem_base() + stage_bytes(shape) - stage


@device_function
def cast_messages(ctx, inputs):
    """Casters: all tokens of this block, one after the other; with deduplicate, too."""
    num_casters = ptx.block_dim() // 32 - NUM_OTHERS
    stage = ptx.smem_base()
    token = ptx.block_idx()
    while token < ctx.sizes.num_tokens:
        row = inputs.x + 2 * token * ctx.shape.hidden
        fill_message(ctx, stage, row, ctx.warp - 1, num_casters)
        open_to_engine()
        token += ptx.grid_dim()
        stage = next_stage(ctx.shape, stage)


@by_type("shape", layout.LowLatencyShape)
def send_choices(ctx, inputs):
    """Sender: all tokens of this block, one after the other."""
    wait_send_area(ctx)
    stage = ptx.smem_base()
    token = ptx.block_idx()
    while token < ctx.sizes.num_tokens:
        expert, slot = take_slot(ctx, inputs, token, ctx.lane)
        clear_gap(ctx, stage)
        if ctx.lane == 0:
            ptx.st_shared_v4(stage + layout.header_offset(ctx.shape), (token, 0, 0, 0))
        open_to_engine()
        put_token(ctx, stage, token, expert, slot)
        token += ptx.grid_dim()
        stage = next_stage(ctx.shape, stage)


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


@by_type("shape", layout.LowLatencyShape)
def count_choices(ctx, inputs):
    """Counter: count the choices of every grid_dim()-th expert, four at a time, and notify their ranks; one warp."""
    step = ptx.grid_dim()
    expert = ptx.block_idx()
    while expert < ctx.shape.num_experts:
        a, b, c, d = count_four(inputs, ctx.sizes.num_tokens * ctx.sizes.num_topk, expert, step, ctx.lane)
        a = warp_sum_s32(ptx.FULL_MASK, a)
        b = warp_sum_s32(ptx.FULL_MASK, b)
        c = warp_sum_s32(ptx.FULL_MASK, c)
        d = warp_sum_s32(ptx.FULL_MASK, d)
        num_chosen = a if ctx.lane == 0 else b if ctx.lane == 1 else c if ctx.lane == 2 else d
        dst_expert = expert + ctx.lane * step
        if ctx.lane < 4 and dst_expert < ctx.shape.num_experts:
            peer, local_expert = layout.rank_of(ctx.shape, dst_expert)
            if may_send(ctx, peer):
                if local_expert == 0:
                    notify_call(ctx, peer)
                add_to_count(ctx, dst_expert, completion(num_chosen), False)
        ptx.syncwarp(ptx.FULL_MASK)
        expert += 4 * step
