"""RDMA receivers and their coordinator: the last step of internode combine. See combine.py.

 (n, l): rings[channel, d], for all d --receiver: biases, sum over d--> combined_x[t]
         heads[channel, n] of (d, l) <--coordinator, when all receivers are past a slot

 cell                   written by             with                    read by             with
 tails[c, d]            (d, l)                 amo_add                 receiver, lane d    ld_acquire_sys
 slot of RDMA ring      (d, l)                 put_nbi_warp            receiver            ld_na, after tails
 biases                 no kernel              -                       receiver            ld_na
 board[w, d]            receiver w, lane d     atom_exch_release_cta   coordinator         ld_acquire_cta
                        all, at the start      st_shared 0             all                 after syncthreads
 heads[c, n] of (d, l)  coordinator, lane d    amo_add, behind reads   forwarders          ld_acquire_sys
 received[c, d]         coordinator, lane d    st_weak                 (next call)         ld_weak
 combined_ arrays       receiver               st_na, st_weak          -                   the next kernel

The receivers take the tokens of the channel in turn. send_rdma_head says which nodes have a sum for a token, and which
index it has in their rings. For a node that has none it says which index comes next: all before it are done when the
token is passed (see cached_notify.py).

Source: DeepEP csrc/kernels/internode.cu, combine (WarpRole::kRDMAReceiver)
"""

import nbep.device.primitives as ptx
from nbep.device.alignment import matrix_cell
from nbep.device.jit import device_function
from nbep.device.kernels.internode.arguments import rank_at, tokens_to_node
from nbep.device.kernels.internode.coordinator import board_row, publish_heads, wait_total
from nbep.device.kernels.parts.sums import Listed, list_biases, list_rows, rows_of_ring, sum_rows_or_two, sum_weights
from nbep.device.layout.internode import recv_row, tail_offset
from nbep.device.network.seam import own_ptr
from nbep.device.protocols.board import RETIRED, first_needed, load_expected, note_progress
from nbep.device.protocols.channels import channel_task_range
from nbep.device.protocols.waits import Waiter, site

RDMA_RECEIVER_TAIL = site(30, "internode combine RDMA receiver", "tail", "the peer's next sums")
RDMA_RECEIVER_COORDINATOR = site(31, "internode combine coordinator", "heads", "the RDMA receivers of its own block")


@device_function
def receive_sums(ctx, out, inputs, receiver, lists):
    """Receiver: sum up every num_receivers-th token of the channel. lists: shared addresses, rows and weights"""
    here, shape, lane = ctx.here, ctx.rdma, ctx.lane
    rows, weights = lists.rows, lists.weights
    is_node = lane < here.num_rdma_ranks
    base = 0
    if is_node:
        base = ptx.ld_weak_s32(matrix_cell(ctx.progress.received, here.channel, lane, here.num_rdma_ranks))
    tail = own_ptr(ctx.network, tail_offset(ctx.sizes.cells, here.num_rdma_ranks, here.channel, lane))
    source = rows_of_ring(own_ptr(ctx.network, recv_row(shape, here.channel, lane, 0)), shape)
    cell = board_row(receiver) + 4 * lane
    token, end = channel_task_range(ctx.sizes.num_combined_tokens, here.num_channels, here.channel)
    token += receiver
    arrived = 0  # in lane d: sums of node d that are known to be there
    expected = load_expected(inputs.send_rdma_head, token, token < end, here.num_rdma_ranks, lane)
    while token < end:
        if is_node:
            note_progress(cell, first_needed(expected))
            if expected >= arrived:
                waiter = Waiter(RDMA_RECEIVER_TAIL, rank_at(ctx, lane), here.channel)
                arrived = ptx.s32(wait_total(tail, ptx.s32(base + expected + 1), ctx.bounds, waiter) - base)
        ptx.syncwarp(ptx.FULL_MASK)
        num_biases = list_biases(rows, (inputs.bias_0, inputs.bias_1), token, shape.hidden_bytes, lane)
        num_nodes = list_rows(rows + 8 * num_biases, weights, lane, expected, source)
        after = token + ctx.sizes.num_receivers
        expected = load_expected(inputs.send_rdma_head, after, after < end, here.num_rdma_ranks, lane)
        dst = out.combined_x + token * shape.hidden_bytes
        sum_rows_or_two(ptx.st_na_v4, dst, Listed(rows, num_biases + num_nodes), 0, shape.hidden_bytes, lane)
        if lane < shape.num_topk:
            total = sum_weights(weights, num_nodes, lane)
            ptx.st_weak_f32(matrix_cell(out.combined_topk_weights, token, lane, shape.num_topk), total)
        ptx.syncwarp(ptx.FULL_MASK)
        token = after
    if is_node:
        note_progress(cell, RETIRED)


@device_function
def coordinate_receivers(ctx, inputs):
    """Coordinator; one warp, a lane for each node."""
    if ctx.lane < ctx.here.num_rdma_ranks:
        total = tokens_to_node(ctx, inputs.rdma_channel_prefix_matrix, ctx.lane)
        publish_heads(ctx, total, ctx.sizes.num_receivers, RDMA_RECEIVER_COORDINATOR)
