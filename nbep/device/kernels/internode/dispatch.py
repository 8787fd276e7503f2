"""Internode dispatch: a token crosses the network once to each node that wants it, and NVLink once to each rank there.

 rank (n, l): x[t] --RDMA sender--> network --> ring[channel, n] of rank (d, l)       the same l of every node
 rank (d, l): its slots --forwarder--> NVLink --> NVL ring[channel, l] of rank (d, k)  the ranks k of one node
 rank (d, k): its slots --NVL receiver--> recv_x[i]

 block 2c         forwarders, a team for each k; their coordinator       dispatch_forwarder.py
                  for the own local rank they deliver to recv_x themselves
 block 2c + 1     NVL receivers, a team for each other l                 dispatch_receiver.py
                  RDMA senders; their coordinator                        dispatch_sender.py

 who waits for whom                 for                          cell                     moved by
 RDMA sender (n, l)                 a free slot at (d, l)        heads[c, d]              forwarder coordinator (d, l)
 forwarder (d, l)                   tokens of (n, l)             tails[c, n]              sender coordinator (n, l)
 forwarder (d, l)                   a free slot at (d, k)        head of NVL ring[c, l]   NVL receiver (d, k)
 NVL receiver (d, k)                tokens of (d, l)             tail of NVL ring[c, l]   forwarder (d, l)
 a coordinator                      the warps of its block       board                    each of them

Each role's file has its ledger. The waits make no circle: an NVL receiver waits for tokens only, so it always empties
its ring; so a forwarder always gets on, and frees RDMA slots; so a sender gets on too.

How many tokens will come from whom is known before the kernel starts (notify_dispatch.py), so no cell announces it.
What a rank sends to its own node takes the same roles and rings; what comes to it over its own local rank is delivered.

Source: DeepEP csrc/kernels/internode.cu, dispatch. Break it: notebooks/13_internode_dispatch.ipynb
"""

from typing import NamedTuple

import nbep.device.primitives as ptx
from nbep.device.jit import device_function, kernel
from nbep.device.kernels.internode.arguments import (
    MAX_WARPS,
    MAX_WARPS_BEFORE_SM90,
    STAGES,
    Context,
    Progress,
    find_here,
)
from nbep.device.kernels.internode.coordinator import begin_block
from nbep.device.kernels.internode.dispatch_forwarder import coordinate_forwarders, deliver_tokens, forward_tokens
from nbep.device.kernels.internode.dispatch_receiver import clean_unused_rows, receive_tokens
from nbep.device.kernels.internode.dispatch_sender import coordinate_senders, send_tokens
from nbep.device.kernels.parts.spoil import has_failed, spoil_rows
from nbep.device.layout.intranode import RingShape
from nbep.device.network.seam import Network
from nbep.device.protocols.peers import CLUSTERS, Bounds, Peers
from nbep.device.protocols.staging import STAGE_STRIDE, open_stage
from nbep.device.protocols.teams import Team
from nbep.device.types import I32, I64, In, Out


class InternodeDispatchOutputs(NamedTuple):
    """All but recv_x may be absent (0): what the inputs lack, and what only a new handle needs."""

    recv_x: Out  # [num_recv_tokens, hidden_bytes]
    recv_x_scales: Out  # [num_recv_tokens, num_scales] 4 bytes each
    recv_src_meta: Out  # [num_recv_tokens, num_meta_words] s32
    recv_topk_idx: Out  # [num_recv_tokens, num_topk] s64
    recv_topk_weights: Out  # [num_recv_tokens, num_topk] f32
    send_rdma_head: Out  # [num_tokens, num_rdma_ranks] s32: the token's index among those of its channel to the node
    send_nvl_head: Out  # [num_rdma_recv_tokens, num_nvl_ranks] s32: the same of what passes through, to a rank; or -1


class InternodeDispatchInputs(NamedTuple):
    """x_scales, topk_idx and topk_weights may be absent (0). The prefix sums are those of notify_dispatch."""

    x: In  # [num_tokens, hidden_bytes]
    x_scales: In  # [num_tokens, num_scales] 4 bytes each, any strides
    topk_idx: In  # [num_tokens, num_topk] s64
    topk_weights: In  # [num_tokens, num_topk] f32
    is_token_in_rank: In  # [num_tokens, num_ranks] u8
    rdma_channel_prefix_matrix: In  # [num_rdma_ranks, num_channels] s32, inclusive
    recv_rdma_channel_prefix_matrix: In  # [num_rdma_ranks, num_channels] s32, inclusive
    recv_rdma_rank_prefix_sum: In  # [num_rdma_ranks] s32, inclusive
    recv_gbl_channel_prefix_matrix: In  # [num_ranks, num_channels] s32: first rows of recv_x
    recv_gbl_rank_prefix_sum: In  # [num_ranks] s32, inclusive


class InternodeDispatchSizes(NamedTuple):
    """Strides count scales, not bytes."""

    num_tokens: I32
    num_recv_tokens: I32  # rows of recv_x
    num_rdma_recv_tokens: I32  # rows of send_nvl_head
    num_worst_tokens: I32
    num_experts: I32
    num_max_nvl_send_tokens: I32
    num_max_rdma_send_tokens: I32
    num_receivers: I32  # warps of each team of NVL receivers
    scale_token_stride: I32
    scale_hidden_stride: I32
    cells: I64  # offset in the RDMA buffer


def dispatch_smem_bytes(num_threads: int) -> int:
    """Dynamic shared memory of a dispatch block: batches, the board, a stage for each warp."""
    return STAGES + STAGE_STRIDE * (num_threads // 32)


@device_function
def forward(ctx, out, inputs, warp):
    """Block 2c: the last warp coordinates, the others are teams of the same size; some may be left over."""
    here = ctx.here
    num_warps = ptx.u32_div(ptx.block_dim() // 32 - 1, here.num_nvl_ranks)
    team = Team(True, ptx.u32_div(warp, num_warps), here.channel, ptx.u32_mod(warp, num_warps), num_warps, ctx.lane)
    if warp == ptx.block_dim() // 32 - 1:
        coordinate_forwarders(ctx, inputs)
    elif team.peer < here.num_nvl_ranks:
        stage = open_stage(ptx.smem_base() + STAGES, warp, ctx.lane)
        if team.peer == here.nvl_rank:
            deliver_tokens(ctx, out, inputs, team, stage)
        else:
            forward_tokens(ctx, out, inputs, team, stage)


@device_function
def send_and_receive(ctx, out, inputs, warp):
    """Block 2c + 1: the first warps send, the last one coordinates them, those between are teams of receivers."""
    here = ctx.here
    num_warps = ctx.sizes.num_receivers
    num_senders = ptx.block_dim() // 32 - 1 - (here.num_nvl_ranks - 1) * num_warps
    if warp == ptx.block_dim() // 32 - 1:
        coordinate_senders(ctx, inputs, num_senders)
    else:
        stage = open_stage(ptx.smem_base() + STAGES, warp, ctx.lane)
        if warp < num_senders:
            send_tokens(ctx, out, inputs, warp, num_senders, stage)
        else:
            which = warp - num_senders
            other = ptx.u32_div(which, num_warps)
            peer = other if other < here.nvl_rank else other + 1  # what comes over the own local rank is delivered
            team = Team(False, peer, here.channel, ptx.u32_mod(which, num_warps), num_warps, ctx.lane)
            receive_tokens(ctx, out, inputs, team, stage)


@kernel(max_threads=32 * MAX_WARPS, clusters=CLUSTERS, max_threads_before_sm90=32 * MAX_WARPS_BEFORE_SM90)
def internode_dispatch(
    out: InternodeDispatchOutputs,
    inputs: InternodeDispatchInputs,
    network: Network,
    peers: Peers,
    progress: Progress,
    bounds: Bounds,
    nvl: RingShape,
    rdma: RingShape,
    sizes: InternodeDispatchSizes,
):
    """Grid: 2 * num_channels blocks. Block: at least (num_nvl_ranks - 1) * num_receivers + 2 warps, and
    num_nvl_ranks + 1.

    Shared memory: `dispatch_smem_bytes`.
    """
    warp = ptx.thread_idx() // 32
    lane = ptx.thread_idx() % 32
    here = find_here(network, peers, ptx.block_idx() // 2, rdma.num_channels)
    ctx = Context(network, peers, progress, bounds, here, lane, sizes, nvl, rdma, None)
    if begin_block(bounds):
        if ptx.block_idx() % 2 == 0:
            forward(ctx, out, inputs, warp)
        else:
            send_and_receive(ctx, out, inputs, warp)
        if sizes.num_worst_tokens > 0:
            clean_unused_rows(ctx, out, inputs)
    if has_failed(bounds):
        spoil_rows(out, nvl, sizes.num_recv_tokens, lane)
