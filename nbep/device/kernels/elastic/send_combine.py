"""Send combine: between nodes, a rank puts the sums that it keeps in its outboxes to the ranks that they are for.

 rank d, its outbox of s: slot of token t --put--> slot (place, t) of rank s

 cell                written by        with             read by           with
 x, topk_weights of  combine.py        -                network           bulk copy, see send_dispatch.py (2)
   an outbox's slots
 x, topk_weights of  combine.py        -                lanes             ld_na, no copy engine
   an outbox's slots
 x, topk_weights of  warps of rank d   put_nbi_warp     warps of rank s   see combine.py, after the meeting
   slots at s
 recv_src_metadata   no thread         -                warps             ld_nc
 marks[n, t, d]      gather_combine.py -                lane 0            ld_na (1)
   once more         lane 0            st_weak 0        (combine)         -
 stage of a warp     copy engine       bulk copy        network           after full
 stage, no copy engine  lanes          st_shared        network           after syncwarp

 (1) In hybrid mode with sums on the way. A mark says that this rank sends what its node has of a token.

Warps take tokens in turn, beginning with those of the rank behind their own: otherwise all would send to rank 0 first.
All that goes to a rank is on one queue, and the next kernel's arrival there comes behind it.

Source: DeepEP deep_ep/include/deep_ep/impls/combine.cuh
Break it: records/faults.md, `elastic.send_combine.elastic_send_combine: quiet`: memory check
"""

from typing import NamedTuple

import nbep.device.primitives as ptx
from nbep.device.jit import device_function, kernel
from nbep.device.kernels.elastic.send_dispatch import SEND_THREADS, put_kept
from nbep.device.layout.elastic import (
    ElasticNodes,
    ElasticSlots,
    is_in_node,
    mark_cell,
    metadata_entry,
    outbox_offset,
    slot_bytes,
    slot_offset,
)
from nbep.device.network.seam import Network, Place, own_ptr, quiet
from nbep.device.protocols.peers import Bounds
from nbep.device.protocols.staging import open_stage
from nbep.device.protocols.waits import has_fault
from nbep.device.types import I32, In


class ElasticRoutes(NamedTuple):
    """Of the handle."""

    psum_num_recv_tokens_per_scaleup_rank: In  # [num_ranks] s32, inclusive
    recv_src_metadata: In  # [num_recv_tokens, 2 + num_topk] s32


class ElasticReturnSizes(NamedTuple):
    """has_weights, one_each: 0 or 1; one_each: each row of an expanded token is sent."""

    num_recv_tokens: I32
    has_weights: I32
    one_each: I32


class ReturnContext(NamedTuple):
    """A kernel's arguments, and its thread."""

    network: Network
    shape: ElasticSlots
    nodes: ElasticNodes
    sizes: ElasticReturnSizes
    lane: int


@device_function
def send_sums(ctx, inputs, index, stage, parity):
    """Put what one received token has become, if it is of another node; a warp. Returns the next parity."""
    shape, network, lane = ctx.shape, ctx.network, ctx.lane
    entry = metadata_entry(inputs.recv_src_metadata, shape, index)
    source, last = ptx.ld_nc_s32(entry), ptx.ld_nc_s32(entry + 4)
    peer = ptx.u32_div(source, shape.num_max_tokens) if source >= 0 else network.rank
    last -= peer * shape.num_topk
    if peer >= network.num_ranks or is_in_node(ctx.nodes, network.rank, peer) or not 0 <= last < shape.num_topk:
        return parity
    token = source - peer * shape.num_max_tokens
    left = 1  # slots of the outbox, as bits
    if ctx.sizes.one_each != 0:
        row = ptx.ld_nc_s32(entry + 4 * (2 + lane)) if lane < shape.num_topk else -1
        left = ptx.vote_ballot(ptx.FULL_MASK, row >= 0)
    outbox = outbox_offset(ctx.nodes, network.rank, peer)
    num_bytes = slot_bytes(shape) if ctx.sizes.has_weights != 0 else shape.hidden_bytes
    while left != 0:
        k = ptx.ffs_u32(left) - 1
        left &= left - 1
        place = k if ctx.sizes.one_each != 0 else network.rank if shape.by_rank != 0 else last
        to = Place(slot_offset(shape, place, token), outbox + slot_offset(shape, k, token), peer, 0)
        parity = put_kept(network, to, num_bytes, stage, parity, lane)
    return parity


@device_function
def send_of_node(ctx, number, stage, parity):
    """Put what a token has become on this node, if this rank sends that; a warp. Returns the next parity.

    number: goes through the other nodes in turn, and their tokens
    """
    shape, network, nodes, lane = ctx.shape, ctx.network, ctx.nodes, ctx.lane
    size = nodes.num_nvl_ranks
    num_others = ptx.u32_div(network.num_ranks, size) - 1
    token = ptx.u32_div(number, num_others)
    turn = number - token * num_others
    peer = ptx.u32_mod(network.rank + size * (turn + 1), network.num_ranks)
    cell = own_ptr(network, mark_cell(nodes, shape, peer, token, ptx.u32_mod(network.rank, size)))
    choices = ptx.u32(ptx.shfl_idx_s32(ptx.FULL_MASK, ptx.ld_na_s32(cell) if lane == 0 else 0, 0))
    if choices != 0:
        if lane == 0:
            ptx.st_weak_s32(cell, 0)
        place = network.rank if shape.by_rank != 0 else ptx.bfind_u32(choices)
        num_bytes = slot_bytes(shape) if ctx.sizes.has_weights != 0 else shape.hidden_bytes
        outbox = outbox_offset(nodes, network.rank, peer)
        to = Place(slot_offset(shape, place, token), outbox + slot_offset(shape, 0, token), peer, 0)
        parity = put_kept(network, to, num_bytes, stage, parity, lane)
    return parity


@kernel(max_threads=SEND_THREADS)
def elastic_send_combine(
    inputs: ElasticRoutes,
    network: Network,
    bounds: Bounds,
    shape: ElasticSlots,
    nodes: ElasticNodes,
    sizes: ElasticReturnSizes,
):
    """Grid: any. Block: a multiple of 32. Shared memory: `elastic_send_smem_bytes`."""
    num_warps = ptx.block_dim() // 32
    warp = ptx.thread_idx() // 32
    lane = ptx.thread_idx() % 32
    if ptx.vote_any(ptx.FULL_MASK, has_fault(bounds)):
        return  # there are no sums
    ctx = ReturnContext(network, shape, nodes, sizes, lane)
    ends = inputs.psum_num_recv_tokens_per_scaleup_rank
    num_tokens = min(ptx.ld_nc_s32(ends + 4 * (network.num_ranks - 1)), sizes.num_recv_tokens)
    first = ptx.ld_nc_s32(ends + 4 * network.rank)
    stage = open_stage(ptx.smem_base(), warp, lane)
    parity = 0
    if nodes.num_sharing > 1:
        num_tokens = (ptx.u32_div(network.num_ranks, nodes.num_nvl_ranks) - 1) * shape.num_max_tokens
    number = ptx.block_idx() + ptx.grid_dim() * warp
    while number < num_tokens:
        index = first + number
        if nodes.num_sharing > 1:
            parity = send_of_node(ctx, number, stage, parity)
        else:
            parity = send_sums(ctx, inputs, index - num_tokens if index >= num_tokens else index, stage, parity)
        number += ptx.grid_dim() * num_warps
    quiet(network, lane)
