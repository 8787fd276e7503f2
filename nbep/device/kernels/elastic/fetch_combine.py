"""Fetch combine: a rank brings the rows of its tokens from where the experts have written them, and adds them up.

 rank d: x[i], in its shared rows <--bulk copy-- sum over the ranks of a token --> combined_x[t] : rank s

 i                   the first row that d has of s, see offer_rows.py, + dst_buffer_slot_idx[t, k]
 order of a sum      biases, then by the last choice that each rank has: that of combine.py, so the bits are the same
 cells               see fetched_sums.py

Compact form. With rows of several experts a rank would fetch each, where it gets one sum by combine.py.

Source: none; DeepEP's combine pushes
Break it: records/faults.md, `staged_sums.sum_rows_staged: wait_half`: memory check
"""

from typing import NamedTuple

import nbep.device.primitives as ptx
from nbep.device.alignment import matrix_cell
from nbep.device.jit import device_function, kernel
from nbep.device.kernels.elastic.combine import find_owner
from nbep.device.kernels.parts.fetched_sums import (
    FetchContext,
    FetchedSums,
    FetchShape,
    Found,
    OfferCells,
    fetch_tokens,
)
from nbep.device.protocols.peers import Bounds, Peers
from nbep.device.protocols.teams import Team
from nbep.device.types import I32, In


class ElasticWanted(NamedTuple):
    """topk_weights, bias_0 and bias_1 may be absent (0)."""

    x: In  # [num_recv_tokens, hidden_bytes] bf16: only rows of the rank's own tokens are read here
    topk_weights: In  # [num_recv_tokens, num_topk] f32: the same
    bias_0: In  # [num_combined_tokens, hidden_bytes] bf16
    bias_1: In  # [num_combined_tokens, hidden_bytes] bf16
    topk_idx: In  # [num_combined_tokens, num_topk] s64
    dst_buffer_slot_idx: In  # [num_combined_tokens, num_topk] s32


class ElasticFetchSizes(NamedTuple):
    num_local_experts: I32


@device_function
def find_choice(ctx, inputs, token):
    """In lane k what is known of choice k of a token."""
    shape, lane = ctx.shape, ctx.team.lane
    rank = find_owner(ctx, inputs, token)
    is_last = ptx.bfind_u32(ptx.match_any_s32(ptx.FULL_MASK, rank)) == lane
    index = 0
    if rank >= 0:
        index = ptx.ld_nc_s32(matrix_cell(inputs.dst_buffer_slot_idx, ptx.s64(token), lane, shape.num_topk))
    return Found(rank, index, rank >= 0 and is_last)


@device_function
def weight_of_choice(ctx, found, weights):
    """The weight that the rank of choice `lane` has for it; 0 for a choice that is unused."""
    return ptx.ld_na_f32(weights + 4 * ctx.team.lane) if found.rank >= 0 else ptx.f32(0)


@kernel(max_threads=768)
def elastic_fetch_combine(
    out: FetchedSums,
    inputs: ElasticWanted,
    peers: Peers,
    of_rows: Peers,
    bounds: Bounds,
    cells: OfferCells,
    shape: FetchShape,
    sizes: ElasticFetchSizes,
):
    """Grid: any. Block: a multiple of 32. Shared memory: `sums_smem_bytes`. of_rows: the shared rows"""
    warp, lane = ptx.thread_idx() // 32, ptx.thread_idx() % 32
    team = Team(False, -1, -1, warp, ptx.block_dim() // 32, lane)
    ctx = FetchContext(peers, of_rows, bounds, cells, shape, sizes, team)
    fetch_tokens(find_choice, weight_of_choice, ctx, out, inputs)
