"""Direct combine: a rank brings the rows of its tokens from where the others have them, and adds them up.

 rank d: x[i], in the area <--bulk copy-- sum over d --> combined_x[t] : rank s

 i                   the first row that d has of s, see offer_rows.py, + the token's index among those that went to d
 order of a sum      biases, then by rank
 cells               see fetched_sums.py

Source: DeepEP csrc/kernels/intranode.cu, combine, which pushes into rings
"""

from typing import NamedTuple

import nbep.device.primitives as ptx
from nbep.device.alignment import matrix_cell
from nbep.device.jit import device_function, kernel
from nbep.device.kernels.parts.fetched_sums import (
    FetchContext,
    FetchedSums,
    FetchShape,
    Found,
    OfferCells,
    fetch_tokens,
)
from nbep.device.protocols.peers import CLUSTERS, Bounds, Peers
from nbep.device.protocols.teams import Team
from nbep.device.types import I32, In


class DirectCombineInputs(NamedTuple):
    """topk_weights, bias_0 and bias_1 may be absent (0)."""

    x: In  # [num_tokens, hidden_bytes] bf16: only rows of the rank's own tokens are read here
    topk_weights: In  # [num_tokens, num_topk] f32: the same
    bias_0: In  # [num_combined_tokens, hidden_bytes] bf16
    bias_1: In  # [num_combined_tokens, hidden_bytes] bf16
    channel_prefix_matrix: In  # [num_ranks, num_channels] s32, inclusive
    send_head: In  # [num_combined_tokens, num_ranks] s32: index among those of the channel to the rank, or negative


class DirectCombineSizes(NamedTuple):
    num_channels: I32


@device_function
def find_row(ctx, inputs, token):
    """In lane r what is known of the row of rank r."""
    peers, lane, num_channels = ctx.peers, ctx.team.lane, ctx.sizes.num_channels
    head, start = -1, 0
    if lane < peers.num_ranks:
        head = ptx.ld_nc_s32(matrix_cell(inputs.send_head, token, lane, peers.num_ranks))
        channel = ptx.u32_div(token, ptx.u32_div(ctx.shape.num_combined_tokens + num_channels - 1, num_channels))
        if channel > 0:
            start = ptx.ld_nc_s32(matrix_cell(inputs.channel_prefix_matrix, lane, channel - 1, num_channels))
    return Found(lane if head >= 0 else -1, start + head, head >= 0)


@device_function
def sum_weights_of(ctx, found, weights):
    """The sum of the weights that the ranks have for choice `lane`."""
    total = ptx.f32(0)
    left = ptx.vote_ballot(ptx.FULL_MASK, found.is_row)
    while left != 0:
        of_rank = ptx.shfl_idx_s64(ptx.FULL_MASK, weights, ptx.ffs_u32(left) - 1)
        left &= left - 1
        if ctx.team.lane < ctx.shape.num_topk:
            total += ptx.ld_na_f32(of_rank + 4 * ctx.team.lane)
    return total


@kernel(max_threads=768, clusters=CLUSTERS)
def direct_combine(
    out: FetchedSums,
    inputs: DirectCombineInputs,
    peers: Peers,
    bounds: Bounds,
    cells: OfferCells,
    shape: FetchShape,
    sizes: DirectCombineSizes,
):
    """Grid: any. Block: a multiple of 32. Shared memory: `sums_smem_bytes`. peers: of the areas"""
    warp, lane = ptx.thread_idx() // 32, ptx.thread_idx() % 32
    team = Team(False, -1, -1, warp, ptx.block_dim() // 32, lane)
    ctx = FetchContext(peers, peers, bounds, cells, shape, sizes, team)
    fetch_tokens(find_row, sum_weights_of, ctx, out, inputs)
