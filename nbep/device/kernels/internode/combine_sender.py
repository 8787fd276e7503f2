"""NVL senders: the first step of internode combine. See combine.py.

 (d, k): x[i] --sender--> NVL ring[channel, n * num_nvl_ranks + k] of rank (d, l)     for every rank (n, l), l not k

 cell                 written by         with              read by              with
 slot of NVL ring     sender             bulk copy, st_na  forwarders (d, l)    ld_na, after tail
 tail of NVL ring     warp 0 of a team   st_release_sys    forwarders (d, l)    ld_acquire_sys
 head of NVL ring     coordinator (d,l)  st_relaxed_sys    warp 0, its lane     ld_relaxed_sys (1)
 batch of a team      warp 0, lane 0     st_shared_s32     the team             ld_shared_s32, after bar_sync

 (1) It publishes nothing: the forwarders have added up what was in a slot before its head moves.

The rows of one source rank and channel lie together in x, and have a ring of their own. A team of warps serves several
rings, and takes the next one that has room for a chunk: it must not wait for one ring while another could go on. If it
did, a circle could close: senders of one node wait for room in rings for node A, those of another one for node B. A's
receivers wait for a sum for which the second node has no rows yet, and B's for one of the first.

Source: DeepEP csrc/kernels/internode.cu, combine (WarpRole::kNVLSender)
"""

from typing import NamedTuple

import nbep.device.primitives as ptx
from nbep.device.alignment import matrix_cell
from nbep.device.jit import device_function
from nbep.device.kernels.internode.arguments import MAX_TEAMS, neighbor_at, rows_from
from nbep.device.kernels.internode.coordinator import NOTHING, load_batch, next_after, share_batch
from nbep.device.layout.internode import rings_offset
from nbep.device.layout.intranode import locate_header, locate_ring, slot_bytes
from nbep.device.protocols.copies import Row, begin_copy, end_copy
from nbep.device.protocols.peers import buffer_of
from nbep.device.protocols.reduce import warp_sum_s32
from nbep.device.protocols.teams import Team, publish_tail, team_barrier, wait_expired_together
from nbep.device.protocols.waits import report_fault, site, wait_until

NVL_SENDER_HEAD = site(27, "internode combine NVL sender", "head", "free slots in the peer's NVL ring")


@device_function
def join_team(ctx, num_rings, sender, num_senders):
    """The team of a sender, whose number is its peer; and how many teams there are."""
    num_teams = min(min(num_senders, num_rings), MAX_TEAMS)
    num_warps = ptx.u32_div(num_senders, num_teams)
    team, warp = ptx.u32_div(sender, num_warps), ptx.u32_mod(sender, num_warps)
    return Team(True, team, ctx.here.channel, warp, num_warps, ctx.lane), num_teams


@device_function
def rank_of_ring(ctx, which):
    """The rank whose rows take a ring: the which-th of those with another local rank."""
    node = ptx.u32_div(which, ctx.here.num_nvl_ranks - 1)
    nvl_rank = which - node * (ctx.here.num_nvl_ranks - 1)
    return node * ctx.here.num_nvl_ranks + (nvl_rank if nvl_rank < ctx.here.nvl_rank else nvl_rank + 1)


@device_function
def ring_for(ctx, rank):
    """The ring that this rank fills with what goes back to a rank of the group; it is at this node's end of the way."""
    here = ctx.here
    node = ptx.u32_div(rank, here.num_nvl_ranks)
    buffer = buffer_of(ctx.peers, rank - node * here.num_nvl_ranks)
    rings = buffer + rings_offset(here.num_rdma_ranks, here.num_nvl_ranks)
    return locate_ring(rings, ctx.nvl, here.channel, node * here.num_nvl_ranks + here.nvl_rank)


class Expected(NamedTuple):
    """What a lane waits for: a head of at least so much, of a ring that is to have room for `size` rows."""

    head: int
    size: int
    least: int


@device_function
def load_head(expected):
    """The head of a lane's ring; 0 if it has no rows left."""
    return ptx.ld_relaxed_sys_s32(expected.head) if expected.size > 0 else 0


@device_function
def lanes_with_room(head, expected):
    return ptx.vote_ballot(ptx.FULL_MASK, expected.size > 0 and head >= expected.least)


@device_function
def find_room(ctx, ring, sent, count, rank, last):
    """Wait for a ring with room for a chunk: the lane that has it, the first row of the chunk and how many. One warp.

    ring, sent, count, rank: each lane's own; count rows in all, 0 if it has no ring; last: the lane of the batch before
    """
    size = min(ctx.sizes.num_max_nvl_send_tokens, count - sent)
    expected = Expected(ring.head, size, sent + size - ctx.nvl.num_slots)
    seen, ready = wait_until(load_head, expected, lanes_with_room, expected, ctx.bounds, wait_expired_together)
    if ready != 0:
        which = next_after(ready, last)
        return which, ptx.shfl_idx_s32(ptx.FULL_MASK, sent, which), ptx.shfl_idx_s32(ptx.FULL_MASK, size, which)
    if size > 0:
        peer = neighbor_at(ctx, ptx.u32_mod(rank, ctx.here.num_nvl_ranks))
        report_fault(ctx.bounds, NVL_SENDER_HEAD, peer, ctx.here.channel, expected.least, seen)
    return NOTHING, 0, 0


@device_function
def send_row(ctx, inputs, dst, row, stage, parity):
    """Copy a row and its weights to a ring's slot; one warp. Returns the parity of the stage's next copy."""
    shape = ctx.nvl
    src = Row(inputs.x + row * shape.hidden_bytes, shape.hidden_bytes, 0)
    begin_copy(src, stage, ctx.lane)
    if ctx.lane < shape.num_topk:
        weight = ptx.ld_na_f32(matrix_cell(inputs.topk_weights, row, ctx.lane, shape.num_topk))
        ptx.st_na_f32(locate_header(dst, shape).topk_weights + 4 * ctx.lane, weight)
    return end_copy(ptx.ld_nc_v4, dst, src, stage, parity, ctx.lane)


@device_function
def send_rows(ctx, inputs, sender, num_senders, stage):
    """Sender: push this channel's rows back to where they came through, a chunk of one ring after the other."""
    here, lane = ctx.here, ctx.lane
    # What came over this rank itself takes no ring: its forwarders read it where it is.
    num_rings = here.num_rdma_ranks * (here.num_nvl_ranks - 1)
    if num_rings == 0:
        return
    team, num_teams = join_team(ctx, num_rings, sender, num_senders)
    which = team.peer + num_teams * lane  # the lane's ring
    rank = here.nvl_rank
    begin = count = 0
    if team.peer < num_teams and which < num_rings:
        rank = rank_of_ring(ctx, which)
        begin, behind = rows_from(ctx, inputs, rank)
        count = behind - begin
    own_ring = ring_for(ctx, rank)
    left = warp_sum_s32(ptx.FULL_MASK, count)
    sent = 0
    parity = 0
    last = ptx.u32_div(here.rdma_rank * (here.num_nvl_ranks - 1), num_teams)  # not all ranks begin with the same
    while left > 0:
        if team.warp == 0:
            which, first, size = find_room(ctx, own_ring, sent, count, rank, last)
            if lane == 0:
                share_batch(team, which, first, first + size)
        team_barrier(team)
        which, first, end = load_batch(team)
        if which == NOTHING:
            return
        ring = ring_for(ctx, ptx.shfl_idx_s32(ptx.FULL_MASK, rank, which))
        row = ptx.shfl_idx_s32(ptx.FULL_MASK, begin, which)
        i = first + team.warp
        while i < end:
            dst = ring.x + ptx.u32_mod(i, ctx.nvl.num_slots) * slot_bytes(ctx.nvl)
            parity = send_row(ctx, inputs, dst, row + i, stage, parity)
            i += team.num_warps
        publish_tail(ring, end, True, team)
        left -= end - first
        last = which
        if lane == which:
            sent = end
