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
 landed, next_token  the owner          see notify.py
 rows of x, biases   no thread          -                        warps             bulk copy, or ld_na
 rows[w]             warp w             st_shared                the same warp     ld_shared, after syncwarp
 stage of a warp     copy engine        bulk copy                the warp          ld_shared, see staged_sums.py
 combined_ arrays    receivers          st_na                    -                 the next kernel

 (1) All ranks have met in the kernel before: the slots are free.
 (2) A sender waits for its bulk copies to the end, and its lanes come to a syncwarp, before one says that the chunk has
     landed. A receiver's lanes acquire, meet at a syncwarp, and fence for the copy engine.

A chunk is some tokens in a row that came from one rank. Warps take chunks in turn, of one rank after the other,
beginning with the one behind their own. The first num_push_warps warps of each block push, the others add up from the
first token on; whoever has pushed all adds up, too. Between nodes these are two launches: what is pushed has to cross
the network before it is added up.

Without sums on the way (allow_multiple_reduction=False) each row of an expanded token is sent, and rounded once.

In hybrid mode with sums on the way a token comes back as one row of each node, in the place of the rank that sends it:
see gather_combine.py. Who pushes marks there which choices of the token it has.

Source: DeepEP deep_ep/include/deep_ep/impls/combine.cuh, combine_reduce_epilogue.cuh
Break it: records/faults.md, `elastic.combine.announce: release of elastic-landed`: race
"""

from typing import NamedTuple

import nbep.device.primitives as ptx
from nbep.device.alignment import matrix_cell
from nbep.device.jit import device_function, kernel
from nbep.device.kernels.elastic.dispatch import ELASTIC_SOURCES, most_tokens
from nbep.device.kernels.parts.spoil import DISPATCH_RECEIVER_ROWS, SUM_ROWS, has_failed, spoil_sums
from nbep.device.kernels.parts.staged_sums import add_up, flipped, list_row, open_sum_stage, take_token
from nbep.device.kernels.parts.sums import list_biases
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
from nbep.device.protocols.peers import Bounds, Peers, buffer_of
from nbep.device.protocols.staging import STAGE_BYTES, Stage
from nbep.device.protocols.teams import Team
from nbep.device.protocols.waits import Waiter, has_fault, is_set, report_fault, site, wait_or_report
from nbep.device.types import I32, In, Out

ELASTIC_LANDED = site(39, "elastic combine receiver", "landed", "the peer's rows of a token")


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


class Destination(NamedTuple):
    """Where the rows of a token go: which token of a rank it is, and where this rank sees the buffer of that one.

    token: -1 if the handle says nothing of the kind; last: its last choice here
    """

    buffer: int
    token: int
    last: int
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
def find_destination(ctx, inputs, index, origin):
    """Where a received token goes; origin: the same in all lanes. A handle that somebody has overwritten is reported:
    the slot would hold the row of an earlier call.
    """
    shape, sizes = ctx.shape, ctx.sizes
    entry = metadata_entry(inputs.recv_src_metadata, shape, index)
    token = ptx.ld_nc_s32(entry) - origin.rank * shape.num_max_tokens
    last = ptx.ld_nc_s32(entry + 4) - origin.rank * shape.num_topk
    place = ctx.peers.rank if shape.by_rank != 0 else last
    if not sizes.node_begin <= origin.rank < sizes.node_end:
        place = 0  # of the rank's outbox, which has one slot a token, and with one_each those of choices
    if not (0 <= token < shape.num_max_tokens and 0 <= last < shape.num_topk):
        if ctx.team.lane == 0:
            report_fault(ctx.bounds, DISPATCH_RECEIVER_ROWS, ctx.peers.rank, ELASTIC_SOURCES, index + 1, token)
        token = -1
    return Destination(origin.buffer, token, last, place)


@device_function
def find_rows(ctx, inputs, index, destination):
    """In lane k the row of x for choice k of a token, or -1; in compact form its one row in lane 0. And whether all of
    them are there: else one is reported.
    """
    shape, sizes, lane = ctx.shape, ctx.sizes, ctx.team.lane
    row, needs_last = index if lane == 0 else -1, False
    if sizes.is_expanded != 0:
        entry = metadata_entry(inputs.recv_src_metadata, shape, index)
        row = ptx.ld_nc_s32(entry + 4 * (2 + lane)) if lane < shape.num_topk else -1
        # In a handle that is rewritten the last choice may have none, but not where each is looked up.
        needs_last = sizes.one_each != 0 or inputs.topk_weights != 0
    is_wrong = row >= sizes.num_rows or (needs_last and row < 0 and lane == destination.last)
    if is_wrong:
        report_fault(ctx.bounds, DISPATCH_RECEIVER_ROWS, ctx.peers.rank, SUM_ROWS, row + 1, sizes.num_rows)
    return row, not ptx.vote_any(ptx.FULL_MASK, is_wrong)


@device_function
def begin_row(ctx, inputs, index, stage):
    """Start to copy the row of a compact token through the stage of this warp."""
    hidden_bytes = ctx.shape.hidden_bytes
    row = Row(inputs.x + ptx.s64(index) * hidden_bytes, hidden_bytes, 0)
    copies = Stage(stage.data, stage.full, STAGE_BYTES)  # half 0, and half 1 as far as it takes
    begin_copy(row, copies, ctx.team.lane)
    return row, copies


@device_function
def push_row(ctx, inputs, index, destination, begun, stage):
    """Bring a row, begun by `begin_row`, to its slot, and its weights; a warp. Returns the stage, behind its fills."""
    shape, lane = ctx.shape, ctx.team.lane
    row, copies = begun
    slot = destination.buffer + slot_offset(shape, destination.place, destination.token)
    if inputs.topk_weights != 0 and lane < shape.num_topk:
        weight = ptx.ld_na_f32(matrix_cell(inputs.topk_weights, ptx.s64(index), lane, shape.num_topk))
        ptx.st_na_f32(slot + shape.hidden_bytes + 4 * lane, weight)
    phase = stage.phases & 1
    next_phase = end_copy(ptx.ld_nc_v4, slot, row, copies, phase, lane)
    return flipped(stage, ptx.shfl_idx_s32(ptx.FULL_MASK, next_phase, 0) ^ phase)  # lane 0 alone drives the copies


@device_function
def push_sum(ctx, inputs, row, destination, place, stage):
    """Add up the rows of a token, see `find_rows`, into a slot; a warp. Returns the stage, behind its fills."""
    shape, lane = ctx.shape, ctx.team.lane
    slot = destination.buffer + slot_offset(shape, place, destination.token)
    number = list_row(stage, 0, lane, inputs.x + ptx.s64(row) * shape.hidden_bytes, row >= 0)
    stage = add_up(ctx, slot, number, stage)
    if inputs.topk_weights != 0 and lane < shape.num_topk:
        weight = ptx.ld_na_f32(inputs.topk_weights + 4 * ptx.s64(row)) if row >= 0 else ptx.f32(0)
        ptx.st_na_f32(slot + shape.hidden_bytes + 4 * lane, weight)
    return stage


@device_function
def push_each(ctx, inputs, row, destination, stage):
    """Copy each row of a token to the slot of its choice; a warp."""
    left = ptx.vote_ballot(ptx.FULL_MASK, row >= 0)
    while left != 0:
        k = ptx.ffs_u32(left) - 1
        left &= left - 1
        stage = push_sum(ctx, inputs, row if ctx.team.lane == k else -1, destination, k, stage)
    return stage


@device_function
def mark_token(ctx, inputs, index, origin, destination):
    """Tell the rank that adds up what the node has of a token which choices of it this rank has; a warp."""
    peers, shape, nodes, lane = ctx.peers, ctx.shape, ctx.nodes, ctx.team.lane
    entry = metadata_entry(inputs.recv_src_metadata, shape, index)
    row = ptx.ld_nc_s32(entry + 4 * (2 + lane)) if lane < shape.num_topk else -1
    choices = ptx.vote_ballot(ptx.FULL_MASK, (row >= 0 and lane < destination.last) or lane == destination.last)
    if lane == 0:
        cell = mark_cell(nodes, shape, origin.rank, destination.token, peers.rank - ctx.sizes.node_begin)
        ptx.st_weak_s32(buffer_of(peers, relay_of(nodes, origin.rank, peers.rank)) + cell, ptx.s32(choices))


@device_function
def push_tokens(ctx, inputs, stage):
    """Sender: the chunks of this warp. Returns the stage, behind its fills."""
    peers, shape, sizes, lane = ctx.peers, ctx.shape, ctx.sizes, ctx.team.lane
    lane_origin = find_origin(ctx, inputs)
    num_chunks = peers.num_ranks * ptx.u32_div(most_tokens(lane_origin) + shape.chunk - 1, shape.chunk)
    landed = 0  # the cell of the chunk before: it is announced while the next row comes
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
        first = chunk * shape.chunk
        for index in range(origin.begin + first, origin.begin + min(first + shape.chunk, origin.num_tokens)):
            destination = find_destination(ctx, inputs, index, origin)
            if destination.token < 0:
                return stage  # the chunk never lands
            row, are_there = find_rows(ctx, inputs, index, destination)
            if not are_there:
                return stage
            if ctx.nodes.num_sharing > 1:
                mark_token(ctx, inputs, index, origin, destination)
            if sizes.is_expanded == 0:
                begun = begin_row(ctx, inputs, index, stage)
                announce(landed, lane)
                stage = push_row(ctx, inputs, index, destination, begun, stage)
            else:
                announce(landed, lane)
                if sizes.one_each != 0:
                    stage = push_each(ctx, inputs, row, destination, stage)
                else:
                    stage = push_sum(ctx, inputs, row, destination, destination.place, stage)
            landed = 0
        if first < origin.num_tokens:
            landed = origin.buffer + landed_cell(peers.rank, chunk)
        number += ptx.grid_dim() * sizes.num_push_warps
    announce(landed, lane)
    return stage


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
def sum_token(ctx, out, inputs, token, rank, stage):
    """Wait for the rows of a token, add them up, and bring their weights; a warp. Returns the stage, behind its fills.

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
    number = list_biases(stage.rows, (inputs.bias_0, inputs.bias_1), ptx.s64(token), shape.hidden_bytes, lane)
    number = list_row(stage, number, lane, slot, is_row)
    if ptx.has_tma():
        ptx.fence_proxy_async_global()  # what the peers have landed, before the bulk copies that read it
    stage = add_up(ctx, out.combined_x + ptx.s64(token) * shape.hidden_bytes, number, stage)
    if out.combined_topk_weights != 0 and lane < shape.num_topk:
        weight = ptx.f32(0)
        if rank >= 0:
            weight = ptx.ld_na_f32(slot + shape.hidden_bytes + 4 * lane)
        ptx.st_na_f32(matrix_cell(out.combined_topk_weights, ptx.s64(token), lane, shape.num_topk), weight)
    return stage


@device_function
def receive_tokens(ctx, out, inputs, stage):
    """Receiver: add up the tokens that this warp gets hold of."""
    lane = ctx.team.lane
    own = buffer_of(ctx.peers, ctx.peers.rank)
    # After a fault the handle may say anything of where rows are.
    has_rows = ptx.vote_all(ptx.FULL_MASK, not has_fault(ctx.bounds))
    token = ptx.shfl_idx_s32(ptx.FULL_MASK, take_token(own + NEXT_TOKEN, lane), 0)
    while token < ctx.sizes.num_combined_tokens:
        rank = find_rank(ctx, inputs, token) if has_rows else -1
        following = take_token(own + NEXT_TOKEN, lane)
        stage = sum_token(ctx, out, inputs, token, rank, stage)
        token = ptx.shfl_idx_s32(ptx.FULL_MASK, following, 0)
    if has_failed(ctx.bounds):
        spoil_sums(out, ctx.shape, ctx.sizes.num_combined_tokens, lane)


@device_function
def open_context(peers, bounds, shape, nodes, sizes):
    """The context of this thread."""
    warp, lane = ptx.thread_idx() // 32, ptx.thread_idx() % 32
    return CombineContext(peers, bounds, shape, sizes, nodes, Team(True, -1, -1, warp, ptx.block_dim() // 32, lane))


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
    ctx = open_context(peers, bounds, shape, nodes, sizes)
    stage = open_sum_stage(ctx.team.num_warps, ctx.team.warp, ctx.team.lane)
    if ctx.team.warp < sizes.num_push_warps and ptx.vote_all(ptx.FULL_MASK, not has_fault(bounds)):
        stage = push_tokens(ctx, inputs, stage)
    receive_tokens(ctx, out, inputs, stage)


@device_function
def wait_landed(cell, bounds, peer, row):
    """Wait until a peer has pushed the chunk of tokens that a cell stands for: its slots can be read then."""
    waiter = Waiter(ELASTIC_LANDED, peer, -1)
    wait_or_report(ptx.ld_acquire_sys_s32, cell, is_set, row, bounds, waiter)  # PAIR elastic-landed


@kernel(max_threads=768, max_threads_before_sm90=THREADS_BEFORE_SM90)
def elastic_push_sums(
    inputs: ElasticRows,
    peers: Peers,
    bounds: Bounds,
    shape: ElasticSlots,
    nodes: ElasticNodes,
    sizes: ElasticCombineSizes,
):
    """Grid: any. Block: a multiple of 32. Shared memory: `sums_smem_bytes`."""
    ctx = open_context(peers, bounds, shape, nodes, sizes)
    stage = open_sum_stage(ctx.team.num_warps, ctx.team.warp, ctx.team.lane)
    if ptx.vote_all(ptx.FULL_MASK, not has_fault(bounds)):
        push_tokens(ctx, inputs, stage)


@kernel(max_threads=768, max_threads_before_sm90=THREADS_BEFORE_SM90)
def elastic_add_sums(
    out: ElasticSums,
    inputs: ElasticRows,
    peers: Peers,
    bounds: Bounds,
    shape: ElasticSlots,
    nodes: ElasticNodes,
    sizes: ElasticCombineSizes,
):
    """Grid: any. Block: a multiple of 32. Shared memory: `sums_smem_bytes`."""
    ctx = open_context(peers, bounds, shape, nodes, sizes)
    receive_tokens(ctx, out, inputs, open_sum_stage(ctx.team.num_warps, ctx.team.warp, ctx.team.lane))
