"""Send dispatch: between nodes, a rank puts what others want of its half into their inboxes of it.

 rank s, its half: x[t] ---------------------------------put--> x[t] of the inbox of s at q, if t goes to a rank of q
                   scales, topk_idx, .. of all tokens ---put--> the same place there
                   lists[r], for each rank r of q
 its outbox of r:  rank_counts, expert_counts ------------put--> those of rank r

 The ranks of q: q alone, so that a row crosses the network once for each rank that wants it. In hybrid mode all ranks
 of its node, which read its inbox, and q is the one with the local index of s: once for each node.

 cell                    written by       with            read by             with
 x, scales, topk_idx,    publish.py (1)   -               network (2)         bulk copy; topk_idx ld_nc
   topk_weights, numbers,
   lists of a half
   of an inbox, at q     warps of rank s  put_nbi_warp    the ranks of q      see dispatch.py, after the meeting
 rank_counts[half, s],   warps of rank s  put_nbi_warp    rank r              see meet.py
   expert_counts, at r
   of an outbox, here    publish.py       -               network (2)         bulk copy; rank_counts ld_nc
 x, scales, topk_idx,    publish.py (1)   -               lanes               ld_na, no copy engine
   topk_weights, lists,
   numbers, rank_counts,
   expert_counts
 stage of a warp         copy engine      bulk copy       network             after full
 stage, no copy engine   lanes            st_shared       network             after syncwarp

 (1) The kernel before: see its ledger.
 (2) Where it goes to mapped memory: the warp that fills its stage. Else the NIC, or NVSHMEM.

Rows leave from where they lie: see put_kept. What goes with them is small, 16 bytes a choice and the scales, and goes
to every inbox for all tokens, in few messages; rows go where they are wanted.

All that goes to a rank is on one queue: the next kernel's arrival there comes behind it.

Who writes into an inbox has met all that read it since they have: at the meeting of the dispatch before. And who lays
out its half anew has met since all that have got this one: a rank comes to the next meeting only after the meeting of
this one, behind which all is here.

Source: DeepEP deep_ep/include/deep_ep/impls/dispatch.cuh (dispatch warps), which puts from the copy engine's stage
Break it: records/faults.md, `elastic.send_dispatch.elastic_send_dispatch: quiet`: memory check
"""

from typing import NamedTuple

import nbep.device.primitives as ptx
from nbep.device.alignment import align_up
from nbep.device.jit import device_function, kernel
from nbep.device.layout.elastic import (
    COUNTS_HEAD,
    MESSAGE_BYTES,
    TURN,
    ElasticNodes,
    ElasticPlaces,
    ElasticShape,
    counts_row,
    half_offset,
    inbox_offset,
    is_in_node,
    list_offset,
    outbox_offset,
    rank_count,
    relay_of,
)
from nbep.device.network.seam import Network, Place, further, is_message, own_ptr, put_nbi_warp, quiet
from nbep.device.protocols.copies import Row, begin_copy, end_fill
from nbep.device.protocols.peers import Bounds
from nbep.device.protocols.staging import STAGE_STRIDE, open_stage
from nbep.device.protocols.waits import has_timed_out
from nbep.device.types import I32

SEND_THREADS = 384  # of a block at most: over queue pairs more have not enough registers
NUMBERS_ARRAY = 3  # goes only if choices are numbered, as those behind it
LIST_ARRAY = 4  # for one rank, as the next one
COUNTS_ARRAY = 5


class ElasticSendSizes(NamedTuple):
    """has_weights, does_number: 0 or 1; see PublishSizes."""

    num_tokens: I32
    num_experts: I32
    has_weights: I32
    does_number: I32


class SendContext(NamedTuple):
    """A kernel's arguments, and its thread."""

    network: Network
    places: ElasticPlaces
    shape: ElasticShape
    nodes: ElasticNodes
    sizes: ElasticSendSizes
    lane: int


def elastic_send_smem_bytes(num_threads: int) -> int:
    """Dynamic shared memory of a block: a stage for each warp."""
    return STAGE_STRIDE * (num_threads // 32)


@device_function
def put_kept(network, place, num_bytes, stage, parity, lane):
    """Start to put what this rank's buffer has at place.src; a warp. Returns the parity of the stage's next fill.

    An earlier kernel has written it, so it is what keep_message would keep there. Only what goes to mapped memory takes
    the way through the stage.
    """
    done = 0
    while done < num_bytes:
        part = min(num_bytes - done, stage.room)
        at = further(place, done)
        if not is_message(network, place.peer):
            row = Row(own_ptr(network, at.src), part, 0)
            begin_copy(row, stage, lane)
            parity = end_fill(ptx.ld_na_v4, row, stage, parity, lane)
        put_nbi_warp(network, at, stage.data, part, lane)
        done += part
    return parity


@device_function
def to_inbox(ctx, src, peer):
    """The way of what lies in a half of this rank: to the same place of its inbox at a peer."""
    return Place(inbox_offset(ctx.nodes, peer, ctx.network.rank) + src, src, peer, 0)


@device_function
def find_array(ctx, half, number, peer, which):
    """Where one of the arrays that go with rows goes, for a peer, and how many bytes of it.

    half: its offset; which: 0 to 4 of the half, COUNTS_ARRAY the counts for the peer
    """
    places, shape, sizes, rank = ctx.places, ctx.shape, ctx.sizes, ctx.network.rank
    num_choices = sizes.num_tokens * shape.num_topk
    outbox = outbox_offset(ctx.nodes, rank, peer)
    if which == COUNTS_ARRAY:
        row = counts_row(number, rank)
        num_bytes = COUNTS_HEAD + 4 * ptx.u32_div(sizes.num_experts, ctx.network.num_ranks)
        return Place(row, outbox + row, peer, 0), num_bytes
    begin, num_bytes = half + places.topk_idx, 8 * num_choices
    if which == 1:
        begin, num_bytes = half + places.scales, 4 * sizes.num_tokens * shape.num_scales
    elif which == 2:
        begin, num_bytes = half + places.topk_weights, 4 * num_choices * sizes.has_weights
    elif which == 3:
        begin, num_bytes = half + places.numbers, 4 * num_choices
    elif which == LIST_ARRAY:
        begin = half + list_offset(places, shape, peer)
        num_bytes = 4 * ptx.ld_nc_s32(own_ptr(ctx.network, outbox + rank_count(number, rank)))
    return to_inbox(ctx, begin, relay_of(ctx.nodes, rank, peer)), num_bytes


@device_function
def send_arrays(ctx, half, number, peer, stage, parity):
    """All but rows, for one rank, in whole messages; a warp. Returns the parity of the stage's next fill."""
    first = 0 if relay_of(ctx.nodes, ctx.network.rank, peer) == peer else LIST_ARRAY  # the rest is there once
    for which in range(first, COUNTS_ARRAY + 1 if ctx.sizes.does_number != 0 else NUMBERS_ARRAY):
        place, num_bytes = find_array(ctx, half, number, peer, which)
        if num_bytes > 0:
            parity = put_kept(ctx.network, place, align_up(num_bytes, MESSAGE_BYTES), stage, parity, ctx.lane)
    return parity


@device_function
def find_remote(ctx, half, token):
    """In lane k the rank that gets the row for choice k, if that is of another node; else -1."""
    network, lane = ctx.network, ctx.lane
    rank = -1
    if lane < ctx.shape.num_topk:
        choice = token * ctx.shape.num_topk + lane
        expert = ptx.ld_nc_s64(own_ptr(network, half + ctx.places.topk_idx) + 8 * choice)
        if 0 <= expert < ctx.sizes.num_experts:
            rank = ptx.u32_div(expert, ptx.u32_div(ctx.sizes.num_experts, network.num_ranks))
            rank = -1 if is_in_node(ctx.nodes, network.rank, rank) else relay_of(ctx.nodes, network.rank, rank)
    return rank


@device_function
def send_token(ctx, half, token, stage, parity):
    """Put a row to where it goes in other nodes, once to each; a warp. Returns the parity of the stage's next fill."""
    rank = find_remote(ctx, half, token)
    left = ptx.vote_ballot(ptx.FULL_MASK, rank >= 0)
    while left != 0:
        peer = ptx.shfl_idx_s32(ptx.FULL_MASK, rank, ptx.ffs_u32(left) - 1)
        left &= ~ptx.vote_ballot(ptx.FULL_MASK, rank == peer)
        src = half + ctx.places.x + ptx.s64(token) * ctx.shape.hidden_bytes
        parity = put_kept(ctx.network, to_inbox(ctx, src, peer), ctx.shape.hidden_bytes, stage, parity, ctx.lane)
    return parity


@kernel(max_threads=SEND_THREADS)
def elastic_send_dispatch(
    network: Network,
    bounds: Bounds,
    places: ElasticPlaces,
    shape: ElasticShape,
    nodes: ElasticNodes,
    sizes: ElasticSendSizes,
):
    """Grid: any. Block: a multiple of 32. Shared memory: `elastic_send_smem_bytes`."""
    num_warps = ptx.block_dim() // 32
    warp = ptx.thread_idx() // 32
    lane = ptx.thread_idx() % 32
    if ptx.vote_any(ptx.FULL_MASK, has_timed_out(bounds)):
        return  # a peer that is only late may still read what is there
    ctx = SendContext(network, places, shape, nodes, sizes, lane)
    number = ptx.ld_nc_s32(own_ptr(network, TURN))
    half = half_offset(places, number)
    stage = open_stage(ptx.smem_base(), warp, lane)
    parity = 0
    job = ptx.block_idx() + ptx.grid_dim() * warp
    while job < network.num_ranks + sizes.num_tokens:
        if job >= network.num_ranks:
            parity = send_token(ctx, half, job - network.num_ranks, stage, parity)
        elif not is_in_node(nodes, network.rank, job):
            parity = send_arrays(ctx, half, number, job, stage, parity)
        job += ptx.grid_dim() * num_warps
    quiet(network, lane)
