"""Elastic combine: a rank adds up the rows of each token that it has, and pushes the sum to where the token came from;
that rank adds up what all have sent.

 rank d: recv_src_metadata[i] = (t of rank s, rows of its choices)
         x[i], or the sum of its rows --sender--> slot (place, t) --receiver: sum over places--> combined_x[t] : rank s

 place               in compact form, and with sums on the way: that of rank d; without: a place for each choice
 order of a sum      biases, then by the last choice that each rank has; of the rows on a rank: by choice

 cell                written by         with                     read by           with
 landed[d, chunk]    sender(d)          st_release_sys           receivers(s)      ld_acquire_sys
 x of a slot         sender(d)          bulk copy, or st_na (1)  receivers(s)      bulk copy, or ld_na, after landed (2)
 topk_weights of it  sender(d)          st_na (1)                receivers(s)      ld_na, after landed
 next_token          receivers          atom_add_relaxed_gpu     receivers         the same
 marks[n, t, d]      sender(d)          st_weak                  (gather_combine)  -
 landed, next_token  the owner          see notify_combine.py
 rows of x, biases   no thread          -                        warps             bulk copy, or ld_na
 rows[w]             warp w             st_shared                the same warp     ld_shared, after syncwarp
 stage of a warp     copy engine        bulk copy                the warp          ld_shared, see staged_sums.py
 combined_ arrays    receivers          st_na                    -                 the next kernel

 (1) All ranks have met in the kernel before: the slots are free.
 (2) A sender waits for its bulk copies to the end, and its lanes come to a syncwarp, before one says that the chunk has
     landed. A receiver's lanes acquire, meet at a syncwarp, and fence for the copy engine.

A chunk is some tokens in a row that came from one rank. Warps take chunks in turn, of one rank after the other,
beginning with the one behind their own. The first num_push_warps warps of each block push, the others add up from the
first token on; whoever has pushed all adds up, too. See direct_combine.

Without sums on the way (allow_multiple_reduction=False) each row of an expanded token is sent, and rounded once.

In hybrid mode with sums on the way a token comes back as one row of each node, in the place of the rank that sends it:
see gather_combine.py. Who pushes marks there which choices of the token it has.

Source: DeepEP deep_ep/include/deep_ep/impls/combine.cuh, combine_reduce_epilogue.cuh
"""

from typing import NamedTuple

import nbep.device.primitives as ptx
from nbep.device.jit import device_function, kernel
from nbep.device.kernels.elastic.dispatch import ELASTIC_SOURCES, most_tokens
from nbep.device.kernels.parts.spoil import DISPATCH_RECEIVER_ROWS, SUM_ROWS, has_failed, spoil_sums
from nbep.device.kernels.parts.staged_sums import add_up, list_row, locate_list, open_sum_stage, take_token
from nbep.device.kernels.parts.sums import Listed, list_biases
from nbep.device.layout.elastic import (
    NEXT_TOKEN,
    THREADS_BEFORE_SM90,
    ElasticNodes,
    ElasticSlots,
    landed_cell,
    mark_cell,
    metadata_entry,
    relay_of,
    slot_offset,
)
from nbep.device.protocols.copies import Row, begin_copy, end_copy
from nbep.device.protocols.matrices import matrix_cell
from nbep.device.protocols.peers import Bounds, Peers, buffer_of
from nbep.device.protocols.staging import STAGE_BYTES, Stage
from nbep.device.protocols.teams import Team
from nbep.device.protocols.waits import Waiter, has_fault, is_set, report_fault, site, wait_or_report
from nbep.device.types import I32, In, Out

ELASTIC_LANDED = site(39, "elastic combine receiver", "landed", "the peer's rows of a token")

STOPPED = -1  # in place of parities: the token has a row past the last one


class ElasticSums(NamedTuple):
    """combined_topk_weights may be absent (0)."""

    combined_x: Out  # [num_combined_tokens, hidden_bytes] bf16
    combined_topk_weights: Out  # [num_combined_tokens, num_topk] f32


class ElasticRows(NamedTuple):
    """topk_weights, bias_0 and bias_1 may be absent (0)."""

    x: In  # [num_rows, hidden_bytes] bf16
    topk_weights: In  # [num_rows, num_topk] f32; expanded: [num_rows]
    bias_0: In  # [num_combined_tokens, hidden_bytes] bf16
    bias_1: In  # [num_combined_tokens, hidden_bytes] bf16
    psum_num_recv_tokens_per_scaleup_rank: In  # [num_ranks] s32, inclusive
    recv_src_metadata: In  # [num_recv_tokens, 2 + num_topk] s32
    topk_idx: In  # [num_combined_tokens, num_topk] s64
    dst_buffer_slot_idx: In  # [num_combined_tokens, num_topk] s32


class ElasticCombineSizes(NamedTuple):
    """is_expanded, one_each: 0 or 1; one_each: each row of an expanded token is sent."""

    num_combined_tokens: I32
    num_recv_tokens: I32
    num_rows: I32
    num_local_experts: I32
    num_push_warps: I32  # of a block
    is_expanded: I32
    one_each: I32
    node_begin: I32  # the ranks of the node: node_begin to node_end - 1
    node_end: I32


class CombineContext(NamedTuple):
    """A kernel's arguments that are no arrays, and its thread."""

    peers: Peers
    bounds: Bounds
    shape: ElasticSlots
    sizes: NamedTuple
    nodes: ElasticNodes
    team: Team


class Origin(NamedTuple):
    """What a lane knows of one rank: of the (rank + 1 + i)-th in lane i. Its tokens are rows of recv_src_metadata."""

    rank: int
    buffer: int
    begin: int
    num_tokens: int


class Goal(NamedTuple):
    """Where the rows of a token go: which token of a rank it is, and where this rank sees the buffer of that one."""

    buffer: int
    token: int
    place: int


# Senders


@device_function
def find_origin(ctx, inputs):
    """What this lane has to know of its rank."""
    peers, lane = ctx.peers, ctx.team.lane
    rank = ptx.u32_mod(peers.rank + 1 + lane, peers.num_ranks)
    up_to = inputs.psum_num_recv_tokens_per_scaleup_rank + 4 * rank
    begin = ptx.ld_nc_s32(up_to - 4) if rank > 0 else 0
    end = min(ptx.ld_nc_s32(up_to), ctx.sizes.num_recv_tokens)
    return Origin(rank, buffer_of(peers, rank), begin, end - begin if lane < peers.num_ranks else 0)


@device_function
def announce(landed, lane):
    """Say that the chunk has landed which the warp has pushed last; nothing if landed, its cell, is 0."""
    if landed != 0:
        if ptx.has_tma() and lane == 0:
            ptx.tma_store_wait_all()
        ptx.syncwarp(ptx.FULL_MASK)
        if lane == 0:
            ptx.st_release_sys_s32(landed, 1)  # PAIR elastic-landed: the chunk's slots


@device_function
def push_row(ctx, inputs, row, goal, landed, stage, parities):
    """Copy a token that is one row to its slot; a warp. Returns the parities of the stage's next fills."""
    shape, lane = ctx.shape, ctx.team.lane
    slot = goal.buffer + slot_offset(shape, goal.place, goal.token)
    copied = Row(inputs.x + ptx.s64(row) * shape.hidden_bytes, shape.hidden_bytes, 0)
    copies = Stage(stage.data, stage.full, STAGE_BYTES)
    begin_copy(copied, copies, lane)
    weight = ptx.f32(0)
    has_weight = inputs.topk_weights != 0 and lane < shape.num_topk
    if has_weight:
        weight = ptx.ld_na_f32(matrix_cell(inputs.topk_weights, ptx.s64(row), lane, shape.num_topk))
    announce(landed, lane)
    if has_weight:
        ptx.st_na_f32(slot + shape.hidden_bytes + 4 * lane, weight)
    return end_copy(ptx.ld_nc_v4, slot, copied, copies, parities, lane)


@device_function
def push_sum(ctx, inputs, row, goal, rows, stage, parities):
    """Add up the rows of a token into its slot; a warp. row: in lane k that of choice k, or -1. rows: of its list"""
    shape, lane = ctx.shape, ctx.team.lane
    slot = goal.buffer + slot_offset(shape, goal.place, goal.token)
    number = list_row(rows, lane, inputs.x + ptx.s64(row) * shape.hidden_bytes, row >= 0)
    parities = add_up(ctx, slot, Listed(rows, number), stage, parities)
    if inputs.topk_weights != 0 and lane < shape.num_topk:
        weight = ptx.ld_na_f32(inputs.topk_weights + 4 * ptx.s64(row)) if row >= 0 else ptx.f32(0)
        ptx.st_na_f32(slot + shape.hidden_bytes + 4 * lane, weight)
    return parities


@device_function
def push_each(ctx, inputs, row, goal, rows, stage, parities):
    """Copy each row of a token to the slot of its choice; a warp."""
    left = ptx.vote_ballot(ptx.FULL_MASK, row >= 0)
    while left != 0:
        k = ptx.ffs_u32(left) - 1
        left &= left - 1
        only = row if ctx.team.lane == k else -1
        parities = push_sum(ctx, inputs, only, Goal(goal.buffer, goal.token, k), rows, stage, parities)
    return parities


@device_function
def mark_token(ctx, inputs, index, origin):
    """Tell the rank that adds up what the node has of a token which choices of it this rank has; a warp."""
    peers, shape, nodes, lane = ctx.peers, ctx.shape, ctx.nodes, ctx.team.lane
    entry = metadata_entry(inputs.recv_src_metadata, shape, index)
    token = ptx.ld_nc_s32(entry) - origin.rank * shape.num_max_tokens
    last = ptx.ld_nc_s32(entry + 4) - origin.rank * shape.num_topk
    row = ptx.ld_nc_s32(entry + 4 * (2 + lane)) if lane < shape.num_topk else -1
    choices = ptx.vote_ballot(ptx.FULL_MASK, (row >= 0 and lane < last) or lane == last)
    if lane == 0 and 0 <= token < shape.num_max_tokens and 0 <= last < shape.num_topk:
        cell = mark_cell(nodes, shape, origin.rank, token, peers.rank - ctx.sizes.node_begin)
        ptx.st_weak_s32(buffer_of(peers, relay_of(nodes, origin.rank, peers.rank)) + cell, ptx.s32(choices))


@device_function
def push_token(ctx, inputs, index, origin, landed, rows, stage, parities):
    """Push one received token to where it came from; a warp. Returns the next parities, or STOPPED.

    index: its entry of recv_src_metadata; origin: the same in all lanes
    landed: the cell of the chunk before, if this is the first token behind it: it is announced meanwhile
    """
    shape, sizes, lane = ctx.shape, ctx.sizes, ctx.team.lane
    entry = metadata_entry(inputs.recv_src_metadata, shape, index)
    token = ptx.ld_nc_s32(entry) - origin.rank * shape.num_max_tokens
    last = ptx.ld_nc_s32(entry + 4) - origin.rank * shape.num_topk
    place = ctx.peers.rank if shape.by_rank != 0 else last
    if not sizes.node_begin <= origin.rank < sizes.node_end:
        place = 0  # of the rank's outbox, which has one slot a token, and with one_each those of choices
    goal = Goal(origin.buffer, token, place)
    if not (0 <= token < shape.num_max_tokens and 0 <= last < shape.num_topk):
        if lane == 0:  # a handle that somebody has overwritten: the slot would hold the row of an earlier call
            report_fault(ctx.bounds, DISPATCH_RECEIVER_ROWS, ctx.peers.rank, ELASTIC_SOURCES, index + 1, token)
        return STOPPED
    if sizes.is_expanded == 0 and index >= sizes.num_rows:
        if lane == 0:
            report_fault(ctx.bounds, DISPATCH_RECEIVER_ROWS, ctx.peers.rank, SUM_ROWS, index + 1, sizes.num_rows)
        return STOPPED
    if sizes.is_expanded == 0:
        return push_row(ctx, inputs, index, goal, landed, stage, parities)
    announce(landed, lane)
    row = ptx.ld_nc_s32(entry + 4 * (2 + lane)) if lane < shape.num_topk else -1
    needs_each = sizes.one_each != 0 or inputs.topk_weights != 0  # then the last choice has none in a rewritten handle
    is_wrong = row >= sizes.num_rows or (needs_each and row < 0 and lane == last)
    if ptx.vote_ballot(ptx.FULL_MASK, is_wrong) != 0:
        if is_wrong:
            report_fault(ctx.bounds, DISPATCH_RECEIVER_ROWS, ctx.peers.rank, SUM_ROWS, row + 1, sizes.num_rows)
        return STOPPED
    if sizes.one_each != 0:
        return push_each(ctx, inputs, row, goal, rows, stage, parities)
    return push_sum(ctx, inputs, row, goal, rows, stage, parities)


@device_function
def push_tokens(ctx, inputs, rows, stage):
    """Sender: the chunks of this warp. Returns the parities of the stage's next fills."""
    peers, shape, lane = ctx.peers, ctx.shape, ctx.team.lane
    lane_origin = find_origin(ctx, inputs)
    num_chunks = peers.num_ranks * ptx.u32_div(most_tokens(lane_origin) + shape.chunk - 1, shape.chunk)
    parities = 0
    landed = 0
    number = ptx.block_idx() + ptx.grid_dim() * ctx.team.warp
    while number < num_chunks:
        turn = ptx.u32_mod(number, peers.num_ranks)
        chunk = ptx.u32_div(number, peers.num_ranks)
        origin = Origin(
            ptx.shfl_idx_s32(ptx.FULL_MASK, lane_origin.rank, turn),
            ptx.shfl_idx_s64(ptx.FULL_MASK, lane_origin.buffer, turn),
            ptx.shfl_idx_s32(ptx.FULL_MASK, lane_origin.begin, turn),
            ptx.shfl_idx_s32(ptx.FULL_MASK, lane_origin.num_tokens, turn),
        )
        i = chunk * shape.chunk
        end = min(i + shape.chunk, origin.num_tokens)
        if i < end:
            while i < end:
                if ctx.nodes.num_sharing > 1:
                    mark_token(ctx, inputs, origin.begin + i, origin)
                parities = push_token(ctx, inputs, origin.begin + i, origin, landed, rows, stage, parities)
                if parities == STOPPED:
                    return 0  # its chunk never lands
                landed = 0
                i += 1
            landed = origin.buffer + landed_cell(peers.rank, chunk)
        number += ptx.grid_dim() * ctx.sizes.num_push_warps
    announce(landed, lane)
    return ptx.shfl_idx_s32(ptx.FULL_MASK, parities, 0)  # lane 0 drives the copies of whole rows, so it alone knows


# Receivers


@device_function
def find_owner(ctx, inputs, token):
    """In lane k the rank of the expert that is choice k of a token; -1 if it is unused."""
    shape, sizes, lane = ctx.shape, ctx.sizes, ctx.team.lane
    rank = -1
    if lane < shape.num_topk:
        expert = ptx.ld_nc_s64(inputs.topk_idx + 8 * (ptx.s64(token) * shape.num_topk + lane))
        if 0 <= expert < ctx.peers.num_ranks * sizes.num_local_experts:
            rank = ptx.u32_div(expert, sizes.num_local_experts)
    return rank


@device_function
def find_rank(ctx, inputs, token):
    """In lane k the rank that sends what choice k of a token has become; -1 if it is unused."""
    rank = find_owner(ctx, inputs, token)
    return relay_of(ctx.nodes, ctx.peers.rank, rank) if rank >= 0 else -1


@device_function
def sum_token(ctx, out, inputs, token, rank, rows, stage, parities):
    """Wait for the rows of a token, add them up, and bring their weights; a warp. Returns the next parities.

    rank: in lane k that of choice k, or -1
    """
    shape, lane = ctx.shape, ctx.team.lane
    own = buffer_of(ctx.peers, ctx.peers.rank)
    last = ptx.bfind_u32(ptx.match_any_s32(ptx.FULL_MASK, rank))
    place = rank if shape.by_rank != 0 else last
    is_row = rank >= 0 and last == lane
    if ctx.sizes.one_each != 0:
        place, is_row = lane, rank >= 0
    if rank >= 0 and last == lane:
        index = ptx.ld_nc_s32(matrix_cell(inputs.dst_buffer_slot_idx, ptx.s64(token), lane, shape.num_topk))
        wait_landed(own + landed_cell(rank, ptx.u32_div(index, shape.chunk)), ctx.bounds, rank, index)
    slot = own + slot_offset(shape, place, token)
    num_biases = list_biases(rows, (inputs.bias_0, inputs.bias_1), ptx.s64(token), shape.hidden_bytes, lane)
    number = list_row(rows + 8 * num_biases, lane, slot, is_row)
    if ptx.has_tma():
        ptx.fence_proxy_async_global()  # what the peers have landed, before the bulk copies that read it
    dst = out.combined_x + ptx.s64(token) * shape.hidden_bytes
    parities = add_up(ctx, dst, Listed(rows, num_biases + number), stage, parities)
    if out.combined_topk_weights != 0 and lane < shape.num_topk:
        weight = ptx.f32(0)
        if rank >= 0:
            weight = ptx.ld_na_f32(slot + shape.hidden_bytes + 4 * lane)
        ptx.st_na_f32(matrix_cell(out.combined_topk_weights, ptx.s64(token), lane, shape.num_topk), weight)
    return parities


@device_function
def receive_tokens(ctx, out, inputs, rows, stage, parities):
    """Receiver: add up the tokens that this warp gets hold of."""
    lane = ctx.team.lane
    own = buffer_of(ctx.peers, ctx.peers.rank)
    # After a fault the handle may say anything of where rows are.
    has_rows = ptx.vote_all(ptx.FULL_MASK, not has_fault(ctx.bounds))
    token = ptx.shfl_idx_s32(ptx.FULL_MASK, take_token(own + NEXT_TOKEN, lane), 0)
    while token < ctx.sizes.num_combined_tokens:
        rank = find_rank(ctx, inputs, token) if has_rows else -1
        following = take_token(own + NEXT_TOKEN, lane)
        parities = sum_token(ctx, out, inputs, token, rank, rows, stage, parities)
        token = ptx.shfl_idx_s32(ptx.FULL_MASK, following, 0)


@kernel(max_threads=768, max_threads_before_sm90=THREADS_BEFORE_SM90)
def elastic_combine(
    out: ElasticSums,
    inputs: ElasticRows,
    peers: Peers,
    bounds: Bounds,
    shape: ElasticSlots,
    nodes: ElasticNodes,
    sizes: ElasticCombineSizes,
):
    """Grid: any. Block: a multiple of 32. Shared memory: `sums_smem_bytes`."""
    num_warps = ptx.block_dim() // 32
    warp = ptx.thread_idx() // 32
    lane = ptx.thread_idx() % 32
    ctx = CombineContext(peers, bounds, shape, sizes, nodes, Team(True, -1, -1, warp, num_warps, lane))
    stage = open_sum_stage(ptx.smem_base(), num_warps, warp, lane)
    rows = locate_list(num_warps, warp)
    parities = 0
    if warp < sizes.num_push_warps and ptx.vote_all(ptx.FULL_MASK, not has_fault(bounds)):
        parities = push_tokens(ctx, inputs, rows, stage)
    receive_tokens(ctx, out, inputs, rows, stage, parities)
    if has_failed(bounds):
        spoil_sums(out, shape, sizes.num_combined_tokens, lane)


@device_function
def wait_landed(cell, bounds, peer, row):
    """Wait until a peer has pushed the chunk of tokens that a cell stands for: its slots can be read then."""
    waiter = Waiter(ELASTIC_LANDED, peer, -1)
    wait_or_report(ptx.ld_acquire_sys_s32, cell, is_set, row, bounds, waiter)  # PAIR elastic-landed
