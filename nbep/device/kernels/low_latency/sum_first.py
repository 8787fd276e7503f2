"""The send phase of low-latency combine with deduplicate: sum up and put. See combine_once.py.

 cell          written by   with            read by           with
 row           senders      put_nbi_warp    source s          after arrivals
 arrivals[r]   senders      amo_add         source s          ld_acquire_sys
 stage         lanes        st_shared_v4    network, lanes    after a proxy fence and syncwarp
 parts sent    all warps    st_shared 0     senders           after syncthreads
               senders      atom_add_relaxed_cta  warp 0      ld_shared, after syncthreads
 calls[r]      who announces parts  amo_add  teller           ld_relaxed_sys, see calls.py
 arrivals      next keeper  resets, see journal.py

A warp sums up a part of a row, COLUMNS columns: more warps than there are rows then have something to do. The sum is in
float32, in the order of the token's choices, each product and each sum rounded; then it is rounded to bf16, once more
than without deduplicate.
"""

import nbep.device.primitives as ptx
from nbep.device.jit import device_function
from nbep.device.kernels.low_latency.arguments import SUM_TABLE_BYTES
from nbep.device.kernels.low_latency.calls import tell_call
from nbep.device.kernels.low_latency.journal import may_send, may_warp_send
from nbep.device.kernels.low_latency.send_once import QUEUE, add_to_arrival
from nbep.device.layout.low_latency import local_and_rank, recv_offset, send_offset
from nbep.device.network.seam import keep_message, own_ptr, put_nbi_warp, quiet, sends_from_buffer
from nbep.device.protocols.arrivals import TAG, completion
from nbep.device.protocols.reduce import add_weighted_bf16x8, to_bf16x8, zero_f32x8
from nbep.device.protocols.staging import STAGE_STRIDE

COLUMNS = 1024  # of a part: 32 lanes, four times eight columns each
STRIDE = 512  # bytes from one of a lane's four places to the next


@device_function
def add_part(inputs, shape, rows, weights, first, lane):
    """The weighted sum of COLUMNS columns from `first` on, rounded: four times eight columns in each lane.

    rows, weights: in lane k those of choice k; a row is -1 if the choice is not here
    """
    a = b = c = d = zero_f32x8()
    nothing = (0, 0, 0, 0)
    left = ptx.vote_ballot(ptx.FULL_MASK, rows >= 0)
    columns = shape.hidden - first - 8 * lane
    while left != 0:
        choice = ptx.ffs_u32(left) - 1
        weight = ptx.shfl_idx_f32(ptx.FULL_MASK, weights, choice)
        x = inputs.x + 2 * (ptx.shfl_idx_s32(ptx.FULL_MASK, rows, choice) * shape.hidden + first + 8 * lane)
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
def kept_offset(inputs, network, call, shape, rows, cell):
    """Where this rank keeps the sum of a message, if it leaves from the buffer. rows: in lane k that of choice k.

    With zero_copy the experts' rows lie there already. The sum takes the place of the first row that it is the sum of:
    nobody else reads that row, and this warp has.
    """
    here = send_offset(call.num_rdma_bytes, call.half)
    if sends_from_buffer(network) and inputs.x == own_ptr(network, here):
        first = ptx.ffs_u32(ptx.vote_ballot(ptx.FULL_MASK, rows >= 0)) - 1
        return here + 2 * ptx.shfl_idx_s32(ptx.FULL_MASK, rows, first) * shape.hidden
    return here + 2 * cell * shape.hidden


@device_function
def send_part(inputs, network, work, bounds, call, shape, stage, peer, message, first, lane):
    """Sum up and send some columns of one message's row; one warp."""
    cell = peer * shape.num_max_tokens + message
    row = -1
    weight = ptx.f32(0)
    if lane < shape.num_topk:
        row = ptx.ld_nc_s32(inputs.message_rows + 4 * (cell * shape.num_topk + lane))
        weight = ptx.ld_nc_f32(inputs.message_weights + 4 * (cell * shape.num_topk + lane))
    is_free = may_warp_send(network, work, bounds, call, peer, lane)
    sums = add_part(inputs, shape, row, weight, first, lane)
    store_part(stage + 16 * lane, sums, shape.hidden - first - 8 * lane)
    if ptx.has_tma():
        ptx.fence_proxy_async_shared()
    ptx.syncwarp(ptx.FULL_MASK)
    if is_free:
        token = ptx.ld_nc_s32(inputs.message_src_idx + 4 * cell)
        offset = 2 * (token * shape.hidden + first)
        dst = recv_offset(call, network.rank) + offset
        src = kept_offset(inputs, network, call, shape, row, cell) + 2 * first
        num_bytes = 2 * min(COLUMNS, shape.hidden - first)
        keep_message(network, src, stage, num_bytes, lane)
        put_nbi_warp(network, dst, src, stage, num_bytes, peer, QUEUE, lane)
        if lane == 0:
            ptx.atom_add_relaxed_cta_shared_s32(ptx.smem_base() + 4 * peer, 1)
            if ptx.has_tma():
                ptx.tma_store_wait_read_all()  # the stage may be written again


@device_function
def announce_parts(inputs, network, work, bounds, call, shape, num_parts, lane):
    """Tell every source how many parts it gets; lane r rank r."""
    if lane < shape.num_ranks:
        num_messages = ptx.ld_nc_s32(inputs.num_messages + 4 * lane)
        if may_send(network, work, bounds, call, lane):
            tell_call(network, call, lane)
            if num_messages != 0:
                add_to_arrival(network, work, call, lane, completion(num_messages * num_parts), False)
    ptx.syncwarp(ptx.FULL_MASK)


@device_function
def tell_sources(network, work, call, shape, lane):
    """Tell the sources how many parts this block has sent, lane r rank r: one fence for all."""
    if lane < shape.num_ranks:
        num_sent = ptx.ld_shared_s32(ptx.smem_base() + 4 * lane)
        if num_sent != 0:
            add_to_arrival(network, work, call, lane, num_sent * TAG, True)


@device_function
def send_sums(inputs, network, work, bounds, call, shape, warp, lane):
    """Sender: all warps take the parts of all messages' rows in turn."""
    num_parts = ptx.u32_div(shape.hidden + COLUMNS - 1, COLUMNS)
    num_units = shape.num_ranks * shape.num_max_tokens * num_parts
    stage = ptx.smem_base() + SUM_TABLE_BYTES + STAGE_STRIDE * warp
    if ptx.block_idx() == 0 and warp == 0:
        announce_parts(inputs, network, work, bounds, call, shape, num_parts, lane)
    if warp == 0 and lane < shape.num_ranks:
        ptx.st_shared_s32(ptx.smem_base() + 4 * lane, 0)
    ptx.syncthreads()
    unit = ptx.block_idx() + ptx.grid_dim() * warp
    while unit < num_units:
        place, peer = local_and_rank(shape, unit)
        message = ptx.u32_div(place, num_parts)
        num_messages = ptx.ld_nc_s32(inputs.num_messages + 4 * peer)
        if message < num_messages:
            first = (place - message * num_parts) * COLUMNS
            send_part(inputs, network, work, bounds, call, shape, stage, peer, message, first, lane)
        ptx.syncwarp(ptx.FULL_MASK)
        unit += ptx.grid_dim() * (ptx.block_dim() // 32)
    quiet(network, lane)
    ptx.syncthreads()
    if warp == 0:
        tell_sources(network, work, call, shape, lane)
