"""Dispatch layout: count how many tokens go to each rank and expert, and mark which rank needs which token.

 block b: topk_idx[tokens of b] --> shared counts --> totals
 last block: totals --> num_tokens_per_rank, num_tokens_per_rdma_rank, num_tokens_per_expert; totals = 0

 cell                written by   with                     read by      with
 topk_idx            no kernel    -                        all          ld_nc
 shared count[i]     a block      st_shared 0              same block   after syncthreads
                     a block      atom_add_relaxed_cta     same block   ld_shared, after syncthreads
 totals[i]           all blocks   atom_add_relaxed_gpu     last block   ld_weak, after arrivals
                     last block   st_weak 0                (the next launch)
 arrivals            thread 0     atom_add_acq_rel_gpu     same         its return value
                     last block   st_weak 0                (the next launch)
 shared is_last      thread 0     st_shared                same block   ld_shared, after syncthreads
 num_tokens_per_*    last block   st_weak                  -            (the next kernel)
 is_token_in_rank    block b      st_weak                  -            (the next kernel)

The block whose arrival is the last knows that all totals are there: its atomic acquires what the others released. It
leaves totals and arrivals at 0 for the next launch. DeepEP scans all tokens once for every four experts; here each
token is read once.

Source: DeepEP csrc/kernels/layout.cu. Break it: notebooks/02_layout.ipynb
"""

from typing import NamedTuple

import nbep.device.primitives as ptx
from nbep.device.jit import device_function, kernel
from nbep.device.protocols.channels import channel_task_range
from nbep.device.types import I32, In, Out, Sym

RANKS_PER_PASS = 32  # ranks whose membership one 64-bit mask holds with room to spare


class LayoutOutputs(NamedTuple):
    """num_tokens_per_rdma_rank is 0 (absent) inside a node."""

    num_tokens_per_rank: Out  # [num_ranks] s32
    num_tokens_per_rdma_rank: Out  # [num_ranks / num_nvl_peers] s32
    num_tokens_per_expert: Out  # [num_experts] s32
    is_token_in_rank: Out  # [num_tokens, num_ranks] u8


class LayoutWorkspace(NamedTuple):
    totals: Sym  # [num_ranks + num_rdma_ranks + num_experts] s32, 0 between launches
    arrivals: Sym  # s32, 0 between launches


class LayoutSizes(NamedTuple):
    num_tokens: I32
    num_topk: I32
    num_ranks: I32
    num_nvl_peers: I32
    num_experts: I32


@device_function
def num_counters(sizes):
    """Counters of a launch: ranks first, then nodes, then experts. Shared memory holds one s32 each, plus one flag."""
    return sizes.num_ranks + ptx.u32_div(sizes.num_ranks, sizes.num_nvl_peers) + sizes.num_experts


@device_function
def count_expert(expert_counts, expert, first_rank, sizes):
    """Count one choice if its expert is on one of the ranks of this pass; returns that rank's bit."""
    if 0 <= expert < sizes.num_experts:
        rank = ptx.u32_div(expert, ptx.u32_div(sizes.num_experts, sizes.num_ranks)) - first_rank
        if 0 <= rank < RANKS_PER_PASS:
            ptx.atom_add_relaxed_cta_shared_s32(expert_counts + 4 * expert, 1)
            return 1 << rank
    return 0


@device_function
def count_choices(expert_counts, topk_row, first_rank, sizes):
    """Count the experts of one token; returns the ranks that they are on, a bit each. Four loads are in flight."""
    ranks = 0
    for k in range(0, sizes.num_topk, 4):
        a = ptx.ld_nc_s64(topk_row + 8 * k)
        b = ptx.ld_nc_s64(topk_row + 8 * (k + 1)) if k + 1 < sizes.num_topk else -1
        c = ptx.ld_nc_s64(topk_row + 8 * (k + 2)) if k + 2 < sizes.num_topk else -1
        d = ptx.ld_nc_s64(topk_row + 8 * (k + 3)) if k + 3 < sizes.num_topk else -1
        ranks |= count_expert(expert_counts, a, first_rank, sizes)
        ranks |= count_expert(expert_counts, b, first_rank, sizes)
        ranks |= count_expert(expert_counts, c, first_rank, sizes)
        ranks |= count_expert(expert_counts, d, first_rank, sizes)
    return ranks


@device_function
def count_token(out, counts, topk_row, token, sizes):
    """Count one token once for each rank, node and expert that it goes to."""
    rdma_counts = counts + 4 * sizes.num_ranks
    expert_counts = rdma_counts + 4 * ptx.u32_div(sizes.num_ranks, sizes.num_nvl_peers)
    last_node = -1
    for first_rank in range(0, sizes.num_ranks, RANKS_PER_PASS):
        ranks = count_choices(expert_counts, topk_row, first_rank, sizes)
        for rank in range(first_rank, min(first_rank + RANKS_PER_PASS, sizes.num_ranks)):
            chosen = (ranks >> (rank - first_rank)) & 1
            ptx.st_weak_u8(out.is_token_in_rank + token * sizes.num_ranks + rank, chosen)
            if chosen != 0:
                ptx.atom_add_relaxed_cta_shared_s32(counts + 4 * rank, 1)
                node = ptx.u32_div(rank, sizes.num_nvl_peers)
                if node != last_node:
                    last_node = node
                    ptx.atom_add_relaxed_cta_shared_s32(rdma_counts + 4 * node, 1)


@device_function
def store_total(out, index, total, sizes):
    """Write one counter's total to the output that it belongs to."""
    num_rdma_ranks = ptx.u32_div(sizes.num_ranks, sizes.num_nvl_peers)
    if index < sizes.num_ranks:
        ptx.st_weak_s32(out.num_tokens_per_rank + 4 * index, total)
    elif index < sizes.num_ranks + num_rdma_ranks:
        if out.num_tokens_per_rdma_rank != 0:
            ptx.st_weak_s32(out.num_tokens_per_rdma_rank + 4 * (index - sizes.num_ranks), total)
    else:
        ptx.st_weak_s32(out.num_tokens_per_expert + 4 * (index - sizes.num_ranks - num_rdma_ranks), total)


@kernel(max_threads=1024)
def get_dispatch_layout(out: LayoutOutputs, topk_idx: In, workspace: LayoutWorkspace, sizes: LayoutSizes):
    """Grid: any. Block: any multiple of 32. Dynamic shared memory: 4 * (num_counters + 1) bytes."""
    counters = num_counters(sizes)
    counts = ptx.smem_base()
    is_last = counts + 4 * counters
    for i in range(ptx.thread_idx(), counters, ptx.block_dim()):
        ptx.st_shared_s32(counts + 4 * i, 0)
    ptx.syncthreads()

    begin, end = channel_task_range(sizes.num_tokens, ptx.grid_dim(), ptx.block_idx())
    for token in range(begin + ptx.thread_idx(), end, ptx.block_dim()):
        count_token(out, counts, topk_idx + 8 * token * sizes.num_topk, token, sizes)
    ptx.syncthreads()

    for i in range(ptx.thread_idx(), counters, ptx.block_dim()):
        count = ptx.ld_shared_s32(counts + 4 * i)
        if count != 0:
            ptx.atom_add_relaxed_gpu_s32(workspace.totals + 4 * i, count)
    ptx.syncthreads()
    if ptx.thread_idx() == 0:
        arrived = ptx.atom_add_acq_rel_gpu_s32(workspace.arrivals, 1)  # PAIR layout-arrivals (both ends)
        ptx.st_shared_s32(is_last, 1 if arrived == ptx.grid_dim() - 1 else 0)
    ptx.syncthreads()
    if ptx.ld_shared_s32(is_last) != 0:
        for i in range(ptx.thread_idx(), counters, ptx.block_dim()):
            store_total(out, i, ptx.ld_weak_s32(workspace.totals + 4 * i), sizes)
            ptx.st_weak_s32(workspace.totals + 4 * i, 0)
        if ptx.thread_idx() == 0:
            ptx.st_weak_s32(workspace.arrivals, 0)
