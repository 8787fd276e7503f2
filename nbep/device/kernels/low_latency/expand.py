"""The receive phase of low-latency dispatch with deduplicate: a message is copied to all experts that its note names.

 cell            written by   with                    read by     with
 arrivals[s]     source s     amo_add                 receivers   ld_acquire_sys
 counts[e, s]    source s     amo_add                 receivers   ld_relaxed_sys
 message         source s     put_nbi_warp            receivers   bulk copy and ld_na, after arrivals
 table           receivers    st_shared               receivers   ld_shared, after syncthreads
 recv_*          receivers    bulk copy, st_na, weak  -           the next kernel
 message_*, num_messages  receivers  st_weak          (combine)   -
 counts, arrivals  next keeper  resets, see journal.py

The table of a block holds the counts of each (local expert, source): a token's row in recv_x is its place behind the
tokens of the sources before it. So rows do not depend on who comes first, and every block finds the same ones.
"""

import nbep.device.primitives as ptx
from nbep.device.jit import device_function
from nbep.device.kernels.low_latency.arguments import TABLE_BYTES
from nbep.device.kernels.low_latency.dispatch_receiver import index_of, is_lost, load_scale, note_range, store_scale
from nbep.device.kernels.low_latency.recv_cost import note_sources
from nbep.device.kernels.low_latency.send_once import ENTRIES, SRC_IDX
from nbep.device.layout.low_latency import (
    ALIGNMENT_BYTES,
    MAX_EXPERTS,
    arrival_offset,
    count_offset,
    local_and_rank,
    num_scales,
    payload_bytes,
    recv_offset,
)
from nbep.device.network.seam import own_ptr
from nbep.device.protocols.arrivals import announced, wait_arrival, wait_number
from nbep.device.protocols.copies import VEC_BYTES, WARP_BYTES
from nbep.device.protocols.staging import (
    STAGE_BYTES,
    begin_fill,
    drain_stage,
    empty_stage,
    open_stage,
    wait_filled,
)
from nbep.device.protocols.waits import LOW_LATENCY_DISPATCH_COUNT, Waiter

NUM_MESSAGES = 4 * MAX_EXPERTS  # where a word for each rank stands in the table
LOST = -1  # in place of a number: the wait for it timed out, and nobody may be left out
assert TABLE_BYTES - NUM_MESSAGES >= ALIGNMENT_BYTES


@device_function
def wait_sources(out, network, work, bounds, call, shape, table):
    """Wait for all sources and note how many messages each has sent. A whole block; a barrier follows."""
    src = ptx.block_dim() - 1 - ptx.thread_idx()  # the last threads: the first ones wait for counts meanwhile
    if src < shape.num_ranks:
        arrival = own_ptr(network, arrival_offset(call.num_rdma_bytes, call.half, src))
        value = wait_arrival(arrival, bounds, work.mask, Waiter(LOW_LATENCY_DISPATCH_COUNT, src, -1))
        num_messages = announced(value, shape.num_max_tokens)
        ptx.st_shared_s32(table + NUM_MESSAGES + 4 * src, LOST if is_lost(work, value) else num_messages)
        if ptx.block_idx() == 0:
            ptx.st_weak_s32(out.num_messages + 4 * src, num_messages)


@device_function
def load_counts(network, work, bounds, call, shape, table):
    """Copy the counts of all sources to the table. A whole block; they come long before the messages do."""
    for cell in range(ptx.thread_idx(), shape.num_experts, ptx.block_dim()):
        local_expert, src = local_and_rank(shape, cell)
        count = own_ptr(network, count_offset(call.num_rdma_bytes, call.half, src, local_expert))
        value = wait_number(count, bounds, work.mask, Waiter(LOW_LATENCY_DISPATCH_COUNT, src, cell))
        count = announced(value, shape.num_max_tokens)
        ptx.st_shared_s32(table + 4 * cell, LOST if is_lost(work, value) else count)


@device_function
def count_of(shape, table, local_expert, src):
    """How many tokens a source has for an expert: none if it is absent, whatever had come of it."""
    if ptx.ld_shared_s32(table + NUM_MESSAGES + 4 * src) <= 0:
        return 0
    return max(ptx.ld_shared_s32(table + 4 * (local_expert * shape.num_ranks + src)), 0)


@device_function
def has_lost(shape, table, local_expert):
    """Whether a wait for what an expert gets has timed out."""
    least = 0
    for src in range(shape.num_ranks):
        least = min(least, ptx.ld_shared_s32(table + NUM_MESSAGES + 4 * src))
        least = min(least, ptx.ld_shared_s32(table + 4 * (local_expert * shape.num_ranks + src)))
    return least < 0


@device_function
def begin_of(shape, table, local_expert, src):
    """Where the tokens of a source begin among an expert's: behind those of the sources before it."""
    begin = 0
    for earlier in range(src):
        begin += count_of(shape, table, local_expert, earlier)
    return begin


@device_function
def note_ranges(out, shape, table):
    """Note where the tokens of each source are, for every grid_dim()-th expert; a whole block.

    The last threads first: their warps have the fewest messages.
    """
    for cell in range(ptx.block_dim() - 1 - ptx.thread_idx(), shape.num_experts, ptx.block_dim()):
        local_expert, src = local_and_rank(shape, cell)
        if ptx.u32_mod(local_expert, ptx.grid_dim()) == ptx.block_idx():
            num_tokens = count_of(shape, table, local_expert, src)
            failed = src == shape.num_ranks - 1 and has_lost(shape, table, local_expert)
            note_range(out, shape, local_expert, src, begin_of(shape, table, local_expert, src), num_tokens, failed)


@device_function
def find_row(out, shape, table, entry, src, cell):
    """Where the token goes that an entry of a note names: local expert * T + row, or -1; one thread.

    entry: local expert, place and weight. cell: the entry's index among those that combine will need
    """
    num_rows = shape.num_ranks * shape.num_max_tokens
    expert, place, weight = entry
    row = -1
    # A count may have been given up, although the messages came; and a message may be one of another call.
    is_here = 0 <= expert < shape.num_local_experts
    if is_here and 0 <= place < count_of(shape, table, expert, src):
        row = expert * num_rows + begin_of(shape, table, expert, src) + place
    ptx.st_weak_s32(out.message_rows + 4 * cell, row)
    ptx.st_weak_f32(out.message_weights + 4 * cell, weight)
    return row


@device_function
def copy_to_rows(out, message, row, shape, stage, parity, lane):
    """Copy the values of a message to all its rows; one warp. Returns the parity of the stage's next fill.

    The stage is being filled with the first of them. row: in lane k the row for choice k, or -1
    """
    num_bytes = payload_bytes(shape)
    chosen = ptx.vote_ballot(ptx.FULL_MASK, row >= 0)
    if ptx.has_tma():
        offset = 0
        while offset < num_bytes:
            if offset > 0:
                begin_fill(message + offset, num_bytes - offset, stage, lane)
            parity = wait_filled(stage, parity)
            left = chosen
            while left != 0:
                dst = ptx.shfl_idx_s32(ptx.FULL_MASK, row, ptx.ffs_u32(left) - 1)
                empty_stage(out.recv_x + dst * num_bytes + offset, num_bytes - offset, stage, lane)
                left &= left - 1
            drain_stage(lane)
            offset += STAGE_BYTES
    else:
        left = chosen
        while left != 0:
            dst = out.recv_x + ptx.shfl_idx_s32(ptx.FULL_MASK, row, ptx.ffs_u32(left) - 1) * num_bytes
            for offset in range(lane * VEC_BYTES, num_bytes, WARP_BYTES):
                ptx.st_na_v4(dst + offset, ptx.ld_na_v4(message + offset))
            left &= left - 1
    return parity


@device_function
def store_scales(out, scale, row, shape, sizes, index):
    """Write one scale of a message, a lane's own, to all its rows; one warp. row: as in `copy_to_rows`."""
    num_rows = shape.num_ranks * shape.num_max_tokens
    left = ptx.vote_ballot(ptx.FULL_MASK, row >= 0)
    while left != 0:
        dst = ptx.shfl_idx_s32(ptx.FULL_MASK, row, ptx.ffs_u32(left) - 1)
        expert = ptx.u32_div(dst, num_rows)
        if index < num_scales(shape):
            store_scale(out, scale, shape, sizes.use_ue8m0, expert, num_rows, dst - expert * num_rows, index)
        left &= left - 1


@device_function
def expand_message(out, message, shape, sizes, table, src, index, stage, parity, lane):
    """Copy one message to the rows of all its experts here; one warp. Returns the parity of the stage's next fill.

    All loads begin before the first of them is used.
    """
    if ptx.has_tma():
        begin_fill(message, payload_bytes(shape), stage, lane)
    note = message + sizes.note_offset
    entry = (-1, 0, ptx.f32(0))
    if lane < shape.num_topk:
        at = note + 4 * ENTRIES + 12 * lane
        entry = (ptx.ld_na_s32(at), ptx.ld_na_s32(at + 4), ptx.ld_na_f32(at + 8))
    src_idx = ptx.ld_na_s32(note + 4 * SRC_IDX)
    scale = load_scale(message, shape, lane)
    next_scale = load_scale(message, shape, lane + 32)
    cell = src * shape.num_max_tokens + index
    row = -1
    if lane < shape.num_topk:
        row = find_row(out, shape, table, entry, src, cell * shape.num_topk + lane)
    parity = copy_to_rows(out, message, row, shape, stage, parity, lane)
    if row >= 0:
        ptx.st_weak_s32(out.recv_src_info + 4 * row, src_idx)
    if lane == 0:
        ptx.st_weak_s32(out.message_src_idx + 4 * cell, index_of(shape, src_idx))
    store_scales(out, scale, row, shape, sizes, lane)
    store_scales(out, next_scale, row, shape, sizes, lane + 32)
    for first in range(64, num_scales(shape), 32):
        store_scales(out, load_scale(message, shape, first + lane), row, shape, sizes, first + lane)
    return parity


@device_function
def message_of(messages, call, shape, sizes, unit):
    """Where a message lies: those of all sources in turn."""
    index, src = local_and_rank(shape, unit)
    return messages + src * call.share_bytes + index * sizes.message_stride


@device_function
def expand_messages(out, network, work, bounds, call, shape, sizes, warp, lane):
    """Receiver: all warps take the messages of all sources in turn."""
    table = ptx.smem_base()
    stage = open_stage(table + TABLE_BYTES, warp, lane)
    messages = own_ptr(network, recv_offset(call, 0))
    unit = ptx.block_idx() + ptx.grid_dim() * warp
    if lane == 0 and unit < shape.num_ranks * shape.num_max_tokens:
        ptx.prefetch_l2(message_of(messages, call, shape, sizes, unit))
    if out.wait_recv_cost_stats != 0:
        note_sources(out, network, work, bounds, call, shape, warp, lane)
    load_counts(network, work, bounds, call, shape, table)
    wait_sources(out, network, work, bounds, call, shape, table)
    ptx.syncthreads()
    if ptx.has_tma() and lane == 0:
        ptx.fence_proxy_async_global()  # what the arrivals have published, before the bulk copies that read it
    parity = 0
    while unit < shape.num_ranks * shape.num_max_tokens:
        index, src = local_and_rank(shape, unit)
        if index < ptx.ld_shared_s32(table + NUM_MESSAGES + 4 * src):
            message = message_of(messages, call, shape, sizes, unit)
            parity = expand_message(out, message, shape, sizes, table, src, index, stage, parity, lane)
        ptx.syncwarp(ptx.FULL_MASK)
        unit += ptx.grid_dim() * (ptx.block_dim() // 32)
    note_ranges(out, shape, table)
    if ptx.has_tma() and lane == 0:
        ptx.tma_store_wait_read_all()  # a block's shared memory ends with it
