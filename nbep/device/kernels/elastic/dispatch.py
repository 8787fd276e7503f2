"""Elastic dispatch: each rank fetches the rows that come to it, and puts them into its own outputs. No thread waits.

 rank s, its half: lists[r, i] = t --> x[t] and its scales, topk_idx, topk_weights, numbers
                                         | over the wire, once
 rank r:                                 stage --a store for each row--> recv_x[row], recv_x_scales[row]

 compact           row = tokens of the ranks before + i
 expanded          row = where the rows of (s, expert) begin + numbers[t, k], for each choice k of an expert here

 cell                    written by     with                   read by              with
 x of a half             rank s         see publish.py (1)     warps of all ranks   bulk copy, or ld_na
 scales of a half        rank s         see publish.py (1)     warps of all ranks   bulk copy, or ld_na (4)
 x, scales: shared rows  no thread      (3)                    warps of all ranks   as those of a half
 offers[s]               rank s         see publish.py (1)     all warps            ld_na
 lists, topk_idx,        rank s         see publish.py (1)     warps of all ranks   ld_na
   topk_weights, numbers
   of a half
 turn                    see notify.py                         all warps            ld_nc
 recv_src_metadata       a warp         st_na, or st_weak (2)  with a handle: warps ld_nc
 recv_x                  a warp         bulk copy, or st_na    the next kernel      -
 recv_x_scales           a warp         st_na                  the next kernel      -
 recv_topk_              a warp         st_na, or st_weak (2)  the next kernel      -
 stage of a warp         copy engine    bulk copy              copy engine          after full
   its scales            copy engine    bulk copy              the warp             ld_shared, after full (5)

 (1) This rank has met all ranks since then, in the kernel before.
 (2) st_weak for rows that no token has.
 (3) The caller of rank s has written it before this call. All ranks meet behind this kernel: then it may again.
 (4) The copy engine takes 16 bytes at a time. Where the scales of a token are no multiple of that, lanes load them.
 (5) They are loaded again after the proxy fence and the syncwarp behind the warp's loads from them.

Warps take tokens of all ranks in turn, beginning with the one behind their own: otherwise all would read from rank 0
first. The number of the next token comes while this one does.

The rows past the last one have expert -1, weight 0 and no source, -1. What is in recv_x there is not written.

Source: DeepEP deep_ep/include/deep_ep/impls/dispatch.cuh and dispatch_copy_epilogue.cuh: two kernels, the first of
which brings rows into the buffer, and the second from there to the outputs
Break it: records/faults.md, `elastic.dispatch.store_row: wait_filled`: race
"""

from typing import NamedTuple

import nbep.device.primitives as ptx
from nbep.device.alignment import matrix_cell
from nbep.device.jit import device_function, kernel
from nbep.device.kernels.parts.header import Experts, keep_in_range
from nbep.device.kernels.parts.spoil import DISPATCH_RECEIVER_ROWS, has_failed, spoil
from nbep.device.layout.elastic import (
    OFFERS,
    THREADS_BEFORE_SM90,
    TURN,
    ElasticPlaces,
    ElasticShape,
    half_offset,
    list_offset,
    metadata_entry,
)
from nbep.device.layout.intranode import OFFER_BYTES
from nbep.device.protocols.peers import Bounds, Peers, buffer_of
from nbep.device.protocols.staging import (
    STAGE_STRIDE,
    VEC_BYTES,
    WARP_BYTES,
    Stage,
    drain_stage,
    empty_stage,
    load_stage,
    open_stage,
    wait_filled,
)
from nbep.device.protocols.teams import Context, Team
from nbep.device.protocols.waits import has_timed_out, report_fault
from nbep.device.types import I32, In, InOut, Out

ELASTIC_ROWS, ELASTIC_SOURCES = -2, -4  # a report's channel


class ElasticOutputs(NamedTuple):
    """Those that the input has no part for are absent (0). recv_src_metadata is read if there is a handle."""

    recv_x: Out  # [num_rows, hidden_bytes]
    recv_x_scales: Out  # [num_rows, num_scales] 4 bytes each, any strides
    recv_topk_idx: Out  # [num_rows, num_topk] s64; absent if expanded
    recv_topk_weights: Out  # [num_rows, num_topk] f32; expanded: [num_rows]
    recv_src_metadata: InOut  # [num_recv_tokens, 2 + num_topk] s32: token, rank and last choice, row of each choice


class ElasticInputs(NamedTuple):
    """What notify_dispatch has found out; row_starts is absent (0) with a handle."""

    psum_num_recv_tokens_per_scaleup_rank: In  # [num_ranks] s32
    psum_num_recv_tokens_per_expert: In  # [num_local_experts] s32
    row_starts: In  # [num_ranks, num_local_experts] s32


class ElasticSizes(NamedTuple):
    """Strides count scales, not bytes. do_expand, do_zero_padding, is_cached: 0 or 1.

    is_shared: what lies in the shared rows of each rank: 1 x, 2 its scales, too; else 0
    """

    num_rows: I32
    num_recv_tokens: I32
    num_local_experts: I32
    expert_alignment: I32
    scale_token_stride: I32
    scale_hidden_stride: I32
    do_expand: I32
    do_zero_padding: I32
    is_cached: I32
    is_shared: I32


class Sources(NamedTuple):
    """What lane i knows of the (rank + 1 + i)-th rank, counted around: its half, its x and scales, its tokens for this
    rank.
    """

    half: int
    x: int
    scales: int
    rank: int
    first_row: int
    num_tokens: int


class Item(NamedTuple):
    """A token to be fetched; the same in all lanes. token: -1 if there is none; x, scales: of its rank's first token"""

    half: int
    x: int
    scales: int
    src: int
    row: int
    token: int


def elastic_dispatch_smem_bytes(num_threads: int, has_tma: bool) -> int:
    """Dynamic shared memory of a block: where there are bulk copies, a stage for each warp."""
    return STAGE_STRIDE * (num_threads // 32) if has_tma else 0


@device_function
def find_sources(ctx, inputs, of_rows, offset):
    """What this lane has to know of its rank; no tokens after a wait that timed out. offset: of the halves"""
    peers, lane = ctx.peers, ctx.team.lane
    rank = ptx.u32_mod(peers.rank + 1 + lane, peers.num_ranks)
    up_to = inputs.psum_num_recv_tokens_per_scaleup_rank + 4 * rank
    first = ptx.ld_nc_s32(up_to - 4) if rank > 0 else 0
    num_tokens = ptx.ld_nc_s32(up_to) - first
    if has_timed_out(ctx.bounds) or lane >= peers.num_ranks:
        num_tokens = 0
    half = buffer_of(peers, rank) + offset
    x, scales = half + ctx.places.x, half + ctx.places.scales
    offer = buffer_of(peers, peers.rank) + OFFERS + OFFER_BYTES * rank
    if ctx.sizes.is_shared > 0:
        x = buffer_of(of_rows, rank) + ptx.s64(ptx.ld_na_s32(offer)) * VEC_BYTES
    if ctx.sizes.is_shared > 1:
        scales = buffer_of(of_rows, rank) + ptx.s64(ptx.ld_na_s32(offer + 4)) * VEC_BYTES
    return Sources(half, x, scales, rank, first, num_tokens)


@device_function
def most_tokens(of_lane):
    """The most tokens that come from one rank; a warp. of_lane: what each lane knows of its rank, see `Sources`"""
    most = of_lane.num_tokens
    most = max(most, ptx.shfl_xor_s32(ptx.FULL_MASK, most, 16))
    most = max(most, ptx.shfl_xor_s32(ptx.FULL_MASK, most, 8))
    most = max(most, ptx.shfl_xor_s32(ptx.FULL_MASK, most, 4))
    most = max(most, ptx.shfl_xor_s32(ptx.FULL_MASK, most, 2))
    most = max(most, ptx.shfl_xor_s32(ptx.FULL_MASK, most, 1))
    return ptx.shfl_idx_s32(ptx.FULL_MASK, most, 0)


@device_function
def find_item(ctx, out, sources, number):
    """The token of a number; a warp. Numbers go through the ranks in turn."""
    peers, shape = ctx.peers, ctx.shape
    turn = ptx.u32_mod(number, peers.num_ranks)
    index = ptx.u32_div(number, peers.num_ranks)
    half = ptx.shfl_idx_s64(ptx.FULL_MASK, sources.half, turn)
    x = ptx.shfl_idx_s64(ptx.FULL_MASK, sources.x, turn)
    scales = ptx.shfl_idx_s64(ptx.FULL_MASK, sources.scales, turn)
    src = ptx.shfl_idx_s32(ptx.FULL_MASK, sources.rank, turn)
    row = ptx.shfl_idx_s32(ptx.FULL_MASK, sources.first_row, turn) + index
    token = -1
    if index < ptx.shfl_idx_s32(ptx.FULL_MASK, sources.num_tokens, turn) and row < ctx.sizes.num_recv_tokens:
        if ctx.sizes.is_cached != 0:
            token = ptx.ld_nc_s32(metadata_entry(out.recv_src_metadata, shape, row)) - src * shape.num_max_tokens
            if not 0 <= token < shape.num_max_tokens:  # a handle that somebody has overwritten
                if ctx.team.lane == 0:
                    report_fault(ctx.bounds, DISPATCH_RECEIVER_ROWS, peers.rank, ELASTIC_SOURCES, row + 1, token)
                token = -1
        else:
            token = ptx.ld_na_s32(half + list_offset(ctx.places, shape, peers.rank) + 4 * index)
    return Item(half, x, scales, src, row, token)


@device_function
def find_rows(ctx, out, inputs, item, expert):
    """In lane k the row for choice k of a token, -1 if there is none; expert: of this rank, or -1."""
    shape, sizes, lane = ctx.shape, ctx.sizes, ctx.team.lane
    row = -1
    if sizes.do_expand == 0:
        row = item.row if lane == 0 else -1
    elif expert >= 0 and sizes.is_cached != 0:
        row = ptx.ld_nc_s32(metadata_entry(out.recv_src_metadata, shape, item.row) + 4 * (2 + lane))
    elif expert >= 0:
        number = ptx.ld_na_s32(matrix_cell(item.half + ctx.places.numbers, item.token, lane, shape.num_topk))
        row = ptx.ld_nc_s32(matrix_cell(inputs.row_starts, item.src, expert, sizes.num_local_experts)) + number
    return row if 0 <= row < sizes.num_rows else -1


@device_function
def store_header(ctx, out, item, row, choice):
    """Write what goes with a token besides its scales, and where it is from; one warp. choice: as of `load_choice`"""
    shape, sizes, lane = ctx.shape, ctx.sizes, ctx.team.lane
    num_topk = shape.num_topk
    here = ptx.vote_ballot(ptx.FULL_MASK, choice[0] >= 0)
    if sizes.do_expand != 0:
        if row >= 0 and out.recv_topk_weights != 0:
            ptx.st_na_f32(out.recv_topk_weights + 4 * row, choice[1])
    elif lane < num_topk:
        at = item.row * num_topk + lane
        ptx.st_na_s64(out.recv_topk_idx + 8 * at, choice[0])
        if out.recv_topk_weights != 0:
            ptx.st_na_f32(out.recv_topk_weights + 4 * at, choice[1])
    if sizes.is_cached == 0:
        entry = metadata_entry(out.recv_src_metadata, shape, item.row)
        if lane == 0:
            ptx.st_na_s32(entry, item.src * shape.num_max_tokens + item.token)
        if lane < num_topk:
            if choice[0] >= 0 and here >> lane == 1:  # the last one
                ptx.st_na_s32(entry + 4, item.src * num_topk + lane)
            own_row = item.row if choice[0] >= 0 else -1
            ptx.st_na_s32(entry + 4 * (2 + lane), row if sizes.do_expand != 0 else own_row)


@device_function
def store_scales(load, ctx, out, src, row):
    """Copy the scales of a token to all its rows; one warp. load: as src, their address, wants it"""
    shape, sizes, lane = ctx.shape, ctx.sizes, ctx.team.lane
    rows = ptx.vote_ballot(ptx.FULL_MASK, row >= 0)
    for begin in range(0, shape.num_scales, 32):
        index = begin + lane
        scale = load(src + 4 * index) if index < shape.num_scales else 0
        left = rows
        while left != 0:
            to = ptx.shfl_idx_s32(ptx.FULL_MASK, row, ptx.ffs_u32(left) - 1)
            left &= left - 1
            if index < shape.num_scales:
                at = ptx.s64(to) * sizes.scale_token_stride + ptx.s64(index) * sizes.scale_hidden_stride
                ptx.st_na_s32(out.recv_x_scales + 4 * at, scale)


@device_function
def begin_fetch(ctx, src, scales, stage, num_staged):
    """Start to fill the stage with a row, as much as fits, and behind its room with num_staged bytes of scales."""
    num_bytes = min(ctx.shape.hidden_bytes, stage.room)
    if ctx.team.lane == 0:
        ptx.tma_store_wait_read_all()
        ptx.tma_load_1d(stage.data, src, num_bytes, stage.full)
        if num_staged > 0:
            ptx.tma_load_1d(stage.data + stage.room, scales, num_staged, stage.full)
        ptx.mbarrier_arrive_expect_tx(stage.full, num_bytes + num_staged)


@device_function
def store_row(ctx, out, src, row, stage, parity):
    """Bring a row, whose copy has begun, to all its places; one warp. Returns the parity of the next copy."""
    num_bytes, lane = ctx.shape.hidden_bytes, ctx.team.lane
    rows = ptx.vote_ballot(ptx.FULL_MASK, row >= 0)
    offset = 0
    while offset < num_bytes:
        part = min(num_bytes - offset, stage.room)
        if offset > 0 and lane == 0:
            load_stage(stage.data, src + offset, part, stage)
        parity = wait_filled(stage, parity)
        left = rows
        while left != 0:
            to = ptx.shfl_idx_s32(ptx.FULL_MASK, row, ptx.ffs_u32(left) - 1)
            left &= left - 1
            empty_stage(out.recv_x + ptx.s64(to) * num_bytes + offset, part, stage, lane)
        drain_stage(lane)
        offset += part
    return parity


@device_function
def spread_row(ctx, out, src, row):
    """The same without a copy engine."""
    num_bytes, lane = ctx.shape.hidden_bytes, ctx.team.lane
    rows = ptx.vote_ballot(ptx.FULL_MASK, row >= 0)
    for begin in range(0, num_bytes, WARP_BYTES):
        offset = begin + lane * VEC_BYTES
        values = ptx.ld_na_v4(src + offset) if offset < num_bytes else (0, 0, 0, 0)
        left = rows
        while left != 0:
            to = ptx.shfl_idx_s32(ptx.FULL_MASK, row, ptx.ffs_u32(left) - 1)
            left &= left - 1
            if offset < num_bytes:
                ptx.st_na_v4(out.recv_x + ptx.s64(to) * num_bytes + offset, values)


@device_function
def load_choice(ctx, out, item):
    """In lane k choice k of a token: its expert, counted from this rank's first, and its weight; -1 and 0 if elsewhere.

    The weight is 0 if there are no outputs for weights.
    """
    shape, lane = ctx.shape, ctx.team.lane
    experts = Experts(ctx.peers.rank * ctx.sizes.num_local_experts, ctx.sizes.num_local_experts)
    expert, weight = ptx.s64(-1), ptx.f32(0)
    if lane < shape.num_topk:
        at = item.token * shape.num_topk + lane
        expert = ptx.ld_na_s64(item.half + ctx.places.topk_idx + 8 * at)
        if out.recv_topk_weights != 0:
            weight = ptx.ld_na_f32(item.half + ctx.places.topk_weights + 4 * at)
        expert, weight = keep_in_range(expert, weight, experts)
    return expert, weight


@device_function
def fetch_tokens(ctx, out, inputs, of_rows, offset):
    """All tokens that come to this rank, each warp its share."""
    shape, warp, lane = ctx.shape, ctx.team.warp, ctx.team.lane
    sources = find_sources(ctx, inputs, of_rows, offset)
    num_items = most_tokens(sources) * ctx.peers.num_ranks
    stage = open_stage(ptx.smem_base(), warp, lane)
    num_staged = 4 * shape.num_scales if ptx.has_tma() and 4 * shape.num_scales % VEC_BYTES == 0 else 0
    stage = Stage(stage.data, stage.full, stage.room - num_staged)
    parity = 0
    step = ptx.grid_dim() * ctx.team.num_warps
    number = ptx.block_idx() + ptx.grid_dim() * warp
    item = find_item(ctx, out, sources, number)
    while number < num_items:
        number += step
        following = find_item(ctx, out, sources, number)
        if item.token >= 0:
            src = item.x + item.token * shape.hidden_bytes
            scales = item.scales + 4 * item.token * shape.num_scales
            if ptx.has_tma():
                begin_fetch(ctx, src, scales, stage, num_staged)
            choice = load_choice(ctx, out, item)
            row = find_rows(ctx, out, inputs, item, choice[0])
            store_header(ctx, out, item, row, choice)
            if ptx.has_tma():
                parity = store_row(ctx, out, src, row, stage, parity)
            else:
                spread_row(ctx, out, src, row)
            if num_staged > 0:
                store_scales(ptx.ld_shared_s32, ctx, out, stage.data + stage.room, row)
                ptx.fence_proxy_async_shared()
                ptx.syncwarp(ptx.FULL_MASK)
            else:
                store_scales(ptx.ld_na_s32, ctx, out, scales, row)
        item = following
    if ptx.has_tma() and lane == 0:
        ptx.tma_store_wait_all()


@device_function
def clear_row(ctx, out, row):
    """Zeros for a row that pads an expert: its values and its scales; one warp."""
    shape, sizes, lane = ctx.shape, ctx.sizes, ctx.team.lane
    for offset in range(lane * VEC_BYTES, shape.hidden_bytes, WARP_BYTES):
        ptx.st_na_v4(out.recv_x + ptx.s64(row) * shape.hidden_bytes + offset, (0, 0, 0, 0))
    for index in range(lane, shape.num_scales, 32):
        at = ptx.s64(row) * sizes.scale_token_stride + ptx.s64(index) * sizes.scale_hidden_stride
        ptx.st_na_s32(out.recv_x_scales + 4 * at, 0)


@device_function
def find_gap(ctx, inputs, expert):
    """The rows between those of an expert and those of the next one: the first, and the one behind the last."""
    alignment = ctx.sizes.expert_alignment
    begin = ptx.ld_nc_s32(inputs.psum_num_recv_tokens_per_expert + 4 * expert)
    return begin, ptx.u32_div(begin + alignment - 1, alignment) * alignment


@device_function
def clear_gaps(ctx, out, inputs, first, step):
    """Zeros for the rows between experts; a warp. A lane looks at an expert: all loads are under way at once."""
    lane, num_experts = ctx.team.lane, ctx.sizes.num_local_experts
    ahead = first  # of this warp's next row, from where a gap begins: the warps take the rows of all gaps in turn
    for block in range(0, num_experts, 32):
        begin, end = find_gap(ctx, inputs, min(block + lane, num_experts - 1))
        for i in range(min(32, num_experts - block)):
            row = ptx.shfl_idx_s32(ptx.FULL_MASK, begin, i) + ahead
            gap_end = ptx.shfl_idx_s32(ptx.FULL_MASK, end, i)
            while row < gap_end:
                clear_row(ctx, out, row)
                row += step
            ahead = row - gap_end  # rows of the next gap that others take first


@device_function
def clean_gaps(ctx, out, inputs, first, step):
    """Weight 0, and zeros if they are wanted, for the rows between experts; weight 0 behind the last one. A warp."""
    sizes, lane = ctx.sizes, ctx.team.lane
    last_end = find_gap(ctx, inputs, sizes.num_local_experts - 1)[1]
    if last_end > sizes.num_rows:  # after a failed meeting, or as tokens name an expert more than once
        if lane == 0:
            report_fault(ctx.bounds, DISPATCH_RECEIVER_ROWS, ctx.peers.rank, ELASTIC_ROWS, last_end, sizes.num_rows)
        return
    if out.recv_topk_weights != 0:
        for expert in range(first, sizes.num_local_experts, step):
            begin, end = find_gap(ctx, inputs, expert)
            for row in range(begin + lane, end, 32):
                ptx.st_weak_f32(out.recv_topk_weights + 4 * row, ptx.f32(0))
        for row in range(last_end + 32 * first + lane, sizes.num_rows, 32 * step):
            ptx.st_weak_f32(out.recv_topk_weights + 4 * row, ptx.f32(0))
    if sizes.do_zero_padding != 0:
        clear_gaps(ctx, out, inputs, first, step)


@device_function
def clean_rest(ctx, out, num_tokens, first, step):
    """Mark what is past the last token: no expert, no weight, no source. A warp; threads take words in turn."""
    num_topk, num_rows = ctx.shape.num_topk, ctx.sizes.num_recv_tokens
    thread = 32 * first + ctx.team.lane
    if ctx.sizes.do_expand == 0:
        for i in range(num_tokens * num_topk + thread, num_rows * num_topk, 32 * step):
            ptx.st_weak_s64(out.recv_topk_idx + 8 * i, -1)
            if out.recv_topk_weights != 0:
                ptx.st_weak_f32(out.recv_topk_weights + 4 * i, ptx.f32(0))
    if ctx.sizes.is_cached == 0:
        for i in range(num_tokens * (2 + num_topk) + thread, num_rows * (2 + num_topk), 32 * step):
            ptx.st_weak_s32(out.recv_src_metadata + 4 * i, -1)


@device_function
def spoil_outputs(ctx, out):
    """What has been received, after a failure; a whole warp. Scales may have gaps, and stay as they are."""
    shape, sizes, lane = ctx.shape, ctx.sizes, ctx.team.lane
    spoil(out.recv_x, sizes.num_rows * shape.hidden_bytes, lane)
    if sizes.do_expand == 0:
        spoil(out.recv_topk_idx, 8 * sizes.num_rows * shape.num_topk, lane)
        spoil(out.recv_topk_weights, 4 * sizes.num_rows * shape.num_topk, lane)
    else:
        spoil(out.recv_topk_weights, 4 * sizes.num_rows, lane)


@kernel(max_threads=768, max_threads_before_sm90=THREADS_BEFORE_SM90)
def elastic_dispatch(
    out: ElasticOutputs,
    inputs: ElasticInputs,
    peers: Peers,
    of_rows: Peers,
    bounds: Bounds,
    places: ElasticPlaces,
    shape: ElasticShape,
    sizes: ElasticSizes,
):
    """Grid: any. Block: a multiple of 32. Shared memory: `elastic_dispatch_smem_bytes`. of_rows: the shared rows"""
    num_warps = ptx.block_dim() // 32
    warp = ptx.thread_idx() // 32
    lane = ptx.thread_idx() % 32
    ctx = Context(peers, bounds, shape, sizes, places, Team(False, -1, -1, warp, num_warps, lane))
    # notify_dispatch has counted this dispatch already
    number = ptx.ld_nc_s32(buffer_of(peers, peers.rank) + TURN) - 1
    fetch_tokens(ctx, out, inputs, of_rows, half_offset(places, number))
    first, step = ptx.block_idx() + ptx.grid_dim() * warp, ptx.grid_dim() * num_warps
    if sizes.do_expand != 0:
        clean_gaps(ctx, out, inputs, first, step)
    last = inputs.psum_num_recv_tokens_per_scaleup_rank + 4 * (peers.num_ranks - 1)
    clean_rest(ctx, out, min(ptx.ld_nc_s32(last), sizes.num_recv_tokens), first, step)
    if has_failed(bounds):
        spoil_outputs(ctx, out)
