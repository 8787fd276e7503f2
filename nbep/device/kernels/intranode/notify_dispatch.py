"""Notify dispatch: ranks tell each other how many tokens are coming, and reset their rings.

 block 0, rank s: own ring cells = 0
                  num_tokens_per_rank[d] ------> rank_counts[s, d] of every peer d
                  num_tokens_per_expert[d, e] -> expert_counts[s, e] of peer d
         barrier; prefix sums over s --> counters for the CPU, rank_prefix_matrix of the handle
 block 1 + d:     tokens of each channel that go to rank d --> channel_prefix_matrix[d, channel]

 cell                        written by               with                   read by           with
 rank_counts[s, d]           block 0 of rank s        st_weak, barrier       block 0           ld_weak
 expert_counts[s, e]         block 0 of rank s        st_weak, barrier       block 0           ld_weak
 start, end, head, tail      block 0 of the owner     st_weak 0, barrier     (dispatch)        -
 arrived, landed, next_token block 0 of the owner     st_weak 0, barrier     (without rings)   -
 moe_recv_counter            block 0                  st_relaxed_sys         the CPU           polls until >= 0
 moe_recv_expert_counter[e]  block 0                  st_relaxed_sys         the CPU           polls until >= 0
 rank_prefix_matrix          block 0                  st_weak                (dispatch)        -
 channel_prefix_matrix,      block 1 + d              st_weak                block 1 + d       ld_weak, same warp
   rdma_, gbl_ (nodes)                                                       (dispatch)        -

The barrier makes the counts visible and keeps peers from filling rings that are not reset yet. DeepEP has one more in
front of the counts, and one more behind the sums. nbep needs neither:
 - A rank that is here has left its previous kernel, so it had received all that its peers sent in that kernel. No rank
   writes to its cells any more, nor waits for one of its heads.
 - Counts of the call before have been summed up: to leave the dispatch of that call, this rank heard from every peer's
   dispatch, which came after the peer's sums.
After a wait of a rank that timed out neither holds for it, but its results are not used any more.

Every rank writes its whole row at every peer: after the exchange each of them holds the same counts. The barrier
compares the ranks' calls, too: see parts.calls.

Source: DeepEP csrc/kernels/intranode.cu, notify_dispatch. Break it: notebooks/03_notify.ipynb
"""

from typing import NamedTuple

import nbep.device.primitives as ptx
from nbep.device.alignment import matrix_cell
from nbep.device.jit import device_function, kernel
from nbep.device.kernels.parts.calls import Call, meet_block
from nbep.device.layout.intranode import EXPERT_COUNTS, RINGS
from nbep.device.protocols.channels import count_channel_tokens
from nbep.device.protocols.peers import Bounds, Peers, buffer_of
from nbep.device.protocols.waits import has_timed_out
from nbep.device.types import I32, In, Out, Sym


class NotifyOutputs(NamedTuple):
    rank_prefix_matrix: Out  # [num_ranks, num_ranks] s32, inclusive over the source rank
    channel_prefix_matrix: Out  # [num_ranks, num_channels] s32, inclusive over the channel
    moe_recv_counter: Sym  # s32 that the CPU polls
    moe_recv_expert_counter: Sym  # [num_local_experts] s32 that the CPU polls


class NotifyInputs(NamedTuple):
    num_tokens_per_rank: In  # [num_ranks] s32
    num_tokens_per_expert: In  # [num_experts] s32
    is_token_in_rank: In  # [num_tokens, num_ranks] u8


class NotifySizes(NamedTuple):
    num_tokens: I32
    num_experts: I32
    num_channels: I32
    num_ring_cell_words: I32
    expert_alignment: I32


@device_function
def send_counts(inputs, peers, num_local_experts):
    """Thread d writes this rank's row of every peer's rank_counts, and its counts of peer d's experts."""
    peer = ptx.thread_idx()
    if peer < peers.num_ranks:
        buffer = buffer_of(peers, peer)
        row = buffer + 4 * peers.rank * peers.num_ranks
        for dst in range(peers.num_ranks):
            ptx.st_weak_s32(row + 4 * dst, ptx.ld_nc_s32(inputs.num_tokens_per_rank + 4 * dst))
        experts = buffer + EXPERT_COUNTS + 4 * peers.rank * num_local_experts
        for e in range(num_local_experts):
            count = ptx.ld_nc_s32(matrix_cell(inputs.num_tokens_per_expert, peer, e, num_local_experts))
            ptx.st_weak_s32(experts + 4 * e, count)


@device_function
def sum_counts(out, buffer, peers, num_local_experts, expert_alignment):
    """Turn counts into prefix sums and totals, and give the totals to the CPU."""
    dst = ptx.thread_idx()
    if dst < peers.num_ranks:
        total = 0
        for src in range(peers.num_ranks):
            cell = 4 * (src * peers.num_ranks + dst)
            total += ptx.ld_weak_s32(buffer + cell)
            ptx.st_weak_s32(out.rank_prefix_matrix + cell, total)
        if dst == peers.rank:
            ptx.st_relaxed_sys_s32(out.moe_recv_counter, total)
    for e in range(ptx.thread_idx(), num_local_experts, ptx.block_dim()):
        total = 0
        for src in range(peers.num_ranks):
            total += ptx.ld_weak_s32(matrix_cell(buffer + EXPERT_COUNTS, src, e, num_local_experts))
        total = ptx.u32_div(total + expert_alignment - 1, expert_alignment) * expert_alignment
        ptx.st_relaxed_sys_s32(out.moe_recv_expert_counter + 4 * e, total)


@device_function
def count_nothing(out, num_ranks):
    """What dispatch finds if the peers called something else: no tokens. The CPU waits for counters, or for a fault."""
    for i in range(ptx.thread_idx(), num_ranks * num_ranks, ptx.block_dim()):
        ptx.st_weak_s32(out.rank_prefix_matrix + 4 * i, 0)


@device_function
def reset_ring_cells(buffer, num_words):
    """Set start, end, head and tail of all rings to 0. A barrier with the peers follows."""
    for i in range(ptx.thread_idx(), num_words, ptx.block_dim()):
        ptx.st_weak_s32(buffer + RINGS + 4 * i, 0)


@kernel(max_threads=128)
def notify_dispatch(
    out: NotifyOutputs, inputs: NotifyInputs, peers: Peers, bounds: Bounds, sizes: NotifySizes, call: Call
):
    """Grid: 1 + num_ranks blocks. Block: 128 threads, or any multiple of 32 that is at least num_ranks."""
    if ptx.block_idx() == 0:
        buffer = buffer_of(peers, peers.rank)
        num_local_experts = ptx.u32_div(sizes.num_experts, peers.num_ranks)
        reset_ring_cells(buffer, sizes.num_ring_cell_words)
        if not has_timed_out(bounds):  # a peer that is only late may still need those of the last call
            send_counts(inputs, peers, num_local_experts)
        if meet_block(peers, bounds, call):
            sum_counts(out, buffer, peers, num_local_experts, sizes.expert_alignment)
        else:
            count_nothing(out, peers.num_ranks)
    else:
        dst_rank = ptx.block_idx() - 1
        channel_prefix = out.channel_prefix_matrix + 4 * dst_rank * sizes.num_channels
        count_channel_tokens(channel_prefix, inputs.is_token_in_rank, peers.num_ranks, dst_rank, 1, sizes)
