"""The receive phase of low-latency dispatch: pack what has arrived, expert by expert. See dispatch.py."""

import nbep.device.layout.low_latency as layout
import nbep.device.primitives as ptx
from nbep.device.alignment import ALIGNMENT_BYTES, align_up, divided
from nbep.device.jit import by_type, device_function
from nbep.device.kernels.low_latency.arguments import count_cell
from nbep.device.kernels.parts.arrivals import announced, is_complete, note_wait, wait_arrival
from nbep.device.network.seam import own_ptr
from nbep.device.protocols.copies import Row, begin_copy, end_copy
from nbep.device.protocols.reduce import warp_sum_s32
from nbep.device.protocols.staging import open_stage
from nbep.device.protocols.waits import Waiter, site

LOW_LATENCY_DISPATCH_COUNT = site(11, "low-latency dispatch receiver", "count", "the peer's tokens and their number")


@device_function
def table_bytes(shape):
    """What a receiver has with deduplicate: the count of each (local expert, source), and a word for each rank."""
    return align_up(4 * (shape.num_experts + shape.num_ranks), ALIGNMENT_BYTES)


@device_function
def wait_counts(ctx, local_expert, src):
    """Where the tokens of a source begin among an expert's and how many there are; the same in every lane.

    The lanes wait for the counts of the sources up to `src`, 32 at once. Returns too whether one of these waits timed
    out, and no rank may be left out.
    """
    num_tokens = num_before = 0
    has_failed = False
    rank = ctx.lane
    while rank - ctx.lane <= src:
        num_tokens = 0
        if rank <= src:
            waiter = Waiter(LOW_LATENCY_DISPATCH_COUNT, rank, local_expert)
            value = wait_arrival(count_cell(ctx, rank, local_expert), ctx.bounds, ctx.work.mask, waiter)
            num_tokens = announced(value, ctx.shape.num_max_tokens)
            has_failed = has_failed or is_lost(ctx, value)
        num_before += num_tokens if rank < src else 0
        rank += 32
    ptx.syncwarp(ptx.FULL_MASK)
    if ptx.has_tma() and ctx.lane == 0:
        ptx.fence_proxy_async_global()  # what the counts have published, before the bulk copies that read it
    begin = warp_sum_s32(ptx.FULL_MASK, num_before)
    rows = begin, ptx.shfl_idx_s32(ptx.FULL_MASK, num_tokens, src % 32)
    return rows, ptx.vote_any(ptx.FULL_MASK, has_failed)


@device_function
def is_lost(ctx, value):
    """Whether a wait for a cell timed out, and no rank may be left out."""
    return ctx.work.mask == 0 and not is_complete(value)


@device_function
def note_range(ctx, out, local_expert, src, rows, has_failed):
    """Write down where the tokens of a source are; one thread. With those of the last source all are counted.

    rows: where they begin, and how many there are
    has_failed: a wait for one of the sources so far timed out. Then the expert has received -1 tokens
    """
    begin, num_tokens = rows
    cell = out.recv_layout_range + 8 * (local_expert * ctx.shape.num_ranks + src)
    ptx.st_weak_s64(cell, (begin << 32) | num_tokens)
    if src == ctx.shape.num_ranks - 1:
        ptx.st_weak_s32(out.recv_count + 4 * local_expert, -1 if has_failed else begin + num_tokens)
        if out.cumulative_recv_stats != 0:
            ptx.atom_add_relaxed_gpu_s32(out.cumulative_recv_stats + 4 * local_expert, begin + num_tokens)


@device_function
def store_scale(ctx, out, scale, local_expert, row, index):
    """Write one scale of a row to its column of recv_x_scales; for UE8M0 its exponent alone."""
    num_rows = ctx.shape.num_ranks * ctx.shape.num_max_tokens
    if ctx.sizes.use_ue8m0 != 0:
        word = (local_expert * (layout.num_scales(ctx.shape) // 4) + index // 4) * num_rows + row
        ptx.st_weak_u8(out.recv_x_scales + 4 * word + index % 4, ptx.f32_to_ue8m0(scale))
    else:
        word = (local_expert * layout.num_scales(ctx.shape) + index) * num_rows + row
        ptx.st_weak_f32(out.recv_x_scales + 4 * word, scale)


@device_function
def index_of(shape, src_idx):
    """The token's index that a header names; 0 if there is no such token: then the message is one of another call."""
    return src_idx if 0 <= src_idx < shape.num_max_tokens else 0


@device_function
def load_scale(message, shape, index):
    """A scale of a message; 0 past the last."""
    return ptx.ld_na_f32(message + shape.hidden + 4 * index) if index < layout.num_scales(shape) else ptx.f32(0)


@device_function
def receive_message(ctx, out, message, place, stage, parity):
    """Copy a message to a place, a local expert and a row; one warp. Returns the parity of the stage's next fill.

    All loads begin before the first of them is used.
    """
    local_expert, row = place
    num_bytes = layout.payload_bytes(ctx.shape)
    source = Row(message, num_bytes, 0)
    begin_copy(source, stage, ctx.lane)
    src_idx = ptx.ld_na_s32(message + ctx.sizes.header_offset)
    scale = load_scale(message, ctx.shape, ctx.lane)
    next_scale = load_scale(message, ctx.shape, ctx.lane + 32)
    to = local_expert * (ctx.shape.num_ranks * ctx.shape.num_max_tokens) + row
    parity = end_copy(ptx.ld_na_v4, out.recv_x + to * num_bytes, source, stage, parity, ctx.lane)
    if ctx.lane == 0:
        ptx.st_weak_s32(out.recv_src_info + 4 * to, index_of(ctx.shape, src_idx))
    index = ctx.lane
    while index < layout.num_scales(ctx.shape):
        store_scale(ctx, out, scale, local_expert, row, index)
        scale = next_scale
        index += 32
        next_scale = load_scale(message, ctx.shape, index + 32)
    return parity


@by_type("shape", layout.LowLatencyShape)
def receive_choices(ctx, out):
    """Receiver: a team of warps for each (local expert, source), which take its messages in turn.

    The warps of all blocks are shared out evenly: a team may have its warps in two blocks.
    """
    unit = ptx.block_idx() * (ptx.block_dim() // 32) + ctx.warp
    pair = divided(unit, ctx.sizes.inverse_of_team)
    warp_in_team = unit - pair * ctx.sizes.team_warps
    if pair == ctx.sizes.num_teams:  # too few are left for a team
        pair = ctx.shape.num_experts
    stage = open_stage(ptx.smem_base(), ctx.warp, ctx.lane)
    parity = 0
    while pair < ctx.shape.num_experts:
        local_expert, src = layout.local_and_rank(ctx.shape, pair)
        message = own_ptr(ctx.network, layout.recv_offset(ctx.call, src))
        message += (local_expert * ctx.shape.num_max_tokens + warp_in_team) * ctx.sizes.message_stride
        if ctx.lane == 0:
            ptx.prefetch_l2(message)  # its page, too: a team has one of its own
        if out.wait_recv_cost_stats != 0 and warp_in_team == 0 and ctx.lane == 0:
            waiter = Waiter(LOW_LATENCY_DISPATCH_COUNT, src, local_expert)
            cell = count_cell(ctx, src, local_expert)
            note_wait(out.wait_recv_cost_stats, cell, ctx.bounds, ctx.work.mask, waiter)
        rows, has_failed = wait_counts(ctx, local_expert, src)
        begin, num_tokens = rows
        i = warp_in_team
        while i < num_tokens:
            parity = receive_message(ctx, out, message, (local_expert, begin + i), stage, parity)
            message += ctx.sizes.team_warps * ctx.sizes.message_stride
            i += ctx.sizes.team_warps
        if warp_in_team == 0 and ctx.lane == 0:
            note_range(ctx, out, local_expert, src, rows, has_failed)
        pair += ctx.sizes.num_teams
    if ptx.has_tma() and ctx.lane == 0:
        ptx.tma_store_wait_read_all()  # a block's shared memory ends with it
