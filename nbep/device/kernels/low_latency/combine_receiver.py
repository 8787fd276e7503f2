"""The receive phase of low-latency combine: add up the rows of each token with its weights. See combine.py."""

import nbep.device.layout.low_latency as layout
import nbep.device.primitives as ptx
from nbep.device.alignment import ALIGNMENT_BYTES, align_up
from nbep.device.jit import by_type, device_function
from nbep.device.kernels.low_latency.arguments import Call, arrival_cell, count_cell
from nbep.device.kernels.parts.arrivals import LOW_LATENCY_CALL, is_complete, note_wait, wait_arrival
from nbep.device.kernels.parts.logfmt import ENCODED_BYTES, HIGH_BITS, PLAIN_BYTES, decode_four, is_encoded, log_range
from nbep.device.network.seam import own_ptr
from nbep.device.protocols.reduce import to_bf16x8, unpack_bf16x8, zero_f32x8
from nbep.device.protocols.waits import Waiter, site

LOW_LATENCY_COMBINE_COUNT = site(12, "low-latency combine receiver", "count", "the rows of the peer's experts")

# The sum table
ROWS = 0  # [32] s64: their addresses
WEIGHTS = 256  # [32] f32
NUM_ROWS = 384
SUM_TABLE_BYTES = 4 * ALIGNMENT_BYTES
NAN = float("nan")
COLUMNS = 256  # of a token that a warp adds up at once, eight a lane


@device_function
def sum_table_bytes(shape):
    """What combine has of a token, rows [32] s64, weights [32] f32, their number; while it sends, a word a rank."""
    word_a_rank = align_up(4 * shape.num_ranks, ALIGNMENT_BYTES) if layout.deduplicates(shape) else 0
    return max(SUM_TABLE_BYTES, word_a_rank)


@device_function
def locate_row(ctx, token, expert, weight):
    """Wait for the row that belongs to an expert, or with deduplicate to its rank. Returns where it is, and its weight.

    0 if the rank is left out. After a time-out the weight is NaN, and so is the sum.
    """
    peer, local_expert = layout.rank_of(ctx.shape, expert)
    unit = 0 if layout.deduplicates(ctx.shape) else local_expert
    cell = arrival_cell(ctx, peer) if layout.deduplicates(ctx.shape) else count_cell(ctx, peer, local_expert)
    place = layout.recv_offset(ctx.call, peer)
    place += (unit * ctx.shape.num_max_tokens + token) * layout.row_stride(ctx.shape)
    row = own_ptr(ctx.network, place)
    ptx.prefetch_l2(row)  # its page, too: each expert has one of its own
    value = wait_arrival(cell, ctx.bounds, ctx.work.mask, Waiter(LOW_LATENCY_COMBINE_COUNT, peer, expert))
    if not is_complete(value):
        weight = ptx.f32(NAN)
        row = row if ctx.work.mask == 0 else 0
    return row, weight


@device_function
def list_rows(ctx, inputs, token):
    """Wait for the rows of a token and write down where they are, in the order of its choices; one warp."""
    table = ptx.smem_base()
    weight = ptx.f32(1)
    cell = token * ctx.sizes.num_topk + min(ctx.lane, ctx.sizes.num_topk - 1)
    expert = ptx.ld_nc_s64(inputs.topk_idx + 8 * cell)
    if not layout.deduplicates(ctx.shape):
        weight = ptx.ld_na_f32(inputs.topk_weights + 4 * cell)
    is_wanted = ctx.lane < ctx.sizes.num_topk and 0 <= expert < ctx.shape.num_experts
    if layout.deduplicates(ctx.shape):  # one row from each rank
        peer = layout.rank_of(ctx.shape, expert)[0] if is_wanted else -1
        same = ptx.match_any_s32(ptx.FULL_MASK, peer)
        is_wanted = is_wanted and same & ((1 << ctx.lane) - 1) == 0
    row = 0
    if is_wanted:
        row, weight = locate_row(ctx, token, expert, weight)
    present = ptx.vote_ballot(ptx.FULL_MASK, row != 0)
    if row != 0:
        index = ptx.popc_u32(present & ((1 << ctx.lane) - 1))
        ptx.st_shared_s64(table + ROWS + 8 * index, row)
        ptx.st_shared_f32(table + WEIGHTS + 4 * index, weight)
    if ctx.lane == 0:
        ptx.st_shared_s32(table + NUM_ROWS, ptx.popc_u32(present))


@device_function
def add_weighted_f32x8(total, values, weight):
    """Add eight values, times a weight, to eight sums. Each product and each sum is rounded, never fused."""
    return (
        ptx.f32_add_rn(total[0], ptx.f32_mul_rn(values[0], weight)),
        ptx.f32_add_rn(total[1], ptx.f32_mul_rn(values[1], weight)),
        ptx.f32_add_rn(total[2], ptx.f32_mul_rn(values[2], weight)),
        ptx.f32_add_rn(total[3], ptx.f32_mul_rn(values[3], weight)),
        ptx.f32_add_rn(total[4], ptx.f32_mul_rn(values[4], weight)),
        ptx.f32_add_rn(total[5], ptx.f32_mul_rn(values[5], weight)),
        ptx.f32_add_rn(total[6], ptx.f32_mul_rn(values[6], weight)),
        ptx.f32_add_rn(total[7], ptx.f32_mul_rn(values[7], weight)),
    )


@device_function
def add_weighted_bf16x8(total, row, weight):
    """The same for eight bf16 values, packed in four words."""
    return add_weighted_f32x8(total, unpack_bf16x8(row), weight)


@device_function
def load_columns(table, i, num_rows, offset):
    """16 bytes of a listed row, zeros past the last."""
    nothing = (0, 0, 0, 0)
    return ptx.ld_na_v4(ptx.ld_shared_s64(table + ROWS + 8 * i) + offset) if i < num_rows else nothing


@device_function
def add_listed(table, total, words, i, num_rows):
    """Add eight columns of row i with its weight, if there is such a row."""
    if i < num_rows:
        total = add_weighted_bf16x8(total, words, ptx.ld_shared_f32(table + WEIGHTS + 4 * i))
    return total


@device_function
def load_four(table, first, num_rows, offset):
    """16 bytes at the same offset of four listed rows."""
    return (
        load_columns(table, first, num_rows, offset),
        load_columns(table, first + 1, num_rows, offset),
        load_columns(table, first + 2, num_rows, offset),
        load_columns(table, first + 3, num_rows, offset),
    )


@device_function
def add_four(table, total, loaded, first, num_rows):
    """Add what `load_four` has brought, in order."""
    total = add_listed(table, total, loaded[0], first, num_rows)
    total = add_listed(table, total, loaded[1], first + 1, num_rows)
    total = add_listed(table, total, loaded[2], first + 2, num_rows)
    return add_listed(table, total, loaded[3], first + 3, num_rows)


@device_function
def sum_columns(table, num_rows, offset, next_offset):
    """The weighted sums of eight columns of all listed rows at two places; 12 loads in flight. -1: no second place."""
    num_next = num_rows if next_offset >= 0 else 0
    total = zero_f32x8()
    next_total = zero_f32x8()
    for first in range(0, num_rows, 8):
        a = load_four(table, first, num_rows, offset)
        b = load_four(table, first + 4, num_rows, offset)
        c = load_four(table, first, num_next, next_offset)
        total = add_four(table, total, a, first, num_rows)
        d = load_four(table, first + 4, num_next, next_offset)
        total = add_four(table, total, b, first + 4, num_rows)
        next_total = add_four(table, next_total, c, first, num_next)
        next_total = add_four(table, next_total, d, first + 4, num_next)
    return to_bf16x8(total), to_bf16x8(next_total)


@device_function
def add_logfmt(ctx, total, row, weight, column):
    """Add eight columns of a LogFMT row."""
    block = column // layout.LOGFMT_COLUMNS
    num_encoded = 0
    for i in range(block):
        num_encoded += 1 if is_encoded(ptx.ld_na_s32(row + layout.LOGFMT_META_BYTES * i)) else 0
    data = row + layout.row_stride(ctx.shape) - 2 * ctx.shape.hidden
    data += ENCODED_BYTES * num_encoded + PLAIN_BYTES * (block - num_encoded)
    place = column % layout.LOGFMT_COLUMNS // 8
    meta = ptx.ld_na_s32(row + layout.LOGFMT_META_BYTES * block)
    if not is_encoded(meta):
        return add_weighted_bf16x8(total, ptx.ld_na_v4(data + 16 * place), weight)
    least, step = log_range(meta)
    low, high = ptx.ld_na_v2(data + 8 * place)
    bits = ptx.ld_na_s32(data + HIGH_BITS + 4 * (place // 2)) >> (16 * (place % 2))
    a = decode_four(low, bits & 15, (bits >> 8) & 15, least, step)
    b = decode_four(high, (bits >> 4) & 15, (bits >> 12) & 15, least, step)
    return add_weighted_f32x8(total, (a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3]), weight)


@device_function
def sum_logfmt(ctx, table, num_rows, column):
    """The weighted sum of eight columns of all listed rows, which are in LogFMT."""
    total = zero_f32x8()
    for i in range(num_rows):
        row = ptx.ld_shared_s64(table + ROWS + 8 * i)
        total = add_logfmt(ctx, total, row, ptx.ld_shared_f32(table + WEIGHTS + 4 * i), column)
    return to_bf16x8(total)


@device_function
def sum_token(ctx, out, token):
    """Add up the listed rows of a token; each warp some of its columns."""
    table = ptx.smem_base()
    num_rows = ptx.ld_shared_s32(table + NUM_ROWS)
    row = out.combined_x + 2 * token * ctx.shape.hidden
    step = COLUMNS * (ptx.block_dim() // 32)
    column = COLUMNS * ctx.warp + 8 * ctx.lane
    while column < ctx.shape.hidden:
        next_column = column + step
        if ctx.shape.use_logfmt == 1:
            ptx.st_na_v4(row + 2 * column, sum_logfmt(ctx, table, num_rows, column))
            column = next_column
        else:
            has_next = next_column < ctx.shape.hidden
            total, next_total = sum_columns(table, num_rows, 2 * column, 2 * next_column if has_next else -1)
            ptx.st_na_v4(row + 2 * column, total)
            if has_next:
                ptx.st_na_v4(row + 2 * next_column, next_total)
            column = next_column + step


@device_function
def is_chosen(ctx, inputs, local_expert, peer):
    """Whether a token of this rank has chosen an expert, or with deduplicate one of its rank's; a whole warp."""
    first = peer * ctx.shape.num_local_experts
    past = first + ctx.shape.num_local_experts
    if not layout.deduplicates(ctx.shape):
        first += local_expert
        past = first + 1
    found = False
    for cell in range(ctx.lane, ctx.sizes.num_tokens * ctx.sizes.num_topk, 32):
        found = found or first <= ptx.ld_nc_s64(inputs.topk_idx + 8 * cell) < past
    return ptx.vote_any(ptx.FULL_MASK, found)


@by_type("call", Call)
def call_cell(ctx, peer):
    """Where a peer says that it has begun the call; 0 if it does not: see calls.py."""
    return 0


@device_function
def note_owners(ctx, out, inputs):
    """Note how long each expert's rows take: all warps in turn, but for the first of each block, which lists rows.

    In DeepEP an expert without rows for this rank says so when its rank begins to send. Here its wait ends when the
    rank tells its call; where calls are not compared, such an expert adds nothing.
    """
    unit = ptx.block_idx() + ptx.grid_dim() * (ctx.warp - 1)
    if ctx.warp == 0:
        unit = ctx.shape.num_experts
    while unit < ctx.shape.num_experts:
        local_expert, peer = layout.local_and_rank(ctx.shape, unit)
        cell = call_cell(ctx, peer)
        awaited = LOW_LATENCY_CALL
        if is_chosen(ctx, inputs, local_expert, peer):
            cell = arrival_cell(ctx, peer) if layout.deduplicates(ctx.shape) else count_cell(ctx, peer, local_expert)
            awaited = LOW_LATENCY_COMBINE_COUNT
        if ctx.lane == 0 and cell != 0:
            waiter = Waiter(awaited, peer, peer * ctx.shape.num_local_experts + local_expert)
            note_wait(out.wait_recv_cost_stats, cell, ctx.bounds, ctx.work.mask, waiter)
        unit += ptx.grid_dim() * (ptx.block_dim() // 32 - 1)


@device_function
def receive_rows(ctx, out, inputs):
    """Receiver: all tokens of this block, one after the other."""
    if out.wait_recv_cost_stats != 0:
        note_owners(ctx, out, inputs)
    token = ptx.block_idx()
    while token < ctx.sizes.num_tokens:
        if ctx.warp == 0:
            list_rows(ctx, inputs, token)
        ptx.syncthreads()
        sum_token(ctx, out, token)
        ptx.syncthreads()
        token += ptx.grid_dim()
