"""Forwarders and their coordinator: where internode dispatch changes from RDMA to NVLink. See dispatch.py.

 (d, l): ring[channel, n], for every node n --forwarder: those for (d, k)--> NVL ring[channel, l] of rank (d, k)
         heads[channel, d] of (n, l) <--coordinator, when the forwarders of all k are past a slot

 cell                  written by           with                    read by           with
 tails[c, n]           (n, l)               amo_add                 warp 0, lane n    ld_acquire_sys
 slot of RDMA ring     (n, l)               put_nbi_warp            forwarders        bulk copy, ld_na, after tails (1)
 batch of a team       warp 0, lane 0       st_shared_s32           the team          ld_shared_s32, after bar_sync
 slot of NVL ring      forwarder            bulk copy, or st_na     receivers (d, k)  after tail
 tail of NVL ring      warp 0 of a team     st_release_sys          receivers (d, k)  ld_acquire_sys
 head of NVL ring      receivers (d, k)     st_relaxed_sys          forwarders        ld_relaxed_sys
 board[k, n]           warp 0 of team k     atom_exch_release_cta   coordinator       ld_acquire_cta
                       all, at the start    st_shared 0             all               after syncthreads
 heads[c, d] of (n,l)  coordinator, lane n  amo_add, behind reads   senders           ld_acquire_sys
 received[c, n]        coordinator, lane n  st_weak                 (next call)       ld_weak
 send_nvl_head         warp 0 of team k     st_weak                 (combine)         -
 recv_ arrays          deliverer            bulk copy, st_na, weak  -                 the next kernel

 (1) One lane acquires, a barrier of the team spreads it, and a proxy fence stands before the bulk copies.

There is a team of warps for each rank of the node. Its first warp finds tokens that are there, from one node after the
other, and the team takes those that its rank wants: a token for three ranks of the node crosses the network once, and
NVLink three times. A forwarder hands the slot on as it came; it reads nothing but the bits of the source meta. The
team of the own rank delivers: its tokens go straight to recv_x.

A slot is free when the slowest team is past it. The head does not tell each slot but each chunk: an add is a message on
the network. So a ring must have room for two chunks (see Config).

Source: DeepEP csrc/kernels/internode.cu, dispatch (WarpRole::kRDMAAndNVLForwarder, kForwarderCoordinator)
"""

from typing import NamedTuple

import nbep.device.primitives as ptx
from nbep.device.alignment import matrix_cell
from nbep.device.jit import device_function
from nbep.device.kernels.internode.arguments import first_passing_row, neighbor_at, rank_at, tokens_to_node
from nbep.device.kernels.internode.coordinator import (
    FORWARDER_COORDINATOR,
    NOTHING,
    board_row,
    load_batch,
    next_after,
    publish_heads,
    share_batch,
)
from nbep.device.kernels.internode.dispatch_receiver import output_rows, receive_token
from nbep.device.kernels.parts.spoil import DISPATCH_RECEIVER_ROWS
from nbep.device.layout.internode import bits_shift, bits_word, recv_row, rings_offset, tail_offset
from nbep.device.layout.intranode import header_bytes, locate_header, locate_ring, slot_bytes
from nbep.device.network.seam import own_ptr
from nbep.device.protocols.board import RETIRED, note_progress
from nbep.device.protocols.copies import Row, begin_copy, end_copy
from nbep.device.protocols.peers import buffer_of
from nbep.device.protocols.teams import publish_tail, team_barrier, wait_expired_together, wait_free_slots
from nbep.device.protocols.waits import (
    Waiter,
    report_fault,
    site,
    wait_until,
)

FORWARDER_RDMA_TAIL = site(
    23, "internode dispatch forwarder", "tail", "the next tokens in an RDMA ring, the peer's among them"
)
FORWARDER_NVL_HEAD = site(24, "internode dispatch forwarder", "head", "free slots in the peer's NVL ring")


class Incoming(NamedTuple):
    """What comes to a forwarder on its channel: in lane n from node n. Rows are those of send_nvl_head."""

    base: int  # what the ring's tail was at the start
    total: int
    row: int


class Batch(NamedTuple):
    """Tokens in the ring of a node: the node, the first and the one behind the last."""

    node: int
    first: int
    end: int


class Expected(NamedTuple):
    """What a lane waits for: a tail that has started at base, of a ring whose tokens are done up to head of total."""

    tail: int
    base: int
    head: int
    total: int


@device_function
def load_tail(expected):
    """The tail of a lane's ring, counted from its start; 0 if nothing more comes."""
    if expected.head < expected.total:
        return ptx.s32(ptx.ld_acquire_sys_s32(expected.tail) - expected.base)  # PAIR network-amo
    return 0


@device_function
def lanes_with_tokens(tail, expected):
    """Which lanes' rings have tokens that are not done."""
    return ptx.vote_ballot(ptx.FULL_MASK, expected.head < min(tail, expected.total))


@device_function
def find_batch(ctx, incoming, head, last):
    """Wait for tokens that are there: the node that they come from, the first and how many. All lanes of a warp.

    head: in lane n how many tokens of ring n are done; last: the node of the batch before
    """
    total = incoming.total
    tail = own_ptr(ctx.network, tail_offset(ctx.sizes.cells, ctx.here.num_rdma_ranks, ctx.here.channel, ctx.lane))
    ring = Expected(tail, incoming.base, head, total)
    seen, ready = wait_until(load_tail, ring, lanes_with_tokens, ring, ctx.bounds, wait_expired_together)
    if ready != 0:
        node = next_after(ready, last)
        count = min(seen, total) - head
        return node, ptx.shfl_idx_s32(ptx.FULL_MASK, head, node), ptx.shfl_idx_s32(ptx.FULL_MASK, count, node)
    if head < total:
        report_fault(ctx.bounds, FORWARDER_RDMA_TAIL, rank_at(ctx, ctx.lane), ctx.here.channel, head + 1, seen)
    return NOTHING, 0, 0


@device_function
def row_of_slot(ctx, node, slot):
    """The address of the row of a slot that a node's rank has filled."""
    slots = own_ptr(ctx.network, recv_row(ctx.rdma, ctx.here.channel, node, 0))
    return slots + ptx.u32_mod(slot, ctx.rdma.num_slots) * slot_bytes(ctx.rdma)


@device_function
def tokens_for_rank(ctx, batch, k):
    """Which of 32 slots of a node's ring go to rank k of this node: bit j for the j-th. The same in every lane."""
    is_wanted = False
    if ctx.lane < batch.end - batch.first:
        header = locate_header(row_of_slot(ctx, batch.node, batch.first + ctx.lane), ctx.rdma)
        bits = ptx.ld_na_s32(header.src_idx + 4 * bits_word(ctx.here.rdma_rank))
        is_wanted = (bits >> (bits_shift(ctx.here.rdma_rank) + k)) & 1 != 0
    return ptx.vote_ballot(ptx.FULL_MASK, is_wanted)


@device_function
def share_out(chosen, number, most, team):
    """The first of the chosen tokens, at most so many, and those of them that are this warp's: two masks.

    number: of the first one; the warps of the team take the numbers in turn
    """
    before = ptx.popc_u32(chosen & ((1 << team.lane) - 1))
    is_first = (chosen >> team.lane) & 1 != 0 and before < most
    is_own = is_first and ptx.u32_mod(number + before, team.num_warps) == team.warp
    return ptx.vote_ballot(ptx.FULL_MASK, is_first), ptx.vote_ballot(ptx.FULL_MASK, is_own)


@device_function
def steps_to_own_turn(number, team):
    """Steps from this ticket to the next one of this warp: tickets go to the warps in turn."""
    ahead = team.warp - ptx.u32_mod(number, team.num_warps)
    return ahead if ahead >= 0 else ahead + team.num_warps


@device_function
def forward_slot(ctx, dst, src, stage, parity):
    """Copy a slot, header and all, to another one; one warp. Returns the parity of the stage's next copy."""
    front = header_bytes(ctx.rdma)
    slot = Row(src - front, front + ctx.rdma.hidden_bytes, 0)
    begin_copy(slot, stage, ctx.lane)
    return end_copy(ptx.ld_na_v4, dst - front, slot, stage, parity, ctx.lane)


@device_function
def find_incoming(ctx, out, inputs, team):
    base = total = row = 0
    if ctx.lane < ctx.here.num_rdma_ranks:
        base = ptx.ld_weak_s32(matrix_cell(ctx.progress.received, ctx.here.channel, ctx.lane, ctx.here.num_rdma_ranks))
        total = tokens_to_node(ctx, inputs.recv_rdma_channel_prefix_matrix, ctx.lane)
        row = first_passing_row(ctx, inputs, ctx.lane)
    if out.send_nvl_head != 0:
        last, num_rows = ctx.here.num_rdma_ranks - 1, ctx.sizes.num_rdma_recv_tokens
        passing = ptx.ld_nc_s32(inputs.recv_rdma_rank_prefix_sum + 4 * last)
        if passing > num_rows and team.warp == 0 and ctx.lane == 0:  # only with num_worst_tokens it may be
            report_fault(ctx.bounds, DISPATCH_RECEIVER_ROWS, rank_at(ctx, last), ctx.here.channel, passing, num_rows)
    return Incoming(base, total, row)


@device_function
def next_batch(ctx, incoming, head, last, team):
    """The tokens that the team takes next. The whole team.

    head: in lane n how many of node n are done; last: the node of the batch before
    """
    if team.warp == 0:
        node, first, count = find_batch(ctx, incoming, head, last)
        if ctx.lane == 0:
            share_batch(team, node, first, first + count)
    team_barrier(team)
    if ptx.has_tma() and ctx.lane == 0:
        ptx.fence_proxy_async_global()  # what the tail published, before the bulk copies that read it
    return load_batch(team)


@device_function
def choose_tokens(ctx, out, incoming, batch, index, team):
    """Which of up to 32 tokens of a batch go to the team's rank; and it is written down for combine.

    index: in lane n how many of node n before them went there, the entry of the next one in send_nvl_head
    """
    chosen = tokens_for_rank(ctx, batch, team.peer)
    if team.warp == 0 and out.send_nvl_head != 0:
        row = ptx.shfl_idx_s32(ptx.FULL_MASK, incoming.row, batch.node) + batch.first + ctx.lane
        before = ptx.shfl_idx_s32(ptx.FULL_MASK, index, batch.node)
        if ctx.lane < batch.end - batch.first and row < ctx.sizes.num_rdma_recv_tokens:
            head = before + ptx.popc_u32(chosen & ((1 << ctx.lane) - 1)) if (chosen >> ctx.lane) & 1 != 0 else -1
            ptx.st_weak_s32(matrix_cell(out.send_nvl_head, row, team.peer, ctx.here.num_nvl_ranks), head)
    return chosen


@device_function
def forward_tokens(ctx, out, inputs, team, stage):
    """Forwarder: hand on to another rank of the node what it wants of the tokens that come on this channel."""
    here, nvl, lane = ctx.here, ctx.nvl, ctx.lane
    rings = buffer_of(ctx.peers, team.peer) + rings_offset(here.num_rdma_ranks, here.num_nvl_ranks)
    ring = locate_ring(rings, nvl, here.channel, here.nvl_rank)
    board = board_row(team.peer)
    waiter = Waiter(FORWARDER_NVL_HEAD, neighbor_at(ctx, team.peer), here.channel)
    chunk = ctx.sizes.num_max_nvl_send_tokens
    incoming = find_incoming(ctx, out, inputs, team)
    head = index = 0  # in lane n: tokens of node n that are done, and those of them for this rank
    last = here.rdma_rank  # the node behind this one comes first, so that not all ranks begin with the same
    parity = 0
    tail = 0  # slots filled
    is_published = True  # all of them
    chunk_end = 0
    may_fill = True
    while ptx.vote_any(ptx.FULL_MASK, head < incoming.total):
        node, slot, end = next_batch(ctx, incoming, head, last, team)
        if node == NOTHING:
            return
        while slot < end:
            chosen = choose_tokens(ctx, out, incoming, Batch(node, slot, end), index, team)
            if lane == node:
                index += ptx.popc_u32(chosen)
            while chosen != 0:
                if tail == chunk_end:
                    chunk_end += chunk
                    has_room = True
                    if lane == 0 and chunk_end > nvl.num_slots:  # until then it cannot be full
                        has_room = wait_free_slots(ring.head, tail, nvl.num_slots, chunk, ctx.bounds, waiter)
                    ptx.syncwarp(ptx.FULL_MASK)  # what lane 0 has seen of the head comes before all lanes' stores
                    may_fill = may_fill and ptx.vote_all(ptx.FULL_MASK, has_room)
                of_chunk, own = share_out(chosen, tail, chunk_end - tail, team)
                own = own if may_fill else 0
                at = tail + steps_to_own_turn(tail, team)
                chosen ^= of_chunk
                tail += ptx.popc_u32(of_chunk)
                is_published = False
                while own != 0:
                    src = row_of_slot(ctx, node, slot + ptx.ffs_u32(own) - 1)
                    dst = ring.x + ptx.u32_mod(at, nvl.num_slots) * slot_bytes(nvl)
                    parity = forward_slot(ctx, dst, src, stage, parity)
                    own &= own - 1
                    at += team.num_warps
                if tail == chunk_end:
                    if not publish_tail(ring, tail, may_fill, team):
                        return
                    is_published = True
            slot += 32
        # All of the batch at the latest now: the next one may be long in coming. But never the same tail twice: who has
        # all of its tokens may have left, and have reset its cells for the next call.
        if is_published:
            team_barrier(team)
        elif not publish_tail(ring, tail, may_fill, team):
            return
        is_published = True
        last = node
        if lane == node:
            head = end
            if team.warp == 0:
                note_progress(board + 4 * node, head)
    if team.warp == 0 and lane < here.num_rdma_ranks:
        note_progress(board + 4 * lane, RETIRED)


@device_function
def deliver_tokens(ctx, out, inputs, team, stage):
    """Deliverer: the forwarders for the own rank copy its tokens straight to their rows of recv_x.

    Through a ring such a token would leave an SM twice.
    """
    lane = ctx.lane
    board = board_row(team.peer)
    incoming = find_incoming(ctx, out, inputs, team)
    next_row, end_row = output_rows(ctx, inputs, team)
    head = index = 0
    last = ctx.here.rdma_rank
    parity = 0
    number = 0
    while ptx.vote_any(ptx.FULL_MASK, head < incoming.total):
        node, slot, end = next_batch(ctx, incoming, head, last, team)
        if node == NOTHING:
            break
        while slot < end:
            chosen = choose_tokens(ctx, out, incoming, Batch(node, slot, end), index, team)
            row = ptx.shfl_idx_s32(ptx.FULL_MASK, next_row + index, node)
            left_there = ptx.shfl_idx_s32(ptx.FULL_MASK, end_row, node) - row  # rows up to the end of recv_x
            if lane == node:
                index += ptx.popc_u32(chosen)
            _, own = share_out(chosen, number, left_there, team)
            row += steps_to_own_turn(number, team)
            number += ptx.popc_u32(chosen)
            while own != 0:
                src = row_of_slot(ctx, node, slot + ptx.ffs_u32(own) - 1)
                parity = receive_token(ctx, out, src, row, stage, parity)
                own &= own - 1
                row += team.num_warps
            slot += 32
        team_barrier(team)
        last = node
        if lane == node:
            head = end
            if team.warp == 0:
                note_progress(board + 4 * node, head)
    if not ptx.vote_any(ptx.FULL_MASK, head < incoming.total) and team.warp == 0 and lane < ctx.here.num_rdma_ranks:
        note_progress(board + 4 * lane, RETIRED)
    if ptx.has_tma() and lane == 0:
        ptx.tma_store_wait_all()


@device_function
def coordinate_forwarders(ctx, inputs):
    """Forwarder coordinator; one warp, a lane for each node."""
    if ctx.lane < ctx.here.num_rdma_ranks:
        total = tokens_to_node(ctx, inputs.recv_rdma_channel_prefix_matrix, ctx.lane)
        publish_heads(ctx, total, ctx.here.num_nvl_ranks, FORWARDER_COORDINATOR)
