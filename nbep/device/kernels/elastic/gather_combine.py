"""Gather combine: in hybrid mode one rank of a node adds up what all ranks of the node have made of a token.

 rank d: marks[node of s, t, each rank of the node] = its choices of token t of rank s
         slot of t in the outbox of s of each of them --sum, in place--> the same slot of rank d

 rank d              that of its node with the local index of s, so that s itself adds up what its own node has
 order of a sum      by the last choice that each rank has, as in combine.py; rounded to bf16

 cell                written by    with                       read by          with
 marks[n, t, q]      rank q        see combine.py (1)         lane q           ld_na
   once more         lane q        st_weak 0, or all choices  (send_combine)   -
 x, topk_weights of  rank q        see combine.py (1)         warps of rank d  bulk copy, or ld_na
   slots of q
 x of own slots      warps         st_na                      (send_combine)   -
 topk_weights of it  warps         st_na                      (send_combine)   -
 rows[w]             warp w        st_shared                  the same warp    ld_shared, after syncwarp
 stage of a warp     copy engine   bulk copy                  the warp         ld_shared, see staged_sums.py

 (1) The ranks of the node have met since then, in the kernel before: cached_notify_dispatch, which resets nothing here.

Of another node the slots are those of the outboxes, of the own node the own slots, which the ranks of the node have
filled. What leaves for another node stays marked at this rank's own place, with the choices of all.

Warps take nodes in turn, beginning with the one behind their own, and the tokens of each.

Source: DeepEP deep_ep/include/deep_ep/impls/hybrid_combine.cuh (forward warps)
Break it: records/faults.md, `elastic.gather_combine.gather_token: reset of cell`: race
"""

from typing import NamedTuple

import nbep.device.primitives as ptx
from nbep.device.jit import device_function, kernel
from nbep.device.kernels.elastic.combine import CombineContext
from nbep.device.kernels.parts.staged_sums import add_up, list_row, open_sum_stage
from nbep.device.layout.elastic import (
    THREADS_BEFORE_SM90,
    ElasticNodes,
    ElasticSlots,
    mark_cell,
    outbox_offset,
    slot_offset,
)
from nbep.device.protocols.peers import Bounds, Peers, buffer_of
from nbep.device.protocols.teams import Team
from nbep.device.protocols.waits import has_fault
from nbep.device.types import I32


class ElasticGatherSizes(NamedTuple):
    """has_weights: 0 or 1"""

    has_weights: I32


class Part(NamedTuple):
    """The sum that a rank of this node has for a token: the rank's local index, and its last choice."""

    local: int
    last: int


@device_function
def find_parts(mark, lane):
    """In lane k the part that has choice k, and the rank whose last choice is k, or -1; the choices of all, as bits.

    mark: in lane q the choices that the rank with this local index has. A warp
    """
    left = ptx.vote_ballot(ptx.FULL_MASK, mark != 0)
    local, last, ending, choices = -1, -1, -1, 0
    while left != 0:
        peer = ptx.ffs_u32(left) - 1
        left &= left - 1
        of_peer = ptx.u32(ptx.shfl_idx_s32(ptx.FULL_MASK, mark, peer))
        its_last = ptx.bfind_u32(of_peer)
        if (of_peer >> lane) & 1 != 0:
            local, last = peer, its_last
        if its_last == lane:
            ending = peer
        choices |= of_peer
    return Part(local, last), ending, choices


@device_function
def find_slot(ctx, src, token, part):
    """Where a rank of this node has its sum for a token of a rank."""
    peers, shape, nodes = ctx.peers, ctx.shape, ctx.nodes
    owner = peers.rank - ptx.u32_mod(peers.rank, nodes.num_nvl_ranks) + part.local
    if src == peers.rank:
        place = owner if shape.by_rank != 0 else part.last
        return buffer_of(peers, src) + slot_offset(shape, place, token)
    return buffer_of(peers, owner) + outbox_offset(nodes, owner, src) + slot_offset(shape, 0, token)


@device_function
def gather_token(ctx, src, token, stage):
    """Add up what the node has of a token of a rank; a warp. Returns the stage, behind its fills."""
    peers, shape, nodes, lane = ctx.peers, ctx.shape, ctx.nodes, ctx.team.lane
    own = ptx.u32_mod(peers.rank, nodes.num_nvl_ranks)
    cell = buffer_of(peers, peers.rank) + mark_cell(nodes, shape, src, token, lane)
    mark = ptx.ld_na_s32(cell) if lane < nodes.num_nvl_ranks else 0
    part, ending, choices = find_parts(mark, lane)
    if choices == 0:
        return stage
    dst = find_slot(ctx, src, token, Part(own, ptx.bfind_u32(choices)))
    slot = find_slot(ctx, src, token, Part(ending, lane)) if ending >= 0 else dst
    if ptx.vote_any(ptx.FULL_MASK, slot != dst):  # else it is all there
        number = list_row(stage, 0, lane, slot, ending >= 0)
        stage = add_up(ctx, dst, number, stage)
        if ctx.sizes.has_weights != 0 and part.local >= 0:
            weights = find_slot(ctx, src, token, part) + shape.hidden_bytes
            ptx.st_na_f32(dst + shape.hidden_bytes + 4 * lane, ptx.ld_na_f32(weights + 4 * lane))
    if lane == own:
        ptx.st_weak_s32(cell, ptx.s32(choices) if src != peers.rank else 0)
    elif mark != 0:
        ptx.st_weak_s32(cell, 0)
    return stage


@kernel(max_threads=768, max_threads_before_sm90=THREADS_BEFORE_SM90)
def elastic_gather_combine(
    peers: Peers,
    bounds: Bounds,
    shape: ElasticSlots,
    nodes: ElasticNodes,
    sizes: ElasticGatherSizes,
):
    """Grid: any. Block: a multiple of 32. Shared memory: `sums_smem_bytes`."""
    num_warps = ptx.block_dim() // 32
    warp = ptx.thread_idx() // 32
    lane = ptx.thread_idx() % 32
    if ptx.vote_any(ptx.FULL_MASK, has_fault(bounds)):
        return  # there are no sums
    ctx = CombineContext(peers, bounds, shape, sizes, nodes, Team(True, -1, -1, warp, num_warps, lane))
    stage = open_sum_stage(num_warps, warp, lane)
    num_nodes = ptx.u32_div(peers.num_ranks, nodes.num_nvl_ranks)
    number = ptx.block_idx() + ptx.grid_dim() * warp
    while number < num_nodes * shape.num_max_tokens:
        token = ptx.u32_div(number, num_nodes)
        turn = number - token * num_nodes + 1
        src = ptx.u32_mod(peers.rank + nodes.num_nvl_ranks * turn, peers.num_ranks)
        stage = gather_token(ctx, src, token, stage)
        number += ptx.grid_dim() * num_warps
