"""Sums of rows that a rank fetches from where the others have them: what the combines that pull are made of.

 rank d: x[i], topk_weights[i] <--bulk copy, or loads-- sum over the ranks of a token --> combined_x[t] : rank s

 cell               written by         with                   read by           with
 offers[d], at s    rank d             see offer_rows.py      lanes             ld_na
 x, topk_weights    earlier kernels    (1)                    warps of rank s   bulk copy, or ld_na
 next_token         warps              atom_add_relaxed_gpu   warps             the same
 biases             no thread          -                      warps             bulk copy, or ld_na
 rows[w]            warp w             st_shared              the same warp     ld_shared, after syncwarp
 stage of a warp    copy engine        bulk copy              the warp          ld_shared, see staged_sums.py
 combined_ arrays   warps              st_na                  -                 the next kernel

 (1) All ranks have met since, in the kernel before. They meet once more in the kernel behind: then both may be written.

No thread waits: there is no slot, no flag, and the blocks need not be there at once. A row leaves no SM; it crosses the
wire as the answer to a read. An SM that sends is held to what leaves it, one that fetches is not: records/attempts.md.
What a rank has of its own tokens is added where it is.
"""

from typing import NamedTuple

import nbep.device.primitives as ptx
from nbep.device.alignment import matrix_cell
from nbep.device.jit import device_function
from nbep.device.kernels.parts.spoil import has_failed, spoil_sums
from nbep.device.kernels.parts.staged_sums import add_up, list_row, open_sum_stage, take_token
from nbep.device.kernels.parts.sums import list_biases
from nbep.device.layout.intranode import OFFER_BYTES
from nbep.device.protocols.peers import Bounds, Peers, buffer_of
from nbep.device.protocols.staging import VEC_BYTES
from nbep.device.protocols.teams import Team
from nbep.device.protocols.waits import has_fault
from nbep.device.types import I32, Out


class OfferCells(NamedTuple):
    """Where a rank's buffer has next_token, and what the others offer.

    column, stride: where the prefix sums of received rows say how many came from ranks 0 to r: at column + stride * r
    """

    next_token: I32
    offers: I32
    column: I32
    stride: I32


class FetchShape(NamedTuple):
    hidden_bytes: I32
    num_topk: I32
    num_combined_tokens: I32


class FetchedSums(NamedTuple):
    """combined_topk_weights may be absent (0)."""

    combined_x: Out  # [num_combined_tokens, hidden_bytes] bf16
    combined_topk_weights: Out  # [num_combined_tokens, num_topk] f32


class FetchContext(NamedTuple):
    """A kernel's arguments that are no arrays, and its thread. of_rows: the memories in which the rows lie"""

    peers: Peers
    of_rows: Peers
    bounds: Bounds
    cells: OfferCells
    shape: FetchShape
    sizes: NamedTuple
    team: Team


class Origins(NamedTuple):
    """In lane r: where this rank sees the first row that rank r has for it, and the weights of that."""

    x: int
    topk_weights: int


class Found(NamedTuple):
    """What a lane knows of a token: a rank that has a row of it, or -1; its place among those that went there.

    is_row: whether this lane lists the row; sums are in the order of lanes
    """

    rank: int
    place: int
    is_row: bool


@device_function
def offer_cell(cells, src):
    """Where a rank finds what another one has for it: where x and topk_weights begin, in 16 bytes; the first row."""
    return cells.offers + OFFER_BYTES * src


@device_function
def first_row(prefix, cells, src):
    """Which received row is the first that came from a rank."""
    return ptx.ld_nc_s32(prefix + 4 * (cells.column + cells.stride * (src - 1))) if src > 0 else 0


@device_function
def find_origins(ctx, inputs):
    """What this lane has to know of its rank; a warp."""
    peers, shape = ctx.peers, ctx.shape
    rank = ctx.team.lane if ctx.team.lane < peers.num_ranks else 0
    cell = buffer_of(peers, peers.rank) + offer_cell(ctx.cells, rank)
    memory = buffer_of(ctx.of_rows, rank)
    x = memory + ptx.s64(ptx.ld_na_s32(cell)) * VEC_BYTES
    topk_weights = memory + ptx.s64(ptx.ld_na_s32(cell + 4)) * VEC_BYTES
    row = ptx.s64(ptx.ld_na_s32(cell + 8))
    if rank == peers.rank:
        x, topk_weights = inputs.x, inputs.topk_weights
    return Origins(x + row * shape.hidden_bytes, topk_weights + 4 * row * shape.num_topk)


@device_function
def fetch_token(weigh, ctx, out, inputs, token, found, origins, stage):
    """Bring the rows of a token and their weights, and add them up; a warp. Returns the stage, behind its fills."""
    shape, lane = ctx.shape, ctx.team.lane
    rank, index = max(found.rank, 0), ptx.s64(found.place)
    x = ptx.shfl_idx_s64(ptx.FULL_MASK, origins.x, rank) + index * shape.hidden_bytes
    number = list_biases(stage.rows, (inputs.bias_0, inputs.bias_1), ptx.s64(token), shape.hidden_bytes, lane)
    number = list_row(stage, number, lane, x, found.is_row)
    stage = add_up(ctx, out.combined_x + ptx.s64(token) * shape.hidden_bytes, number, stage)
    if out.combined_topk_weights != 0:
        weights = ptx.shfl_idx_s64(ptx.FULL_MASK, origins.topk_weights, rank) + 4 * index * shape.num_topk
        weight = weigh(ctx, found, weights)
        if lane < shape.num_topk:
            ptx.st_na_f32(matrix_cell(out.combined_topk_weights, ptx.s64(token), lane, shape.num_topk), weight)
    return stage


@device_function
def fetch_tokens(find, weigh, ctx, out, inputs):
    """The tokens that this warp gets hold of.

    find(ctx, inputs, token): what a lane knows of a token
    weigh(ctx, found, weights): the weight of choice `lane`; weights: where those of the lane's row are
    """
    lane = ctx.team.lane
    stage = open_sum_stage(ctx.team.num_warps, ctx.team.warp, lane)
    next_token = buffer_of(ctx.peers, ctx.peers.rank) + ctx.cells.next_token
    # A rank that has not come may write its rows still.
    has_rows = ptx.vote_all(ptx.FULL_MASK, not has_fault(ctx.bounds))
    origins = find_origins(ctx, inputs)
    token = ptx.shfl_idx_s32(ptx.FULL_MASK, take_token(next_token, lane), 0)
    while token < ctx.shape.num_combined_tokens and has_rows:
        found = find(ctx, inputs, token)
        following = take_token(next_token, lane)
        stage = fetch_token(weigh, ctx, out, inputs, token, found, origins, stage)
        token = ptx.shfl_idx_s32(ptx.FULL_MASK, following, 0)
    if has_failed(ctx.bounds):
        spoil_sums(out, ctx.shape, ctx.shape.num_combined_tokens, lane)
