"""Internode cached notify: the ranks come together before a dispatch whose counts are known, or before a combine.

 block 0, (n, l):  arrived[n] += call at every (d, l); NVL ring cells = 0; barrier of the node; waits for arrived[d]
 block 1 + c:      before combine: heads of channel c, see intranode/cached_notify.py: those of send_rdma_head,
                   then those of send_nvl_head, node by node

 cell                        written by             with                  read by            with
 arrived[n]                  (n, l)                 amo_add               block 0, lane n    ld_acquire_sys
 head, tail of NVL rings     the owner              st_weak 0, barrier    (next kernel)      -
 send_rdma_head[t, n]        one warp               st_weak               same warp          ld_weak, before it writes
 send_nvl_head[i, k]         one warp               st_weak               same warp          ld_weak, before it writes
 rounds, called              block 0                st_weak               (next notify)      ld_weak

That (d, l) has arrived says that it has left its last kernel: so it has emptied all slots of its RDMA rings, and this
rank may fill them again. The barrier says the same of the NVL rings. Both compare the ranks' calls: see meet_nodes and
parts.calls. A rank whose call differs is known at once to those of its node and of its local rank in the others. The
rest may have left this kernel. Only before a combine are there blocks 1 + c.

Source: DeepEP csrc/kernels/internode.cu, cached_notify
"""

from typing import NamedTuple

import nbep.device.primitives as ptx
from nbep.device.jit import device_function, kernel
from nbep.device.kernels.internode.arguments import (
    Context,
    Progress,
    find_here,
    first_passing_row,
    rank_at,
    tokens_to_node,
)
from nbep.device.kernels.internode.meet_nodes import send_to_ranks, wait_node
from nbep.device.kernels.intranode.cached_notify import encode_absent_tokens
from nbep.device.kernels.intranode.notify_dispatch import reset_ring_cells
from nbep.device.kernels.parts.calls import Call, wait_peer
from nbep.device.layout.internode import arrived_offset, rings_offset
from nbep.device.network.seam import Network, amo_add
from nbep.device.protocols.channels import channel_task_range
from nbep.device.protocols.peers import Bounds, Peers, buffer_of
from nbep.device.protocols.waits import has_timed_out
from nbep.device.types import I32, I64, In, InOut


class CachedHeads(NamedTuple):
    """What a combine needs prepared; all are absent (0) before a dispatch."""

    send_rdma_head: InOut  # [num_combined_tokens, num_rdma_ranks] s32
    send_nvl_head: InOut  # [num_rdma_recv_tokens, num_nvl_ranks] s32
    recv_rdma_channel_prefix_matrix: In  # [num_rdma_ranks, num_channels] s32, inclusive
    recv_rdma_rank_prefix_sum: In  # [num_rdma_ranks] s32, inclusive


class CachedSizes(NamedTuple):
    num_combined_tokens: I32
    num_rdma_recv_tokens: I32  # rows of send_nvl_head
    num_channels: I32
    num_ring_cell_words: I32  # of the NVL rings
    cells: I64  # offset in the RDMA buffer


@device_function
def come_together(ctx):
    """Block 0."""
    rounds = ptx.ld_weak_s32(ctx.progress.rounds)
    called = ptx.ld_weak_s32(ctx.progress.called)
    node, may_meet = ptx.thread_idx(), not has_timed_out(ctx.bounds)
    if node < ctx.here.num_rdma_ranks and may_meet:
        arrived = arrived_offset(ctx.sizes.cells, ctx.here.rdma_rank)
        amo_add(ctx.network, arrived, ctx.call.signal, rank_at(ctx, node), 0, True)
    rings = buffer_of(ctx.peers, ctx.here.nvl_rank) + rings_offset(ctx.here.num_rdma_ranks, ctx.here.num_nvl_ranks)
    reset_ring_cells(rings, ctx.sizes.num_ring_cell_words)
    is_other_peer = wait_peer(ctx.peers, ctx.bounds, ctx.call.signal)
    is_other_node = wait_node(ctx, called, may_meet)
    if not ptx.bar_red_and(0, ptx.block_dim(), not (is_other_peer or is_other_node)):
        send_to_ranks(ctx, is_other_node, is_other_peer)
    if ptx.thread_idx() == 0:
        ptx.st_weak_s32(ctx.progress.rounds, rounds + 1)
        ptx.st_weak_s32(ctx.progress.called, ptx.s32(called + ctx.call.signal))


@device_function
def encode_heads(ctx, heads):
    """Blocks 1 and up: their channel's entries of tokens that are absent; see `encode_absent_tokens`."""
    here, sizes = ctx.here, ctx.sizes
    warp, num_warps = ptx.thread_idx() // 32, ptx.block_dim() // 32
    begin, end = channel_task_range(sizes.num_combined_tokens, here.num_channels, here.channel)
    for node in range(warp, here.num_rdma_ranks, num_warps):
        encode_absent_tokens(heads.send_rdma_head, begin, end, node, here.num_rdma_ranks, ctx.lane)
    for which in range(warp, ctx.network.num_ranks, num_warps):
        node = ptx.u32_div(which, here.num_nvl_ranks)
        k = which - node * here.num_nvl_ranks
        first = first_passing_row(ctx, heads, node)
        count = tokens_to_node(ctx, heads.recv_rdma_channel_prefix_matrix, node)
        last = min(first + count, sizes.num_rdma_recv_tokens)
        encode_absent_tokens(heads.send_nvl_head, first, last, k, here.num_nvl_ranks, ctx.lane)


@kernel(max_threads=256)
def internode_cached_notify(
    heads: CachedHeads,
    network: Network,
    peers: Peers,
    progress: Progress,
    bounds: Bounds,
    sizes: CachedSizes,
    call: Call,
):
    """Grid: 1 block, before combine 1 + num_channels. Block: a multiple of 32."""
    here = find_here(network, peers, ptx.block_idx() - 1, sizes.num_channels)
    ctx = Context(network, peers, progress, bounds, here, ptx.thread_idx() % 32, sizes, None, None, call)
    if ptx.block_idx() == 0:
        come_together(ctx)
    elif ptx.vote_all(ptx.FULL_MASK, not has_timed_out(bounds)):  # after a time-out the handle may say anything
        encode_heads(ctx, heads)
