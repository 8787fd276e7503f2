"""Low-latency dispatch with deduplicate: a token goes to each rank of its experts once, and is copied to them there.

 rank s: x[t] --sender: cast--> stage --put_nbi_warp--> message[s, j] --receiver--> recv_x[e, i] for each e : rank r
         header: for each choice its local expert, its place among those from s, its weight
         counter: how many for expert e, how many messages --amo_add--> counts[e, s], arrivals[s]

 cell            written by         with                  read by      with
 slots[h, e, r]  senders            atom_add_relaxed_gpu  -            -
 message         senders            put_nbi_warp          receivers    bulk copy, ld_na, after arrivals
 arrivals[s]     senders, counters  amo_add               receivers    ld_acquire_sys
 counts[e, s]    counter            amo_add (-n - 1)      receivers    ld_relaxed_sys
 stage           casters            st_shared_v2, _v4     network      after a proxy fence and bar_sync
   its header    sender             st_shared             network      the same
 histogram       counter            st_shared 0           counter      after syncwarp
                 counter            atom_add_relaxed_cta  counter      ld_shared, after syncwarp
 table           receivers          st_shared             receivers    ld_shared, after syncthreads
 recv_*          receivers          bulk copy, st_na, weak  -          the next kernel
 cumulative_recv_stats  receivers   atom_add_relaxed_gpu    -          the next kernel
 message_*, num_messages  receivers  st_weak              (combine)    -
 slots, counts, arrivals  next coordinator  resets, see coordinator.py

All messages for a rank go through one queue, and behind each of them a TAG for the rank's arrival. Counts say nothing
but themselves, so they need not wait for what is on its way.

The table of a block holds the counts of each (local expert, source): a token's row in recv_x is its place behind the
tokens of the sources before it. So rows do not depend on who comes first, and every block finds the same ones.

This is `dispatch` for a DeduplicatedShape, and a binary of its own: few tokens wait for machine code that is fetched
anew, the longer the more of it there is. See records/attempts.md.
"""

from typing import NamedTuple

import nbep.device.layout.low_latency as layout
import nbep.device.primitives as ptx
from nbep.device.alignment import matrix_cell
from nbep.device.jit import device_function
from nbep.device.kernels.low_latency.arguments import (
    QUEUE,
    add_to_arrival,
    arrival_cell,
    count_cell,
    count_of_call,
    slot_counter,
)
from nbep.device.kernels.low_latency.coordinator import may_send, may_warp_send, notify_call, wait_send_area
from nbep.device.kernels.low_latency.dispatch_receiver import (
    LOW_LATENCY_DISPATCH_COUNT,
    index_of,
    is_lost,
    load_scale,
    note_range,
    store_scale,
    table_bytes,
)
from nbep.device.kernels.low_latency.dispatch_sender import (
    clear_gap,
    expert_of,
    header_stride,
    next_stage,
    open_to_engine,
    stage_bytes,
)
from nbep.device.kernels.parts.arrivals import TAG, announced, completion, note_wait, wait_arrival, wait_number
from nbep.device.network.seam import Place, amo_add, further, keep_message, own_ptr, put_nbi_warp, quiet
from nbep.device.protocols.reduce import warp_sum_s32
from nbep.device.protocols.staging import (
    STAGE_BYTES,
    VEC_BYTES,
    WARP_BYTES,
    begin_fill,
    drain_stage,
    empty_stage,
    open_stage,
    wait_filled,
)
from nbep.device.protocols.waits import Waiter

# Words of a header
SRC_IDX = 0
ENTRIES = 4  # for each choice: local expert or -1, place, weight
NO_PEER = -1
LOST = -1  # in place of a number: the wait for it timed out, and no rank may be left out


class Choice(NamedTuple):
    """What lane k of a sender knows of choice k of a token."""

    peer: int  # the rank of its expert, NO_PEER if it is unused
    local_expert: int
    place: int  # among the tokens for the expert
    weight: float
    is_first: bool  # of those of the token that are on this rank
    slot: int  # of the message for the rank, in the lane that is first; -1 if nothing may be put


@device_function
def take_places(ctx, inputs, token):
    """Take places at the experts of a token, and a slot for its message at each of their ranks; one warp."""
    expert = -1
    weight = ptx.f32(0)
    if ctx.lane < ctx.shape.num_topk:
        weight = ptx.ld_na_f32(matrix_cell(inputs.topk_weights, token, ctx.lane, ctx.shape.num_topk))
        expert = expert_of(ctx, inputs, token, ctx.lane)
    peer = NO_PEER
    place = local_expert = 0
    if expert >= 0:
        peer, local_expert = layout.rank_of(ctx.shape, expert)
        place = ptx.atom_add_relaxed_gpu_s32(slot_counter(ctx, expert), 1)
    same = ptx.match_any_s32(ptx.FULL_MASK, peer)
    is_first = peer != NO_PEER and same & ((1 << ctx.lane) - 1) == 0
    slot = -1
    if is_first:
        slot = ptx.atom_add_relaxed_gpu_s32(slot_counter(ctx, layout.MAX_EXPERTS + peer), 1)
        if not may_send(ctx, peer):
            slot = -1
    return Choice(peer, local_expert, place, weight, is_first, slot)


@device_function
def write_headers(ctx, headers, token, choice):
    """Write the headers for all ranks of a token, in the place of the first choice that is there; one warp."""
    left = ptx.vote_ballot(ptx.FULL_MASK, choice.is_first)
    while left != 0:
        first = ptx.ffs_u32(left) - 1
        peer = ptx.shfl_idx_s32(ptx.FULL_MASK, choice.peer, first)
        header = headers + first * header_stride(ctx.shape)
        if ctx.lane < ctx.shape.num_topk:
            entry = header + 4 * ENTRIES + 12 * ctx.lane
            ptx.st_shared_s32(entry, choice.local_expert if choice.peer == peer else -1)
            ptx.st_shared_s32(entry + 4, choice.place)
            ptx.st_shared_f32(entry + 8, choice.weight)
        if ctx.lane < ENTRIES:
            ptx.st_shared_s32(header + 4 * ctx.lane, token if ctx.lane == SRC_IDX else 0)
        if ctx.lane < ctx.shape.num_topk & 3:  # three words for each choice, and padding up to HEADER_ALIGNMENT
            ptx.st_shared_s32(header + 4 * ENTRIES + 12 * ctx.shape.num_topk + 4 * ctx.lane, 0)
        left &= left - 1


@device_function
def put_message(ctx, stage, header, token, peer, slot):
    """Start to put the values in the stage and a header into a slot of a rank; one warp."""
    stride = ctx.sizes.message_stride
    dst = layout.recv_offset(ctx.call, ctx.network.rank) + slot * stride
    src = layout.send_offset(ctx.call.num_rdma_bytes, ctx.call.half) + (token * ctx.shape.num_ranks + peer) * stride
    at = ctx.sizes.header_offset
    place = Place(dst, src, peer, QUEUE)
    keep_message(ctx.network, src, stage, at, ctx.lane)
    put_nbi_warp(ctx.network, place, stage, at, ctx.lane)
    keep_message(ctx.network, src + at, header, layout.header_bytes(ctx.shape), ctx.lane)
    put_nbi_warp(ctx.network, further(place, at), header, layout.header_bytes(ctx.shape), ctx.lane)


@device_function
def put_to_ranks(ctx, stage, headers, token, choice):
    """Sender: put the message in the stage to all ranks of the token, then notify them."""
    left = ptx.vote_ballot(ptx.FULL_MASK, choice.slot >= 0)
    while left != 0:
        source = ptx.ffs_u32(left) - 1
        peer = ptx.shfl_idx_s32(ptx.FULL_MASK, choice.peer, source)
        slot = ptx.shfl_idx_s32(ptx.FULL_MASK, choice.slot, source)
        put_message(ctx, stage, headers + source * header_stride(ctx.shape), token, peer, slot)
        left &= left - 1
    quiet(ctx.network, ctx.lane)
    if choice.slot >= 0:
        add_to_arrival(ctx, choice.peer, TAG, True)


@device_function
def send_to_ranks(ctx, inputs):
    """Sender: all tokens of this block, one after the other."""
    wait_send_area(ctx)
    stage = ptx.smem_base()
    token = ptx.block_idx()
    while token < ctx.sizes.num_tokens:
        headers = stage + ctx.sizes.message_stride
        choice = take_places(ctx, inputs, token)
        write_headers(ctx, headers, token, choice)
        clear_gap(ctx, stage)
        open_to_engine()
        put_to_ranks(ctx, stage, headers, token, choice)
        token += ptx.grid_dim()
        stage = next_stage(ctx.shape, stage)


@device_function
def local_choice(ctx, inputs, token, choice, first):
    """The local expert of a choice on the rank whose experts begin at `first`; -1 if it is on another.

    It loads in any case: behind a branch a load waits for the one before.
    """
    index = token * ctx.shape.num_topk + min(choice, ctx.shape.num_topk - 1)
    expert = ptx.ld_nc_s64(inputs.topk_idx + 8 * index) - first
    is_here = choice < ctx.shape.num_topk and 0 <= expert < ctx.shape.num_local_experts
    return expert if is_here else -1


@device_function
def count_choice(histogram, local_expert):
    """Count a choice that is here; one thread. Returns 1 if it is."""
    if local_expert < 0:
        return 0
    ptx.atom_add_relaxed_cta_shared_s32(histogram + 4 * local_expert, 1)
    return 1


@device_function
def count_token(ctx, inputs, token, first, histogram):
    """Count the choices of a token that are on a rank, in the histogram. Returns how many there are; one thread."""
    num_chosen = 0
    for choice in range(0, ctx.shape.num_topk, 8):
        # Eight loads in flight: the counter must be done before the messages are.
        a = local_choice(ctx, inputs, token, choice, first)
        b = local_choice(ctx, inputs, token, choice + 1, first)
        c = local_choice(ctx, inputs, token, choice + 2, first)
        d = local_choice(ctx, inputs, token, choice + 3, first)
        e = local_choice(ctx, inputs, token, choice + 4, first)
        f = local_choice(ctx, inputs, token, choice + 5, first)
        g = local_choice(ctx, inputs, token, choice + 6, first)
        h = local_choice(ctx, inputs, token, choice + 7, first)
        num_chosen += count_choice(histogram, a) + count_choice(histogram, b)
        num_chosen += count_choice(histogram, c) + count_choice(histogram, d)
        num_chosen += count_choice(histogram, e) + count_choice(histogram, f)
        num_chosen += count_choice(histogram, g) + count_choice(histogram, h)
    return num_chosen


@device_function
def notify_counts(ctx, histogram, num_messages, peer):
    """Tell a rank how many tokens each of its experts gets from here, and how many messages there are; one warp."""
    if may_warp_send(ctx, peer):
        if ctx.lane == 0:
            notify_call(ctx, peer)
            add_to_arrival(ctx, peer, completion(num_messages), False)
        for i in range(ctx.lane, ctx.shape.num_local_experts, 32):
            cell = count_of_call(ctx, ctx.network.rank, i)
            amo_add(ctx.network, cell, completion(0) - ptx.ld_shared_s32(histogram + 4 * i), peer, QUEUE, False)
    ptx.syncwarp(ptx.FULL_MASK)


@device_function
def count_ranks(ctx, inputs):
    """Counter: notify every grid_dim()-th rank of its experts' tokens, then count its messages; one warp."""
    num_local_experts = ctx.shape.num_local_experts
    histogram = ptx.smem_base() + 2 * stage_bytes(ctx.shape)
    # The blocks before the last one, which has the coordinator: if they have no token to send, their SMs have nothing
    # on the way that loads would wait behind.
    peer = ptx.u32_mod(2 * ptx.grid_dim() - 2 - ptx.block_idx(), ptx.grid_dim())
    while peer < ctx.shape.num_ranks:
        for i in range(ctx.lane, num_local_experts, 32):
            ptx.st_shared_s32(histogram + 4 * i, 0)
        ptx.syncwarp(ptx.FULL_MASK)
        num_messages = 0
        for token in range(ctx.lane, ctx.sizes.num_tokens, 32):
            is_here = count_token(ctx, inputs, token, peer * num_local_experts, histogram) != 0
            num_messages += 1 if is_here else 0
        ptx.syncwarp(ptx.FULL_MASK)
        num_messages = warp_sum_s32(ptx.FULL_MASK, num_messages)
        notify_counts(ctx, histogram, num_messages, peer)
        peer += ptx.grid_dim()


@device_function
def messages_at(shape, table, src):
    """Where the table says how many messages a source has sent: behind the counts."""
    return table + 4 * (shape.num_experts + src)


@device_function
def note_sources(ctx, out):
    """Dispatch with deduplicate: all warps of all blocks take the experts in turn."""
    unit = ptx.block_idx() + ptx.grid_dim() * ctx.warp
    while unit < ctx.shape.num_experts:
        src = layout.local_and_rank(ctx.shape, unit)[1]
        if ctx.lane == 0:
            waiter = Waiter(LOW_LATENCY_DISPATCH_COUNT, src, -1)
            note_wait(out.wait_recv_cost_stats, arrival_cell(ctx, src), ctx.bounds, ctx.work.mask, waiter)
        unit += ptx.grid_dim() * (ptx.block_dim() // 32)


@device_function
def wait_sources(ctx, out, table):
    """Wait for all sources and note how many messages each has sent. A whole block; a barrier follows.

    A `range` with a step that is known at run time begins with a division of 64 bits, which these loops do without.
    """
    # The last threads: the first ones wait for counts meanwhile.
    src = ptx.block_dim() - 1 - ptx.thread_idx()
    while src < ctx.shape.num_ranks:
        waiter = Waiter(LOW_LATENCY_DISPATCH_COUNT, src, -1)
        value = wait_arrival(arrival_cell(ctx, src), ctx.bounds, ctx.work.mask, waiter)
        num_messages = announced(value, ctx.shape.num_max_tokens)
        ptx.st_shared_s32(messages_at(ctx.shape, table, src), LOST if is_lost(ctx, value) else num_messages)
        if ptx.block_idx() == 0:
            ptx.st_weak_s32(out.num_messages + 4 * src, num_messages)
        src += ptx.block_dim()


@device_function
def load_counts(ctx, table):
    """Copy the counts of all sources to the table. A whole block; they come long before the messages do."""
    cell = ptx.thread_idx()
    while cell < ctx.shape.num_experts:
        local_expert, src = layout.local_and_rank(ctx.shape, cell)
        count = count_cell(ctx, src, local_expert)
        value = wait_number(count, ctx.bounds, ctx.work.mask, Waiter(LOW_LATENCY_DISPATCH_COUNT, src, cell))
        count = announced(value, ctx.shape.num_max_tokens)
        ptx.st_shared_s32(table + 4 * cell, LOST if is_lost(ctx, value) else count)
        cell += ptx.block_dim()


@device_function
def count_of(shape, table, local_expert, src):
    """How many tokens a source has for an expert: none if it is absent, whatever had come of it."""
    if ptx.ld_shared_s32(messages_at(shape, table, src)) <= 0:
        return 0
    return max(ptx.ld_shared_s32(matrix_cell(table, local_expert, src, shape.num_ranks)), 0)


@device_function
def has_lost(shape, table, local_expert):
    """Whether a wait for what an expert gets has timed out."""
    least = 0
    for src in range(shape.num_ranks):
        least = min(least, ptx.ld_shared_s32(messages_at(shape, table, src)))
        least = min(least, ptx.ld_shared_s32(matrix_cell(table, local_expert, src, shape.num_ranks)))
    return least < 0


@device_function
def begin_of(shape, table, local_expert, src):
    """Where the tokens of a source begin among an expert's: behind those of the sources before it."""
    begin = 0
    for earlier in range(src):
        begin += count_of(shape, table, local_expert, earlier)
    return begin


@device_function
def note_ranges(ctx, out, table):
    """Note where the tokens of each source are, for every grid_dim()-th expert; a whole block.

    The last threads first: their warps have the fewest messages.
    """
    cell = ptx.block_dim() - 1 - ptx.thread_idx()
    while cell < ctx.shape.num_experts:
        local_expert, src = layout.local_and_rank(ctx.shape, cell)
        if ptx.u32_mod(local_expert, ptx.grid_dim()) == ptx.block_idx():
            rows = begin_of(ctx.shape, table, local_expert, src), count_of(ctx.shape, table, local_expert, src)
            failed = src == ctx.shape.num_ranks - 1 and has_lost(ctx.shape, table, local_expert)
            note_range(ctx, out, local_expert, src, rows, failed)
        cell += ptx.block_dim()


@device_function
def find_row(ctx, out, table, entry, src, cell):
    """Where the token goes that an entry of a header names: local expert * T + row, or -1; one thread.

    entry: local expert, place and weight. cell: the entry's index among those that combine will need
    """
    num_rows = ctx.shape.num_ranks * ctx.shape.num_max_tokens
    expert, place, weight = entry
    row = -1
    # A count may have been given up, although the messages came; and a message may be one of another call.
    is_here = 0 <= expert < ctx.shape.num_local_experts
    if is_here and 0 <= place < count_of(ctx.shape, table, expert, src):
        row = expert * num_rows + begin_of(ctx.shape, table, expert, src) + place
    ptx.st_weak_s32(out.message_rows + 4 * cell, row)
    ptx.st_weak_f32(out.message_weights + 4 * cell, weight)
    return row


@device_function
def copy_to_rows(ctx, out, message, row, stage, parity):
    """Copy the values of a message to all its rows; one warp. Returns the parity of the stage's next fill.

    The stage is being filled with the first of them. row: in lane k the row for choice k, or -1
    """
    num_bytes = layout.payload_bytes(ctx.shape)
    chosen = ptx.vote_ballot(ptx.FULL_MASK, row >= 0)
    if ptx.has_tma():
        offset = 0
        while offset < num_bytes:
            if offset > 0:
                begin_fill(message + offset, num_bytes - offset, stage, ctx.lane)
            parity = wait_filled(stage, parity)
            left = chosen
            while left != 0:
                dst = ptx.shfl_idx_s32(ptx.FULL_MASK, row, ptx.ffs_u32(left) - 1)
                empty_stage(out.recv_x + dst * num_bytes + offset, num_bytes - offset, stage, ctx.lane)
                left &= left - 1
            drain_stage(ctx.lane)
            offset += STAGE_BYTES
    else:
        left = chosen
        while left != 0:
            dst = out.recv_x + ptx.shfl_idx_s32(ptx.FULL_MASK, row, ptx.ffs_u32(left) - 1) * num_bytes
            for offset in range(ctx.lane * VEC_BYTES, num_bytes, WARP_BYTES):
                ptx.st_na_v4(dst + offset, ptx.ld_na_v4(message + offset))
            left &= left - 1
    return parity


@device_function
def store_scales(ctx, out, scale, row, index):
    """Write one scale of a message, a lane's own, to all its rows; one warp. row: as in `copy_to_rows`."""
    num_rows = ctx.shape.num_ranks * ctx.shape.num_max_tokens
    left = ptx.vote_ballot(ptx.FULL_MASK, row >= 0)
    while left != 0:
        dst = ptx.shfl_idx_s32(ptx.FULL_MASK, row, ptx.ffs_u32(left) - 1)
        expert = ptx.u32_div(dst, num_rows)
        if index < layout.num_scales(ctx.shape):
            store_scale(ctx, out, scale, expert, dst - expert * num_rows, index)
        left &= left - 1


@device_function
def receive_message(ctx, out, unit, stage, parity):
    """Copy a message, if there is one of that number, to the rows of all its experts here; one warp.

    Returns the parity of the stage's next fill. All loads begin before the first of them is used.
    """
    table = ptx.smem_base()
    index, src = layout.local_and_rank(ctx.shape, unit)
    if index >= ptx.ld_shared_s32(messages_at(ctx.shape, table, src)):
        return parity
    message = message_of(ctx, unit)
    if ptx.has_tma():
        begin_fill(message, layout.payload_bytes(ctx.shape), stage, ctx.lane)
    header = message + ctx.sizes.header_offset
    entry = (-1, 0, ptx.f32(0))
    if ctx.lane < ctx.shape.num_topk:
        at = header + 4 * ENTRIES + 12 * ctx.lane
        entry = (ptx.ld_na_s32(at), ptx.ld_na_s32(at + 4), ptx.ld_na_f32(at + 8))
    src_idx = ptx.ld_na_s32(header + 4 * SRC_IDX)
    scale = load_scale(message, ctx.shape, ctx.lane)
    next_scale = load_scale(message, ctx.shape, ctx.lane + 32)
    cell = src * ctx.shape.num_max_tokens + index
    row = -1
    if ctx.lane < ctx.shape.num_topk:
        row = find_row(ctx, out, table, entry, src, cell * ctx.shape.num_topk + ctx.lane)
    parity = copy_to_rows(ctx, out, message, row, stage, parity)
    if row >= 0:
        ptx.st_weak_s32(out.recv_src_info + 4 * row, src_idx)
    if ctx.lane == 0:
        ptx.st_weak_s32(out.message_src_idx + 4 * cell, index_of(ctx.shape, src_idx))
    store_scales(ctx, out, scale, row, ctx.lane)
    store_scales(ctx, out, next_scale, row, ctx.lane + 32)
    for first in range(64, layout.num_scales(ctx.shape), 32):
        store_scales(ctx, out, load_scale(message, ctx.shape, first + ctx.lane), row, first + ctx.lane)
    return parity


@device_function
def message_of(ctx, unit):
    """Where a message lies: those of all sources in turn."""
    index, src = layout.local_and_rank(ctx.shape, unit)
    share = own_ptr(ctx.network, layout.recv_offset(ctx.call, src))
    return share + index * ctx.sizes.message_stride


@device_function
def receive_from_ranks(ctx, out):
    """Receiver: all warps take the messages of all sources in turn."""
    table = ptx.smem_base()
    stage = open_stage(table + table_bytes(ctx.shape), ctx.warp, ctx.lane)
    unit = ptx.block_idx() + ptx.grid_dim() * ctx.warp
    if ctx.lane == 0 and unit < ctx.shape.num_ranks * ctx.shape.num_max_tokens:
        ptx.prefetch_l2(message_of(ctx, unit))
    if out.wait_recv_cost_stats != 0:
        note_sources(ctx, out)
    load_counts(ctx, table)
    wait_sources(ctx, out, table)
    ptx.syncthreads()
    if ptx.has_tma() and ctx.lane == 0:
        ptx.fence_proxy_async_global()  # what the arrivals have published, before the bulk copies that read it
    parity = 0
    while unit < ctx.shape.num_ranks * ctx.shape.num_max_tokens:
        parity = receive_message(ctx, out, unit, stage, parity)
        ptx.syncwarp(ptx.FULL_MASK)
        unit += ptx.grid_dim() * (ptx.block_dim() // 32)
    note_ranges(ctx, out, table)
    if ptx.has_tma() and ctx.lane == 0:
        ptx.tma_store_wait_read_all()  # a block's shared memory ends with it
