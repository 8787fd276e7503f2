"""Intranode dispatch: a sender pushes tokens into its peer's ring, the peer's receiver drains it into recv_x.

 rank s: x[t] --sender--> NVLink --> ring[channel c, source s] of rank r --receiver--> recv_x[i] : rank r
 rank s: x[t] --copier--> recv_x[i] : rank s                               (what a rank sends to itself)

 cell            written by    with                        read by       with
 start, end      sender(s)     st_relaxed_sys (-n - 1)     receiver(r)   ld_relaxed_sys (3)
 tail            sender(s)     st_release_sys              receiver(r)   ld_acquire_sys
 head            receiver(r)   st_relaxed_sys (1)          sender(s)     ld_relaxed_sys
 slot[k]         sender(s)     bulk copy, or st_na         receiver(r)   bulk copy and ld_na, after tail (2)
 shared tail     receiver(r)   st_shared, in warp 0        its team      ld_shared, after bar_sync
 stage           its warp      bulk copy, or st_shared     copy engine   bulk copy, after a proxy fence
 recv_ arrays    receiver(r)   bulk copy, st_na, st_weak   -             the next kernel
  own rows       copier(r)     bulk copy and st_na         -             the next kernel
 send_head       sender(s)     st_weak                     (combine)     -

 (1) head publishes nothing. The receiver's loads of the slot returned before its barrier, and head moves after
     it; the sender overwrites the slot only when it has seen head: no load can see what the sender writes later.
 (2) The slots below tail were written before the sender's barrier, and the thread that moves tail waits at it. Bulk
     copies are waited for to the end (tma_store_wait_all) by the thread that started them, before the barrier.
     A bulk copy reads through the async proxy, so a proxy fence stands between the acquire and the copy.
 (3) The number is all that is read because of it. That it has come also says that s has left its notify kernel, whose
     loads have returned: so r may overwrite what s has read there, in the notify kernel of the next call.

A ring and its cells are in the receiver's memory. start and end say which of the tokens from s to r are on channel c;
they travel as -n - 1, so that 0 means "not here yet".

A block's warps are split evenly over the ranks: a team for each. `join_team` deals out who sends and who receives. The
teams for the own rank are copiers: no ring, no cell, see `copy_own_tokens`.

Source: DeepEP csrc/kernels/intranode.cu, dispatch. Break it: notebooks/04_dispatch.ipynb
"""

from typing import NamedTuple

import nbep.device.primitives as ptx
from nbep.device.alignment import matrix_cell
from nbep.device.jit import device_function, kernel
from nbep.device.kernels.parts.header import (
    Experts,
    Token,
    clean_choices,
    clear_padding,
    read_header,
    to_memory,
    to_stage,
    write_header,
)
from nbep.device.kernels.parts.spoil import DISPATCH_RECEIVER_ROWS, has_failed, spoil_rows
from nbep.device.layout.intranode import Header, RingShape, header_bytes, locate_header, locate_ring, slot_bytes
from nbep.device.protocols.channels import channel_task_range
from nbep.device.protocols.copies import Row, begin_copy, end_copy
from nbep.device.protocols.peers import CLUSTERS, Bounds, Peers, buffer_of
from nbep.device.protocols.staging import STAGE_STRIDE, open_stage
from nbep.device.protocols.teams import Context, Team, publish_tail, team_barrier, wait_free_slots, wait_tail_past
from nbep.device.protocols.waits import (
    Waiter,
    has_timed_out,
    is_set,
    report_fault,
    site,
    wait_or_report,
)
from nbep.device.types import I32, In, Out

DISPATCH_SENDER_HEAD = site(2, "dispatch sender", "head", "free slots in the peer's ring")
DISPATCH_RECEIVER_OFFSETS = site(3, "dispatch receiver", "start/end", "the peer's announcement of its tokens")
DISPATCH_RECEIVER_TAIL = site(4, "dispatch receiver", "tail", "the peer's next chunk of tokens")

SHARED_TAILS_BYTES = 128  # before the warps' stages: one s32 for each warp; a team has that of its first


class DispatchOutputs(NamedTuple):
    """All but recv_x may be absent (0): what the inputs lack, and what only a new handle needs (with send_head)."""

    recv_x: Out  # [num_recv_tokens, hidden_bytes]
    recv_x_scales: Out  # [num_recv_tokens, num_scales] 4 bytes each
    recv_src_idx: Out  # [num_recv_tokens] s32
    recv_topk_idx: Out  # [num_recv_tokens, num_topk] s64
    recv_topk_weights: Out  # [num_recv_tokens, num_topk] f32
    recv_channel_prefix_matrix: Out  # [num_ranks, num_channels] s32, exclusive
    send_head: Out  # [num_tokens, num_ranks] s32: the token's index among those of its channel to the rank, or -1


class DispatchInputs(NamedTuple):
    """x_scales, topk_idx and topk_weights may be absent (0)."""

    x: In  # [num_tokens, hidden_bytes]
    x_scales: In  # [num_tokens, num_scales] 4 bytes each, any strides
    topk_idx: In  # [num_tokens, num_topk] s64
    topk_weights: In  # [num_tokens, num_topk] f32
    is_token_in_rank: In  # [num_tokens, num_ranks] u8
    rank_prefix_matrix: In  # [num_ranks, num_ranks] s32, inclusive over the source rank
    channel_prefix_matrix: In  # [num_ranks, num_channels] s32, inclusive


class DispatchSizes(NamedTuple):
    """Strides count scales, not bytes."""

    num_tokens: I32
    num_recv_tokens: I32  # rows of recv_x
    num_worst_tokens: I32
    num_local_experts: I32
    num_max_send_tokens: I32
    scale_token_stride: I32
    scale_hidden_stride: I32
    mix_roles: I32  # 1: see join_team


def dispatch_smem_bytes(num_threads: int, has_tma: bool) -> int:
    """Dynamic shared memory of a dispatch block: the shared tails and, where there are bulk copies, a stage a warp.

    Stages of 24 warps are more than a block before sm_90 may have.
    """
    return SHARED_TAILS_BYTES + (STAGE_STRIDE * (num_threads // 32) if has_tma else 0)


@device_function
def join_team(num_ranks, mix_roles):
    """Which peer and channel this thread works for, and in which role.

    Blocks come in pairs: block 2c sends and block 2c + 1 receives channel c. With mix_roles both blocks send to one
    half of the peers and receive from the other, so that every SM pushes: what leaves an SM is the limit.
    """
    threads_per_rank = ptx.u32_div(ptx.block_dim(), num_ranks)
    thread_in_rank = ptx.u32_mod(ptx.thread_idx(), threads_per_rank)
    peer = ptx.u32_div(ptx.thread_idx(), threads_per_rank)
    is_even = ptx.block_idx() % 2 == 0
    sends = is_even == (2 * peer < num_ranks) if mix_roles != 0 else is_even
    return Team(
        sends,
        peer,
        ptx.block_idx() // 2,
        thread_in_rank // 32,
        threads_per_rank // 32,
        ptx.thread_idx() % 32,
    )


@device_function
def channel_range(ctx, inputs):
    """Where this channel's tokens start and end among those that this rank sends to the peer."""
    team = ctx.team
    prefix = matrix_cell(inputs.channel_prefix_matrix, team.peer, team.channel, ctx.shape.num_channels)
    return ptx.ld_nc_s32(prefix - 4) if team.channel > 0 else 0, ptx.ld_nc_s32(prefix)


@device_function
def announce_tokens(ctx, inputs, ring):
    """Tell the receiver that range."""
    if ctx.team.warp == 0 and ctx.team.lane == 0:
        start, end = channel_range(ctx, inputs)
        ptx.st_relaxed_sys_s32(ring.start, -start - 1)
        ptx.st_relaxed_sys_s32(ring.end, -end - 1)
    ptx.syncwarp(ptx.FULL_MASK)


@device_function
def own_token(ctx, inputs, token):
    """A token of this rank, and the experts of the peer."""
    num_experts = ctx.sizes.num_local_experts
    return Token(inputs, ctx.sizes, token, Experts(ctx.team.peer * num_experts, num_experts))


@device_function
def fill_slot(ctx, token, row, stage, parity):
    """Copy one token and its header into a slot; one warp. Returns the parity of the stage's next copy.

    row is the address of the slot's row; the header lies in front of it.
    """
    shape, lane = ctx.shape, ctx.team.lane
    copied = Row(token.inputs.x + token.row * shape.hidden_bytes, shape.hidden_bytes, header_bytes(shape))
    begin_copy(copied, stage, lane)
    if ptx.has_tma():
        ptx.syncwarp(ptx.FULL_MASK)
        write_header(to_stage(), locate_header(stage.data + copied.front, shape), token, token.row, shape, lane)
        ptx.fence_proxy_async_shared()
        ptx.syncwarp(ptx.FULL_MASK)
    else:
        write_header(to_memory(), locate_header(row, shape), token, token.row, shape, lane)
    return end_copy(ptx.ld_nc_v4, row, copied, stage, parity, lane)


@device_function
def locate_output(out, row, shape):
    """Where the header of an output row goes."""
    return Header(
        out.recv_topk_idx + 8 * row * shape.num_topk,
        out.recv_topk_weights + 4 * row * shape.num_topk,
        out.recv_x_scales + 4 * row * shape.num_scales,
        out.recv_src_idx + 4 * row,
    )


@device_function
def tokens_for_peer(ctx, inputs, token, end):
    """Which of 32 tokens go to the team's peer: bit l for token + l. The same in every lane."""
    team, is_chosen = ctx.team, 0
    if token + team.lane < end:
        is_chosen = ptx.ld_nc_u8(inputs.is_token_in_rank + (token + team.lane) * ctx.shape.num_ranks + team.peer)
    return ptx.vote_ballot(ptx.FULL_MASK, is_chosen != 0)


@device_function
def note_send_heads(ctx, out, chosen, tail, token, end):
    """Write the indexes of 32 tokens, lane l that of token + l; -1 for those that do not go to this peer."""
    team = ctx.team
    if token + team.lane < end:
        before = ptx.popc_u32(chosen & ((1 << team.lane) - 1))
        head = tail + before if (chosen >> team.lane) & 1 != 0 else -1
        ptx.st_weak_s32(matrix_cell(out.send_head, token + team.lane, team.peer, ctx.shape.num_ranks), head)


@device_function
def send_tokens(ctx, out, inputs):
    """Sender: push this channel's tokens to one peer, num_max_send_tokens a chunk.

    The warps of a team go through the same tokens and take those that go to the peer in turn.
    """
    peers, bounds, shape, sizes, team = ctx.peers, ctx.bounds, ctx.shape, ctx.sizes, ctx.team
    ring = locate_ring(buffer_of(peers, team.peer), shape, team.channel, peers.rank)
    may_fill = ptx.vote_all(ptx.FULL_MASK, not has_timed_out(bounds))
    if may_fill:
        announce_tokens(ctx, inputs, ring)
    token, end = channel_task_range(sizes.num_tokens, shape.num_channels, team.channel)
    stage = open_stage(ptx.smem_base() + SHARED_TAILS_BYTES, ptx.thread_idx() // 32, team.lane)
    if ptx.has_tma():
        clear_padding(stage.data + header_bytes(shape), shape, team.lane)
    parity = 0
    tail = 0
    chunk_end = 0
    while token < end:
        chosen = tokens_for_peer(ctx, inputs, token, end)
        if team.warp == 0 and out.send_head != 0:
            note_send_heads(ctx, out, chosen, tail, token, end)
        while chosen != 0:
            if tail == chunk_end:
                chunk_end += sizes.num_max_send_tokens
                has_room = True
                if team.lane == 0 and chunk_end > shape.num_slots:  # until then it cannot be full
                    # Room for a full chunk, although fewer tokens may be left: counting them first would cost more.
                    waiter = Waiter(DISPATCH_SENDER_HEAD, team.peer, team.channel)
                    wanted = sizes.num_max_send_tokens
                    has_room = wait_free_slots(ring.head, tail, shape.num_slots, wanted, bounds, waiter)
                ptx.syncwarp(ptx.FULL_MASK)  # what lane 0 has seen of the head comes before all lanes' stores
                may_fill = may_fill and ptx.vote_all(ptx.FULL_MASK, has_room)
            if may_fill and ptx.u32_mod(tail, team.num_warps) == team.warp:
                row = ring.x + ptx.u32_mod(tail, shape.num_slots) * slot_bytes(shape)
                next_token = own_token(ctx, inputs, token + ptx.ffs_u32(chosen) - 1)
                parity = fill_slot(ctx, next_token, row, stage, parity)
            chosen &= chosen - 1
            tail += 1
            if tail == chunk_end and not publish_tail(ring, tail, may_fill, team):
                return
        token += 32
    if tail != chunk_end:
        publish_tail(ring, tail, may_fill, team)


@device_function
def tokens_up_to(ctx, inputs, src_rank):
    """How many tokens the ranks from 0 to src_rank send to this rank."""
    return ptx.ld_nc_s32(matrix_cell(inputs.rank_prefix_matrix, src_rank, ctx.peers.rank, ctx.shape.num_ranks))


@device_function
def first_row(ctx, inputs):
    """Where the peer's tokens start in recv_x of this rank."""
    return tokens_up_to(ctx, inputs, ctx.team.peer - 1) if ctx.team.peer > 0 else 0


@device_function
def check_rows(ctx, start, num_tokens):
    """Whether the tokens fit into recv_x; if not, that is reported to the host."""
    team, num_rows = ctx.team, ctx.sizes.num_recv_tokens
    fits = start >= 0 and start + num_tokens <= num_rows
    if not fits and team.warp == 0 and team.lane == 0:
        report_fault(ctx.bounds, DISPATCH_RECEIVER_ROWS, team.peer, team.channel, start + num_tokens, num_rows)
    return fits


@device_function
def note_channel_start(ctx, out, start):
    """What combine needs to know of this channel of the peer."""
    team = ctx.team
    if team.warp == 0 and team.lane == 0 and out.recv_channel_prefix_matrix != 0:
        ptx.st_weak_s32(
            matrix_cell(out.recv_channel_prefix_matrix, team.peer, team.channel, ctx.shape.num_channels), start
        )


@device_function
def wait_announced(cell, bounds, peer, channel):
    """Wait for a count that travels as -n - 1, so that 0 means "not here yet". Returns n; 0 if it never came.

    The load is relaxed: the count is the message itself, and nothing else is published by it.
    """
    waiter = Waiter(DISPATCH_RECEIVER_OFFSETS, peer, channel)
    value, came = wait_or_report(ptx.ld_relaxed_sys_s32, cell, is_set, -1, bounds, waiter)
    return -value - 1 if came else 0


@device_function
def receive_offsets(ctx, out, inputs, ring):
    """Receiver: where this channel's tokens go in recv_x, how many are coming, whether they fit.

    The same in every lane.
    """
    team = ctx.team
    start = 0
    num_tokens = 0
    if team.lane == 0:
        start = wait_announced(ring.start, ctx.bounds, team.peer, team.channel)
        num_tokens = wait_announced(ring.end, ctx.bounds, team.peer, team.channel) - start
        note_channel_start(ctx, out, start)
    start = ptx.shfl_idx_s32(ptx.FULL_MASK, start, 0)
    num_tokens = ptx.shfl_idx_s32(ptx.FULL_MASK, num_tokens, 0)
    start += first_row(ctx, inputs)
    return start, num_tokens, check_rows(ctx, start, num_tokens)


@device_function
def receive_token(ctx, out, src, row, stage, parity):
    """Copy the slot that has its row at src to an output row; one warp. Returns the parity of the stage's next copy."""
    shape, lane = ctx.shape, ctx.team.lane
    begin_copy(Row(src, shape.hidden_bytes, 0), stage, lane)
    read_header(locate_output(out, row, shape), locate_header(src, shape), shape, lane)  # while the row is on its way
    dst = out.recv_x + row * shape.hidden_bytes
    return end_copy(ptx.ld_na_v4, dst, Row(src, shape.hidden_bytes, 0), stage, parity, lane)


@device_function
def receive_tokens(ctx, out, inputs):
    """Receiver: drain one ring of this rank into the output rows that the prefix sums give it.

    Tokens that do not fit are drained and dropped: the sender must not hang on the receiver's fault.
    """
    peers, bounds, shape, team = ctx.peers, ctx.bounds, ctx.shape, ctx.team
    ring = locate_ring(buffer_of(peers, peers.rank), shape, team.channel, team.peer)
    shared_tail = ptx.smem_base() + 4 * (ptx.thread_idx() // 32 - team.warp)
    stage = open_stage(ptx.smem_base() + SHARED_TAILS_BYTES, ptx.thread_idx() // 32, team.lane)
    parity = 0
    first, num_left, fits = receive_offsets(ctx, out, inputs, ring)
    head = 0
    while num_left > 0:
        # One thread reads the tail for all: the warps of a team must agree on it.
        if team.warp == 0 and team.lane == 0:
            last = head + num_left
            waiter = Waiter(DISPATCH_RECEIVER_TAIL, team.peer, team.channel)
            tail = wait_tail_past(ring.tail, head, last, bounds, waiter)
            ptx.st_shared_s32(shared_tail, tail)
        team_barrier(team)
        tail = ptx.ld_shared_s32(shared_tail)
        if ptx.has_tma() and team.lane == 0:
            ptx.fence_proxy_async_global()  # what the tail published, before the bulk copies that read it
        num_tokens = tail - head
        num_kept = num_tokens if fits else 0
        for i in range(team.warp, num_kept, team.num_warps):
            src = ring.x + ptx.u32_mod(head + i, shape.num_slots) * slot_bytes(shape)
            parity = receive_token(ctx, out, src, first + i, stage, parity)
        head = tail
        first += num_tokens
        num_left -= num_tokens
        team_barrier(team)
        if team.warp == team.num_warps - 1 and team.lane == 0:
            ptx.st_relaxed_sys_s32(ring.head, head)
    if ptx.has_tma() and team.lane == 0:
        ptx.tma_store_wait_all()


@device_function
def copy_own_token(ctx, out, token, row, stage, parity):
    """Copy one token to an output row; one warp. Returns the parity of the stage's next copy."""
    shape, lane = ctx.shape, ctx.team.lane
    copied = Row(token.inputs.x + token.row * shape.hidden_bytes, shape.hidden_bytes, 0)
    begin_copy(copied, stage, lane)
    write_header(to_memory(), locate_output(out, row, shape), token, token.row, shape, lane)
    return end_copy(ptx.ld_nc_v4, out.recv_x + row * shape.hidden_bytes, copied, stage, parity, lane)


@device_function
def copy_own_tokens(ctx, out, inputs):
    """Copier: both teams of a channel whose peer is their own rank copy what stays here straight to its rows.

    Through a ring such a token would leave an SM twice, and the way out of its SMs is what limits dispatch. The two
    teams, one in each block of the channel, go through the same tokens and take them in turn.
    """
    shape, sizes, team = ctx.shape, ctx.sizes, ctx.team
    warp = team.warp if team.sends else team.num_warps + team.warp
    start, num_tokens = channel_range(ctx, inputs)
    num_tokens -= start
    if team.sends:
        note_channel_start(ctx, out, start)
    row = start + first_row(ctx, inputs)
    fits = check_rows(ctx, row, num_tokens)
    stage = open_stage(ptx.smem_base() + SHARED_TAILS_BYTES, ptx.thread_idx() // 32, team.lane)
    parity = 0
    index = 0
    token, end = channel_task_range(sizes.num_tokens, shape.num_channels, team.channel)
    while token < end:
        chosen = tokens_for_peer(ctx, inputs, token, end)
        if warp == 0 and out.send_head != 0:
            note_send_heads(ctx, out, chosen, index, token, end)
        while chosen != 0:
            if fits and ptx.u32_mod(index, 2 * team.num_warps) == warp:
                own = own_token(ctx, inputs, token + ptx.ffs_u32(chosen) - 1)
                parity = copy_own_token(ctx, out, own, row + index, stage, parity)
            chosen &= chosen - 1
            index += 1
        token += 32
    if ptx.has_tma() and team.lane == 0:
        ptx.tma_store_wait_all()


@device_function
def clean_unused_rows(ctx, out, inputs):
    """Mark the rows past the received ones: expert -1, weight 0."""
    num_topk = ctx.shape.num_topk
    num_recv_tokens = tokens_up_to(ctx, inputs, ctx.shape.num_ranks - 1)
    # After a failed barrier the matrix may hold anything.
    begin = max(num_recv_tokens, 0) * num_topk
    clean_choices(out.recv_topk_idx, out.recv_topk_weights, begin, ctx.sizes.num_worst_tokens * num_topk)


@kernel(max_threads=768, clusters=CLUSTERS)
def dispatch(
    out: DispatchOutputs, inputs: DispatchInputs, peers: Peers, bounds: Bounds, shape: RingShape, sizes: DispatchSizes
):
    """Grid: 2 * num_channels blocks. Block: a multiple of 32 * num_ranks. Shared memory: `dispatch_smem_bytes`."""
    team = join_team(shape.num_ranks, sizes.mix_roles)
    ctx = Context(peers, bounds, shape, sizes, 0, team)
    if team.peer == peers.rank:
        copy_own_tokens(ctx, out, inputs)
    elif team.sends:
        send_tokens(ctx, out, inputs)
    else:
        receive_tokens(ctx, out, inputs)
    if sizes.num_worst_tokens > 0:
        clean_unused_rows(ctx, out, inputs)
    if has_failed(bounds):
        spoil_rows(out, shape, sizes.num_recv_tokens, team.lane)
