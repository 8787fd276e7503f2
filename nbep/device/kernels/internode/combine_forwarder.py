"""Forwarders and their coordinators: where internode combine changes from NVLink to RDMA. See combine.py.

 (d, l): NVL rings[channel, n * num_nvl_ranks + k], for all k, and x --forwarder: sum over k--> network
                                                                    --> ring[channel, d] of rank (n, l)

 cell                   written by             with                    read by             with
 tail of NVL ring       NVL sender (d, k)      st_release_sys          forwarder, lane k   ld_acquire_sys
 slot of NVL ring       NVL sender (d, k)      bulk copy, st_na        forwarder           ld_na, after tail
 own rows of x          no kernel              -                       forwarder           ld_na
 stage of a warp        forwarder              st_shared               network             after a proxy fence, syncwarp
 slot of (n, l)         forwarder              put_nbi_warp            RDMA receiver       after tails
 board[w]               forwarder w            atom_exch_release_cta   coordinators        ld_acquire_cta
                        all, at the start      st_shared 0             all                 after syncthreads
 published[ring]        NVL coordinator        st_shared_s32           the same lane       ld_shared_s32
 head of NVL ring       NVL coordinator        st_relaxed_sys (1)      NVL sender (d, k)   ld_relaxed_sys
 tails[c, d] of (n, l)  RDMA coordinator       amo_add, behind slots   RDMA receiver       ld_acquire_sys
 heads[c, n]            (n, l)                 amo_add, behind reads   forwarder, lane 0   ld_acquire_sys
 sent[c, n]             RDMA coordinator       st_weak                 (next call)         ld_weak

 (1) It publishes nothing: what was in a slot has been added up before.

A forwarder adds up the rows of one token, one from each rank of this node that it went to, and rounds the sum to bf16:
so one row crosses the network where NVLink carried several. It does not know the token: it takes the tokens of node n
in the order in which they passed through this rank in dispatch, and send_nvl_head says which of the rings have a row.

Each node has warps of its own, which take its tokens in turn. A warp that served two nodes could wait for room at one
node, whose receivers wait for a sum that a warp of another node puts only after it has found room at the second one.

Source: DeepEP csrc/kernels/internode.cu, combine (WarpRole::kNVLAndRDMAForwarder, kCoordinator; combine_token)
"""

from typing import NamedTuple

import nbep.device.primitives as ptx
from nbep.device.alignment import matrix_cell
from nbep.device.jit import device_function
from nbep.device.kernels.internode.arguments import (
    BOARD_ROW,
    PUBLISHED,
    SUMS_WORD,
    first_passing_row,
    neighbor_at,
    rank_at,
    rows_from,
    tokens_to_node,
)
from nbep.device.kernels.internode.coordinator import (
    FORWARDER_COORDINATOR,
    Column,
    board_row,
    publish_tails,
    wait_total_free,
)
from nbep.device.kernels.parts.sums import Listed, list_rows, rows_or_ring, sum_rows_or_two, sum_weights
from nbep.device.layout.internode import head_offset, recv_row, rings_offset, send_row
from nbep.device.layout.intranode import header_bytes, locate_header, locate_ring
from nbep.device.network.seam import Place, further, own_ptr, put_stage, quiet
from nbep.device.protocols.board import (
    RETIRED,
    first_needed,
    has_stalled,
    least_progress,
    load_expected,
    note_progress,
)
from nbep.device.protocols.peers import buffer_of
from nbep.device.protocols.staging import STAGE_BYTES
from nbep.device.protocols.teams import wait_tail_past
from nbep.device.protocols.waits import Waiter, site, start_wait

FORWARDER_NVL_TAIL = site(28, "internode combine forwarder", "tail", "the peer's next chunk of rows")
FORWARDER_RDMA_HEAD = site(29, "internode combine forwarder", "head", "free slots in the peer's RDMA ring")


class Group(NamedTuple):
    """The warps of a block that forward to one node."""

    node: int
    warp: int
    num_warps: int
    row: int  # of this warp on the board


@device_function
def own_ring(ctx, node, k):
    """The NVL ring of this rank that brings rows of local rank k for a node."""
    here = ctx.here
    rings = buffer_of(ctx.peers, here.nvl_rank) + rings_offset(here.num_rdma_ranks, here.num_nvl_ranks)
    return locate_ring(rings, ctx.nvl, here.channel, node * here.num_nvl_ranks + k)


@device_function
def locate_source(ctx, inputs, ring, node, k):
    """Where rows of local rank k for a node are: in a ring or, what this rank has made of its own tokens, in x."""
    first = 0
    if k == ctx.here.nvl_rank:
        first, _ = rows_from(ctx, inputs, node * ctx.here.num_nvl_ranks + k)
    return rows_or_ring(inputs, ctx.nvl, k == ctx.here.nvl_rank, first, ring.x)


@device_function
def put_sum(ctx, node, index, lists, num_rows, stage):
    """Add up the listed rows in the stage and put the sum to a node, a stage at a time; one warp."""
    shape = ctx.rdma
    front = header_bytes(shape)
    slot = ptx.u32_mod(index, shape.num_slots)
    dst = recv_row(shape, ctx.here.channel, ctx.here.rdma_rank, slot)
    src = send_row(shape, ctx.here.channel, node, slot)
    place = Place(dst, src, rank_at(ctx, node), ctx.here.channel)
    row = stage.data + front
    listed = Listed(lists.rows, num_rows)
    if ctx.lane < shape.num_topk:
        weight = sum_weights(lists.weights, num_rows, ctx.lane)
        ptx.st_shared_f32(locate_header(row, shape).topk_weights + 4 * ctx.lane, weight)
    done = 0
    while done < shape.hidden_bytes:
        part = min(shape.hidden_bytes - done, STAGE_BYTES - front)
        sum_rows_or_two(ptx.st_shared_v4, row - done, listed, done, done + part, ctx.lane)
        extra = front if done == 0 else 0  # the header goes with the first part
        put_stage(ctx.network, further(place, done - extra), row - extra, part + extra, ctx.lane)
        done += part
    quiet(ctx.network, ctx.lane)


@device_function
def forward_sums(ctx, inputs, group, lists, stage):
    """Forwarder: sum up the tokens that go back to its node, in turn with the others of its group.

    lists: shared addresses of what it adds up, rows and weights
    """
    here, lane = ctx.here, ctx.lane
    node, num_warps = group.node, group.num_warps
    total = ptx.s32(tokens_to_node(ctx, inputs.recv_rdma_channel_prefix_matrix, node))
    first = first_passing_row(ctx, inputs, node)
    heads = inputs.send_nvl_head + 4 * first * here.num_nvl_ranks
    base = ptx.ld_weak_s32(matrix_cell(ctx.progress.sent, here.channel, node, here.num_rdma_ranks))
    room = own_ptr(ctx.network, head_offset(ctx.sizes.cells, here.num_rdma_ranks, here.channel, node))
    ring = own_ring(ctx, node, lane if lane < here.num_nvl_ranks else 0)
    source = locate_source(ctx, inputs, ring, node, lane)
    board = board_row(group.row)
    for at in range(4 * ctx.lane, header_bytes(ctx.rdma), 128):  # only the weights change later
        ptx.st_shared_s32(stage.data + at, 0)
    i = ptx.s32(group.warp)
    expected = load_expected(heads, i, i < total, here.num_nvl_ranks, lane)
    while i < total:
        # Both levels get their progress before any wait: their ranks may wait for slots that this warp is done with.
        if lane < here.num_nvl_ranks:
            note_progress(board + 4 * lane, first_needed(expected))
        if lane == 0:
            note_progress(board + 4 * SUMS_WORD, i)
        is_here = True
        if expected >= 0 and lane != here.nvl_rank:
            waiter = Waiter(FORWARDER_NVL_TAIL, neighbor_at(ctx, lane), here.channel)
            is_here = wait_tail_past(ring.tail, expected, RETIRED, ctx.bounds, waiter) != RETIRED
        has_room = True
        if lane == 0:
            waiter = Waiter(FORWARDER_RDMA_HEAD, rank_at(ctx, node), here.channel)
            has_room = i < wait_total_free(room, base, i, ctx.rdma.num_slots, ctx.bounds, waiter)
        if not ptx.vote_all(ptx.FULL_MASK, is_here and has_room):  # after a time-out a sum would lack a row
            return
        num_rows = list_rows(lists.rows, lists.weights, lane, expected, source)
        after = ptx.s32(i + num_warps)
        expected = load_expected(heads, after, after < total, here.num_nvl_ranks, lane)
        put_sum(ctx, node, i, lists, num_rows, stage)
        i = after
    ptx.syncwarp(ptx.FULL_MASK)
    if lane <= SUMS_WORD:
        note_progress(board + 4 * lane, RETIRED)


@device_function
def coordinate_sums(ctx, inputs, num_warps):
    """RDMA coordinator; one warp, a lane for each node: its forwarders are num_warps, one node's after the other's."""
    if ctx.lane < ctx.here.num_rdma_ranks:
        total = tokens_to_node(ctx, inputs.recv_rdma_channel_prefix_matrix, ctx.lane)
        column = Column(board_row(num_warps * ctx.lane) + 4 * SUMS_WORD, num_warps)
        publish_tails(ctx, total, column, FORWARDER_COORDINATOR)


@device_function
def publish_nvl_heads(ctx, num_warps):
    """NVL coordinator; one warp, each lane every 32nd ring: let its sender have the slots that are free again."""
    here = ctx.here
    published = ptx.smem_base() + PUBLISHED
    for which in range(ctx.lane, here.num_rdma_ranks * here.num_nvl_ranks, 32):
        ptx.st_shared_s32(published + 4 * which, 0)
    deadline = 0
    while True:
        is_done = True
        has_moved = False
        peer = least = 0
        for which in range(ctx.lane, here.num_rdma_ranks * here.num_nvl_ranks, 32):
            node = ptx.u32_div(which, here.num_nvl_ranks)
            k = which - node * here.num_nvl_ranks
            head = least_progress(board_row(num_warps * node) + 4 * k, BOARD_ROW, num_warps)
            if head != RETIRED:
                is_done = False
                peer, least = neighbor_at(ctx, k), head
                if head > ptx.ld_shared_s32(published + 4 * which):
                    ptx.st_shared_s32(published + 4 * which, head)
                    ptx.st_relaxed_sys_s32(own_ring(ctx, node, k).head, head)
                    has_moved = True
        if is_done:
            return
        if has_moved:
            deadline = 0
            continue
        if deadline == 0:
            deadline = start_wait(ctx.bounds)
        if has_stalled(deadline, ctx.bounds, Waiter(FORWARDER_COORDINATOR, peer, here.channel), RETIRED, least):
            return
