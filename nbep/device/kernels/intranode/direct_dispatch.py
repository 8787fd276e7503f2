"""Direct dispatch: a sender puts each token into its row of every peer's recv_x. No ring, no receiver, no flow control.

 rank s: x[t] --one load--> stage --a store for each rank that wants it--> recv_x[i] of rank r, itself included
         its header ------------------------------------------------------> recv_topk_idx[i], ...
         last: arrived[s] += 1 for each block ----------------------------> block 0 of rank r waits for all blocks

 cell                    written by         with                        read by         with
 row of recv_x           sender(s)          bulk copy, or st_na (1)     the next kernel -
 recv_x_scales, with     sender(s)          bulk copy, or st_na         the next kernel -
 recv_topk_, recv_src_   sender(s)          st_na                       the next kernel -
 stage of a warp         copy engine, lanes bulk copy, st_shared        copy engine     after a proxy fence, syncwarp
 channel_starts[s, c]    block 0 of s       st_na                       block 0 of r    ld_na, after arrived
 arrived[s]              each block of s    atom_add_release_sys (2)    block 0 of r    ld_acquire_sys
 arrived                 the owner          st_weak 0 (notify), barrier (this kernel)   -
unused recv_topk_        the owner          st_weak                     the next kernel -
 recv_channel_prefix_*   block 0 of r       st_weak                     the next kernel -

 (1) The barrier of the notify kernel stands before: whoever is here may write to this half of every peer. A peer comes
     to that barrier behind its own work on what the half held; see Buffer.dispatch for how long that is.
 (2) Each warp has waited for its bulk copies (tma_store_wait_all) before the block's barrier, and the threads that add
     come behind it.

recv_x and what goes with it lie in the symmetric memory: see layout.direct. After notify_dispatch, or with a handle,
each rank knows in which row of a peer a token ends: those of the ranks before, those of its own channels before, and
those of its channel before, which send_head counts.

Block 0 alone waits for the peers, so the kernel ends when everything is there. A rank whose wait timed out sends
nothing and adds nothing; its peers then time out, too.

The tokens are dealt out to the warps of the grid one by one, neighbours to the same block. A warp goes through the
ranks that want its token beginning with the one behind its own, so that not all send to the same.

Scales are dealt out in groups of up to 32 neighbours. A warp brings those of a group into its stage; as the rows of
neighbours follow each other at a peer, one copy takes the scales of all tokens in a row that go there.

Source: DeepEP csrc/kernels/intranode.cu, dispatch, which has rings. Break it: notebooks/17_without_rings.ipynb
"""

from typing import NamedTuple

import nbep.device.primitives as ptx
from nbep.device.alignment import matrix_cell
from nbep.device.jit import device_function, kernel
from nbep.device.kernels.parts.header import Experts, clean_choices, keep_in_range
from nbep.device.kernels.parts.spoil import DISPATCH_RECEIVER_ROWS, has_failed, spoil, spoil_s64
from nbep.device.layout.direct import DirectShape, HalfPlaces
from nbep.device.layout.intranode import RINGS
from nbep.device.protocols.peers import CLUSTERS, Bounds, Peers, buffer_of
from nbep.device.protocols.staging import (
    STAGE_BYTES,
    STAGE_STRIDE,
    VEC_BYTES,
    WARP_BYTES,
    begin_fill,
    drain_stage,
    load_stage,
    open_stage,
    wait_filled,
)
from nbep.device.protocols.teams import Context, Team
from nbep.device.protocols.waits import (
    Waiter,
    has_timed_out,
    is_at_least,
    report_fault,
    site,
    wait_or_report,
)
from nbep.device.types import I32, In, Out

DIRECT_ARRIVED = site(32, "direct dispatch receiver", "arrived", "all blocks of the peer to have sent their tokens")


class DirectOutputs(NamedTuple):
    """It may be absent (0): only a new handle needs it. All other outputs are in the symmetric memory."""

    recv_channel_prefix_matrix: Out  # [num_ranks, num_channels] s32, exclusive


class DirectInputs(NamedTuple):
    """x_scales, topk_idx and topk_weights may be absent (0)."""

    x: In  # [num_tokens, hidden_bytes]
    x_scales: In  # [num_tokens, num_scales] 4 bytes each, any strides
    topk_idx: In  # [num_tokens, num_topk] s64
    topk_weights: In  # [num_tokens, num_topk] f32
    send_head: In  # [num_tokens, num_ranks] s32: the token's index among those of its channel to the rank, or negative
    rank_prefix_matrix: In  # [num_ranks, num_ranks] s32, inclusive over the source rank
    channel_prefix_matrix: In  # [num_ranks, num_channels] s32, inclusive


class DirectSizes(NamedTuple):
    """Strides count scales, not bytes."""

    num_tokens: I32
    num_recv_tokens: I32  # rows of this rank's recv_x
    num_worst_tokens: I32
    num_local_experts: I32
    scale_token_stride: I32
    scale_hidden_stride: I32


class Destination(NamedTuple):
    """What a lane knows of one peer: lane i of the (rank + 1 + i)-th, counted around. Lanes from num_ranks on: none."""

    peer: int
    area: int  # where this rank sees the peer's
    first_row: int  # of this rank's tokens there


class There(NamedTuple):
    """Where a token goes: in lane i the area and the row at the lane's peer; bit i of wanted: whether there is one."""

    area: int
    row: int
    wanted: int


def direct_dispatch_smem_bytes(num_threads: int, has_tma: bool) -> int:
    """Dynamic shared memory of a block: where there are bulk copies, a stage for each warp."""
    return STAGE_STRIDE * (num_threads // 32) if has_tma else 0


@device_function
def peer_of(peers, turn):
    """The peer whose turn it is, from the one behind this rank up to this rank itself."""
    return ptx.u32_mod(peers.rank + 1 + turn, peers.num_ranks)


@device_function
def find_destination(inputs, peers, lane):
    """What this lane has to know of its peer."""
    peer = peer_of(peers, lane)
    first_row = 0
    if peers.rank > 0:
        first_row = ptx.ld_nc_s32(matrix_cell(inputs.rank_prefix_matrix, peers.rank - 1, peer, peers.num_ranks))
    return Destination(peer, buffer_of(peers, peer), first_row)


@device_function
def load_row(ctx, inputs, peer, first_row, token):
    """The row of a token at a peer; -1 if it does not go there, or if the peer has no such row."""
    num_channels = ctx.shape.num_channels
    channel = ptx.u32_div(token, ptx.u32_div(ctx.sizes.num_tokens + num_channels - 1, num_channels))
    head = ptx.ld_nc_s32(matrix_cell(inputs.send_head, token, peer, ctx.peers.num_ranks))
    before = matrix_cell(inputs.channel_prefix_matrix, peer, channel - 1, num_channels)
    start = ptx.ld_nc_s32(before) if channel > 0 else 0
    row = first_row + start + head
    return row if head >= 0 and 0 <= row < ctx.places.num_rows else -1


@device_function
def load_own_row(ctx, inputs, destination, token):
    """The row of a token at the lane's peer, or -1."""
    if ctx.team.lane >= ctx.peers.num_ranks or token >= ctx.sizes.num_tokens:
        return -1
    return load_row(ctx, inputs, destination.peer, destination.first_row, token)


@device_function
def store_header(ctx, area, row, token, choice, first_expert):
    """Write what goes with a token besides its scales; one warp. choice: in lane k the expert and the weight k."""
    places, shape, lane = ctx.places, ctx.shape, ctx.team.lane
    if lane < shape.num_src_idx:
        ptx.st_na_s32(area + places.src_idx + 4 * row, token)
    if lane < shape.num_topk:
        expert, weight = keep_in_range(choice[0], choice[1], Experts(first_expert, ctx.sizes.num_local_experts))
        ptx.st_na_s64(area + places.topk_idx + 8 * (row * shape.num_topk + lane), expert)
        ptx.st_na_f32(matrix_cell(area + places.topk_weights, row, lane, shape.num_topk), weight)


@device_function
def spread_scales(ctx, there, scales):
    """Load the scales of a token and store them at all ranks that want it; one warp, without the copy engine."""
    num_scales, lane = ctx.shape.num_scales, ctx.team.lane
    for begin in range(0, num_scales, 32):
        is_one = begin + lane < num_scales
        scale = ptx.ld_nc_keep_s32(scales + 4 * (begin + lane) * ctx.sizes.scale_hidden_stride) if is_one else 0
        left = there.wanted
        while left != 0:
            turn = ptx.ffs_u32(left) - 1
            left &= left - 1
            dst = ptx.shfl_idx_s64(ptx.FULL_MASK, there.area, turn) + ctx.places.scales
            at = ptx.shfl_idx_s32(ptx.FULL_MASK, there.row, turn) * num_scales + begin + lane
            if is_one:
                ptx.st_na_s32(dst + 4 * at, scale)


@device_function
def num_scales_at_once(shape):
    """How many consecutive tokens' scales fit into one stage.

    0 if a token's scales are not a multiple of 16 bytes, so that lanes must store them.
    """
    num_bytes = 4 * shape.num_scales
    if not ptx.has_tma() or num_bytes == 0 or num_bytes % VEC_BYTES != 0:
        return 0
    return min(32, ptx.u32_div(STAGE_BYTES, num_bytes))


@device_function
def load_scales(ctx, stage, scales, count, parity):
    """Bring the scales of neighbours into the stage, lane i those of token i. Returns the parity of the next fill.

    A lane has eight loads in flight; where scales are column-major, a load brings those of neighbours.
    """
    shape, sizes, lane = ctx.shape, ctx.sizes, ctx.team.lane
    num_bytes = 4 * shape.num_scales
    if sizes.scale_hidden_stride == 1 and sizes.scale_token_stride == shape.num_scales and scales % VEC_BYTES == 0:
        begin_fill(scales, count * num_bytes, stage, lane)
        return wait_filled(stage, parity)
    if lane == 0:
        ptx.tma_store_wait_read_all()
    ptx.syncwarp(ptx.FULL_MASK)
    if lane < count:
        src = scales + 4 * lane * sizes.scale_token_stride
        stride = 4 * sizes.scale_hidden_stride
        to = stage.data + num_bytes * lane
        end = to + num_bytes
        while to < end:
            has_next = to + VEC_BYTES < end
            next_src = src + 4 * stride if has_next else src
            a = ptx.ld_nc_keep_s32(src)
            b = ptx.ld_nc_keep_s32(src + stride)
            c = ptx.ld_nc_keep_s32(src + 2 * stride)
            d = ptx.ld_nc_keep_s32(src + 3 * stride)
            e = ptx.ld_nc_keep_s32(next_src)
            f = ptx.ld_nc_keep_s32(next_src + stride)
            g = ptx.ld_nc_keep_s32(next_src + 2 * stride)
            h = ptx.ld_nc_keep_s32(next_src + 3 * stride)
            ptx.st_shared_v4(to, (a, b, c, d))
            if has_next:
                ptx.st_shared_v4(to + VEC_BYTES, (e, f, g, h))
            src += 8 * stride
            to += 2 * VEC_BYTES
    ptx.fence_proxy_async_shared()
    ptx.syncwarp(ptx.FULL_MASK)
    return parity


@device_function
def send_scales(ctx, inputs, destination, first, stage, parity):
    """Put the scales of neighbours, at most 32, into their rows; one warp. Returns the parity of the next fill.

    Rows of neighbours that go to the same rank follow each other, so one copy takes the scales of a run of tokens.
    """
    peers, places, shape, lane = ctx.peers, ctx.places, ctx.shape, ctx.team.lane
    count = min(num_scales_at_once(shape), ctx.sizes.num_tokens - first)
    num_bytes = 4 * shape.num_scales
    scales = inputs.x_scales + 4 * first * ctx.sizes.scale_token_stride
    parity = load_scales(ctx, stage, scales, count, parity)
    for turn in range(peers.num_ranks):
        area = ptx.shfl_idx_s64(ptx.FULL_MASK, destination.area, turn)
        first_row = ptx.shfl_idx_s32(ptx.FULL_MASK, destination.first_row, turn)
        row = -1
        if lane < count:
            peer = peer_of(peers, turn)
            row = load_row(ctx, inputs, peer, first_row, first + lane)
        before = ptx.shfl_idx_s32(ptx.FULL_MASK, row, max(lane - 1, 0))
        goes_on = ptx.vote_ballot(ptx.FULL_MASK, lane > 0 and before >= 0 and row == before + 1)
        left = ptx.vote_ballot(ptx.FULL_MASK, row >= 0) & ~goes_on
        while left != 0:
            begin = ptx.ffs_u32(left) - 1
            left &= left - 1
            length = ptx.ffs_u32(~(goes_on >> (begin + 1)))
            to = area + places.scales + num_bytes * ptx.shfl_idx_s32(ptx.FULL_MASK, row, begin)
            if lane == 0:
                ptx.tma_store_1d(to, stage.data + num_bytes * begin, num_bytes * length)
    drain_stage(lane)
    return parity


@device_function
def spread_row(ctx, there, src):
    """Load a row and store it at all ranks that want it; one warp, without the copy engine."""
    num_bytes, lane = ctx.shape.hidden_bytes, ctx.team.lane
    for begin in range(0, num_bytes, WARP_BYTES):
        offset = begin + lane * VEC_BYTES
        values = ptx.ld_nc_v4(src + offset) if offset < num_bytes else (0, 0, 0, 0)
        left = there.wanted
        while left != 0:
            turn = ptx.ffs_u32(left) - 1
            left &= left - 1
            base = ptx.shfl_idx_s64(ptx.FULL_MASK, there.area, turn) + ctx.places.x
            dst = base + ptx.shfl_idx_s32(ptx.FULL_MASK, there.row, turn) * num_bytes
            if offset < num_bytes:
                ptx.st_na_v4(dst + offset, values)


@device_function
def spread_rest(ctx, there, src, begin, stage, parity):
    """What of a row did not fit into the stage with its beginning. Returns the parity of the stage's next copy."""
    num_bytes, lane = ctx.shape.hidden_bytes, ctx.team.lane
    offset = begin
    while offset < num_bytes:
        part = min(num_bytes - offset, STAGE_BYTES)
        if lane == 0:
            load_stage(stage.data, src + offset, part, stage)
            while not ptx.mbarrier_try_wait_parity(stage.full, parity):
                pass
        parity ^= 1
        left = there.wanted
        while left != 0:
            turn = ptx.ffs_u32(left) - 1
            left &= left - 1
            base = ptx.shfl_idx_s64(ptx.FULL_MASK, there.area, turn) + ctx.places.x
            dst = base + ptx.shfl_idx_s32(ptx.FULL_MASK, there.row, turn) * num_bytes
            if lane == 0:
                ptx.tma_store_1d(dst + offset, stage.data, part)
        if lane == 0:
            ptx.tma_store_commit()
        offset += part
    return parity


@device_function
def send_token(ctx, inputs, there, token, stage, parity):
    """Put one token into its row of each rank that wants it; one warp. Returns the parity of the stage's next copy."""
    places, shape, lane = ctx.places, ctx.shape, ctx.team.lane
    src = inputs.x + token * shape.hidden_bytes
    part = min(shape.hidden_bytes, STAGE_BYTES)
    if ptx.has_tma():
        begin_fill(src, shape.hidden_bytes, stage, lane)
    expert = ptx.ld_na_s64(inputs.topk_idx + 8 * (token * shape.num_topk + lane)) if lane < shape.num_topk else 0
    weight = ptx.f32(0)
    if lane < shape.num_topk:
        weight = ptx.ld_na_f32(matrix_cell(inputs.topk_weights, token, lane, shape.num_topk))
    if ptx.has_tma():
        if lane == 0:
            while not ptx.mbarrier_try_wait_parity(stage.full, parity):
                pass
        parity ^= 1
    left = there.wanted
    while left != 0:
        turn = ptx.ffs_u32(left) - 1
        left &= left - 1
        area = ptx.shfl_idx_s64(ptx.FULL_MASK, there.area, turn)
        to = ptx.shfl_idx_s32(ptx.FULL_MASK, there.row, turn)
        if ptx.has_tma() and lane == 0:
            ptx.tma_store_1d(area + places.x + to * shape.hidden_bytes, stage.data, part)
        first_expert = peer_of(ctx.peers, turn) * ctx.sizes.num_local_experts
        store_header(ctx, area, to, token, (expert, weight), first_expert)
    if ptx.has_tma():
        if lane == 0:
            ptx.tma_store_commit()
        parity = spread_rest(ctx, there, src, part, stage, parity)
    else:
        spread_row(ctx, there, src)
    if shape.num_scales != 0 and num_scales_at_once(shape) == 0:
        spread_scales(ctx, there, inputs.x_scales + 4 * token * ctx.sizes.scale_token_stride)
    return parity


@device_function
def send_tokens(ctx, inputs):
    """Sender: all tokens of this rank, each warp its share."""
    shape, sizes, warp, lane = ctx.shape, ctx.sizes, ctx.team.warp, ctx.team.lane
    destination = find_destination(inputs, ctx.peers, lane)
    stage = open_stage(ptx.smem_base(), warp, lane)
    parity = 0
    num_warps = ptx.block_dim() // 32
    num_senders = ptx.grid_dim() * num_warps
    token = ptx.block_idx() * num_warps + warp
    row = load_own_row(ctx, inputs, destination, token)
    at_once = num_scales_at_once(shape)
    # Scales go out behind a row, whose copies keep the way out busy meanwhile.
    first = at_once * (ptx.block_idx() + ptx.grid_dim() * warp) if at_once > 0 else sizes.num_tokens
    while token < sizes.num_tokens or first < sizes.num_tokens:
        next_row = -1
        if ptx.has_tma():  # it arrives while this token goes out; without a copy engine the registers are needed there
            next_row = load_own_row(ctx, inputs, destination, token + num_senders)
        wanted = ptx.vote_ballot(ptx.FULL_MASK, row >= 0)
        if wanted != 0:
            parity = send_token(ctx, inputs, There(destination.area, row, wanted), token, stage, parity)
        if first < sizes.num_tokens:
            parity = send_scales(ctx, inputs, destination, first, stage, parity)
            first += at_once * num_senders
        token += num_senders
        row = next_row if ptx.has_tma() else load_own_row(ctx, inputs, destination, token)
    if ptx.has_tma() and lane == 0:
        ptx.tma_store_wait_all()


@device_function
def notify_channel_starts(ctx, inputs):
    """Tell each rank where the channels start among the tokens that go there; one block."""
    peers, shape = ctx.peers, ctx.shape
    for i in range(ptx.thread_idx(), peers.num_ranks * shape.num_channels, ptx.block_dim()):
        peer = ptx.u32_div(i, shape.num_channels)
        channel = ptx.u32_mod(i, shape.num_channels)
        start = ptx.ld_nc_s32(inputs.channel_prefix_matrix + 4 * (i - 1)) if channel > 0 else 0
        starts = buffer_of(peers, peer) + ctx.places.channel_starts
        ptx.st_na_s32(matrix_cell(starts, peers.rank, channel, shape.num_channels), start)


@device_function
def wait_blocks_arrived(cell, num_blocks, bounds, peer):
    """Wait until so many blocks of a peer have sent all that they have: it can be read then."""
    waiter = Waiter(DIRECT_ARRIVED, peer, -1)
    wait_or_report(ptx.ld_acquire_sys_s32, cell, is_at_least, num_blocks, bounds, waiter)  # PAIR direct-arrived


@device_function
def receive(ctx, out, inputs):
    """Receiver: wait until all blocks of all peers have sent what they have; one block."""
    peers, bounds, num_rows = ctx.peers, ctx.bounds, ctx.sizes.num_recv_tokens
    peer = ptx.thread_idx()
    if peer < peers.num_ranks and peer != peers.rank:
        wait_blocks_arrived(buffer_of(peers, peers.rank) + RINGS + 4 * peer, ptx.grid_dim(), bounds, peer)
    num_tokens = num_received(inputs, peers)
    if ptx.thread_idx() == 0 and not 0 <= num_tokens <= num_rows:
        report_fault(bounds, DISPATCH_RECEIVER_ROWS, peers.rank, -1, num_tokens, num_rows)
    ptx.syncthreads()
    if out.recv_channel_prefix_matrix != 0:
        starts = buffer_of(peers, peers.rank) + ctx.places.channel_starts
        for i in range(ptx.thread_idx(), peers.num_ranks * ctx.shape.num_channels, ptx.block_dim()):
            ptx.st_weak_s32(out.recv_channel_prefix_matrix + 4 * i, ptx.ld_na_s32(starts + 4 * i))


@device_function
def num_received(inputs, peers):
    """How many tokens all ranks send to this one."""
    last = (peers.num_ranks - 1) * peers.num_ranks + peers.rank
    return ptx.ld_nc_s32(inputs.rank_prefix_matrix + 4 * last)


@device_function
def spoil_area(ctx):
    """What has been received, after a failure: see parts.spoil. Peers that are only late may still bring rows."""
    places, shape, lane = ctx.places, ctx.shape, ctx.team.lane
    area = buffer_of(ctx.peers, ctx.peers.rank)
    num_rows = min(ctx.sizes.num_recv_tokens, places.num_rows)
    spoil(area + places.x, num_rows * shape.hidden_bytes, lane)
    spoil(area + places.scales, 4 * num_rows * shape.num_scales, lane)
    spoil_s64(area + places.topk_idx, 8 * num_rows * shape.num_topk, lane)
    spoil(area + places.topk_weights, 4 * num_rows * shape.num_topk, lane)


@kernel(max_threads=768, clusters=CLUSTERS)
def direct_dispatch(
    out: DirectOutputs,
    inputs: DirectInputs,
    peers: Peers,
    bounds: Bounds,
    places: HalfPlaces,
    shape: DirectShape,
    sizes: DirectSizes,
):
    """Grid: any, the same on all ranks. Block: a multiple of 32. Shared memory: `direct_dispatch_smem_bytes`.

    peers: of the areas
    """
    warp = ptx.thread_idx() // 32
    lane = ptx.thread_idx() % 32
    ctx = Context(peers, bounds, shape, sizes, places, Team(True, -1, -1, warp, ptx.block_dim() // 32, lane))
    may_send = ptx.vote_all(ptx.FULL_MASK, not has_timed_out(bounds))
    if may_send:
        send_tokens(ctx, inputs)
        if ptx.block_idx() == 0:
            notify_channel_starts(ctx, inputs)
    if sizes.num_worst_tokens > 0:
        area = buffer_of(peers, peers.rank)
        # After a failed barrier the matrix may hold anything.
        begin, end = max(num_received(inputs, peers), 0) * shape.num_topk, sizes.num_worst_tokens * shape.num_topk
        clean_choices(area + places.topk_idx, area + places.topk_weights, begin, end)
    have_sent = ptx.bar_red_and(1, ptx.block_dim(), may_send)
    peer = ptx.thread_idx()
    if have_sent and peer < peers.num_ranks and peer != peers.rank:
        arrived = buffer_of(peers, peer) + RINGS + 4 * peers.rank
        ptx.atom_add_release_sys_s32(arrived, 1)  # PAIR direct-arrived: its rows
    if ptx.block_idx() == 0:
        receive(ctx, out, inputs)
        if has_failed(bounds):
            spoil_area(ctx)
