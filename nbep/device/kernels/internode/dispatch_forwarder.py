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
other, and the team takes those that its rank wants: a token with three goals in the node crosses the network once, and
NVLink three times. A forwarder hands the slot on as it came; it reads nothing but the bits of the source meta. The
team of the own rank delivers: its tokens go straight to recv_x.

A slot is free when the slowest team is past it. The head does not tell each slot but each chunk: an add is a message on
the network. So a ring must have room for two chunks (see Config).

Source: DeepEP csrc/kernels/internode.cu, dispatch (WarpRole::kRDMAAndNVLForwarder, kForwarderCoordinator)
"""

from typing import NamedTuple

import nbep.device.primitives as ptx
from nbep.device.jit import device_function
from nbep.device.kernels.internode.arguments import BATCHES, BOARD, BOARD_ROW, rank_of
from nbep.device.kernels.internode.coordinator import (
    first_passing_row,
    next_after,
    share_batch,
    tell_heads,
    tokens_to_node,
)
from nbep.device.kernels.internode.dispatch_nvl_receiver import output_rows, receive_token
from nbep.device.layout.internode import bits_shift, bits_word, recv_row, rings_offset, tail_offset
from nbep.device.layout.intranode import locate_notes, locate_ring, note_bytes, slot_bytes
from nbep.device.network.seam import own_ptr
from nbep.device.protocols.board import RETIRED, note_progress
from nbep.device.protocols.peers import buffer_of
from nbep.device.protocols.staging import Row, begin_copy, end_copy
from nbep.device.protocols.teams import publish_tail, team_barrier
from nbep.device.protocols.waits import (
    DISPATCH_RECEIVER_ROWS,
    FORWARDER_COORDINATOR,
    FORWARDER_NVL_HEAD,
    FORWARDER_RDMA_TAIL,
    Waiter,
    report_fault,
    wait_expired_together,
    wait_free_slots,
    wait_until,
)

NOTHING = -1  # the node of a batch that did not come


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
def find_batch(network, bounds, here, cells, base, head, total, last, lane):
    """Wait for tokens that are there: the node that they come from, the first and how many. All lanes of a warp.

    base, head, total: in lane n what ring n's tail was at the start, how many of its tokens are done, and how many come
    last: the node of the batch before
    """
    tail = own_ptr(network, tail_offset(cells, here.num_rdma_ranks, here.channel, lane))
    ring = Expected(tail, base, head, total)
    seen, ready = wait_until(load_tail, ring, lanes_with_tokens, ring, bounds, wait_expired_together)
    if ready != 0:
        node = next_after(ready, last)
        count = min(seen, total) - head
        return node, ptx.shfl_idx_s32(ptx.FULL_MASK, head, node), ptx.shfl_idx_s32(ptx.FULL_MASK, count, node)
    if head < total:
        report_fault(bounds, FORWARDER_RDMA_TAIL, rank_of(here, lane), here.channel, head + 1, seen)
    return NOTHING, 0, 0


@device_function
def tokens_for_rank(slots, shape, here, first, count, k, lane):
    """Which of 32 slots of a ring go to rank k of this node: bit j for slot first + j. The same in every lane."""
    is_wanted = False
    if lane < count:
        row = slots + ptx.u32_mod(first + lane, shape.num_slots) * slot_bytes(shape)
        bits = ptx.ld_na_s32(locate_notes(row, shape).src_idx + 4 * bits_word(here.rdma_rank))
        is_wanted = (bits >> (bits_shift(here.rdma_rank) + k)) & 1 != 0
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
def own_number(number, team):
    """How far it is from a number to the next one that is this warp's."""
    ahead = team.warp - ptx.u32_mod(number, team.num_warps)
    return ahead if ahead >= 0 else ahead + team.num_warps


@device_function
def note_nvl_heads(out, here, chosen, index, row, count, num_rows, k, lane):
    """Write the indexes of up to 32 tokens that pass through, among those of their node and channel for rank k."""
    if lane < count and row + lane < num_rows:
        head = index + ptx.popc_u32(chosen & ((1 << lane) - 1)) if (chosen >> lane) & 1 != 0 else -1
        ptx.st_weak_s32(out.send_nvl_head + 4 * ((row + lane) * here.num_nvl_ranks + k), head)


@device_function
def forward_slot(dst, src, shape, stage, parity, lane):
    """Copy a slot, notes and all, to another one; one warp. Returns the parity of the stage's next copy."""
    front = note_bytes(shape)
    num_bytes = front + shape.hidden_bytes
    begin_copy(Row(src - front, num_bytes, 0), stage, lane)
    return end_copy(ptx.ld_na_v4, dst - front, Row(src - front, num_bytes, 0), stage, parity, lane)


@device_function
def check_passing(inputs, bounds, here, num_rows, team):
    """Tell the host if send_nvl_head has fewer rows than tokens pass through; only with num_worst_tokens it may."""
    last = here.num_rdma_ranks - 1
    total = ptx.ld_nc_s32(inputs.recv_rdma_rank_prefix_sum + 4 * last)
    if total > num_rows and team.warp == 0 and team.lane == 0:
        report_fault(bounds, DISPATCH_RECEIVER_ROWS, rank_of(here, last), here.channel, total, num_rows)


class Incoming(NamedTuple):
    """What comes to a forwarder on its channel: in lane n from node n. Rows are those of send_nvl_head."""

    base: int  # what the ring's tail was at the start
    total: int
    row: int


@device_function
def find_incoming(out, inputs, progress, bounds, here, shape, sizes, team):
    base = total = row = 0
    if team.lane < here.num_rdma_ranks:
        base = ptx.ld_weak_s32(progress.received + 4 * (here.channel * here.num_rdma_ranks + team.lane))
        total = tokens_to_node(inputs.recv_rdma_channel_prefix_matrix, shape.num_channels, here.channel, team.lane)
        row = first_passing_row(inputs, shape.num_channels, here.channel, team.lane)
    if out.send_nvl_head != 0:
        check_passing(inputs, bounds, here, sizes.num_rdma_recv_tokens, team)
    return Incoming(base, total, row)


@device_function
def next_batch(network, bounds, here, cells, incoming, head, last, team):
    """The tokens that the team takes next: their node, the first and the one behind the last. The whole team.

    head: in lane n how many of node n are done; last: the node of the batch before
    """
    batch = ptx.smem_base() + BATCHES + 16 * team.peer
    if team.warp == 0:
        base, total = incoming.base, incoming.total
        node, first, count = find_batch(network, bounds, here, cells, base, head, total, last, team.lane)
        if team.lane == 0:
            share_batch(batch, node, first, first + count)
    team_barrier(team)
    if ptx.has_tma() and team.lane == 0:
        ptx.fence_proxy_async_global()  # what the tail published, before the bulk copies that read it
    return ptx.ld_shared_s32(batch), ptx.ld_shared_s32(batch + 4), ptx.ld_shared_s32(batch + 8)


@device_function
def choose_tokens(out, slots, incoming, here, shape, sizes, node, first, count, index, team):
    """Which of up to 32 slots of a node's ring go to the team's rank; and it is written down for combine.

    index: in lane n how many of node n before them went there
    """
    chosen = tokens_for_rank(slots, shape, here, first, count, team.peer, team.lane)
    if team.warp == 0 and out.send_nvl_head != 0:
        row = ptx.shfl_idx_s32(ptx.FULL_MASK, incoming.row, node) + first
        before = ptx.shfl_idx_s32(ptx.FULL_MASK, index, node)
        num_rows = sizes.num_rdma_recv_tokens
        note_nvl_heads(out, here, chosen, before, row, count, num_rows, team.peer, team.lane)
    return chosen


@device_function
def forward_tokens(out, inputs, network, peers, progress, bounds, here, nvl, rdma, sizes, team, stage):
    """Forwarder: hand on to another rank of the node what it wants of the tokens that come on this channel."""
    lane = team.lane
    rings = buffer_of(peers, team.peer) + rings_offset(here.num_rdma_ranks, here.num_nvl_ranks)
    ring = locate_ring(rings, nvl, here.channel, here.nvl_rank)
    board = ptx.smem_base() + BOARD + BOARD_ROW * team.peer
    incoming = find_incoming(out, inputs, progress, bounds, here, rdma, sizes, team)
    head = index = 0  # in lane n: tokens of node n that are done, and those of them for this rank
    last = here.rdma_rank  # the node behind this one comes first, so that not all ranks begin with the same
    parity = 0
    tail = 0  # slots filled
    is_told = True  # the receiver, of all of them
    chunk_end = 0
    may_fill = True
    while ptx.vote_any(ptx.FULL_MASK, head < incoming.total):
        node, slot, end = next_batch(network, bounds, here, sizes.cells, incoming, head, last, team)
        if node == NOTHING:
            return
        slots = own_ptr(network, recv_row(rdma, here.channel, node, 0))
        while slot < end:
            chosen = choose_tokens(out, slots, incoming, here, rdma, sizes, node, slot, end - slot, index, team)
            if lane == node:
                index += ptx.popc_u32(chosen)
            while chosen != 0:
                if tail == chunk_end:
                    chunk_end += sizes.num_max_nvl_send_tokens
                    has_room = True
                    if lane == 0 and chunk_end > nvl.num_slots:  # until then it cannot be full
                        peer = here.rdma_rank * here.num_nvl_ranks + team.peer
                        waiter = Waiter(FORWARDER_NVL_HEAD, peer, here.channel)
                        wanted = sizes.num_max_nvl_send_tokens
                        has_room = wait_free_slots(ring.head, tail, nvl.num_slots, wanted, bounds, waiter)
                    ptx.syncwarp(ptx.FULL_MASK)  # what lane 0 has seen of the head comes before all lanes' stores
                    may_fill = may_fill and ptx.vote_all(ptx.FULL_MASK, has_room)
                of_chunk, own = share_out(chosen, tail, chunk_end - tail, team)
                own = own if may_fill else 0
                at = tail + own_number(tail, team)
                chosen ^= of_chunk
                tail += ptx.popc_u32(of_chunk)
                is_told = False
                while own != 0:
                    src = slots + ptx.u32_mod(slot + ptx.ffs_u32(own) - 1, rdma.num_slots) * slot_bytes(rdma)
                    dst = ring.x + ptx.u32_mod(at, nvl.num_slots) * slot_bytes(nvl)
                    parity = forward_slot(dst, src, rdma, stage, parity, lane)
                    own &= own - 1
                    at += team.num_warps
                if tail == chunk_end:
                    if not publish_tail(ring, tail, may_fill, team):
                        return
                    is_told = True
            slot += 32
        # All of the batch at the latest now: the next one may be long in coming. But never the same tail twice: who has
        # all of its tokens may have left, and have reset its cells for the next call.
        if is_told:
            team_barrier(team)
        elif not publish_tail(ring, tail, may_fill, team):
            return
        is_told = True
        last = node
        if lane == node:
            head = end
            if team.warp == 0:
                note_progress(board + 4 * node, head)
    if team.warp == 0 and lane < here.num_rdma_ranks:
        note_progress(board + 4 * lane, RETIRED)


@device_function
def deliver_tokens(out, inputs, network, progress, bounds, here, rdma, sizes, team, stage):
    """Deliverer: the forwarders for the own rank copy its tokens straight to their rows of recv_x.

    Through a ring such a token would leave an SM twice.
    """
    lane = team.lane
    board = ptx.smem_base() + BOARD + BOARD_ROW * team.peer
    incoming = find_incoming(out, inputs, progress, bounds, here, rdma, sizes, team)
    next_row, end_row = output_rows(inputs, bounds, here, rdma, sizes, team)
    head = index = 0
    last = here.rdma_rank
    parity = 0
    number = 0
    while ptx.vote_any(ptx.FULL_MASK, head < incoming.total):
        node, slot, end = next_batch(network, bounds, here, sizes.cells, incoming, head, last, team)
        if node == NOTHING:
            break
        slots = own_ptr(network, recv_row(rdma, here.channel, node, 0))
        while slot < end:
            chosen = choose_tokens(out, slots, incoming, here, rdma, sizes, node, slot, end - slot, index, team)
            row = ptx.shfl_idx_s32(ptx.FULL_MASK, next_row + index, node)
            left_there = ptx.shfl_idx_s32(ptx.FULL_MASK, end_row, node) - row  # rows up to the end of recv_x
            if lane == node:
                index += ptx.popc_u32(chosen)
            _, own = share_out(chosen, number, left_there, team)
            row += own_number(number, team)
            number += ptx.popc_u32(chosen)
            while own != 0:
                src = slots + ptx.u32_mod(slot + ptx.ffs_u32(own) - 1, rdma.num_slots) * slot_bytes(rdma)
                parity = receive_token(out, src, row, here, rdma, sizes, stage, parity, lane)
                own &= own - 1
                row += team.num_warps
            slot += 32
        team_barrier(team)
        last = node
        if lane == node:
            head = end
            if team.warp == 0:
                note_progress(board + 4 * node, head)
    if not ptx.vote_any(ptx.FULL_MASK, head < incoming.total) and team.warp == 0 and lane < here.num_rdma_ranks:
        note_progress(board + 4 * lane, RETIRED)
    if ptx.has_tma() and lane == 0:
        ptx.tma_store_wait_all()


@device_function
def coordinate_forwarders(inputs, network, progress, bounds, here, shape, sizes, lane):
    """Forwarder coordinator; one warp, a lane for each node."""
    if lane < here.num_rdma_ranks:
        total = tokens_to_node(inputs.recv_rdma_channel_prefix_matrix, shape.num_channels, here.channel, lane)
        num_teams, chunk, site = here.num_nvl_ranks, sizes.num_max_rdma_send_tokens, FORWARDER_COORDINATOR
        tell_heads(network, progress, bounds, here, total, num_teams, chunk, sizes.cells, site, lane)
