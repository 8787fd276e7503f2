"""Direct combine: ranks push the rows they got back to where they came from, one place for each; the source adds up.

 rank d: x[i] --sender--> NVLink --> slot[(t, d)] --receiver: sum over d--> combined_x[t] : rank s
 rank s: x[i], what it got from itself ------------------^

 cell               written by        with                     read by           with
 landed[d, chunk]   sender(d)         st_release_sys           receivers(s)      ld_acquire_sys
 slot, its weights  sender(d)         bulk copy, st_na (1)     receivers(s)      bulk copy, ld_na, after landed (2)
 next_token         receivers         atom_add_relaxed_gpu     receivers         the same
 landed, next_token the owner         st_weak 0 (notify), barrier (this kernel)  -
 own rows, biases   no kernel         -                        receivers(s)      bulk copy, or ld_na
 rows, weights[w]   warp w            st_shared                the same warp     ld_shared, after syncwarp
 stage of a warp    copy engine       bulk copy                the warp          ld_shared, see staged_sums.py
 combined_ arrays   receivers         st_na, st_weak           -                 the next kernel

 (1) The barrier of the notify kernel stands before: the owner has left the combine before, whose slots they were.
 (2) Bulk copies are waited for to the end (tma_store_wait_all) by the thread that started them, before it says that
     the chunk has landed; a syncwarp stands between the lanes' stores of weights and that. By then it has started to
     load the first row of its next chunk, so that the wait hides that load. A receiver's lanes acquire, meet at the
     syncwarp of list_rows, and fence for the copy engine.

Here d is the rank that sends back and s the one that the tokens came from. Every (token, rank) of s has a slot of its
own at s, see layout.direct: so senders never wait, and need no heads. What a rank sends to itself is
added where it is, in x.

A chunk is some rows in a row that go to one source. Warps of senders take chunks in turn, of one source after the
other, beginning with the one behind their own rank: otherwise all ranks would push to rank 0 first. A chunk is said to
have landed when its last row has: each release makes an SM wait for what it has under way.

The first num_push_warps warps of each block push, the others add up from the first token on: what leaves an SM and what
comes in have ways of their own. Whoever has pushed all adds up, too. A warp takes the next token that no warp has,
so that all end together.

Source: DeepEP csrc/kernels/intranode.cu, combine
"""

from typing import NamedTuple

import nbep.device.primitives as ptx
from nbep.device.jit import device_function, kernel
from nbep.device.kernels.intranode.arguments import Context
from nbep.device.kernels.parts.spoil import has_failed, spoil_sums
from nbep.device.kernels.parts.staged_sums import FULL_BYTES, SUM_STAGE_BYTES, open_sum_stage, sum_rows_staged
from nbep.device.kernels.parts.sums import ENDLESS, Listed, Source, list_biases, list_rows, sum_rows, sum_weights
from nbep.device.layout.direct import NEXT_TOKEN, SlotPlaces, SlotShape, locate_landed, slot_stride
from nbep.device.protocols.copies import Row, begin_copy, end_copy
from nbep.device.protocols.matrices import matrix_cell
from nbep.device.protocols.peers import CLUSTERS, Bounds, Peers, buffer_of
from nbep.device.protocols.staging import STAGE_BYTES, Stage
from nbep.device.protocols.teams import Team
from nbep.device.protocols.waits import Waiter, has_fault, is_set, site, wait_or_report
from nbep.device.types import I32, In, Out

DIRECT_LANDED = site(33, "direct combine receiver", "landed", "the peer's row of a token")

MAX_RANKS = 8
MAX_ROWS = MAX_RANKS + 2  # of one sum: one from each rank, and the biases
LIST_BYTES = 8 * (MAX_ROWS + MAX_RANKS)  # of a warp; see Lists


class DirectCombineOutputs(NamedTuple):
    """combined_topk_weights may be absent (0)."""

    combined_x: Out  # [num_combined_tokens, hidden_bytes] bf16
    combined_topk_weights: Out  # [num_combined_tokens, num_topk] f32


class DirectCombineInputs(NamedTuple):
    """topk_weights, bias_0 and bias_1 may be absent (0)."""

    x: In  # [num_tokens, hidden_bytes] bf16
    topk_weights: In  # [num_tokens, num_topk] f32
    bias_0: In  # [num_combined_tokens, hidden_bytes] bf16
    bias_1: In  # [num_combined_tokens, hidden_bytes] bf16
    rank_prefix_matrix: In  # [num_ranks, num_ranks] s32, inclusive over the source rank
    channel_prefix_matrix: In  # [num_ranks, num_channels] s32, inclusive
    send_head: In  # [num_combined_tokens, num_ranks] s32: index among those of the channel to the rank, or negative


class DirectCombineSizes(NamedTuple):
    num_combined_tokens: I32
    num_push_warps: I32  # of a block


class Rows(NamedTuple):
    """What a lane knows of the rows that go back to one source: in x from begin on, there from first_slot on."""

    area: int  # where this rank sees the source's
    begin: int
    num_rows: int
    first_slot: int


class Way(NamedTuple):
    """Where a row goes: from `row` of x to a slot of the area of its source."""

    row: int
    area: int
    slot: int


class Lists(NamedTuple):
    """What a warp writes down of one sum: the addresses of rows and of their top-k weights, s64 each."""

    rows: int  # [MAX_ROWS]
    weights: int  # [MAX_RANKS]


class Sum(NamedTuple):
    """A token whose rows are to be added up; source and source_index: of the lane's rank, see `list_rows`."""

    token: int
    lists: Lists
    source_index: int
    source: Source


def direct_combine_smem_bytes(num_threads: int, has_tma: bool) -> int:
    """Dynamic shared memory of a block: lists for each warp and, where there are bulk copies, a stage."""
    return num_threads // 32 * (LIST_BYTES + (SUM_STAGE_BYTES + FULL_BYTES if has_tma else 0))


@device_function
def locate_lists(num_warps, warp):
    """The lists of a warp; they lie behind the stages, where there are any."""
    base = ptx.smem_base() + ((SUM_STAGE_BYTES + FULL_BYTES) * num_warps if ptx.has_tma() else 0)
    rows = base + LIST_BYTES * warp
    return Lists(rows, rows + 8 * MAX_ROWS)


@device_function
def tokens_between(inputs, src, dst, num_ranks):
    """How many tokens a rank sends to another."""
    up_to = matrix_cell(inputs.rank_prefix_matrix, src, dst, num_ranks)
    before = ptx.ld_nc_s32(up_to - 4 * num_ranks) if src > 0 else 0
    return ptx.ld_nc_s32(up_to) - before


@device_function
def first_slot_of(inputs, src, dst, num_ranks):
    """The first slot at src of what it sends to dst; its own tokens have none."""
    first = 0
    for rank in range(dst):
        if rank != src:
            first += tokens_between(inputs, src, rank, num_ranks)
    return first


@device_function
def find_rows(inputs, peers, lane):
    """In lane i the rows for the (rank + 1 + i)-th source, counted around."""
    source = ptx.u32_mod(peers.rank + 1 + lane, peers.num_ranks)
    num_rows = tokens_between(inputs, source, peers.rank, peers.num_ranks)
    begin = ptx.ld_nc_s32(matrix_cell(inputs.rank_prefix_matrix, source, peers.rank, peers.num_ranks)) - num_rows
    first_slot = first_slot_of(inputs, source, peers.rank, peers.num_ranks)
    return Rows(buffer_of(peers, source), begin, num_rows, first_slot)


@device_function
def most_rows(inputs, peers):
    """The most rows that go back to one other rank."""
    most = 0
    for source in range(peers.num_ranks):
        if source != peers.rank:
            most = max(most, tokens_between(inputs, source, peers.rank, peers.num_ranks))
    return most


@device_function
def announce(landed, lane):
    """Say that the chunk has landed which the warp has pushed last; nothing if landed, its cell, is 0."""
    if landed != 0:
        if ptx.has_tma() and lane == 0:
            ptx.tma_store_wait_all()
        ptx.syncwarp(ptx.FULL_MASK)
        if lane == 0:
            ptx.st_release_sys_s32(landed, 1)  # PAIR direct-landed: the chunk's slots


@device_function
def send_row(ctx, inputs, way, landed, stage, parity):
    """Copy a row and its weights to a slot; one warp. Returns the parity of the stage's next copy.

    landed: of the chunk before, if this row is the first behind it: it is announced while this one is loaded
    """
    places, shape, lane = ctx.places, ctx.shape, ctx.team.lane
    area, slot, row = way.area, way.slot, way.row
    copied = Row(inputs.x + row * shape.hidden_bytes, shape.hidden_bytes, 0)
    begin_copy(copied, stage, lane)
    weight = ptx.f32(0)
    if lane < shape.num_topk:
        weight = ptx.ld_na_f32(matrix_cell(inputs.topk_weights, row, lane, shape.num_topk))
    announce(landed, lane)
    if lane < shape.num_topk:
        ptx.st_na_f32(matrix_cell(area + places.topk_weights, slot, lane, shape.num_topk), weight)
    dst = area + places.x + slot * slot_stride(shape.hidden_bytes)
    return end_copy(ptx.ld_nc_v4, dst, copied, stage, parity, lane)


@device_function
def send_rows(ctx, inputs, stage):
    """Sender: the chunks of this warp, of one source after the other. Returns the parity of the stage's next copy."""
    peers, places, shape, lane = ctx.peers, ctx.places, ctx.shape, ctx.team.lane
    rows = find_rows(inputs, peers, lane)
    num_sources = peers.num_ranks - 1
    num_chunks = num_sources * ptx.u32_div(most_rows(inputs, peers) + shape.chunk - 1, shape.chunk)
    parity = 0
    landed = 0
    number = ptx.block_idx() + ptx.grid_dim() * ctx.team.warp
    while number < num_chunks:
        turn = ptx.u32_mod(number, num_sources)
        chunk = ptx.u32_div(number, num_sources)
        area = ptx.shfl_idx_s64(ptx.FULL_MASK, rows.area, turn)
        begin = ptx.shfl_idx_s32(ptx.FULL_MASK, rows.begin, turn)
        num_rows = ptx.shfl_idx_s32(ptx.FULL_MASK, rows.num_rows, turn)
        first_slot = ptx.shfl_idx_s32(ptx.FULL_MASK, rows.first_slot, turn)
        i = chunk * shape.chunk
        end = min(i + shape.chunk, num_rows)
        if i < end:
            while i < end:
                parity = send_row(ctx, inputs, Way(begin + i, area, first_slot + i), landed, stage, parity)
                landed = 0
                i += 1
            landed = area + places.landed + 4 * (locate_landed(first_slot, peers.rank, shape.chunk) + chunk)
        number += ptx.grid_dim() * ctx.sizes.num_push_warps
    announce(landed, lane)
    return ptx.shfl_idx_s32(ptx.FULL_MASK, parity, 0)  # lane 0 drives the copies, so it alone knows


@device_function
def take_token(area, lane):
    """The next token that no warp has taken, in lane 0; it arrives while other work goes on."""
    return ptx.atom_add_relaxed_gpu_s32(area + NEXT_TOKEN, 1) if lane == 0 else 0


@device_function
def find_source(ctx, inputs, area, first_slot, rank):
    """Where this rank finds what a rank has made of its tokens."""
    peers, places, shape = ctx.peers, ctx.places, ctx.shape
    x = area + places.x + first_slot * slot_stride(shape.hidden_bytes)
    weights = area + places.topk_weights + 4 * first_slot * shape.num_topk
    x_stride = slot_stride(shape.hidden_bytes)
    if rank == peers.rank:
        first = 0
        if rank > 0:
            first = ptx.ld_nc_s32(matrix_cell(inputs.rank_prefix_matrix, rank - 1, rank, peers.num_ranks))
        x = inputs.x + first * shape.hidden_bytes
        weights = inputs.topk_weights + 4 * first * shape.num_topk
        x_stride = shape.hidden_bytes
    return Source(x, x_stride, weights, 4 * shape.num_topk, ENDLESS)


@device_function
def load_index(ctx, inputs, token):
    """The index of a token among all that go to rank `lane`; negative if it does not go there."""
    peers, shape, lane, num_tokens = ctx.peers, ctx.shape, ctx.team.lane, ctx.sizes.num_combined_tokens
    if token >= num_tokens or lane >= peers.num_ranks:
        return -1
    channel = ptx.u32_div(token, ptx.u32_div(num_tokens + shape.num_channels - 1, shape.num_channels))
    head = ptx.ld_nc_s32(matrix_cell(inputs.send_head, token, lane, peers.num_ranks))
    before = matrix_cell(inputs.channel_prefix_matrix, lane, channel - 1, shape.num_channels)
    start = ptx.ld_nc_s32(before) if channel > 0 else 0
    return start + head if head >= 0 else -1


@device_function
def sum_token(ctx, out, inputs, sum_, stage, parities):
    """Add up the rows of a token, which are there, and their weights. Returns the parities of the next fills."""
    shape, lane = ctx.shape, ctx.team.lane
    token, lists = sum_.token, sum_.lists
    num_biases = list_biases(lists.rows, (inputs.bias_0, inputs.bias_1), token, shape.hidden_bytes, lane)
    num_ranks = list_rows(lists.rows + 8 * num_biases, lists.weights, lane, sum_.source_index, sum_.source)
    dst = out.combined_x + token * shape.hidden_bytes
    rows = Listed(lists.rows, num_biases + num_ranks)
    if ptx.has_tma():
        ptx.fence_proxy_async_global()  # what the peers have landed, before the bulk copies that read it
        parities = sum_rows_staged(dst, rows, shape.hidden_bytes, stage, parities, lane)
    else:
        sum_rows(ptx.st_na_v4, dst, rows, 0, shape.hidden_bytes, lane)
    if lane < shape.num_topk:
        total = sum_weights(lists.weights, num_ranks, lane)
        ptx.st_weak_f32(matrix_cell(out.combined_topk_weights, token, lane, shape.num_topk), total)
    ptx.syncwarp(ptx.FULL_MASK)
    return parities


@device_function
def receive_tokens(ctx, out, inputs, lists, stage, parities):
    """Receiver: add up the tokens that this warp gets hold of."""
    peers, bounds, places, shape, lane = ctx.peers, ctx.bounds, ctx.places, ctx.shape, ctx.team.lane
    num_tokens = ctx.sizes.num_combined_tokens
    area = buffer_of(peers, peers.rank)
    first_slot = 0
    if lane < peers.num_ranks:
        first_slot = first_slot_of(inputs, peers.rank, lane, peers.num_ranks)
    source = find_source(ctx, inputs, area, first_slot, lane)
    landed = area + places.landed + 4 * locate_landed(first_slot, lane, shape.chunk)
    # After a fault the handle may say anything of where rows are.
    has_rows = ptx.vote_all(ptx.FULL_MASK, not has_fault(bounds))
    token = ptx.shfl_idx_s32(ptx.FULL_MASK, take_token(area, lane), 0)
    while token < num_tokens:
        index = load_index(ctx, inputs, token) if has_rows else -1
        next_token = take_token(area, lane)
        if index >= 0 and lane != peers.rank:
            wait_landed(landed + 4 * ptx.u32_div(index, shape.chunk), bounds, lane, index)
        parities = sum_token(ctx, out, inputs, Sum(token, lists, index, source), stage, parities)
        token = ptx.shfl_idx_s32(ptx.FULL_MASK, next_token, 0)


@kernel(max_threads=768, clusters=CLUSTERS)
def direct_combine(
    out: DirectCombineOutputs,
    inputs: DirectCombineInputs,
    peers: Peers,
    bounds: Bounds,
    places: SlotPlaces,
    shape: SlotShape,
    sizes: DirectCombineSizes,
):
    """Grid: any. Block: a multiple of 32. Shared memory: `direct_combine_smem_bytes`.

    peers: of the areas
    """
    num_warps = ptx.block_dim() // 32
    warp = ptx.thread_idx() // 32
    lane = ptx.thread_idx() % 32
    ctx = Context(peers, bounds, shape, sizes, places, Team(True, -1, -1, warp, num_warps, lane))
    stage = open_sum_stage(ptx.smem_base(), num_warps, warp, lane)
    lists = locate_lists(num_warps, warp)
    parities = 0
    if warp < sizes.num_push_warps and ptx.vote_all(ptx.FULL_MASK, not has_fault(bounds)):
        send_stage = Stage(stage.data, stage.full, STAGE_BYTES)
        parities = send_rows(ctx, inputs, send_stage)
    receive_tokens(ctx, out, inputs, lists, stage, parities)
    if has_failed(bounds):
        spoil_sums(out, shape, sizes.num_combined_tokens, lane)


@device_function
def wait_landed(cell, bounds, peer, row):
    """Wait until a peer has pushed the chunk of rows that a cell stands for: they can be read then."""
    waiter = Waiter(DIRECT_LANDED, peer, -1)
    wait_or_report(ptx.ld_acquire_sys_s32, cell, is_set, row, bounds, waiter)  # PAIR direct-landed
