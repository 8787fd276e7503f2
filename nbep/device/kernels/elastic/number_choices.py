"""Where a rank's choices and tokens come to lie at the others: two blocks of `elastic_publish` find that out.

 a block, warp w:  choices of share w --count each expert's--> counts[w, e] --sum over the warps before--> first number
                   the same choices once more ---------------> numbers[t, k] of the half; expert_counts of its rank
 a block, warp w:  tokens of share w, in two such passes ----> lists[r, i] of the half; rank_counts of rank r

 cell                    written by     with                   read by              with
 stage: counts[w, e] (2) warp w (1)     st_shared              warp w; a thread     ld_shared, after syncwarp or
                                                                                    syncthreads
 stage: counts[w, e]     thread e       st_shared              warp w               ld_shared, after syncthreads
 numbers, lists          warps          st_na                  see publish.py
 rank_counts[half, s]    a lane         st_na                  rank r               see notify.py
 expert_counts[half, s]  thread e       st_na                  the expert's rank    see notify.py
 dst_buffer_slot_idx     warps          st_na                  the next kernel      -

 (1) One lane for each expert that the warp has found among 32 choices.
 (2) The tables lie where the warps have their stages later, behind a syncthreads and the fence of `open_stage`.

The order of tokens gives every row its place: nothing is left to chance. Every warp but the first has to know how many
come before its share, so all go through their shares twice. A pass has eight loads of a lane under way; one at a time
it would wait for each.

The table of a warp has room for TABLE_EXPERTS experts. If there are more, the block takes so many at a time.
Break it: records/faults.md, `elastic.number_choices: syncthreads`: race
"""

import nbep.device.primitives as ptx
from nbep.device.alignment import align_up, matrix_cell
from nbep.device.jit import device_function
from nbep.device.layout.elastic import expert_count, list_offset, rank_count
from nbep.device.protocols.peers import buffer_of

TABLE_EXPERTS = 256
TABLE_BYTES = 4 * TABLE_EXPERTS  # of a warp
WARP = 32


@device_function
def load_choices(topk_idx, first, step, end):
    """Eight choices, from the first on, each a step further: all loads are under way at once. -1 from the end on."""
    a = ptx.ld_nc_keep_s64(topk_idx + 8 * first) if first < end else -1
    b = ptx.ld_nc_keep_s64(topk_idx + 8 * (first + step)) if first + step < end else -1
    c = ptx.ld_nc_keep_s64(topk_idx + 8 * (first + 2 * step)) if first + 2 * step < end else -1
    d = ptx.ld_nc_keep_s64(topk_idx + 8 * (first + 3 * step)) if first + 3 * step < end else -1
    e = ptx.ld_nc_keep_s64(topk_idx + 8 * (first + 4 * step)) if first + 4 * step < end else -1
    f = ptx.ld_nc_keep_s64(topk_idx + 8 * (first + 5 * step)) if first + 5 * step < end else -1
    g = ptx.ld_nc_keep_s64(topk_idx + 8 * (first + 6 * step)) if first + 6 * step < end else -1
    h = ptx.ld_nc_keep_s64(topk_idx + 8 * (first + 7 * step)) if first + 7 * step < end else -1
    return a, b, c, d, e, f, g, h


@device_function
def share_of(number, ctx):
    """This warp's share of a number of items, a multiple of 32: the first, and the one behind the last."""
    share = align_up(ptx.u32_div(number + ctx.team.num_warps - 1, ctx.team.num_warps), WARP)
    return min(ctx.team.warp * share, number), min((ctx.team.warp + 1) * share, number)


# Choices


@device_function
def count_some(numbers, choice, expert, first, counts, lane):
    """Count 32 choices, of the experts from the first on, in a warp's table; and number them, unless numbers is 0."""
    key = ptx.s32(expert - first) if first <= expert < first + TABLE_EXPERTS else -1
    same = ptx.match_any_s32(ptx.FULL_MASK, key)
    before = ptx.popc_u32(same & ((1 << lane) - 1))
    cell = counts + 4 * key
    count = ptx.ld_shared_s32(cell) if key >= 0 else 0
    if numbers != 0 and key >= 0:
        ptx.st_na_s32(numbers + 4 * choice, count + before)
    ptx.syncwarp(ptx.FULL_MASK)
    if key >= 0 and before == 0:
        ptx.st_shared_s32(cell, count + ptx.popc_u32(same))
    ptx.syncwarp(ptx.FULL_MASK)


@device_function
def count_share(ctx, topk_idx, numbers, first, counts):
    """The same with all choices of this warp's share, 256 at a time."""
    lane = ctx.team.lane
    begin, end = share_of(ctx.sizes.num_tokens * ctx.shape.num_topk, ctx)
    while begin < end:
        for expert in load_choices(topk_idx, begin + lane, WARP, end):
            if begin < end:
                count_some(numbers, begin + lane, expert, first, counts, lane)
            begin += WARP


@device_function
def begin_numbers(ctx, number, first, end, tables):
    """Replace each count by those of the warps before, and notify the expert's rank of the sum; a thread an expert."""
    peers = ctx.peers
    num_local_experts = ptx.u32_div(ctx.sizes.num_experts, peers.num_ranks)
    for expert in range(first + ptx.thread_idx(), end, ptx.block_dim()):
        total = 0
        for warp in range(ctx.team.num_warps):
            cell = matrix_cell(tables, warp, expert - first, TABLE_EXPERTS)
            count = ptx.ld_shared_s32(cell)
            ptx.st_shared_s32(cell, total)
            total += count
        owner = ptx.u32_div(expert, num_local_experts)
        cell = expert_count(number, peers.rank, expert - owner * num_local_experts)
        ptx.st_na_s32(buffer_of(peers, owner) + cell, total)


@device_function
def number_choices(ctx, topk_idx, half, number, tables):
    """Number the choices of each expert, and notify its rank how many there are; a block. tables: in shared memory"""
    num_experts = ctx.sizes.num_experts
    counts = tables + TABLE_BYTES * ctx.team.warp
    for first in range(0, num_experts, TABLE_EXPERTS):
        end = min(first + TABLE_EXPERTS, num_experts)
        for at in range(ctx.team.lane, end - first, WARP):
            ptx.st_shared_s32(counts + 4 * at, 0)
        ptx.syncwarp(ptx.FULL_MASK)
        count_share(ctx, topk_idx, 0, first, counts)
        ptx.syncthreads()
        begin_numbers(ctx, number, first, end, tables)
        ptx.syncthreads()
        count_share(ctx, topk_idx, half + ctx.places.numbers, first, counts)


# Tokens


@device_function
def rank_of(ctx, expert):
    """The rank of an expert; -1 if there is no such expert."""
    num_experts = ctx.sizes.num_experts
    if not 0 <= expert < num_experts:
        return -1
    return ptx.s32(ptx.u32_div(expert, ptx.u32_div(num_experts, ctx.peers.num_ranks)))


@device_function
def ranks_of(ctx, topk_idx, token, end):
    """The ranks that a token goes to, a bit each; none from the end on."""
    begin = token * ctx.shape.num_topk
    behind = begin + ctx.shape.num_topk if token < end else begin
    ranks = 0
    while begin < behind:
        for expert in load_choices(topk_idx, begin, 1, behind):
            rank = rank_of(ctx, expert)
            ranks |= 1 << rank if rank >= 0 else 0
        begin += 8
    return ranks


@device_function
def note_some(ctx, slots, choice, place, expert, tokens, index):
    """Write to 32 choices which token theirs is among those of the expert's rank; -1 where they are unused.

    place: of a choice among those of 32 tokens; tokens: in lane r which of these go to rank r; index: of the first
    """
    rank = rank_of(ctx, expert)
    of_rank = ptx.shfl_idx_s32(ptx.FULL_MASK, tokens, rank if rank >= 0 else 0)
    first = ptx.shfl_idx_s32(ptx.FULL_MASK, index, rank if rank >= 0 else 0)
    token = ptx.u32_div(place, ctx.shape.num_topk)
    if place < WARP * ctx.shape.num_topk and choice < ctx.sizes.num_tokens * ctx.shape.num_topk:
        before = ptx.popc_u32(of_rank & ((1 << token) - 1))
        ptx.st_na_s32(slots + 4 * choice, first + before if rank >= 0 else -1)


@device_function
def note_tokens(ctx, topk_idx, slots, begin, tokens, index):
    """Write the indices of 32 tokens, from token `begin` on, to their choices; a warp. tokens, index: as `note_some`"""
    num_topk, lane = ctx.shape.num_topk, ctx.team.lane
    end = min(begin + WARP, ctx.sizes.num_tokens) * num_topk
    place = lane
    while place < WARP * num_topk:
        for expert in load_choices(topk_idx, begin * num_topk + place, WARP, end):
            note_some(ctx, slots, begin * num_topk + place, place, expert, tokens, index)
            place += WARP


@device_function
def list_tokens(ctx, topk_idx, slots, half, number, tables):
    """List the tokens that go to each rank, and notify it how many there are; a block. tables: in shared memory"""
    peers, lane, warp = ctx.peers, ctx.team.lane, ctx.team.warp
    begin, end = share_of(ctx.sizes.num_tokens, ctx)
    count = 0  # lane r counts those of rank r
    for first in range(begin, end, WARP):
        ranks = ranks_of(ctx, topk_idx, first + lane, end)
        for rank in range(peers.num_ranks):
            chosen = ptx.vote_ballot(ptx.FULL_MASK, ranks >> rank & 1)
            count += ptx.popc_u32(chosen) if lane == rank else 0
    ptx.st_shared_s32(tables + TABLE_BYTES * warp + 4 * lane, count)
    ptx.syncthreads()
    index = 0
    for earlier in range(warp):
        index += ptx.ld_shared_s32(tables + TABLE_BYTES * earlier + 4 * lane)
    if warp == ctx.team.num_warps - 1 and lane < peers.num_ranks:
        ptx.st_na_s32(buffer_of(peers, lane) + rank_count(number, peers.rank), index + count)
    for first in range(begin, end, WARP):
        ranks = ranks_of(ctx, topk_idx, first + lane, end)
        tokens = 0
        for rank in range(peers.num_ranks):
            chosen = ptx.vote_ballot(ptx.FULL_MASK, ranks >> rank & 1)
            at = ptx.shfl_idx_s32(ptx.FULL_MASK, index, rank) + ptx.popc_u32(chosen & ((1 << lane) - 1))
            if ranks >> rank & 1:
                ptx.st_na_s32(half + list_offset(ctx.places, ctx.shape, rank) + 4 * at, first + lane)
            tokens = chosen if lane == rank else tokens
        note_tokens(ctx, topk_idx, slots, first, tokens, index)
        index += ptx.popc_u32(tokens)
