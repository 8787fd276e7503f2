"""RDMA receivers and their coordinator: the last step of internode combine. See combine.py.

 (n, l): rings[channel, d], for all d --receiver: biases, sum over d--> combined_x[t]
         heads[channel, n] of (d, l) <--coordinator, when all receivers are past a slot

 cell                   written by             with                    read by             with
 tails[c, d]            (d, l)                 amo_add                 receiver, lane d    ld_acquire_sys
 slot of RDMA ring      (d, l)                 put_nbi_warp            receiver            ld_na, after tails
 biases                 nobody                 -                       receiver            ld_na
 board[w, d]            receiver w, lane d     atom_exch_release_cta   coordinator         ld_acquire_cta
 heads[c, n] of (d, l)  coordinator, lane d    amo_add, behind reads   forwarders          ld_acquire_sys
 received[c, d]         coordinator, lane d    st_weak                 (next call)         ld_weak
 combined_ arrays       receiver               st_na, st_weak          -                   the next kernel

The receivers take the tokens of the channel in turn. send_rdma_head says which nodes have a sum for a token, and which
index it has in their rings. For a node that has none it says which index comes next: all before it are done when the
token is passed (see cached_notify.py).

Source: DeepEP csrc/kernels/internode.cu, combine (WarpRole::kRDMAReceiver)
"""

from nbep.device.jit import device_function
from nbep.device.kernels.internode.arguments import BOARD, BOARD_ROW, rank_of
from nbep.device.kernels.internode.coordinator import tell_heads, tokens_to_node
from nbep.device.layout.internode import recv_row, tail_offset
from nbep.device.layout.intranode import locate_notes, slot_bytes
from nbep.device.network import own_ptr
from nbep.device.primitives import (
    FULL_MASK,
    ld_nc_s32,
    ld_weak_s32,
    s32,
    smem_base,
    st_na_v4,
    st_weak_f32,
    syncwarp,
)
from nbep.device.protocols.board import RETIRED, note_progress
from nbep.device.protocols.channels import channel_task_range
from nbep.device.protocols.sums import Source, list_biases, list_rows, sum_rows_or_two, sum_weights
from nbep.device.protocols.totals import wait_total
from nbep.device.protocols.waits import RDMA_RECEIVER_COORDINATOR, RDMA_RECEIVER_TAIL

NOT_THERE = -RETIRED - 1  # the entry of send_rdma_head behind the channel's last token


@device_function
def load_rdma_head(inputs, here, token, end, lane):
    """The entry of send_rdma_head for a token and node `lane`."""
    if token < end and lane < here.num_rdma_ranks:
        return ld_nc_s32(inputs.send_rdma_head + 4 * (token * here.num_rdma_ranks + lane))
    return NOT_THERE


@device_function
def receive_sums(out, inputs, network, progress, bounds, here, shape, sizes, receiver, lists, lane):
    """Receiver: sum up every num_receivers-th token of the channel. lists: shared addresses, rows and weights"""
    rows, weights = lists
    is_node = lane < here.num_rdma_ranks
    base = 0
    if is_node:
        base = ld_weak_s32(progress.received + 4 * (here.channel * here.num_rdma_ranks + lane))
    tail = own_ptr(network, tail_offset(sizes.cells, here.num_rdma_ranks, here.channel, lane))
    row = own_ptr(network, recv_row(shape, here.channel, lane, 0))
    stride = slot_bytes(shape)
    source = Source(row, stride, locate_notes(row, shape).topk_weights, stride, shape.num_slots)
    cell = smem_base() + BOARD + BOARD_ROW * receiver + 4 * lane
    token, end = channel_task_range(sizes.num_combined_tokens, shape.num_channels, here.channel)
    token += receiver
    arrived = 0  # in lane d: sums of node d that are known to be there
    expected = load_rdma_head(inputs, here, token, end, lane)
    while token < end:
        if is_node:
            note_progress(cell, expected if expected >= 0 else -expected - 1)
            if expected >= arrived:
                peer, wanted = rank_of(here, lane), s32(base + expected + 1)
                arrived = s32(wait_total(tail, wanted, bounds, RDMA_RECEIVER_TAIL, peer, here.channel) - base)
        syncwarp(FULL_MASK)
        num_biases = list_biases(rows, (inputs.bias_0, inputs.bias_1), token, shape.hidden_bytes, lane)
        num_nodes = list_rows(rows + 8 * num_biases, weights, lane, expected, source)
        expected = load_rdma_head(inputs, here, token + sizes.num_receivers, end, lane)
        dst = out.combined_x + token * shape.hidden_bytes
        sum_rows_or_two(st_na_v4, dst, rows, num_biases + num_nodes, 0, shape.hidden_bytes, lane)
        if lane < shape.num_topk:
            total = sum_weights(weights, num_nodes, lane)
            st_weak_f32(out.combined_topk_weights + 4 * (token * shape.num_topk + lane), total)
        syncwarp(FULL_MASK)
        token += sizes.num_receivers
    if is_node:
        note_progress(cell, RETIRED)


@device_function
def coordinate_receivers(inputs, network, progress, bounds, here, shape, sizes, lane):
    """Coordinator; one warp, a lane for each node."""
    if lane < here.num_rdma_ranks:
        total = tokens_to_node(inputs.rdma_channel_prefix_matrix, shape.num_channels, here.channel, lane)
        num_warps, chunk, site = sizes.num_receivers, sizes.num_max_rdma_send_tokens, RDMA_RECEIVER_COORDINATOR
        tell_heads(network, progress, bounds, here, total, num_warps, chunk, sizes.cells, site, lane)
