"""Publish: a rank lays its tokens out where the others read them, and numbers its choices. First part of a dispatch.

 warp e:  all choices of expert e, in order ----> numbers[t, k] of the own half; how many --> expert_counts of its rank
 warp r:  all tokens that go to rank r, in order -> lists[r, i] of the own half; how many --> rank_counts of rank r
 warp t:  x[t], its scales, choices and weights -> row t of the own half

 cell                    written by     with                   read by              with
 turn                    the owner      see notify_dispatch.py all warps            ld_nc
 x of a half             warp t         bulk copy, or st_na    all ranks            see dispatch.py (1)
 scales, topk_idx,       warp t         st_na                  all ranks            see dispatch.py (1)
   topk_weights of a half
 numbers, lists          warps e and r  st_na                  all ranks            see dispatch.py (1)
 rank_counts[half, s]    warp r         st_na                  rank r               see notify_dispatch.py
 expert_counts[half, s]  warp e         st_na                  the expert's rank    see notify_dispatch.py
 topk_idx (the handle's) warp t         st_na                  the next kernel      -
 dst_buffer_slot_idx     warp r         st_na                  the next kernel      -
 stage of a warp         copy engine    bulk copy              copy engine          after full

 (1) The next kernel meets all ranks. Who reads this half does so before it comes to the meeting of the next dispatch,
     or of a combine; and this rank comes here again for the same half only after that.

So there is no ring and no flow control, and receivers fetch. A row crosses the wire once for each rank that wants it,
also where several experts there get a copy. What comes lies in ordinary arrays, which no later call overwrites.

One pass over all choices for each expert looks like too many. But a choice is 8 bytes against a row of 14,336, the
passes run side by side with the copies, and the order of tokens gives every row its place: nothing is left to chance.
A pass has eight loads of a lane under way; one at a time it would wait for each.

Source: DeepEP deep_ep/include/deep_ep/impls/dispatch.cuh (notify warps), which adds up counts with atomics and pushes
"""

from typing import NamedTuple

import nbep.device.primitives as ptx
from nbep.device.jit import device_function, kernel
from nbep.device.kernels.intranode.arguments import Context
from nbep.device.kernels.parts.notes import Experts, Scales, copy_scales
from nbep.device.layout.elastic import (
    TURN,
    ElasticPlaces,
    ElasticShape,
    expert_count,
    half_offset,
    list_offset,
    rank_count,
)
from nbep.device.protocols.copies import Row, begin_copy, end_copy
from nbep.device.protocols.peers import Bounds, Peers, buffer_of
from nbep.device.protocols.staging import STAGE_STRIDE, open_stage
from nbep.device.protocols.teams import Team
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
    """Strides count scales, not bytes. does_number: 0 with a handle, which knows where rows go."""

    num_tokens: I32
    num_experts: I32
    does_number: I32
    scale_token_stride: I32
    scale_hidden_stride: I32


def publish_smem_bytes(num_threads: int, has_tma: bool) -> int:
    """Dynamic shared memory of a block: where there are bulk copies, a stage for each warp."""
    return STAGE_STRIDE * (num_threads // 32) if has_tma else 0


@device_function
def load_choices(topk_idx, first, step, end):
    """Eight choices, from the first on, each a step further: all loads are under way at once. -1 from the end on."""
    a = ptx.ld_nc_keep_s64(topk_idx + 8 * first) if first < end else -1
    b = ptx.ld_nc_keep_s64(topk_idx + 8 * (first + step)) if first + step < end else -1
    c = ptx.ld_nc_keep_s64(topk_idx + 8 * (first + 2 * step)) if first + 2 * step < end else -1
    d = ptx.ld_nc_keep_s64(topk_idx + 8 * (first + 3 * step)) if first + 3 * step < end else -1
    e = ptx.ld_nc_keep_s64(topk_idx + 8 * (first + 4 * step)) if first + 4 * step < end else -1
    f = ptx.ld_nc_keep_s64(topk_idx + 8 * (first + 5 * step)) if first + 5 * step < end else -1
    g = ptx.ld_nc_keep_s64(topk_idx + 8 * (first + 6 * step)) if first + 6 * step < end else -1
    h = ptx.ld_nc_keep_s64(topk_idx + 8 * (first + 7 * step)) if first + 7 * step < end else -1
    return a, b, c, d, e, f, g, h


@device_function
def number_some(numbers, choice, is_one, count, lane):
    """Number those of 32 choices that are the expert's; a warp. Returns how many of its choices there were so far."""
    found = ptx.vote_ballot(ptx.FULL_MASK, is_one)
    if is_one:
        ptx.st_na_s32(numbers + 4 * choice, count + ptx.popc_u32(found & ((1 << lane) - 1)))
    return count + ptx.popc_u32(found)


@device_function
def number_choices(ctx, inputs, half, number, expert):
    """Number the choices of one expert, 256 at a time, and tell its rank how many there are; one warp."""
    peers, lane = ctx.peers, ctx.team.lane
    num_choices = ctx.sizes.num_tokens * ctx.shape.num_topk
    numbers = half + ctx.places.numbers
    count = 0
    choice = lane
    while choice - lane < num_choices:
        loaded = load_choices(inputs.topk_idx, choice, 32, num_choices)
        count = number_some(numbers, choice, loaded[0] == expert, count, lane)
        count = number_some(numbers, choice + 32, loaded[1] == expert, count, lane)
        count = number_some(numbers, choice + 64, loaded[2] == expert, count, lane)
        count = number_some(numbers, choice + 96, loaded[3] == expert, count, lane)
        count = number_some(numbers, choice + 128, loaded[4] == expert, count, lane)
        count = number_some(numbers, choice + 160, loaded[5] == expert, count, lane)
        count = number_some(numbers, choice + 192, loaded[6] == expert, count, lane)
        count = number_some(numbers, choice + 224, loaded[7] == expert, count, lane)
        choice += 256
    num_local_experts = ptx.u32_div(ctx.sizes.num_experts, peers.num_ranks)
    owner = ptx.u32_div(expert, num_local_experts)
    if lane == 0:
        cell = expert_count(number, peers.rank, expert - owner * num_local_experts)
        ptx.st_na_s32(buffer_of(peers, owner) + cell, count)


@device_function
def is_among(expert, experts):
    return experts.first <= expert < experts.first + experts.number


@device_function
def goes_to(ctx, inputs, token, experts):
    """Whether a token has chosen one of a range of experts."""
    begin = token * ctx.shape.num_topk
    end = begin + ctx.shape.num_topk if token < ctx.sizes.num_tokens else begin
    found = False
    while begin < end:
        a, b, c, d, e, f, g, h = load_choices(inputs.topk_idx, begin, 1, end)
        found = found or is_among(a, experts) or is_among(b, experts) or is_among(c, experts) or is_among(d, experts)
        found = found or is_among(e, experts) or is_among(f, experts) or is_among(g, experts) or is_among(h, experts)
        begin += 8
    return found


@device_function
def note_one(ctx, out, choice, expert, experts, index):
    """Write the index of a token to a choice, if that is of the range; to the first range's -1 for unused choices."""
    if is_among(expert, experts):
        ptx.st_na_s32(out.dst_buffer_slot_idx + 4 * choice, index)
    elif experts.first == 0 and not 0 <= expert < ctx.sizes.num_experts:
        ptx.st_na_s32(out.dst_buffer_slot_idx + 4 * choice, -1)


@device_function
def note_index(ctx, out, inputs, token, experts, index):
    """Write the index of a token among those of a rank to the choices of that rank's experts."""
    begin = token * ctx.shape.num_topk
    end = begin + ctx.shape.num_topk
    while begin < end:
        loaded = load_choices(inputs.topk_idx, begin, 1, end)
        note_one(ctx, out, begin, loaded[0], experts, index)
        if begin + 1 < end:
            note_one(ctx, out, begin + 1, loaded[1], experts, index)
        if begin + 2 < end:
            note_one(ctx, out, begin + 2, loaded[2], experts, index)
        if begin + 3 < end:
            note_one(ctx, out, begin + 3, loaded[3], experts, index)
        if begin + 4 < end:
            note_one(ctx, out, begin + 4, loaded[4], experts, index)
        if begin + 5 < end:
            note_one(ctx, out, begin + 5, loaded[5], experts, index)
        if begin + 6 < end:
            note_one(ctx, out, begin + 6, loaded[6], experts, index)
        if begin + 7 < end:
            note_one(ctx, out, begin + 7, loaded[7], experts, index)
        begin += 8


@device_function
def list_tokens(ctx, out, inputs, half, number, rank):
    """List the tokens that go to one rank, 32 at a time, and tell it how many there are; one warp."""
    peers, num_tokens, lane = ctx.peers, ctx.sizes.num_tokens, ctx.team.lane
    tokens = half + list_offset(ctx.places, ctx.shape, rank)
    num_local_experts = ptx.u32_div(ctx.sizes.num_experts, peers.num_ranks)
    experts = Experts(rank * num_local_experts, num_local_experts)
    count = 0
    token = lane
    while token - lane < num_tokens:
        goes_there = goes_to(ctx, inputs, token, experts)
        chosen = ptx.vote_ballot(ptx.FULL_MASK, goes_there)
        index = count + ptx.popc_u32(chosen & ((1 << lane) - 1))
        if goes_there:
            ptx.st_na_s32(tokens + 4 * index, token)
        if token < num_tokens:
            note_index(ctx, out, inputs, token, experts, index)
        count += ptx.popc_u32(chosen)
        token += 32
    if lane == 0:
        ptx.st_na_s32(buffer_of(peers, rank) + rank_count(number, peers.rank), count)


@device_function
def lay_out_token(ctx, out, inputs, half, token, stage, parity):
    """Copy a token and what goes with it to its row of the half; one warp. Returns the parity of the next copy."""
    places, shape, sizes, lane = ctx.places, ctx.shape, ctx.sizes, ctx.team.lane
    row = Row(inputs.x + token * shape.hidden_bytes, shape.hidden_bytes, 0)
    begin_copy(row, stage, lane)
    if lane < shape.num_topk:
        choice = token * shape.num_topk + lane
        expert = ptx.ld_nc_keep_s64(inputs.topk_idx + 8 * choice)
        ptx.st_na_s64(half + places.topk_idx + 8 * choice, expert)
        if out.topk_idx != 0:
            ptx.st_na_s64(out.topk_idx + 8 * choice, expert)
        if inputs.topk_weights != 0:
            ptx.st_na_f32(half + places.topk_weights + 4 * choice, ptx.ld_nc_f32(inputs.topk_weights + 4 * choice))
    scales = inputs.x_scales + 4 * token * sizes.scale_token_stride
    scales = Scales(scales, sizes.scale_hidden_stride, shape.num_scales)
    copy_scales(ptx.ld_nc_keep_s32, ptx.st_na_s32, half + places.scales + 4 * token * shape.num_scales, scales, lane)
    return end_copy(ptx.ld_nc_v4, half + places.x + token * shape.hidden_bytes, row, stage, parity, lane)


@kernel(max_threads=768)
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
    if ptx.vote_any(ptx.FULL_MASK, has_timed_out(bounds)):
        return  # a peer that is only late may still read what is there
    own = buffer_of(peers, peers.rank)
    number = ptx.ld_nc_s32(own + TURN)
    half = own + half_offset(places, number)
    stage = open_stage(ptx.smem_base(), warp, lane)
    parity = 0
    num_lists = sizes.num_experts + peers.num_ranks if sizes.does_number != 0 else 0
    job = ptx.block_idx() + ptx.grid_dim() * warp
    while job < num_lists + sizes.num_tokens:
        if job >= num_lists:
            parity = lay_out_token(ctx, out, inputs, half, job - num_lists, stage, parity)
        elif job >= sizes.num_experts:
            list_tokens(ctx, out, inputs, half, number, job - sizes.num_experts)
        else:
            number_choices(ctx, inputs, half, number, job)
        job += ptx.grid_dim() * num_warps
    if ptx.has_tma() and lane == 0:
        ptx.tma_store_wait_all()
