"""Fetch combine: a rank brings the rows of its tokens from where the experts have written them, and adds them up.

 rank d: x[i], in its shared rows <--bulk copy-- sum over the ranks of a token --> combined_x[t] : rank s

 i                   the first row that d has of s, see offer_combine.py, + dst_buffer_slot_idx[t, k]
 order of a sum      biases, then by the last choice that each rank has: that of combine.py, so the bits are the same

 cell                written by         with                       read by           with
 offers[d]           rank d             see offer_combine.py       lanes             ld_na
 x of shared rows    the experts of d   earlier kernels (1)        warps of rank s   bulk copy, or ld_na
 next_token          warps              atom_add_relaxed_gpu       warps             the same
 biases              no thread          -                          warps             bulk copy, or ld_na
 rows[w]             warp w             st_shared                  the same warp     ld_shared, after syncwarp
 stage of a warp     copy engine        bulk copy                  the warp          ld_shared, see staged_sums.py
 combined_x          warps              st_na                      -                 the next kernel

 (1) All ranks have met since, in the kernel before. They meet once more in the kernel behind: then x may be written.

No thread waits: there is no slot, no flag, and the blocks need not be there at once. A row leaves no SM; it crosses the
wire as the answer to a read. An SM that sends is held to what leaves it, one that fetches is not: records/attempts.md.

Compact form without weights. With rows of several experts a rank would fetch each, where it gets one sum by combine.py.

Source: none; DeepEP's combine pushes
"""

from typing import NamedTuple

import nbep.device.primitives as ptx
from nbep.device.jit import device_function, kernel
from nbep.device.kernels.elastic.combine import ElasticSums, add_up, find_owner, list_row, locate_list, take_token
from nbep.device.kernels.elastic.gather_combine import last_of
from nbep.device.kernels.parts.spoil import has_failed, spoil_sums
from nbep.device.kernels.parts.staged_sums import open_sum_stage
from nbep.device.kernels.parts.sums import Listed, list_biases
from nbep.device.layout.elastic import ElasticSlots, offer_cell
from nbep.device.protocols.matrices import matrix_cell
from nbep.device.protocols.peers import Bounds, Peers, buffer_of
from nbep.device.protocols.staging import VEC_BYTES
from nbep.device.protocols.teams import Team
from nbep.device.protocols.waits import has_fault
from nbep.device.types import I32, In


class ElasticWanted(NamedTuple):
    """bias_0 and bias_1 may be absent (0)."""

    bias_0: In  # [num_combined_tokens, hidden_bytes] bf16
    bias_1: In  # [num_combined_tokens, hidden_bytes] bf16
    topk_idx: In  # [num_combined_tokens, num_topk] s64
    dst_buffer_slot_idx: In  # [num_combined_tokens, num_topk] s32


class ElasticFetchSizes(NamedTuple):
    num_combined_tokens: I32
    num_local_experts: I32


class FetchContext(NamedTuple):
    """A kernel's arguments that are no arrays, and its thread."""

    peers: Peers
    bounds: Bounds
    shape: ElasticSlots
    sizes: ElasticFetchSizes
    team: Team


@device_function
def find_first(ctx, of_rows):
    """In lane r where this rank sees the first row that rank r has for it; a warp."""
    peers, lane = ctx.peers, ctx.team.lane
    rank = lane if lane < peers.num_ranks else 0
    cell = buffer_of(peers, peers.rank) + offer_cell(rank)
    begin, row = ptx.ld_na_s32(cell), ptx.ld_na_s32(cell + 4)
    return buffer_of(of_rows, rank) + ptx.s64(begin) * VEC_BYTES + ptx.s64(row) * ctx.shape.hidden_bytes


@device_function
def fetch_token(ctx, out, inputs, token, rank, first, rows, stage, parities):
    """Bring the rows of a token, and add them up; a warp. Returns the next parities.

    rank: in lane k that of choice k, or -1; first: see `find_first`
    """
    shape, lane = ctx.shape, ctx.team.lane
    same = ptx.match_any_s32(ptx.FULL_MASK, rank)
    begin = ptx.shfl_idx_s64(ptx.FULL_MASK, first, rank if rank >= 0 else 0)
    is_row = rank >= 0 and last_of(same) == lane
    index = 0
    if is_row:
        index = ptx.ld_nc_s32(matrix_cell(inputs.dst_buffer_slot_idx, ptx.s64(token), lane, shape.num_topk))
    num_biases = list_biases(rows, (inputs.bias_0, inputs.bias_1), ptx.s64(token), shape.hidden_bytes, lane)
    number = list_row(rows + 8 * num_biases, lane, begin + ptx.s64(index) * shape.hidden_bytes, is_row)
    dst = out.combined_x + ptx.s64(token) * shape.hidden_bytes
    return add_up(ctx, dst, Listed(rows, num_biases + number), stage, parities)


@kernel(max_threads=768)
def elastic_fetch_combine(
    out: ElasticSums,
    inputs: ElasticWanted,
    peers: Peers,
    of_rows: Peers,
    bounds: Bounds,
    shape: ElasticSlots,
    sizes: ElasticFetchSizes,
):
    """Grid: any. Block: a multiple of 32. Shared memory: `elastic_combine_smem_bytes`. of_rows: the shared rows"""
    num_warps = ptx.block_dim() // 32
    warp = ptx.thread_idx() // 32
    lane = ptx.thread_idx() % 32
    ctx = FetchContext(peers, bounds, shape, sizes, Team(False, -1, -1, warp, num_warps, lane))
    stage = open_sum_stage(ptx.smem_base(), num_warps, warp, lane)
    rows = locate_list(num_warps, warp)
    own = buffer_of(peers, peers.rank)
    # A rank that has not come may write its rows still.
    has_rows = ptx.vote_all(ptx.FULL_MASK, not has_fault(bounds))
    first = find_first(ctx, of_rows)
    parities = 0
    token = ptx.shfl_idx_s32(ptx.FULL_MASK, take_token(own, lane), 0)
    while token < sizes.num_combined_tokens and has_rows:
        rank = find_owner(ctx, inputs, token)
        following = take_token(own, lane)
        parities = fetch_token(ctx, out, inputs, token, rank, first, rows, stage, parities)
        token = ptx.shfl_idx_s32(ptx.FULL_MASK, following, 0)
    if has_failed(bounds):
        spoil_sums(out, shape, sizes.num_combined_tokens, lane)
