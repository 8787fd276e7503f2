"""Publish: a rank lays its tokens out where the others read them, and numbers its choices. First part of a dispatch.

 block 0:          numbers the choices of each expert, in order -----> numbers[t, k] of the own half
 block 1:          lists the tokens that go to each rank, in order --> lists[r, i] of the own half
 others:           choices and weights; x[t] and its scales ----------> row t of the own half

 cell                    written by     with                   read by              with
 turn                    the owner      see notify.py          all warps            ld_nc
 x of a half             a warp         bulk copy, or st_na    all ranks            see dispatch.py (1)
 offers[s], at each rank a thread       st_na                  that rank            see dispatch.py (2)
 scales of a half        a warp         st_na                  all ranks            see dispatch.py (1)
 topk_idx, topk_weights  a thread       st_na                  all ranks            see dispatch.py (1)
 numbers, lists, counts  see number_choices.py                 all ranks            see dispatch.py (1)
 topk_idx (the handle's) a thread       st_na                  the next kernel      -
 stage of a warp         copy engine    bulk copy              copy engine          after full

 (1) The next kernel meets all ranks. Who reads this half does so before it comes to the meeting of the next dispatch,
     or of a combine; and this rank comes here again for the same half only after that.
 (2) All ranks have met behind the last call that has read it. x stays where it is then, in the shared rows, and its
     scales, if they lie there, too.

So there is no ring and no flow control, and receivers fetch. A row crosses the wire once for each rank that wants it,
also where several experts there get a copy. What comes lies in ordinary arrays, which no later call overwrites.

With one block, or two, these number and list first, and then lay out rows as well. The tables that they need for that
lie where their stages are later.

Source: DeepEP deep_ep/include/deep_ep/impls/dispatch.cuh (notify warps), which adds up counts with atomics and pushes
Break it: records/faults.md, `elastic.publish.elastic_publish: syncthreads`: race
"""

from typing import NamedTuple

import nbep.device.primitives as ptx
from nbep.device.jit import device_function, kernel
from nbep.device.kernels.elastic.number_choices import TABLE_BYTES, list_tokens, number_choices
from nbep.device.kernels.parts.header import Scales, copy_scales
from nbep.device.layout.elastic import OFFERS, THREADS_BEFORE_SM90, TURN, ElasticPlaces, ElasticShape, half_offset
from nbep.device.layout.intranode import OFFER_BYTES
from nbep.device.protocols.copies import Row, begin_copy, end_copy
from nbep.device.protocols.peers import Bounds, Peers, buffer_of
from nbep.device.protocols.staging import STAGE_STRIDE, open_stage
from nbep.device.protocols.teams import Context, Team
from nbep.device.protocols.waits import has_timed_out
from nbep.device.types import I32, In, Out


class PublishOutputs(NamedTuple):
    """Both may be absent (0): a handle has them."""

    topk_idx: Out  # [num_tokens, num_topk] s64
    dst_buffer_slot_idx: Out  # [num_tokens, num_topk] s32: the token's index among those that go to the choice's rank


class PublishInputs(NamedTuple):
    """x_scales and topk_weights may be absent (0)."""

    x: In  # [num_tokens, hidden_bytes]
    x_scales: In  # [num_tokens, num_scales] 4 bytes each, any strides
    topk_idx: In  # [num_tokens, num_topk] s64
    topk_weights: In  # [num_tokens, num_topk] f32


class PublishSizes(NamedTuple):
    """Strides count scales, not bytes. does_number: 0 with a handle, which knows where rows go.

    x_begin, scales_begin: 0 if they are laid out; else 1 more than where they begin in this rank's shared rows, in 16
    bytes
    """

    num_tokens: I32
    num_experts: I32
    does_number: I32
    scale_token_stride: I32
    scale_hidden_stride: I32
    x_begin: I32
    scales_begin: I32


def publish_smem_bytes(num_threads: int, has_tma: bool) -> int:
    """Dynamic shared memory of a block: a table for each warp, later its stage, where there are bulk copies."""
    return (STAGE_STRIDE if has_tma else TABLE_BYTES) * (num_threads // 32)


@device_function
def lay_out_token(ctx, inputs, half, token, stage, parity):
    """Copy a token and its scales to its row of the half; one warp. Returns the parity of the next copy."""
    places, shape, sizes, lane = ctx.places, ctx.shape, ctx.sizes, ctx.team.lane
    row = Row(inputs.x + token * shape.hidden_bytes, shape.hidden_bytes, 0)
    if sizes.x_begin == 0:
        begin_copy(row, stage, lane)
    if sizes.scales_begin == 0:
        scales = inputs.x_scales + 4 * token * sizes.scale_token_stride
        scales = Scales(scales, sizes.scale_hidden_stride, shape.num_scales)
        to = half + places.scales + 4 * token * shape.num_scales
        copy_scales(ptx.ld_nc_keep_s32, ptx.st_na_s32, to, scales, lane)
    if sizes.x_begin == 0:
        parity = end_copy(ptx.ld_nc_v4, half + places.x + token * shape.hidden_bytes, row, stage, parity, lane)
    return parity


@device_function
def lay_out_tokens(ctx, out, inputs, half, first_block):
    """What others read of all tokens, each warp its share; a block, one of those from the first on."""
    sizes, lane, num_warps = ctx.sizes, ctx.team.lane, ctx.team.num_warps
    stage = open_stage(ptx.smem_base(), ctx.team.warp, lane)
    num_blocks = ptx.grid_dim() - first_block
    first = ptx.block_idx() - first_block + num_blocks * ctx.team.warp
    step = num_blocks * num_warps
    places = ctx.places
    for choice in range(32 * first + lane, sizes.num_tokens * ctx.shape.num_topk, 32 * step):
        expert = ptx.ld_nc_keep_s64(inputs.topk_idx + 8 * choice)
        if inputs.topk_weights != 0:
            ptx.st_na_f32(half + places.topk_weights + 4 * choice, ptx.ld_nc_f32(inputs.topk_weights + 4 * choice))
        ptx.st_na_s64(half + places.topk_idx + 8 * choice, expert)
        if out.topk_idx != 0:
            ptx.st_na_s64(out.topk_idx + 8 * choice, expert)
    parity = 0
    if sizes.x_begin == 0 or (sizes.scales_begin == 0 and ctx.shape.num_scales > 0):
        for token in range(first, sizes.num_tokens, step):
            parity = lay_out_token(ctx, inputs, half, token, stage, parity)
    if ptx.has_tma() and lane == 0:
        ptx.tma_store_wait_all()


@kernel(max_threads=768, max_threads_before_sm90=THREADS_BEFORE_SM90)
def elastic_publish(
    out: PublishOutputs,
    inputs: PublishInputs,
    peers: Peers,
    bounds: Bounds,
    places: ElasticPlaces,
    shape: ElasticShape,
    sizes: PublishSizes,
):
    """Grid: any. Block: a multiple of 32. Shared memory: `publish_smem_bytes`."""
    num_warps = ptx.block_dim() // 32
    warp = ptx.thread_idx() // 32
    lane = ptx.thread_idx() % 32
    ctx = Context(peers, bounds, shape, sizes, places, Team(True, -1, -1, warp, num_warps, lane))
    if not ptx.bar_red_and(0, ptx.block_dim(), not has_timed_out(bounds)):
        return  # a peer that is only late may still read what is there
    own = buffer_of(peers, peers.rank)
    number = ptx.ld_nc_s32(own + TURN)
    half = own + half_offset(places, number)
    if sizes.x_begin > 0 and ptx.block_idx() == 0 and ptx.thread_idx() < peers.num_ranks:
        offer = buffer_of(peers, ptx.thread_idx()) + OFFERS + OFFER_BYTES * peers.rank  # where the shared rows begin
        ptx.st_na_s32(offer, sizes.x_begin - 1)
        ptx.st_na_s32(offer + 4, sizes.scales_begin - 1)
    first_block = 0
    if sizes.does_number != 0:
        if ptx.block_idx() == 0:
            number_choices(ctx, inputs.topk_idx, half, number, ptx.smem_base())
        if ptx.block_idx() == min(1, ptx.grid_dim() - 1):
            list_tokens(ctx, inputs.topk_idx, out.dst_buffer_slot_idx, half, number, ptx.smem_base())
        ptx.syncthreads()  # the stages come to lie over the tables
        first_block = 2 if ptx.grid_dim() > 2 else 0  # the others lay out rows
    if ptx.block_idx() >= first_block:
        lay_out_tokens(ctx, out, inputs, half, first_block)
