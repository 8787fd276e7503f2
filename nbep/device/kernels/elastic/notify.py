"""Notify: all ranks meet, in one block. Between publish and dispatch each adds up what comes to it, before a combine it
resets its cells.

 rank_counts[half, s] ---------sum over s-------------> psum_num_recv_tokens_per_scaleup_rank
 expert_counts[half, s, e] ----sum over s, then e ----> where the rows of each (rank, expert) begin; how many they are

 cell                        written by      with              read by             with
 turn                        thread 0        st_weak           the owner's kernels ld_nc, ld_weak
 rank_counts[half, s]        rank s          see publish.py    all threads         ld_na, after the meeting
 expert_counts[half, s]      rank s          see publish.py    all threads         ld_na, after the meeting
 num_unaligned_recv_         thread e        st_weak           all threads         ld_weak, after syncthreads
 psum_ arrays, row_starts    thread e        st_weak           (dispatch)          -
 moe_recv_counter            a thread        st_relaxed_sys    the CPU             polls until >= 0
 moe_recv_expert_counter[e]  thread e        st_relaxed_sys    the CPU             polls until >= 0
 cumulative_local_expert_    thread e        st_weak           thread e            ld_weak
 landed, next_token          the owner       st_weak 0         (combine)           -

Counts of a half are written again by the second dispatch from here. Its writers have met this rank before, at the first
one, to which this rank came behind this kernel.

Before the meeting of a combine no rank sends, after it no rank reads what an earlier dispatch has laid out in the same
memory.

With a handle there is nothing to count: the ranks only meet.

Source: DeepEP deep_ep/include/deep_ep/impls/dispatch.cuh (notify warps); csrc/kernels/elastic/combine.hpp
Break it: records/faults.md, `elastic.notify.elastic_notify_dispatch: meet_block`: race
"""

from typing import NamedTuple

import nbep.device.primitives as ptx
from nbep.device.alignment import matrix_cell
from nbep.device.jit import device_function, kernel
from nbep.device.kernels.parts.calls import Call, meet_block
from nbep.device.layout.elastic import NEXT_TOKEN, TURN, expert_count, landed_cell, rank_count
from nbep.device.protocols.peers import Bounds, Peers, buffer_of
from nbep.device.protocols.reduce import warp_prefix_sum_s32, warp_sum_s32
from nbep.device.protocols.waits import has_timed_out
from nbep.device.types import I32, InOut, Out, Sym


class ElasticCounts(NamedTuple):
    """All absent (0) with a handle; cumulative_local_expert_recv_stats and psum_of_locals may be."""

    psum_num_recv_tokens_per_scaleup_rank: Out  # [num_ranks] s32, inclusive
    psum_num_recv_tokens_per_expert: Out  # [num_local_experts] s32: see `place_rows`
    num_unaligned_recv_tokens_per_expert: InOut  # [num_local_experts] s32
    row_starts: Out  # [num_ranks, num_local_experts] s32: where an expert's rows from a rank begin, if expanded
    psum_of_locals: Out  # [num_nvl_ranks] s32, inclusive, in hybrid mode: tokens from ranks by local index
    cumulative_local_expert_recv_stats: InOut  # [num_local_experts] s32
    moe_recv_counter: Sym  # s32 that the CPU polls
    moe_recv_expert_counter: Sym  # [num_local_experts] s32 that the CPU polls


class ElasticCountSizes(NamedTuple):
    num_local_experts: I32
    expert_alignment: I32
    do_expand: I32


@device_function
def sum_rank_counts(out, buffer, number, num_ranks, lane):
    """Prefix sums of the tokens from each rank, and the total for the CPU; one warp."""
    count = ptx.ld_na_s32(buffer + rank_count(number, lane)) if lane < num_ranks else 0
    total = warp_prefix_sum_s32(ptx.FULL_MASK, count, lane)
    if lane < num_ranks:
        ptx.st_weak_s32(out.psum_num_recv_tokens_per_scaleup_rank + 4 * lane, total)
    if lane == num_ranks - 1:
        ptx.st_relaxed_sys_s32(out.moe_recv_counter, total)


@device_function
def sum_expert_counts(out, buffer, number, num_ranks, expert):
    """The number of rows of an expert; one thread."""
    total = 0
    for src in range(num_ranks):
        total += ptx.ld_na_s32(buffer + expert_count(number, src, expert))
    ptx.st_weak_s32(out.num_unaligned_recv_tokens_per_expert + 4 * expert, total)
    stats = out.cumulative_local_expert_recv_stats
    if stats != 0:
        ptx.st_weak_s32(stats + 4 * expert, ptx.ld_weak_s32(stats + 4 * expert) + total)


@device_function
def padded_count(out, expert, sizes):
    """The rows of an expert with its padding; none for one that is not there."""
    if expert >= sizes.num_local_experts:
        return 0
    count = ptx.ld_weak_s32(out.num_unaligned_recv_tokens_per_expert + 4 * expert)
    return ptx.u32_div(count + sizes.expert_alignment - 1, sizes.expert_alignment) * sizes.expert_alignment


@device_function
def place_rows(out, buffer, number, num_ranks, first, sizes):
    """Where the rows of 32 experts begin, from the first on, of each rank; a warp, a lane for each expert.

    What the prefix sum says of an expert: up to where its rows go, in compact form with their padding.
    """
    lane = ptx.thread_idx() % 32
    expert = first + lane
    before = 0
    for earlier in range(lane, expert, 32):
        before += padded_count(out, earlier, sizes)
    padded = padded_count(out, expert, sizes)
    start = warp_sum_s32(ptx.FULL_MASK, before) + warp_prefix_sum_s32(ptx.FULL_MASK, padded, lane) - padded
    if expert < sizes.num_local_experts:
        count = ptx.ld_weak_s32(out.num_unaligned_recv_tokens_per_expert + 4 * expert)
        end = start + (count if sizes.do_expand != 0 else padded)
        ptx.st_weak_s32(out.psum_num_recv_tokens_per_expert + 4 * expert, end)
        ptx.st_relaxed_sys_s32(out.moe_recv_expert_counter + 4 * expert, padded)
        for src in range(num_ranks):
            ptx.st_weak_s32(matrix_cell(out.row_starts, src, expert, sizes.num_local_experts), start)
            start += ptx.ld_na_s32(buffer + expert_count(number, src, expert))


@device_function
def count_nothing(out, num_ranks, sizes):
    """What dispatch finds if a peer did not come, or called something else: no tokens. The CPU finds the fault."""
    for src in range(ptx.thread_idx(), num_ranks, ptx.block_dim()):
        ptx.st_weak_s32(out.psum_num_recv_tokens_per_scaleup_rank + 4 * src, 0)
    for expert in range(ptx.thread_idx(), sizes.num_local_experts, ptx.block_dim()):
        ptx.st_weak_s32(out.num_unaligned_recv_tokens_per_expert + 4 * expert, 0)
        ptx.st_weak_s32(out.psum_num_recv_tokens_per_expert + 4 * expert, 0)


@device_function
def count_tokens(out, buffer, number, num_ranks, sizes, has_met):
    """Add up what comes to this rank, and count the dispatch; a block. has_met: all ranks, which called the same"""
    counts = out.psum_num_recv_tokens_per_scaleup_rank != 0
    if counts and has_met:
        if ptx.thread_idx() < 32:
            sum_rank_counts(out, buffer, number, num_ranks, ptx.thread_idx())
        for expert in range(ptx.thread_idx(), sizes.num_local_experts, ptx.block_dim()):
            sum_expert_counts(out, buffer, number, num_ranks, expert)
        ptx.syncthreads()
        for first in range(ptx.thread_idx() // 32 * 32, sizes.num_local_experts, ptx.block_dim()):
            place_rows(out, buffer, number, num_ranks, first, sizes)
    elif counts:
        count_nothing(out, num_ranks, sizes)
    if ptx.thread_idx() == 0:
        ptx.st_weak_s32(buffer + TURN, number + 1)


@kernel(max_threads=128)
def elastic_notify_dispatch(out: ElasticCounts, peers: Peers, bounds: Bounds, sizes: ElasticCountSizes, call: Call):
    """Grid: 1 block. Block: 128 threads, or any multiple of 32."""
    buffer = buffer_of(peers, peers.rank)
    number = ptx.ld_weak_s32(buffer + TURN)
    is_same = meet_block(peers, bounds, call)
    has_met = ptx.bar_red_and(0, ptx.block_dim(), is_same and not has_timed_out(bounds))
    count_tokens(out, buffer, number, peers.num_ranks, sizes, has_met)


@kernel(max_threads=128)
def elastic_notify_combine(num_chunks: I32, peers: Peers, bounds: Bounds, call: Call):
    """Grid: 1 block. Block: 128 threads, or any multiple of 32. num_chunks: of each rank"""
    buffer = buffer_of(peers, peers.rank)
    for rank in range(peers.num_ranks):
        for chunk in range(ptx.thread_idx(), num_chunks, ptx.block_dim()):
            ptx.st_weak_s32(buffer + landed_cell(rank, chunk), 0)
    if ptx.thread_idx() == 0:
        ptx.st_weak_s32(buffer + NEXT_TOKEN, 0)
    meet_block(peers, bounds, call)
