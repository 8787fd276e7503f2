"""Low-latency combine with deduplicate: a rank adds up what its experts have made of a token, and sends the sum.

 rank r: x[e, i] for each e of the token --sender: weighted sum--> stage --put_nbi_warp--> row[r, t]
         --amo_add, after the rows--> arrivals[r] --receiver: sum over ranks--> combined_x[t] : rank s

 cell          written by   with            read by           with
 row           senders      put_nbi_warp    source s          ld_na, after arrivals and syncthreads
 arrivals[r]   senders      amo_add         source s          ld_acquire_sys
 stage         lanes        st_shared_v4    network, lanes    after a proxy fence and syncwarp
 parts sent    warp 0       st_shared 0     senders           after syncthreads
               senders      atom_add_relaxed_cta  warp 0      ld_shared, after syncthreads
 arrivals      next coordinator  resets, see coordinator.py

A warp sums up a part of a row, COLUMNS columns: more warps than there are rows then have something to do. The sum is in
float32, in the order of the token's choices, each product and each sum rounded; then it is rounded to bf16, once more
than without deduplicate. The receive phase is that of `combine`: it adds up the rows of ranks, in the order of each
one's first choice.

This is `combine` for a DeduplicatedShape, a binary of its own for the reason of `deduplicated_dispatch`.
"""

import nbep.device.layout.low_latency as layout
import nbep.device.primitives as ptx
from nbep.device.alignment import matrix_cell
from nbep.device.jit import device_function
from nbep.device.kernels.low_latency.arguments import QUEUE, add_to_arrival
from nbep.device.kernels.low_latency.combine_receiver import add_weighted_bf16x8, sum_table_bytes
from nbep.device.kernels.low_latency.coordinator import may_send, may_warp_send, notify_call, wait_send_area
from nbep.device.kernels.parts.arrivals import TAG, completion
from nbep.device.network.seam import Place, keep_message, own_ptr, put_nbi_warp, quiet, sends_from_buffer
from nbep.device.protocols.reduce import to_bf16x8, zero_f32x8
from nbep.device.protocols.staging import STAGE_STRIDE

COLUMNS = 1024  # of a part: 32 lanes, four times eight columns each
STRIDE = 512  # bytes from one of a lane's four places to the next


@device_function
def add_part(ctx, inputs, rows, weights, first):
    """The weighted sum of COLUMNS columns from `first` on, rounded: four times eight columns in each lane.

    rows, weights: in lane k those of choice k; a row is -1 if the choice is not here
    """
    a = b = c = d = zero_f32x8()
    nothing = (0, 0, 0, 0)
    left = ptx.vote_ballot(ptx.FULL_MASK, rows >= 0)
    columns = ctx.shape.hidden - first - 8 * ctx.lane
    while left != 0:
        choice = ptx.ffs_u32(left) - 1
        weight = ptx.shfl_idx_f32(ptx.FULL_MASK, weights, choice)
        x = inputs.x + 2 * (ptx.shfl_idx_s32(ptx.FULL_MASK, rows, choice) * ctx.shape.hidden + first + 8 * ctx.lane)
        p = ptx.ld_na_v4(x) if columns > 0 else nothing
        q = ptx.ld_na_v4(x + STRIDE) if columns > 256 else nothing
        r = ptx.ld_na_v4(x + 2 * STRIDE) if columns > 512 else nothing
        s = ptx.ld_na_v4(x + 3 * STRIDE) if columns > 768 else nothing
        a = add_weighted_bf16x8(a, p, weight)
        b = add_weighted_bf16x8(b, q, weight)
        c = add_weighted_bf16x8(c, r, weight)
        d = add_weighted_bf16x8(d, s, weight)
        left &= left - 1
    return to_bf16x8(a), to_bf16x8(b), to_bf16x8(c), to_bf16x8(d)


@device_function
def store_part(stage, sums, columns):
    """Write them into the stage; columns is how many are left from this lane's first one on."""
    if columns > 0:
        ptx.st_shared_v4(stage, sums[0])
    if columns > 256:
        ptx.st_shared_v4(stage + STRIDE, sums[1])
    if columns > 512:
        ptx.st_shared_v4(stage + 2 * STRIDE, sums[2])
    if columns > 768:
        ptx.st_shared_v4(stage + 3 * STRIDE, sums[3])


@device_function
def kept_offset(ctx, inputs, rows, cell):
    """Where this rank keeps the sum of a message, if it leaves from the buffer. rows: in lane k that of choice k.

    With zero_copy the experts' rows lie there already. The sum takes the place of the first row that it is the sum of:
    no other warp reads that row, and this one has.
    """
    here = layout.send_offset(ctx.call.num_rdma_bytes, ctx.call.half)
    if sends_from_buffer(ctx.network) and inputs.x == own_ptr(ctx.network, here):
        first = ptx.ffs_u32(ptx.vote_ballot(ptx.FULL_MASK, rows >= 0)) - 1
        return here + 2 * ptx.shfl_idx_s32(ptx.FULL_MASK, rows, first) * ctx.shape.hidden
    return here + 2 * cell * ctx.shape.hidden


@device_function
def send_part(ctx, inputs, stage, peer, message, first):
    """Sum up and send some columns of one message's row; one warp."""
    cell = peer * ctx.shape.num_max_tokens + message
    row = -1
    weight = ptx.f32(0)
    if ctx.lane < ctx.shape.num_topk:
        row = ptx.ld_nc_s32(matrix_cell(inputs.message_rows, cell, ctx.lane, ctx.shape.num_topk))
        weight = ptx.ld_nc_f32(matrix_cell(inputs.message_weights, cell, ctx.lane, ctx.shape.num_topk))
    is_free = may_warp_send(ctx, peer)
    sums = add_part(ctx, inputs, row, weight, first)
    store_part(stage + 16 * ctx.lane, sums, ctx.shape.hidden - first - 8 * ctx.lane)
    if ptx.has_tma():
        ptx.fence_proxy_async_shared()
    ptx.syncwarp(ptx.FULL_MASK)
    if is_free:
        token = ptx.ld_nc_s32(inputs.message_src_idx + 4 * cell)
        offset = 2 * (token * ctx.shape.hidden + first)
        dst = layout.recv_offset(ctx.call, ctx.network.rank) + offset
        src = kept_offset(ctx, inputs, row, cell) + 2 * first
        num_bytes = 2 * min(COLUMNS, ctx.shape.hidden - first)
        keep_message(ctx.network, src, stage, num_bytes, ctx.lane)
        put_nbi_warp(ctx.network, Place(dst, src, peer, QUEUE), stage, num_bytes, ctx.lane)
        if ctx.lane == 0:
            ptx.atom_add_relaxed_cta_shared_s32(ptx.smem_base() + 4 * peer, 1)
            if ptx.has_tma():
                ptx.tma_store_wait_read_all()  # the stage may be written again


@device_function
def announce_parts(ctx, inputs, num_parts):
    """Tell every source how many parts it gets; one warp."""
    for peer in range(ctx.lane, ctx.shape.num_ranks, 32):
        num_messages = ptx.ld_nc_s32(inputs.num_messages + 4 * peer)
        if may_send(ctx, peer):
            notify_call(ctx, peer)
            if num_messages != 0:
                add_to_arrival(ctx, peer, completion(num_messages * num_parts), False)
    ptx.syncwarp(ptx.FULL_MASK)


@device_function
def notify_sources(ctx):
    """Tell the sources how many parts this block has sent, 32 at once: one fence for them; one warp."""
    for peer in range(ctx.lane, ctx.shape.num_ranks, 32):
        num_sent = ptx.ld_shared_s32(ptx.smem_base() + 4 * peer)
        if num_sent != 0:
            add_to_arrival(ctx, peer, num_sent * TAG, True)


@device_function
def send_sums(ctx, inputs):
    """Sender: all warps take the parts of all messages' rows in turn."""
    num_parts = ptx.u32_div(ctx.shape.hidden + COLUMNS - 1, COLUMNS)
    num_units = ctx.shape.num_ranks * ctx.shape.num_max_tokens * num_parts
    stage = ptx.smem_base() + sum_table_bytes(ctx.shape) + STAGE_STRIDE * ctx.warp
    if ctx.warp == 0:
        for peer in range(ctx.lane, ctx.shape.num_ranks, 32):
            ptx.st_shared_s32(ptx.smem_base() + 4 * peer, 0)
        wait_send_area(ctx)
    ptx.syncthreads()
    if ptx.block_idx() == 0 and ctx.warp == ptx.block_dim() // 32 - 1:
        announce_parts(ctx, inputs, num_parts)
    unit = ptx.block_idx() + ptx.grid_dim() * ctx.warp
    while unit < num_units:
        place, peer = layout.local_and_rank(ctx.shape, unit)
        message = ptx.u32_div(place, num_parts)
        num_messages = ptx.ld_nc_s32(inputs.num_messages + 4 * peer)
        if message < num_messages:
            first = (place - message * num_parts) * COLUMNS
            send_part(ctx, inputs, stage, peer, message, first)
        ptx.syncwarp(ptx.FULL_MASK)
        unit += ptx.grid_dim() * (ptx.block_dim() // 32)
    quiet(ctx.network, ctx.lane)
    ptx.syncthreads()
    if ctx.warp == 0:
        notify_sources(ctx)
