"""What coordinators of both kernels do: they tell other nodes how far the warps of their block have come.

 cell                  written by              with                       read by              with
 board[w, i]           the warps               atom_exch_release_cta      coordinator          ld_acquire_cta
                       all, at the start       st_shared 0                all                  after syncthreads
 batch of a team       lane 0 of its warp 0    st_shared_s32              the team             see the roles
 tails[c, n] of (d,l)  coordinator of (n, l)   amo_add, behind slots      who empties slots    ld_acquire_sys
 heads[c, d] of (n,l)  coordinator of (d, l)   amo_add, behind reads      who fills slots      ld_acquire_sys
 sent, received        coordinator, its lane   st_weak                    of the next call     ld_weak

An add is a message on the network, so a coordinator waits until it has a chunk to tell, or the rest. The two of a ring
together hold back less than two chunks, filled or freed: the ring must have that much room (see Config).

Source: DeepEP csrc/kernels/internode.cu (kRDMASenderCoordinator, kForwarderCoordinator, combine's kCoordinator)
"""

import nbep.device.primitives as ptx
from nbep.device.jit import device_function
from nbep.device.kernels.internode.arguments import BOARD, BOARD_ROW, rank_of
from nbep.device.layout.internode import head_offset, tail_offset
from nbep.device.network.seam import amo_add
from nbep.device.protocols.board import has_stalled, least_progress
from nbep.device.protocols.waits import start_wait


@device_function
def tokens_to_node(prefix_matrix, num_channels, channel, node):
    """How many tokens of a channel there are for a node, or from it; prefix_matrix is inclusive."""
    cell = prefix_matrix + 4 * (node * num_channels + channel)
    return ptx.ld_nc_s32(cell) - (ptx.ld_nc_s32(cell - 4) if channel > 0 else 0)


@device_function
def tell_slots(network, counter, cell, column, bounds, here, total, num_warps, chunk, site, peer):
    """Add to a peer's cell, in chunks, how many of total slots the first warps of a column of the board are done with.

    counter: where the next call finds how many there were in all
    """
    told = 0
    deadline = 0
    while told < total:
        done = min(least_progress(column, BOARD_ROW, num_warps), total)
        if done - told >= chunk or done == total:
            amo_add(network, cell, done - told, peer, here.channel, True)
            told = done
            deadline = 0
        elif deadline == 0:
            deadline = start_wait(bounds)
        elif has_stalled(deadline, bounds, site, peer, here.channel, total, done):
            return
    if total > 0:
        ptx.st_weak_s32(counter, ptx.s32(ptx.ld_weak_s32(counter) + total))


@device_function
def tell_tails(network, progress, bounds, here, total, column, num_warps, chunk, cells, site, lane):
    """Coordinator, lane d: tell node d how many of its slots a column of the board has filled."""
    sent = progress.sent + 4 * (here.channel * here.num_rdma_ranks + lane)
    tail = tail_offset(cells, here.num_rdma_ranks, here.channel, here.rdma_rank)
    tell_slots(network, sent, tail, column, bounds, here, total, num_warps, chunk, site, rank_of(here, lane))


@device_function
def tell_heads(network, progress, bounds, here, total, num_warps, chunk, cells, site, lane):
    """Coordinator, lane n: tell node n how many of its slots the first warps of the board have freed."""
    received = progress.received + 4 * (here.channel * here.num_rdma_ranks + lane)
    head = head_offset(cells, here.num_rdma_ranks, here.channel, here.rdma_rank)
    column = ptx.smem_base() + BOARD + 4 * lane
    tell_slots(network, received, head, column, bounds, here, total, num_warps, chunk, site, rank_of(here, lane))


@device_function
def first_passing_row(inputs, num_channels, channel, node):
    """The row of send_nvl_head of the first token of a channel from a node."""
    row = ptx.ld_nc_s32(inputs.recv_rdma_rank_prefix_sum + 4 * (node - 1)) if node > 0 else 0
    if channel > 0:
        row += ptx.ld_nc_s32(inputs.recv_rdma_channel_prefix_matrix + 4 * (node * num_channels + channel - 1))
    return row


@device_function
def next_after(mask, last):
    """The first bit of a mask behind a place, or else the first of all."""
    behind = (mask >> (last + 1)) << (last + 1)
    return ptx.ffs_u32(behind if behind != 0 else mask) - 1


@device_function
def share_batch(cell, which, first, end):
    """Lane 0 of the first warp; a barrier of the team follows. which: node or ring"""
    ptx.st_shared_s32(cell, which)
    ptx.st_shared_s32(cell + 4, first)
    ptx.st_shared_s32(cell + 8, end)
