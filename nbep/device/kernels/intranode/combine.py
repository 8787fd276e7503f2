"""Intranode combine: ranks send the tokens they got back to where they came from; the source rank adds them up.

 rank s: x[i] --sender--> NVLink --> ring[channel c, source s] --receiver: sum over s--> combined_x[t] : rank r
 rank r: x[i], what it got from itself ----------------------------^
                                     head, tail <--coordinator (warp 0 of a receiving block)--> shared memory

 cell                  written by       with                   read by           with
 tail                  sender(s)        st_release_sys         coordinator(r)    ld_acquire_sys
 head                  coordinator(r)   st_relaxed_sys (1)     sender(s)         ld_relaxed_sys
 slot[k]               sender(s)        st_na                  receivers(r)      ld_na, after shared tail (2)
 own rows of x, biases no kernel        -                      receivers(r)      ld_na
 shared tail[s]        coordinator      atom_exch_release_cta  receivers         ld_acquire_cta
 shared head[w, s]     receiver w       atom_exch_relaxed_cta  coordinator       ld_relaxed_cta (1)
 shared head, tail     all warps        st_shared 0            all warps         after syncthreads
 shared rows[w]        receiver w       st_shared              the same warp     ld_shared, after syncwarp
 shared weights[w]     receiver w       st_shared              the same warp     ld_shared, after syncwarp
 combined_ arrays      receivers(r)     st_na, st_weak         -                 the next kernel

 (1) Heads publish nothing. All lanes have used what they loaded from a slot before the syncwarp that stands before the
     next head; the sender overwrites the slot only after it has seen that head.
 (2) tail -> coordinator -> shared tail is a chain of two release-acquire pairs. DeepEP's shared tail is volatile, and
     its receivers read the array of num_ranks tails at every lane, past its end; here only lanes below num_ranks wait.

Here s is the rank that sends back and r the one that the tokens came from. The receivers of a block, its warps w from 1
up, take tokens in turn, and a token may have a slot in every ring of the channel: so they share the rings, and only
the coordinator reads tails and moves heads.

Blocks come in pairs: block 2c sends and block 2c + 1 receives channel c. Tokens were dispatched in channels of rank r,
so a sender's channel is found in recv_channel_prefix_matrix and a receiver's tokens are its own channel's. What a rank
sends to itself takes no ring: receivers read it where it is, in x.

Source: DeepEP csrc/kernels/intranode.cu, combine. Break it: notebooks/05_combine.ipynb
"""

from typing import NamedTuple

import nbep.device.primitives as ptx
from nbep.device.alignment import matrix_cell
from nbep.device.jit import device_function, kernel
from nbep.device.kernels.parts.spoil import has_failed, spoil_sums
from nbep.device.kernels.parts.sums import Listed, list_biases, list_rows, rows_or_ring, sum_rows, sum_weights
from nbep.device.layout.intranode import RingShape, locate_header, locate_ring, slot_bytes
from nbep.device.protocols.board import RETIRED, first_needed, has_stalled, load_expected
from nbep.device.protocols.channels import channel_task_range
from nbep.device.protocols.copies import copy_row
from nbep.device.protocols.peers import CLUSTERS, Bounds, Peers, buffer_of
from nbep.device.protocols.teams import Context, Team, wait_free_slots
from nbep.device.protocols.waits import Waiter, has_fault, is_at_least, site, start_wait, wait_or_report
from nbep.device.types import I32, In, Out

COMBINE_SENDER_HEAD = site(5, "combine sender", "head", "free slots in the peer's ring")
COMBINE_RECEIVER_TAIL = site(6, "combine receiver", "tail", "the peer's next chunk of tokens")
COMBINE_COORDINATOR = site(7, "combine coordinator", "heads", "the receivers of its own block")

MAX_RANKS = 8
MAX_ROWS = MAX_RANKS + 2  # of one sum: one from each rank, and the biases


class CombineOutputs(NamedTuple):
    """combined_topk_weights may be absent (0)."""

    combined_x: Out  # [num_combined_tokens, hidden_bytes] bf16
    combined_topk_weights: Out  # [num_combined_tokens, num_topk] f32


class CombineInputs(NamedTuple):
    """topk_weights, bias_0 and bias_1 may be absent (0)."""

    x: In  # [num_tokens, hidden_bytes] bf16
    topk_weights: In  # [num_tokens, num_topk] f32
    bias_0: In  # [num_combined_tokens, hidden_bytes] bf16
    bias_1: In  # [num_combined_tokens, hidden_bytes] bf16
    rank_prefix_matrix: In  # [num_ranks, num_ranks] s32, inclusive over the source rank
    channel_prefix_matrix: In  # [num_ranks, num_channels] s32: the handle's recv_channel_prefix_matrix, exclusive
    send_head: In  # [num_combined_tokens, num_ranks] s32, as cached_notify_combine leaves it


class CombineSizes(NamedTuple):
    num_combined_tokens: I32
    num_max_send_tokens: I32


class Board(NamedTuple):
    """What a receiving block shares: the addresses in its shared memory."""

    tails: int  # [MAX_RANKS] s32
    heads: int  # [num_warps, MAX_RANKS] s32; RETIRED once a warp has no more tokens
    rows: int  # [num_warps, MAX_ROWS] s64: the addresses of the rows to add, those of the biases first
    weights: int  # [num_warps, MAX_RANKS] s64: those of the ranks' top-k weights


def combine_smem_bytes(num_threads: int) -> int:
    """Dynamic shared memory of a combine block."""
    return 4 * MAX_RANKS + (8 * MAX_ROWS + 12 * MAX_RANKS) * (num_threads // 32)


@device_function
def locate_board(num_warps):
    rows = ptx.smem_base()
    weights = rows + 8 * MAX_ROWS * num_warps
    heads = weights + 8 * MAX_RANKS * num_warps
    return Board(heads + 4 * MAX_RANKS * num_warps, heads, rows, weights)


@device_function
def reset_board(board, warp, lane):
    """Each warp resets its own heads, the first one the tails; a block barrier follows."""
    if lane < MAX_RANKS:
        if warp == 0:
            ptx.st_shared_s32(board.tails + 4 * lane, 0)
        ptx.st_shared_s32(matrix_cell(board.heads, warp, lane, MAX_RANKS), 0)


@device_function
def token_range_to_send(ctx, inputs, dst_rank):
    """Rows of x that came from the channel of dst_rank."""
    peers, shape, channel = ctx.peers, ctx.shape, ctx.team.channel
    rank_begin = 0
    if dst_rank > 0:
        rank_begin = ptx.ld_nc_s32(matrix_cell(inputs.rank_prefix_matrix, dst_rank - 1, peers.rank, shape.num_ranks))
    prefix = matrix_cell(inputs.channel_prefix_matrix, dst_rank, channel, shape.num_channels)
    begin = rank_begin + ptx.ld_nc_s32(prefix)
    if channel == shape.num_channels - 1:
        return begin, ptx.ld_nc_s32(matrix_cell(inputs.rank_prefix_matrix, dst_rank, peers.rank, shape.num_ranks))
    return begin, rank_begin + ptx.ld_nc_s32(prefix + 4)


@device_function
def join_senders(num_ranks):
    """The team of a sending warp: they take the peers in turn, starting with another one in each channel."""
    channel = ptx.block_idx() // 2
    warp = ptx.thread_idx() // 32
    peer = ptx.u32_mod(channel + warp, num_ranks)
    num_warps = ptx.u32_div(ptx.block_dim() // 32, num_ranks)
    return Team(True, peer, channel, ptx.u32_div(warp, num_ranks), num_warps, ptx.thread_idx() % 32)


@device_function
def send_tokens(ctx, inputs):
    """Sender: push one channel's rows back to one peer, num_max_send_tokens a chunk.

    They copy with plain loads and stores: through the copy engine, as dispatch does, combine was 2 % slower on H200s
    where the wire is full.
    """
    peers, bounds, shape, sizes, team = ctx.peers, ctx.bounds, ctx.shape, ctx.sizes, ctx.team
    peer, channel, lane = team.peer, team.channel, team.lane
    if peer == peers.rank:
        return
    ring = locate_ring(buffer_of(peers, peer), shape, channel, peers.rank)
    begin, end = token_range_to_send(ctx, inputs, peer)
    num_tokens = end - begin
    tail = 0
    may_fill = ptx.vote_all(ptx.FULL_MASK, not has_fault(bounds))
    while tail < num_tokens:
        next_tail = min(tail + sizes.num_max_send_tokens, num_tokens)
        has_room = True
        if lane == 0 and next_tail > shape.num_slots:  # until then it cannot be full
            waiter = Waiter(COMBINE_SENDER_HEAD, peer, channel)
            has_room = wait_free_slots(ring.head, tail, shape.num_slots, next_tail - tail, bounds, waiter)
        # What lane 0 has seen of the head comes before all lanes' stores: a vote orders nothing.
        ptx.syncwarp(ptx.FULL_MASK)
        may_fill = may_fill and ptx.vote_all(ptx.FULL_MASK, has_room)
        i = tail + team.warp
        # No range: with a step that is no constant it divides 64-bit numbers, which takes a call and registers.
        while i < next_tail and may_fill:
            row = begin + i
            src = inputs.x + row * shape.hidden_bytes
            dst = ring.x + ptx.u32_mod(i, shape.num_slots) * slot_bytes(shape)
            copy_row(ptx.ld_nc_v4, dst, src, shape.hidden_bytes, lane)
            if lane < shape.num_topk:
                weight = ptx.ld_na_f32(matrix_cell(inputs.topk_weights, row, lane, shape.num_topk))
                ptx.st_na_f32(locate_header(dst, shape).topk_weights + 4 * lane, weight)
            i += team.num_warps
        tail = next_tail
        if not ptx.bar_red_and(1 + peer, 32 * team.num_warps, may_fill):
            return
        if team.warp == 0 and lane == 0:
            ptx.st_release_sys_s32(ring.tail, tail)  # PAIR combine-tail: the chunk's slots


@device_function
def minimum_head(board, num_warps, peer):
    """The head that all receiving warps have passed, RETIRED if they have no more tokens."""
    head = RETIRED
    for warp in range(1, num_warps):
        head = min(head, ptx.ld_relaxed_cta_shared_s32(matrix_cell(board.heads, warp, peer, MAX_RANKS)))
    return head


@device_function
def wait_shared_tail_past(tail, index, bounds, peer, channel):
    """Wait until the tail that the block's coordinator keeps in shared memory is past index."""
    load = ptx.ld_acquire_cta_shared_s32  # PAIR combine-shared-tail
    wait_or_report(load, tail, is_at_least, index + 1, bounds, Waiter(COMBINE_RECEIVER_TAIL, peer, channel))


@device_function
def coordinate(ctx, board):
    """Coordinator, a lane for each peer: take a tail to the block and the block's head to the ring's sender."""
    peers, bounds, shape, team = ctx.peers, ctx.bounds, ctx.shape, ctx.team
    peer, channel = team.peer, team.channel
    ring = locate_ring(buffer_of(peers, peers.rank), shape, channel, peer)
    last_tail = 0
    last_head = 0
    deadline = 0
    while True:
        head = minimum_head(board, team.num_warps, peer)
        if head == RETIRED:
            return
        tail = ptx.ld_acquire_sys_s32(ring.tail)  # PAIR combine-tail
        moved = tail != last_tail or head > last_head
        if tail != last_tail:
            last_tail = tail
            ptx.atom_exch_release_cta_shared_s32(board.tails + 4 * peer, tail)  # PAIR combine-shared-tail
        if head > last_head:
            last_head = head
            ptx.st_relaxed_sys_s32(ring.head, head)
        if moved:
            deadline = 0
            continue
        if deadline == 0:
            deadline = start_wait(bounds)
        if has_stalled(deadline, bounds, Waiter(COMBINE_COORDINATOR, peers.rank, channel), RETIRED, head):
            return


@device_function
def locate_source(ctx, inputs, rank):
    """Where this rank finds what a rank has made of the tokens of the channel."""
    peers, shape = ctx.peers, ctx.shape
    first = 0
    if rank == peers.rank:
        first, _ = token_range_to_send(ctx, inputs, rank)
    ring = locate_ring(buffer_of(peers, peers.rank), shape, ctx.team.channel, rank)
    return rows_or_ring(inputs, shape, rank == peers.rank, first, ring.x)


@device_function
def receive_tokens(ctx, out, inputs, board):
    """Receiver: sum up the tokens of one channel; each warp takes every (num_warps - 1)-th.

    A warp's head is the first slot that it still needs. It moves before the warp waits for its token, not after it has
    summed up the last one: otherwise the ring would be held there, and would need slots for a row of each receiving
    warp and for a chunk, less one. See records/shared_cells.md.
    """
    peers, bounds, shape, sizes, team = ctx.peers, ctx.bounds, ctx.shape, ctx.sizes, ctx.team
    channel, warp, lane = team.channel, team.warp, team.lane
    source = locate_source(ctx, inputs, lane)
    # After a fault of dispatch the handle may say that x has more rows than it has.
    has_rows = lane != peers.rank or not has_fault(bounds)
    rows = board.rows + 8 * MAX_ROWS * warp
    weights = board.weights + 8 * MAX_RANKS * warp
    head = matrix_cell(board.heads, warp, lane, MAX_RANKS)
    token, end = channel_task_range(sizes.num_combined_tokens, shape.num_channels, channel)
    token += warp - 1
    expected = load_expected(inputs.send_head, token, token < end, shape.num_ranks, lane)
    while token < end:
        if lane < shape.num_ranks:
            ptx.atom_exch_relaxed_cta_shared_s32(head, first_needed(expected))
            if expected >= 0 and lane != peers.rank:
                wait_shared_tail_past(board.tails + 4 * lane, expected, bounds, lane, channel)
        ptx.syncwarp(ptx.FULL_MASK)
        here = expected if has_rows else -1
        num_biases = list_biases(rows, (inputs.bias_0, inputs.bias_1), token, shape.hidden_bytes, lane)
        num_ranks = list_rows(rows + 8 * num_biases, weights, lane, here, source)
        after = token + team.num_warps - 1
        expected = load_expected(inputs.send_head, after, after < end, shape.num_ranks, lane)
        row = out.combined_x + token * shape.hidden_bytes
        sum_rows(ptx.st_na_v4, row, Listed(rows, num_biases + num_ranks), 0, shape.hidden_bytes, lane)
        if lane < shape.num_topk:
            total = sum_weights(weights, num_ranks, lane)
            ptx.st_weak_f32(matrix_cell(out.combined_topk_weights, token, lane, shape.num_topk), total)
        ptx.syncwarp(ptx.FULL_MASK)
        token = after
    if lane < MAX_RANKS:
        ptx.atom_exch_relaxed_cta_shared_s32(head, RETIRED)


@kernel(max_threads=768, clusters=CLUSTERS)
def combine(
    out: CombineOutputs, inputs: CombineInputs, peers: Peers, bounds: Bounds, shape: RingShape, sizes: CombineSizes
):
    """Grid: 2 * num_channels blocks. Block: a multiple of 32 * num_ranks, at least 64. Shared: `combine_smem_bytes`."""
    if ptx.block_idx() % 2 == 0:
        send_tokens(Context(peers, bounds, shape, sizes, 0, join_senders(shape.num_ranks)), inputs)
    else:
        num_warps = ptx.u32_div(ptx.block_dim(), 32)
        warp = ptx.thread_idx() // 32
        lane = ptx.thread_idx() % 32
        ctx = Context(peers, bounds, shape, sizes, 0, Team(False, lane, ptx.block_idx() // 2, warp, num_warps, lane))
        board = locate_board(num_warps)
        reset_board(board, warp, lane)
        ptx.syncthreads()
        if warp > 0:
            receive_tokens(ctx, out, inputs, board)
        elif lane < shape.num_ranks and lane != peers.rank:
            coordinate(ctx, board)
        if has_failed(bounds):
            spoil_sums(out, shape, sizes.num_combined_tokens, lane)
