"""Forwarders and their coordinators: where internode combine changes from NVLink to RDMA. See combine.py.

 (d, l): NVL rings[channel, n * num_nvl_ranks + k], for all k, and x --forwarder: sum over k--> network
                                                                    --> ring[channel, d] of rank (n, l)

 cell                   written by             with                    read by             with
 tail of NVL ring       NVL sender (d, k)      st_release_sys          forwarder, lane k   ld_acquire_sys
 slot of NVL ring       NVL sender (d, k)      bulk copy, st_na        forwarder           ld_na, after tail
 own rows of x          nobody                 -                       forwarder           ld_na
 stage of a warp        forwarder              st_shared               network             after a proxy fence, syncwarp
 slot of (n, l)         forwarder              put_nbi_warp            RDMA receiver       after tails
 board[w]               forwarder w            atom_exch_release_cta   coordinators        ld_acquire_cta
                        all, at the start      st_shared 0             all                 after syncthreads
 told[ring]             NVL coordinator        st_shared_s32           the same lane       ld_shared_s32
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
from nbep.device.jit import device_function
from nbep.device.kernels.internode.arguments import BOARD, BOARD_ROW, SUMS_WORD, TOLD, rank_of
from nbep.device.kernels.internode.coordinator import first_passing_row, tell_tails, tokens_to_node
from nbep.device.kernels.internode.dispatch_nvl_receiver import rows_from
from nbep.device.layout.internode import head_offset, recv_row, rings_offset, send_row
from nbep.device.layout.intranode import locate_notes, locate_ring, note_bytes
from nbep.device.network.seam import own_ptr, quiet
from nbep.device.protocols.board import (
    RETIRED,
    first_needed,
    has_stalled,
    least_progress,
    load_expected,
    note_progress,
)
from nbep.device.protocols.messages import put_stage
from nbep.device.protocols.peers import buffer_of
from nbep.device.protocols.staging import STAGE_BYTES
from nbep.device.protocols.sums import Listed, list_rows, rows_or_ring, sum_rows_or_two, sum_weights
from nbep.device.protocols.totals import wait_total_free
from nbep.device.protocols.waits import (
    FORWARDER_COORDINATOR,
    FORWARDER_NVL_TAIL,
    FORWARDER_RDMA_HEAD,
    Waiter,
    start_wait,
    wait_tail_past,
)


class Group(NamedTuple):
    """The warps of a block that forward to one node."""

    node: int
    warp: int
    num_warps: int
    row: int  # of this warp on the board


@device_function
def own_ring(peers, here, shape, node, k):
    """The NVL ring of this rank that brings rows of place k for a node."""
    rings = buffer_of(peers, peers.rank) + rings_offset(here.num_rdma_ranks, here.num_nvl_ranks)
    return locate_ring(rings, shape, here.channel, node * here.num_nvl_ranks + k)


@device_function
def locate_source(inputs, here, shape, ring, node, k):
    """Where rows of place k for a node are: in a ring or, what this rank has made of its own tokens, in x."""
    first = 0
    if k == here.nvl_rank:
        first, _ = rows_from(inputs, shape, here.channel, node * here.num_nvl_ranks + k)
    return rows_or_ring(inputs, shape, k == here.nvl_rank, first, ring.x)


@device_function
def clear_notes(stage, shape, lane):
    """Write what is in front of the row in a stage, once: only the weights change later."""
    for at in range(4 * lane, note_bytes(shape), 128):
        ptx.st_shared_s32(stage.data + at, 0)


@device_function
def put_sum(network, here, shape, node, index, rows, weights, num_rows, stage, lane):
    """Add up the listed rows in the stage and put the sum to a node, a stage at a time; one warp."""
    front = note_bytes(shape)
    slot = ptx.u32_mod(index, shape.num_slots)
    dst = recv_row(shape, here.channel, here.rdma_rank, slot)
    src = send_row(shape, here.channel, node, slot)
    peer = rank_of(here, node)
    row = stage.data + front
    if lane < shape.num_topk:
        ptx.st_shared_f32(locate_notes(row, shape).topk_weights + 4 * lane, sum_weights(weights, num_rows, lane))
    done = 0
    while done < shape.hidden_bytes:
        part = min(shape.hidden_bytes - done, STAGE_BYTES - front)
        sum_rows_or_two(ptx.st_shared_v4, row - done, Listed(rows, num_rows), done, done + part, lane)
        extra = front if done == 0 else 0  # the notes go with the first part
        at = done - extra
        put_stage(network, dst + at, src + at, row - extra, part + extra, peer, here.channel, lane)
        done += part
    quiet(network, lane)


@device_function
def forward_sums(inputs, network, peers, progress, bounds, here, nvl, rdma, cells, group, lists, stage, lane):
    """Forwarder: sum up the tokens that go back to its node, in turn with the others of its group.

    lists: shared addresses of what it adds up, rows and weights
    """
    rows, weights = lists
    node, num_warps = group.node, group.num_warps
    total = ptx.s32(tokens_to_node(inputs.recv_rdma_channel_prefix_matrix, rdma.num_channels, here.channel, node))
    first = first_passing_row(inputs, rdma.num_channels, here.channel, node)
    heads = inputs.send_nvl_head + 4 * first * here.num_nvl_ranks
    base = ptx.ld_weak_s32(progress.sent + 4 * (here.channel * here.num_rdma_ranks + node))
    room = own_ptr(network, head_offset(cells, here.num_rdma_ranks, here.channel, node))
    ring = own_ring(peers, here, nvl, node, lane if lane < here.num_nvl_ranks else 0)
    source = locate_source(inputs, here, nvl, ring, node, lane)
    board = ptx.smem_base() + BOARD + BOARD_ROW * group.row
    clear_notes(stage, rdma, lane)
    i = ptx.s32(group.warp)
    expected = load_expected(heads, i, i < total, here.num_nvl_ranks, lane)
    while i < total:
        # Both levels are told before any wait: what this warp waits for may wait for what it is done with.
        if lane < here.num_nvl_ranks:
            note_progress(board + 4 * lane, first_needed(expected))
        if lane == 0:
            note_progress(board + 4 * SUMS_WORD, i)
        is_here = True
        if expected >= 0 and lane != here.nvl_rank:
            peer = here.rdma_rank * here.num_nvl_ranks + lane
            waiter = Waiter(FORWARDER_NVL_TAIL, peer, here.channel)
            tail = wait_tail_past(ring.tail, expected, RETIRED, bounds, waiter)
            is_here = tail != RETIRED
        has_room = True
        if lane == 0:
            peer = rank_of(here, node)
            waiter = Waiter(FORWARDER_RDMA_HEAD, peer, here.channel)
            free_end = wait_total_free(room, base, i, rdma.num_slots, bounds, waiter)
            has_room = i < free_end
        if not ptx.vote_all(ptx.FULL_MASK, is_here and has_room):  # after a time-out a sum would lack a row
            return
        num_rows = list_rows(rows, weights, lane, expected, source)
        after = ptx.s32(i + num_warps)
        expected = load_expected(heads, after, after < total, here.num_nvl_ranks, lane)
        put_sum(network, here, rdma, node, i, rows, weights, num_rows, stage, lane)
        i = after
    ptx.syncwarp(ptx.FULL_MASK)
    if lane <= SUMS_WORD:
        note_progress(board + 4 * lane, RETIRED)


@device_function
def coordinate_sums(inputs, network, progress, bounds, here, shape, sizes, num_warps, lane):
    """RDMA coordinator; one warp, a lane for each node: its forwarders are num_warps, one node's after the other's."""
    if lane < here.num_rdma_ranks:
        total = tokens_to_node(inputs.recv_rdma_channel_prefix_matrix, shape.num_channels, here.channel, lane)
        column = ptx.smem_base() + BOARD + BOARD_ROW * num_warps * lane + 4 * SUMS_WORD
        chunk, site = sizes.num_max_rdma_send_tokens, FORWARDER_COORDINATOR
        tell_tails(network, progress, bounds, here, total, column, num_warps, chunk, sizes.cells, site, lane)


@device_function
def tell_nvl_heads(peers, bounds, here, shape, num_warps, lane):
    """NVL coordinator; one warp, each lane every 32nd ring: tell its sender of the slots that are free again."""
    told = ptx.smem_base() + TOLD
    for which in range(lane, here.num_rdma_ranks * here.num_nvl_ranks, 32):
        ptx.st_shared_s32(told + 4 * which, 0)
    deadline = 0
    while True:
        is_done = True
        has_moved = False
        peer = least = 0
        for which in range(lane, here.num_rdma_ranks * here.num_nvl_ranks, 32):
            node = ptx.u32_div(which, here.num_nvl_ranks)
            k = which - node * here.num_nvl_ranks
            column = ptx.smem_base() + BOARD + BOARD_ROW * num_warps * node + 4 * k
            head = least_progress(column, BOARD_ROW, num_warps)
            if head != RETIRED:
                is_done = False
                peer, least = here.rdma_rank * here.num_nvl_ranks + k, head
                if head > ptx.ld_shared_s32(told + 4 * which):
                    ptx.st_shared_s32(told + 4 * which, head)
                    ptx.st_relaxed_sys_s32(own_ring(peers, here, shape, node, k).head, head)
                    has_moved = True
        if is_done:
            return
        if has_moved:
            deadline = 0
        elif deadline == 0:
            deadline = start_wait(bounds)
        elif has_stalled(deadline, bounds, FORWARDER_COORDINATOR, peer, here.channel, RETIRED, least):
            return
