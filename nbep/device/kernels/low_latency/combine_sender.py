"""The send phase of low-latency combine: each row goes to the rank that its token came from. See combine.py."""

import nbep.device.layout.low_latency as layout
import nbep.device.primitives as ptx
from nbep.device.jit import by_type, device_function
from nbep.device.kernels.low_latency.arguments import Call, count_of_call
from nbep.device.kernels.low_latency.combine_receiver import SUM_TABLE_BYTES
from nbep.device.kernels.low_latency.coordinator import (
    is_last_block,
    is_notifier,
    may_send,
    may_warp_send,
    wait_send_area,
)
from nbep.device.kernels.parts.arrivals import completion, is_masked
from nbep.device.kernels.parts.logfmt import (
    ENCODED_BYTES,
    HIGH_BITS,
    PLAIN_BYTES,
    encode_four,
    encoding,
    is_encoded,
    log_range,
    pack_meta,
)
from nbep.device.network.seam import (
    Place,
    amo_add,
    further,
    keep_message,
    own_ptr,
    put_nbi_warp,
    put_stage,
    quiet,
    sends_from_buffer,
)
from nbep.device.protocols.reduce import abs_max8, half_warp_max_f32, unpack_bf16x8
from nbep.device.protocols.staging import STAGE_BYTES, VEC_BYTES, WARP_BYTES, begin_fill, open_stage, wait_filled

COLUMNS = 256  # of a row that a warp encodes at once, eight a lane


@device_function
def groups_here(num_experts, most):
    """Groups of warps in this block: where one pair less falls to it, there is one group less, and each is larger."""
    return most - 1 if most > 1 and ptx.block_idx() + ptx.grid_dim() * (most - 1) >= num_experts else most


@device_function
def put_row(ctx, place, row, stage, parity):
    """Put a row of global memory, a stage at a time; one warp. Returns the parity of the stage's next fill."""
    num_bytes = 2 * ctx.shape.hidden
    offset = 0
    while offset < num_bytes:
        part = min(num_bytes - offset, STAGE_BYTES)
        if ptx.has_tma():
            begin_fill(row + offset, part, stage, ctx.lane)
            parity = wait_filled(stage, parity)
        else:
            for at in range(ctx.lane * VEC_BYTES, part, WARP_BYTES):
                ptx.st_shared_v4(stage.data + at, ptx.ld_nc_v4(row + offset + at))
            ptx.syncwarp(ptx.FULL_MASK)
        to = further(place, offset)
        if sends_from_buffer(ctx.network) and row != own_ptr(ctx.network, place.src):  # with zero_copy it lies there
            keep_message(ctx.network, to.src, stage.data, part, ctx.lane)
            if ptx.has_tma():
                ptx.fence_proxy_async_shared()  # the lanes have read the stage: the engine may fill it again
        put_nbi_warp(ctx.network, to, stage.data, part, ctx.lane)
        ptx.syncwarp(ptx.FULL_MASK)
        offset += part
    return parity


@device_function
def abs_min8(values):
    """The smallest of eight magnitudes."""
    low = ptx.f32_max(
        ptx.f32_max(-ptx.f32_abs(values[0]), -ptx.f32_abs(values[1])),
        ptx.f32_max(-ptx.f32_abs(values[2]), -ptx.f32_abs(values[3])),
    )
    high = ptx.f32_max(
        ptx.f32_max(-ptx.f32_abs(values[4]), -ptx.f32_abs(values[5])),
        ptx.f32_max(-ptx.f32_abs(values[6]), -ptx.f32_abs(values[7])),
    )
    return -ptx.f32_max(low, high)


@device_function
def encode_columns(data, meta, words, is_active, lane):
    """Write 256 columns into the stage, each half of the warp 128 of them, and their words of the meta.

    data, meta: shared addresses where they go; words: eight bf16 of each lane. Returns the bytes. A half that is not
    active is past the end of the row.
    """
    values = unpack_bf16x8(words)
    smallest = -half_warp_max_f32(ptx.FULL_MASK, -abs_min8(values))
    word = pack_meta(half_warp_max_f32(ptx.FULL_MASK, abs_max8(values)), smallest)
    is_short = is_active and is_encoded(word)
    size = (ENCODED_BYTES if is_short else PLAIN_BYTES) if is_active else 0
    first = ptx.shfl_idx_s32(ptx.FULL_MASK, size, 0)
    second = ptx.shfl_idx_s32(ptx.FULL_MASK, size, 16)
    a = b = c = d = 0
    if is_short:
        low, step = log_range(word)
        per_step, addend = encoding(low, step)
        a, b = encode_four((values[0], values[1], values[2], values[3]), per_step, addend)
        c, d = encode_four((values[4], values[5], values[6], values[7]), per_step, addend)
    # Signs and 9th bits of eight values; two lanes share a word.
    bits = (b & 15) | ((d & 15) << 4) | (b & 0xF00) | ((d & 0xF00) << 4)
    next_bits = ptx.shfl_idx_s32(ptx.FULL_MASK, bits, lane | 1)
    place = lane % 16
    at = data if lane < 16 else data + first
    if is_short:
        ptx.st_shared_v2(at + 8 * place, (a, c))
        if place % 2 == 0:
            ptx.st_shared_s32(at + HIGH_BITS + 2 * place, bits | (next_bits << 16))
    elif is_active:
        ptx.st_shared_v4(at + 16 * place, words)
    if place == 0 and is_active:
        ptx.st_shared_s32(meta + layout.LOGFMT_META_BYTES * (lane // 16), word)
    return first + second


@device_function
def put_encoded_row(ctx, place, row, stage):
    """Put a row in LogFMT: its columns behind each other, then the meta in front of them; one warp."""
    meta_bytes = layout.row_stride(ctx.shape) - 2 * ctx.shape.hidden
    data = stage.data + meta_bytes
    room = STAGE_BYTES - meta_bytes
    if ctx.lane < VEC_BYTES // layout.LOGFMT_META_BYTES:  # what may be padding
        ptx.st_shared_s32(data - VEC_BYTES + 4 * ctx.lane, 0)
    ptx.syncwarp(ptx.FULL_MASK)
    used = 0
    done = meta_bytes
    meta = stage.data
    row += 16 * ctx.lane
    left = ctx.shape.hidden - 8 * ctx.lane
    while left + 8 * ctx.lane > 0:
        nothing = (0, 0, 0, 0)
        words = ptx.ld_nc_v4(row) if left > 0 else nothing
        used += encode_columns(data + used, meta, words, left > 0, ctx.lane)
        meta += layout.LOGFMT_META_BYTES * (COLUMNS // layout.LOGFMT_COLUMNS)
        row += 2 * COLUMNS
        left -= COLUMNS
        if used + 2 * PLAIN_BYTES > room:
            put_stage(ctx.network, further(place, done), data, used, ctx.lane)
            done += used
            used = 0
    if used != 0:
        put_stage(ctx.network, further(place, done), data, used, ctx.lane)
    put_stage(ctx.network, place, stage.data, meta_bytes, ctx.lane)


@device_function
def may_notify(ctx, inputs, pair):
    """Whether the source of a (local expert, source) has rows there, and may be notified; one thread."""
    if pair >= ctx.shape.num_experts:
        return False
    has_rows = ptx.ld_nc_s64(inputs.recv_layout_range + 8 * pair) & 0xFFFFFFFF != 0
    return has_rows and may_send(ctx, layout.local_and_rank(ctx.shape, pair)[1])


@device_function
def notify_sources(ctx, inputs, pair, may):
    """Tell the sources that what this block has sent is there, a lane for each (local expert, source); one warp.

    All at once: a fence waits for whatever its SM has on the way. pair, may: the lane's first, and its `may_notify`.
    A source that is masked by now may have missed rows.
    """
    while pair < ctx.shape.num_experts:
        local_expert, peer = layout.local_and_rank(ctx.shape, pair)
        if may and not is_masked(ctx.work.mask, peer):
            cell = count_of_call(ctx, ctx.network.rank, local_expert)
            amo_add(ctx.network, cell, completion(0), peer, local_expert, True)
        pair += 32 * ptx.grid_dim()
        may = may_notify(ctx, inputs, pair)


@by_type("call", Call)
def notify_peers(ctx):
    """Tell all peers what this rank calls; one warp. A plain Call sends nothing: see calls.py."""


@by_type("shape", layout.LowLatencyShape)
def send_expert_rows(ctx, inputs):
    """Sender: a group of warps for each (local expert, source), its warps take the rows in turn."""
    if is_last_block() and is_notifier():
        notify_peers(ctx)
    if sends_from_buffer(ctx.network):
        if ctx.warp == 0:
            wait_send_area(ctx)
        ptx.syncthreads()
    num_rows = ctx.shape.num_ranks * ctx.shape.num_max_tokens
    num_groups = groups_here(ctx.shape.num_experts, ctx.sizes.num_groups)
    group_warps = ptx.u32_div(ptx.block_dim() // 32, num_groups)
    group = ptx.u32_div(ctx.warp, group_warps)
    warp_in_group = ctx.warp - group * group_warps
    stage = open_stage(ptx.smem_base() + SUM_TABLE_BYTES, ctx.warp, ctx.lane)
    parity = 0
    pair = ptx.block_idx() + ptx.grid_dim() * group
    if group >= num_groups:
        pair = ctx.shape.num_experts
    while pair < ctx.shape.num_experts:
        local_expert, peer = layout.local_and_rank(ctx.shape, pair)
        rows = ptx.ld_nc_s64(inputs.recv_layout_range + 8 * pair)
        num_tokens = rows & 0xFFFFFFFF
        if num_tokens != 0 and not may_warp_send(ctx, peer):
            num_tokens = 0
        i = warp_in_group
        while i < num_tokens:
            row = local_expert * num_rows + (rows >> 32) + i
            token = ptx.ld_nc_s32(inputs.recv_src_info + 4 * row)
            dst = layout.recv_offset(ctx.call, ctx.network.rank)
            dst += (local_expert * ctx.shape.num_max_tokens + token) * layout.row_stride(ctx.shape)
            src = layout.send_offset(ctx.call.num_rdma_bytes, ctx.call.half) + row * layout.row_stride(ctx.shape)
            place = Place(dst, src, peer, local_expert)
            x = inputs.x + 2 * row * ctx.shape.hidden
            if ctx.shape.use_logfmt == 1:
                put_encoded_row(ctx, place, x, stage)
            else:
                parity = put_row(ctx, place, x, stage, parity)
            i += group_warps
        pair += ptx.grid_dim() * num_groups
    # What it takes to notify is looked up before: behind the wait every load would come on top of it.
    pair = ptx.block_idx() + ptx.grid_dim() * ctx.lane
    may = ctx.warp == 0 and may_notify(ctx, inputs, pair)
    quiet(ctx.network, ctx.lane)
    ptx.syncthreads()
    if ctx.warp == 0:
        notify_sources(ctx, inputs, pair, may)
