"""What blocks of both kernels share: batches, a board, and coordinators, which notify other nodes how far it has come.

 cell                  written by              with                       read by              with
 board[w, i]           the warps               atom_exch_release_cta      coordinator          ld_acquire_cta
                       all, at the start       st_shared 0                all                  after syncthreads
 batch of a team       lane 0 of its warp 0    st_shared_s32              the team             ld_shared_s32, bar_sync
 tails[c, n] of (d,l)  coordinator of (n, l)   amo_add, behind slots      who empties slots    ld_acquire_sys
 heads[c, d] of (n,l)  coordinator of (d, l)   amo_add, behind reads      who fills slots      ld_acquire_sys
 sent, received        coordinator, its lane   st_weak                    of the next call     ld_weak

Tails and heads are totals: they count on from call to call. A cell that a network adds to must not be reset by its
owner: of an add and a store at the same time one would be lost. What a total was at the start of a call is in the
rank's own memory (`Progress`): both ends know how many tokens a call has, so both come to the same number. s32 wraps:
only differences mean anything. A head that is still on its way when the next call starts says less than is free, and
that is safe.

The warps of a block fill the slots of a ring in turn, and nothing but the way to the receiver and back orders who fills
a slot behind who has filled it before. So a head releases and acquires, as a tail does; inside a node a team has a
barrier for that.

An add is a message on the network, so a coordinator waits until it has a chunk to tell, or the rest. The two of a ring
together hold back less than two chunks, filled or freed: the ring must have that much room (see Config).

Source: DeepEP csrc/kernels/internode.cu (kRDMASenderCoordinator, kForwarderCoordinator, combine's kCoordinator;
rdma_channel_head, rdma_channel_tail, which each notify resets)
"""

from typing import NamedTuple

import nbep.device.primitives as ptx
from nbep.device.alignment import matrix_cell
from nbep.device.jit import device_function
from nbep.device.kernels.internode.arguments import BATCHES, BOARD, BOARD_ROW, MOST_WARPS, rank_at
from nbep.device.layout.internode import head_offset, tail_offset
from nbep.device.network.seam import amo_add
from nbep.device.protocols.board import has_stalled, least_progress, reset_board
from nbep.device.protocols.waits import (
    Waiter,
    has_timed_out,
    report_fault,
    site,
    start_wait,
    wait_or_report,
    wait_until,
)

FORWARDER_COORDINATOR = site(25, "internode forwarder coordinator", "heads", "the forwarders of its own block")

NOTHING = -1  # where the tokens of a batch come from that did not come


class Column(NamedTuple):
    """A part of the board: the cells of so many warps, one below the other."""

    first: int
    num_warps: int


@device_function
def begin_block(bounds):
    """Reset the board. Returns whether no wait of this rank has timed out before; the same in the whole block."""
    reset_board(ptx.smem_base() + BOARD, MOST_WARPS * BOARD_ROW // 4, ptx.thread_idx(), ptx.block_dim())
    return ptx.bar_red_and(0, ptx.block_dim(), not has_timed_out(bounds))


@device_function
def board_row(row):
    """The first cell of a row of the board."""
    return ptx.smem_base() + BOARD + BOARD_ROW * row


@device_function
def publish_slots(ctx, counter, cell, total, column, site):
    """Add to a cell of node `lane`, in chunks, how many of total slots the warps of a column are done with.

    counter: where the next call finds how many there were in all
    """
    chunk = ctx.sizes.num_max_rdma_send_tokens
    waiter = Waiter(site, rank_at(ctx, ctx.lane), ctx.here.channel)
    published = 0
    deadline = 0
    while published < total:
        done = min(least_progress(column.first, BOARD_ROW, column.num_warps), total)
        if done - published >= chunk or done == total:
            amo_add(ctx.network, cell, done - published, waiter.peer, ctx.here.channel, True)
            published = done
            deadline = 0
            continue
        if deadline == 0:
            deadline = start_wait(ctx.bounds)
        if has_stalled(deadline, ctx.bounds, waiter, total, done):
            return
    if total > 0:
        ptx.st_weak_s32(counter, ptx.s32(ptx.ld_weak_s32(counter) + total))


@device_function
def publish_tails(ctx, total, column, site):
    """Coordinator, lane d: let node d have the slots of it that a column of the board has filled."""
    sent = matrix_cell(ctx.progress.sent, ctx.here.channel, ctx.lane, ctx.here.num_rdma_ranks)
    tail = tail_offset(ctx.sizes.cells, ctx.here.num_rdma_ranks, ctx.here.channel, ctx.here.rdma_rank)
    publish_slots(ctx, sent, tail, total, column, site)


@device_function
def publish_heads(ctx, total, num_warps, site):
    """Coordinator, lane n: let node n have the slots that the first warps of the board have freed."""
    received = matrix_cell(ctx.progress.received, ctx.here.channel, ctx.lane, ctx.here.num_rdma_ranks)
    head = head_offset(ctx.sizes.cells, ctx.here.num_rdma_ranks, ctx.here.channel, ctx.here.rdma_rank)
    publish_slots(ctx, received, head, total, Column(board_row(0) + 4 * ctx.lane, num_warps), site)


@device_function
def has_reached(seen, wanted):
    """Whether a total is at wanted or past it; only their difference means anything."""
    return ptx.s32(seen - wanted) >= 0


@device_function
def wait_total(cell, wanted, bounds, waiter):
    """Wait until a cell counts so many: what was put before is there. Returns what it counts, at least so many."""
    seen, came = wait_or_report(ptx.ld_acquire_sys_s32, cell, has_reached, wanted, bounds, waiter)  # PAIR network-amo
    return seen if came else wanted


@device_function
def wait_total_free(head, base, slot, num_slots, bounds, waiter):
    """Wait until a ring's slot is free: the one num_slots before it has been. Returns the first that is not, or 0.

    base: what the head was at the start of the call
    """
    freed = slot + 1 - num_slots
    load = ptx.ld_acquire_sys_s32  # PAIR network-amo
    seen, came = wait_until(load, head, has_reached, base + freed, bounds, ptx.wait_expired)
    seen = ptx.s32(seen - base)
    if not came:
        report_fault(bounds, waiter.site, waiter.peer, waiter.channel, freed, seen)
    return seen + num_slots if came else 0


@device_function
def next_after(mask, last):
    """The first bit of a mask behind a place, or else the first of all."""
    behind = (mask >> (last + 1)) << (last + 1)
    return ptx.ffs_u32(behind if behind != 0 else mask) - 1


@device_function
def batch_of(team):
    """Where the batch of a team is."""
    return ptx.smem_base() + BATCHES + 16 * team.peer


@device_function
def share_batch(team, which, first, end):
    """Lane 0 of the first warp; a barrier of the team follows. which: node or ring"""
    ptx.st_shared_s32(batch_of(team), which)
    ptx.st_shared_s32(batch_of(team) + 4, first)
    ptx.st_shared_s32(batch_of(team) + 8, end)


@device_function
def load_batch(team):
    """What is shared by `share_batch`, behind the barrier."""
    batch = batch_of(team)
    return ptx.ld_shared_s32(batch), ptx.ld_shared_s32(batch + 4), ptx.ld_shared_s32(batch + 8)
