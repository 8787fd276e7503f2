"""Internode combine: a token's rows go back the way it came, and are added up where they meet.

 rank (d, k): x[i] --NVL sender--> NVLink --> NVL ring[channel, (n, k)] of rank (d, l)
 rank (d, l): rings of all k --forwarder: sum over k--> network --> ring[channel, d] of rank (n, l)
 rank (n, l): rings of all d --RDMA receiver: biases, sum over d--> combined_x[t]

 block 2c         forwarders, some for each n; two coordinators         combine_forwarder.py
 block 2c + 1     RDMA receivers; their coordinator                     combine_receiver.py
                  NVL senders                                           combine_sender.py

 who waits for whom               for                            cell                         moved by
 NVL sender (d, k)                a free slot at (d, l)          head of NVL ring[c, (n, k)]  NVL coordinator (d, l)
 forwarder (d, l)                 rows of (d, k)                 tail of NVL ring[c, (n, k)]  NVL sender (d, k)
 forwarder (d, l)                 a free slot at (n, l)          heads[c, n]                  coordinator (n, l)
 RDMA receiver (n, l)             sums of (d, l)                 tails[c, d]                  RDMA coordinator (d, l)
 a coordinator                    the warps of its block         board                        each of them

Each role's file has its ledger. A channel has the tokens that it had in dispatch at rank (n, l). So a sender finds its
rows in recv_gbl_channel_prefix_matrix, and a forwarder its tokens in recv_rdma_channel_prefix_matrix.

The waits make no circle. Those for the tokens of one (channel, n, l) depend on nothing but waits for tokens of the same
three: an NVL sender takes the ring that has room, and each node has its own forwarders. And all roles take these tokens
in the same order, that of the dispatch: for the first one that is not done, somebody can always go on.

Source: DeepEP csrc/kernels/internode.cu, combine. Break it: notebooks/14_internode_combine.ipynb
"""

from collections.abc import Callable
from typing import NamedTuple

import nbep.device.primitives as ptx
from nbep.device.jit import device_function, for_blocks_of, kernel
from nbep.device.kernels.internode.arguments import (
    COMBINE_STAGES,
    LIST_BYTES,
    LISTS,
    MAX_WARPS,
    MAX_WARPS_BEFORE_SM90,
    MOST_WARPS,
    WEIGHT_LIST,
    Context,
    Progress,
    find_here,
)
from nbep.device.kernels.internode.combine_forwarder import Group, coordinate_sums, forward_sums, publish_nvl_heads
from nbep.device.kernels.internode.combine_receiver import coordinate_receivers, receive_sums
from nbep.device.kernels.internode.combine_sender import send_rows
from nbep.device.kernels.internode.coordinator import begin_block
from nbep.device.kernels.parts.spoil import has_failed, spoil_sums
from nbep.device.layout.intranode import RingShape
from nbep.device.network.seam import Network
from nbep.device.protocols.peers import CLUSTERS, Bounds, Peers
from nbep.device.protocols.staging import STAGE_STRIDE, open_stage
from nbep.device.types import I32, I64, In, Out


class InternodeCombineOutputs(NamedTuple):
    """combined_topk_weights may be absent (0)."""

    combined_x: Out  # [num_combined_tokens, hidden_bytes] bf16
    combined_topk_weights: Out  # [num_combined_tokens, num_topk] f32


class InternodeCombineInputs(NamedTuple):
    """topk_weights, bias_0 and bias_1 may be absent (0). The heads are as internode_cached_notify leaves them."""

    x: In  # [num_tokens, hidden_bytes] bf16
    topk_weights: In  # [num_tokens, num_topk] f32
    bias_0: In  # [num_combined_tokens, hidden_bytes] bf16
    bias_1: In  # [num_combined_tokens, hidden_bytes] bf16
    send_rdma_head: In  # [num_combined_tokens, num_rdma_ranks] s32
    send_nvl_head: In  # [num_rdma_recv_tokens, num_nvl_ranks] s32
    rdma_channel_prefix_matrix: In  # [num_rdma_ranks, num_channels] s32, inclusive
    recv_rdma_channel_prefix_matrix: In  # [num_rdma_ranks, num_channels] s32, inclusive
    recv_rdma_rank_prefix_sum: In  # [num_rdma_ranks] s32, inclusive
    recv_gbl_channel_prefix_matrix: In  # [num_ranks, num_channels] s32: first rows of x
    recv_gbl_rank_prefix_sum: In  # [num_ranks] s32, inclusive


class InternodeCombineSizes(NamedTuple):
    num_combined_tokens: I32
    num_max_nvl_send_tokens: I32
    num_max_rdma_send_tokens: I32
    num_receivers: I32  # warps of the RDMA receivers
    cells: I64  # offset in the RDMA buffer


class Lists(NamedTuple):
    """The shared addresses of what a warp adds up."""

    rows: int
    weights: int


def combine_smem_bytes(num_threads: int) -> int:
    """Dynamic shared memory of a combine block: batches, the board, lists of sums, a stage for each warp."""
    return COMBINE_STAGES + STAGE_STRIDE * (num_threads // 32)


@device_function
def lists_of(warp):
    lists = ptx.smem_base() + LISTS + LIST_BYTES * warp
    return Lists(lists, lists + WEIGHT_LIST)


@device_function
def forward(ctx, inputs, warp):
    """Block 2c: the last two warps coordinate, the others are as many for each node; some may be left over."""
    last = ptx.block_dim() // 32 - 1
    num_warps = ptx.u32_div(last - 1, ctx.here.num_rdma_ranks)
    node = ptx.u32_div(warp, num_warps)
    if warp == last:
        coordinate_sums(ctx, inputs, num_warps)
    elif warp == last - 1:
        publish_nvl_heads(ctx, num_warps)
    elif node < ctx.here.num_rdma_ranks:
        stage = open_stage(ptx.smem_base() + COMBINE_STAGES, warp, ctx.lane)
        group = Group(node, warp - node * num_warps, num_warps, warp)
        forward_sums(ctx, inputs, group, lists_of(warp), stage)


@device_function
def send_and_receive(ctx, out, inputs, warp):
    """Block 2c + 1: the last warp coordinates, the first ones receive, the others send."""
    last = ptx.block_dim() // 32 - 1
    num_receivers = ctx.sizes.num_receivers
    if warp == last:
        coordinate_receivers(ctx, inputs)
    elif warp < num_receivers:
        receive_sums(ctx, out, inputs, warp, lists_of(warp))
    else:
        sender = warp - num_receivers
        # The stage takes the places of receivers, who need none.
        stage = open_stage(ptx.smem_base() + COMBINE_STAGES, sender, ctx.lane, 2)
        send_rows(ctx, inputs, sender, last - num_receivers, stage)


@kernel(max_threads=32 * MAX_WARPS, clusters=CLUSTERS, max_threads_before_sm90=32 * MAX_WARPS_BEFORE_SM90)
def internode_combine(
    out: InternodeCombineOutputs,
    inputs: InternodeCombineInputs,
    network: Network,
    peers: Peers,
    progress: Progress,
    bounds: Bounds,
    nvl: RingShape,
    rdma: RingShape,
    sizes: InternodeCombineSizes,
):
    """Grid: 2 * num_channels blocks. Block: at least num_rdma_ranks + 2 warps. At most half of the warps send, and at
    least one if a node has several ranks.

    Shared memory: `combine_smem_bytes`.
    """
    warp = ptx.thread_idx() // 32
    lane = ptx.thread_idx() % 32
    here = find_here(network, peers, ptx.block_idx() // 2, rdma.num_channels)
    ctx = Context(network, peers, progress, bounds, here, lane, sizes, nvl, rdma, None)
    if begin_block(bounds):
        if ptx.block_idx() % 2 == 0:
            forward(ctx, inputs, warp)
        else:
            send_and_receive(ctx, out, inputs, warp)
    if has_failed(bounds):
        spoil_sums(out, rdma, sizes.num_combined_tokens, lane)


def most_warps(num_rdma_ranks: int) -> int:
    """Most warps of a block between so many nodes."""
    return MAX_WARPS if num_rdma_ranks + 2 <= MAX_WARPS else MOST_WARPS


def kernel_for(num_rdma_ranks: int) -> Callable:
    """The kernel between so many nodes. Larger blocks have fewer registers, so other numbers keep the smaller ones."""
    return for_blocks_of(internode_combine, 32 * most_warps(num_rdma_ranks))
