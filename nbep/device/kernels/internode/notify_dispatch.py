"""Internode notify dispatch: ranks tell each other how many tokens are coming, first between nodes, then inside them.

 block 1 + i:     tokens of each channel that go to rank i, and behind the ranks to node i --> prefix sums
                  --- grid barrier ---
 block 0, (n, l): the sums of node d --put--> count message[n] of (d, l), for every node d
        (d, l):   of the messages of all nodes, what is for (d, k) ---> counts[l] of every rank (d, k) of the node
                  --- barrier of the node --->  counters for the CPU, prefix sums of the handle

 cell                       written by             with                   read by           with
 rdma_ and gbl_channel_     blocks 1 and up        st_weak                block 0           ld_weak, after grid barrier
   prefix_matrix                                                          (dispatch)        -
 stage of a warp: its       block 0                st_shared_s32          network           after fence, syncwarp
   count message
 count message[n]           a warp of (n, l)       put_nbi_warp           block 0           ld_weak, after arrived[n]
   that it sends            keep_message           see network.seam       network           -
 arrived[n]                 (n, l)                 amo_add                block 0, lane n   ld_acquire_sys
 counts[l]                  block 0 of (d, l)      st_weak, barrier       block 0 of peers  ld_weak
 head, tail of NVL rings    block 0 of the owner   st_weak 0, barrier     (dispatch)        -
 moe_recv_counter, for      block 0                st_relaxed_sys         the CPU           polls until >= 0
   rows, nodes, experts
 recv_ arrays               block 0                st_weak                (dispatch)        -
 rounds, called             block 0                st_weak                (next notify)     ld_weak

Messages and counts have two places, which notifies take in turn. A rank may be one notify ahead of another; then it
writes to the other place. It is never two ahead: a notify ends only when all ranks that this one writes to have begun
theirs. DeepEP has one place, and a barrier more for it.

An arrival, and the barrier of the node, compare the ranks' calls: see meet_nodes and parts.calls.

An arrival also frees the slots of the RDMA rings: a rank that has the arrival of (d, l) knows that (d, l) has left its
last kernel, and so has emptied them. And after a notify no announcement is left to make: the `recv_` arrays hold
all that a rank must know of what will come to it, or pass through it. DeepEP's dispatch sends it once more, channel by
channel.

Source: DeepEP csrc/kernels/internode.cu, notify_dispatch. Break it: notebooks/12_internode_notify.ipynb
"""

from typing import NamedTuple

import nbep.device.primitives as ptx
from nbep.device.alignment import matrix_cell
from nbep.device.jit import device_function, kernel
from nbep.device.kernels.internode.arguments import Context, Progress, find_here, rank_at
from nbep.device.kernels.internode.meet_nodes import send_to_ranks, wait_node
from nbep.device.kernels.intranode.notify_dispatch import reset_ring_cells
from nbep.device.kernels.parts.calls import Call, wait_peer
from nbep.device.layout.internode import (
    COUNT_MESSAGE_BYTES,
    arrived_offset,
    counts_bytes,
    message_offset,
    message_words,
    rings_offset,
)
from nbep.device.network.seam import Network, Place, amo_add, keep_message, own_ptr, put_nbi_warp, quiet
from nbep.device.protocols.channels import count_channel_tokens
from nbep.device.protocols.grid_barrier import barrier_grid
from nbep.device.protocols.peers import Bounds, Peers, buffer_of
from nbep.device.protocols.waits import has_timed_out
from nbep.device.types import I32, I64, In, Out, Sym


class InternodeNotifyOutputs(NamedTuple):
    """num_rdma_ranks nodes of num_nvl_ranks ranks each; num_ranks in all."""

    rdma_channel_prefix_matrix: Out  # [num_rdma_ranks, num_channels] s32, inclusive: tokens of this rank to a node
    gbl_channel_prefix_matrix: Out  # [num_ranks, num_channels] s32, inclusive: to a rank
    recv_rdma_channel_prefix_matrix: Out  # [num_rdma_ranks, num_channels] s32, inclusive: from (n, l) to this node
    recv_rdma_rank_prefix_sum: Out  # [num_rdma_ranks] s32, inclusive over the nodes
    recv_gbl_channel_prefix_matrix: Out  # [num_ranks, num_channels] s32: first row of recv_x from a rank's channel
    recv_gbl_rank_prefix_sum: Out  # [num_ranks] s32, inclusive over the ranks
    moe_recv_counter: Sym  # s32 that the CPU polls: rows of recv_x
    moe_recv_rdma_counter: Sym  # s32 that the CPU polls: tokens that come to this rank for its node
    moe_recv_expert_counter: Sym  # [num_local_experts] s32 that the CPU polls


class InternodeNotifyInputs(NamedTuple):
    num_tokens_per_expert: In  # [num_experts] s32
    is_token_in_rank: In  # [num_tokens, num_ranks] u8


class InternodeNotifySizes(NamedTuple):
    num_tokens: I32
    num_experts: I32
    num_channels: I32
    num_ring_cell_words: I32  # of the NVL rings
    expert_alignment: I32
    cells: I64  # offset in the RDMA buffer


def notify_smem_bytes(num_threads: int) -> int:
    """Dynamic shared memory of a block: a count message for each warp."""
    return num_threads // 32 * COUNT_MESSAGE_BYTES


@device_function
def count_tokens(ctx, out, inputs):
    """Blocks 1 and up: the ranks first, then the nodes."""
    which = ptx.block_idx() - 1
    num_ranks, num_nvl_ranks = ctx.network.num_ranks, ctx.here.num_nvl_ranks
    row_bytes = 4 * ctx.here.num_channels
    if which < num_ranks:
        prefix = out.gbl_channel_prefix_matrix + which * row_bytes
        count_channel_tokens(prefix, inputs.is_token_in_rank, num_ranks, which, 1, ctx.sizes)
    else:
        node = which - num_ranks
        prefix = out.rdma_channel_prefix_matrix + node * row_bytes
        first = node * num_nvl_ranks
        count_channel_tokens(prefix, inputs.is_token_in_rank, num_ranks, first, num_nvl_ranks, ctx.sizes)


@device_function
def fill_words(stage, src, num_words, lane):
    """Copy words to shared memory; one warp."""
    for i in range(lane, num_words, 32):
        ptx.st_shared_s32(stage + 4 * i, ptx.ld_weak_s32(src + 4 * i))


@device_function
def received_message(ctx, round_, node):
    """Offset of what the rank of a node sends to the rank of this one with the same local rank."""
    return message_offset(ctx.sizes.cells, ctx.here.num_rdma_ranks, round_ % 2, node)


@device_function
def local_experts(ctx):
    """Experts of each rank."""
    return ptx.u32_div(ctx.sizes.num_experts, ctx.network.num_ranks)


@device_function
def send_message(ctx, out, inputs, round_, node):
    """Put the count message for a node's rank, and notify it; one warp."""
    num_nvl_ranks = ctx.here.num_nvl_ranks
    num_channels = ctx.here.num_channels
    stage = ptx.smem_base() + COUNT_MESSAGE_BYTES * (ptx.thread_idx() // 32)
    num_experts = num_nvl_ranks * local_experts(ctx)  # of the node
    to_ranks = out.gbl_channel_prefix_matrix + 4 * node * num_nvl_ranks * num_channels
    fill_words(stage, to_ranks, num_nvl_ranks * num_channels, ctx.lane)
    to_node = stage + 4 * num_nvl_ranks * num_channels
    fill_words(to_node, out.rdma_channel_prefix_matrix + 4 * node * num_channels, num_channels, ctx.lane)
    to_experts = to_node + 4 * num_channels
    for i in range(ctx.lane, num_experts, 32):
        count = ptx.ld_nc_s32(matrix_cell(inputs.num_tokens_per_expert, node, i, num_experts))
        ptx.st_shared_s32(to_experts + 4 * i, count)
    num_words = message_words(num_nvl_ranks, num_channels, local_experts(ctx))
    if ctx.lane < (-num_words) & 3:  # up to a multiple of 16 bytes
        ptx.st_shared_s32(stage + 4 * (num_words + ctx.lane), 0)
    if ptx.has_tma():
        ptx.fence_proxy_async_shared()
    ptx.syncwarp(ptx.FULL_MASK)
    num_bytes = (4 * num_words + 15) // 16 * 16
    dst = received_message(ctx, round_, ctx.here.rdma_rank)
    src = message_offset(ctx.sizes.cells, ctx.here.num_rdma_ranks, 2 + round_ % 2, node)
    keep_message(ctx.network, src, stage, num_bytes, ctx.lane)
    put_nbi_warp(ctx.network, Place(dst, src, rank_at(ctx, node), 0), stage, num_bytes, ctx.lane)
    quiet(ctx.network, ctx.lane)
    if ctx.lane == 0:
        arrived = arrived_offset(ctx.sizes.cells, ctx.here.rdma_rank)
        amo_add(ctx.network, arrived, ctx.call.signal, rank_at(ctx, node), 0, True)
    ptx.syncwarp(ptx.FULL_MASK)


@device_function
def counts_from(ctx, buffer, round_, nvl_rank):
    """What a rank of the node says to the owner of the buffer in this notify."""
    return buffer + ((round_ % 2) * ctx.here.num_nvl_ranks + nvl_rank) * counts_bytes(ctx.here.num_rdma_ranks)


@device_function
def hand_on_counts(ctx, round_):
    """Give each rank of the node what the messages say of it."""
    num_nvl_ranks, num_rdma_ranks = ctx.here.num_nvl_ranks, ctx.here.num_rdma_ranks
    num_channels = ctx.here.num_channels
    num_local_experts = local_experts(ctx)
    messages = own_ptr(ctx.network, received_message(ctx, round_, 0))
    experts = messages + 4 * (num_nvl_ranks + 1) * num_channels
    for k in range(num_nvl_ranks):
        counts = counts_from(ctx, buffer_of(ctx.peers, k), round_, ctx.here.nvl_rank)
        for i in range(ptx.thread_idx(), num_rdma_ranks * num_channels, ptx.block_dim()):
            node = ptx.u32_div(i, num_channels)
            word = k * num_channels + ptx.u32_mod(i, num_channels)
            ptx.st_weak_s32(counts + 4 * i, ptx.ld_weak_s32(messages + node * COUNT_MESSAGE_BYTES + 4 * word))
        counts += 4 * num_rdma_ranks * num_channels
        for e in range(ptx.thread_idx(), num_local_experts, ptx.block_dim()):
            total = 0
            for node in range(num_rdma_ranks):
                total += ptx.ld_weak_s32(matrix_cell(experts + node * COUNT_MESSAGE_BYTES, k, e, num_local_experts))
            ptx.st_weak_s32(counts + 4 * e, total)


@device_function
def sum_node_counts(ctx, out, round_):
    """What comes to this rank for its node: from the messages. Thread 0."""
    total = 0
    for node in range(ctx.here.num_rdma_ranks):
        message = own_ptr(ctx.network, received_message(ctx, round_, node))
        prefix = message + 4 * ctx.here.num_nvl_ranks * ctx.here.num_channels
        row = out.recv_rdma_channel_prefix_matrix + 4 * node * ctx.here.num_channels
        count = 0
        for channel in range(ctx.here.num_channels):
            count = ptx.ld_weak_s32(prefix + 4 * channel)
            ptx.st_weak_s32(row + 4 * channel, count)
        total += count
        ptx.st_weak_s32(out.recv_rdma_rank_prefix_sum + 4 * node, total)
    ptx.st_relaxed_sys_s32(out.moe_recv_rdma_counter, total)


@device_function
def sum_rank_counts(ctx, out, buffer, round_):
    """What comes to this rank itself, from all ranks: from the node's counts. Thread 0."""
    total = 0
    for rank in range(ctx.network.num_ranks):
        node = ptx.u32_div(rank, ctx.here.num_nvl_ranks)
        nvl_rank = ptx.u32_mod(rank, ctx.here.num_nvl_ranks)
        prefix = counts_from(ctx, buffer, round_, nvl_rank) + 4 * node * ctx.here.num_channels
        row = out.recv_gbl_channel_prefix_matrix + 4 * rank * ctx.here.num_channels
        count = 0
        for channel in range(ctx.here.num_channels):
            ptx.st_weak_s32(row + 4 * channel, total + count)
            count = ptx.ld_weak_s32(prefix + 4 * channel)
        total += count
        ptx.st_weak_s32(out.recv_gbl_rank_prefix_sum + 4 * rank, total)
    ptx.st_relaxed_sys_s32(out.moe_recv_counter, total)


@device_function
def sum_expert_counts(ctx, out, buffer, round_):
    """How many tokens each expert of this rank gets, rounded up."""
    alignment = ctx.sizes.expert_alignment
    for e in range(ptx.thread_idx(), local_experts(ctx), ptx.block_dim()):
        total = 0
        for nvl_rank in range(ctx.here.num_nvl_ranks):
            counts = counts_from(ctx, buffer, round_, nvl_rank)
            total += ptx.ld_weak_s32(counts + 4 * (ctx.here.num_rdma_ranks * ctx.here.num_channels + e))
        total = ptx.u32_div(total + alignment - 1, alignment) * alignment
        ptx.st_relaxed_sys_s32(out.moe_recv_expert_counter + 4 * e, total)


@device_function
def count_none(ctx, out):
    """What dispatch finds if ranks called something else: no tokens. The CPU waits for counters, or for a fault."""
    num_ranks, num_rdma_ranks, num_channels = ctx.network.num_ranks, ctx.here.num_rdma_ranks, ctx.here.num_channels
    for i in range(ptx.thread_idx(), num_rdma_ranks * num_channels, ptx.block_dim()):
        ptx.st_weak_s32(out.recv_rdma_channel_prefix_matrix + 4 * i, 0)
    for i in range(ptx.thread_idx(), num_rdma_ranks, ptx.block_dim()):
        ptx.st_weak_s32(out.recv_rdma_rank_prefix_sum + 4 * i, 0)
    for i in range(ptx.thread_idx(), num_ranks * num_channels, ptx.block_dim()):
        ptx.st_weak_s32(out.recv_gbl_channel_prefix_matrix + 4 * i, 0)
    for i in range(ptx.thread_idx(), num_ranks, ptx.block_dim()):
        ptx.st_weak_s32(out.recv_gbl_rank_prefix_sum + 4 * i, 0)


@device_function
def exchange(ctx, out, inputs):
    """Block 0: between the nodes, then inside the node, then the sums."""
    round_ = ptx.ld_weak_s32(ctx.progress.rounds)
    called = ptx.ld_weak_s32(ctx.progress.called)
    may_meet = not has_timed_out(ctx.bounds)
    if may_meet:  # a rank that is only late may still need what it has of the last call
        for node in range(ptx.thread_idx() // 32, ctx.here.num_rdma_ranks, ptx.block_dim() // 32):
            send_message(ctx, out, inputs, round_, node)
    is_other_node = wait_node(ctx, called, may_meet)
    is_same = ptx.bar_red_and(0, ptx.block_dim(), not is_other_node)
    buffer = buffer_of(ctx.peers, ctx.here.nvl_rank)
    rings = buffer + rings_offset(ctx.here.num_rdma_ranks, ctx.here.num_nvl_ranks)
    reset_ring_cells(rings, ctx.sizes.num_ring_cell_words)
    if is_same and not has_timed_out(ctx.bounds):
        hand_on_counts(ctx, round_)
    # With another signal it is another call to the peers: so they know of a node that differs.
    is_other_peer = wait_peer(ctx.peers, ctx.bounds, ctx.call.signal + (not is_same))
    is_same = ptx.bar_red_and(0, ptx.block_dim(), is_same and not is_other_peer)
    if ptx.thread_idx() == 0:
        ptx.st_weak_s32(ctx.progress.rounds, round_ + 1)
        ptx.st_weak_s32(ctx.progress.called, ptx.s32(called + ctx.call.signal))
    if not is_same:
        send_to_ranks(ctx, is_other_node, is_other_peer)
        count_none(ctx, out)
        return
    if ptx.thread_idx() == 0:
        sum_node_counts(ctx, out, round_)
        sum_rank_counts(ctx, out, buffer, round_)
    sum_expert_counts(ctx, out, buffer, round_)


@kernel(max_threads=128)
def internode_notify_dispatch(
    out: InternodeNotifyOutputs,
    inputs: InternodeNotifyInputs,
    network: Network,
    peers: Peers,
    progress: Progress,
    bounds: Bounds,
    sizes: InternodeNotifySizes,
    call: Call,
):
    """Grid: 1 + num_ranks + num_rdma_ranks blocks. Block: 128 threads, or any multiple of 32. Shared:
    `notify_smem_bytes`.
    """
    here = find_here(network, peers, 0, sizes.num_channels)
    ctx = Context(network, peers, progress, bounds, here, ptx.thread_idx() % 32, sizes, None, None, call)
    if ptx.block_idx() > 0:
        count_tokens(ctx, out, inputs)
    barrier_grid(progress.grid_arrivals, bounds)
    if ptx.block_idx() == 0:
        exchange(ctx, out, inputs)
