"""Intranode dispatch: a sender pushes tokens into its peer's ring, the peer's receiver drains it into recv_x.

 rank s: x[t] --sender--> NVLink --> ring[channel c, source s] of rank r --receiver--> recv_x[i] : rank r

 cell            written by    with                        read by       with
 start, end      sender(s)     st_relaxed_sys (-n - 1)     receiver(r)   ld_relaxed_sys (the count is the message)
 tail            sender(s)     st_release_sys              receiver(r)   ld_acquire_sys
 head            receiver(r)   st_relaxed_sys (1)          sender(s)     ld_relaxed_sys
 slot[k]         sender(s)     st_na                       receiver(r)   ld_na or bulk copy, after tail (2)
 shared tail     warp 0 of r   st_shared                   its warps     ld_shared, after bar_sync

 (1) head publishes nothing. The receiver's loads of the slot returned before its barrier, and head moves after
     it; the sender overwrites the slot only when it has seen head: no load can see what the sender writes later.
 (2) The slots below tail were written before the sender's barrier, and the thread that moves tail waits at it.
     A bulk copy reads through the async proxy, so a proxy fence stands between the acquire and the copy.

Blocks come in pairs: block 2c sends and block 2c + 1 receives channel c. A block's warps are split evenly over
the peers.

Source: DeepEP csrc/kernels/intranode.cu, dispatch. Break it: notebooks/04_dispatch.ipynb
"""

from typing import NamedTuple

from nbep.device.jit import device_function, kernel
from nbep.device.layout.intranode import RingShape, locate_ring
from nbep.device.primitives import (
    FULL_MASK,
    bar_sync,
    block_dim,
    block_idx,
    f32,
    fence_proxy_async_global,
    grid_dim,
    has_tma,
    ld_na_f32,
    ld_na_s32,
    ld_na_s64,
    ld_nc_f32,
    ld_nc_s32,
    ld_nc_s64,
    ld_nc_u8,
    ld_shared_s32,
    ld_weak_s32,
    shfl_idx_s32,
    smem_base,
    st_na_f32,
    st_na_s32,
    st_na_s64,
    st_relaxed_sys_s32,
    st_release_sys_s32,
    st_shared_s32,
    st_weak_f32,
    st_weak_s32,
    st_weak_s64,
    syncwarp,
    thread_idx,
    tma_store_wait_all,
    u32_div,
    u32_mod,
)
from nbep.device.protocols.channels import channel_task_range
from nbep.device.protocols.copies import receive_row, send_row
from nbep.device.protocols.peers import Bounds, Peers, buffer_of
from nbep.device.protocols.staging import STAGE_STRIDE, copy_through_stage, open_stage, stage_of
from nbep.device.protocols.waits import (
    DISPATCH_RECEIVER_ROWS,
    DISPATCH_SENDER_HEAD,
    report_fault,
    wait_announced,
    wait_free_slots,
    wait_tail_past,
)
from nbep.device.types import I32, In, Out

SHARED_TAILS_BYTES = 128  # behind the warps' stages: one s32 for each peer


class DispatchOutputs(NamedTuple):
    """recv_x_scales, recv_topk_idx and recv_topk_weights may be absent (0)."""

    recv_x: Out  # [num_recv_tokens, hidden_bytes]
    recv_x_scales: Out  # [num_recv_tokens, num_scales] 4 bytes each
    recv_src_idx: Out  # [num_recv_tokens] s32
    recv_topk_idx: Out  # [num_recv_tokens, num_topk] s64
    recv_topk_weights: Out  # [num_recv_tokens, num_topk] f32
    recv_channel_prefix_matrix: Out  # [num_ranks, num_channels] s32, exclusive
    send_head: Out  # [num_tokens, num_ranks] s32: the token's index in its ring, or -1


class DispatchInputs(NamedTuple):
    """x_scales, topk_idx and topk_weights may be absent (0)."""

    x: In  # [num_tokens, hidden_bytes]
    x_scales: In  # [num_tokens, num_scales] 4 bytes each, any strides
    topk_idx: In  # [num_tokens, num_topk] s64
    topk_weights: In  # [num_tokens, num_topk] f32
    is_token_in_rank: In  # [num_tokens, num_ranks] u8
    channel_prefix_matrix: In  # [num_ranks, num_channels] s32, inclusive


class DispatchSizes(NamedTuple):
    """Strides count scales, not bytes."""

    num_tokens: I32
    num_recv_tokens: I32  # rows of recv_x
    num_worst_tokens: I32
    num_experts: I32
    num_max_send_tokens: I32
    scale_token_stride: I32
    scale_hidden_stride: I32


class Team(NamedTuple):
    """The warps of a block that serve one peer on one channel."""

    peer: int
    channel: int
    warp: int
    num_warps: int
    lane: int


def dispatch_smem_bytes(num_threads: int) -> int:
    """Dynamic shared memory of a dispatch block: a stage for each warp and the shared tails."""
    return STAGE_STRIDE * (num_threads // 32) + SHARED_TAILS_BYTES


@device_function
def join_team(num_ranks):
    """Which peer and channel this thread works for."""
    threads_per_rank = u32_div(block_dim(), num_ranks)
    thread_in_rank = u32_mod(thread_idx(), threads_per_rank)
    return Team(
        u32_div(thread_idx(), threads_per_rank),
        block_idx() // 2,
        thread_in_rank // 32,
        threads_per_rank // 32,
        thread_idx() % 32,
    )


@device_function
def team_barrier(team):
    """Wait for all warps of the team. Barrier 0 is syncthreads, so teams take 1 and up."""
    bar_sync(1 + team.peer, 32 * team.num_warps)


@device_function
def announce_tokens(ring, inputs, team):
    """Tell the receiver where this channel's tokens start and end among those of this rank."""
    if team.warp == 0 and team.lane == 0:
        prefix = inputs.channel_prefix_matrix + 4 * (team.peer * u32_div(grid_dim(), 2) + team.channel)
        start = ld_nc_s32(prefix - 4) if team.channel > 0 else 0
        st_relaxed_sys_s32(ring.start, -start - 1)
        st_relaxed_sys_s32(ring.end, -ld_nc_s32(prefix) - 1)
    syncwarp(FULL_MASK)


@device_function
def fill_slot(ring, slot, inputs, token, shape, sizes, team):
    """Copy one token and what belongs to it into a slot; one warp."""
    lane = team.lane
    send_row(ring.x + slot * shape.hidden_bytes, inputs.x + token * shape.hidden_bytes, shape.hidden_bytes, lane)
    if lane == 0:
        st_na_s32(ring.src_idx + 4 * slot, token)
    if lane < shape.num_topk:
        experts_per_rank = u32_div(sizes.num_experts, shape.num_ranks)
        expert = ld_nc_s64(inputs.topk_idx + 8 * (token * shape.num_topk + lane)) - team.peer * experts_per_rank
        weight = ld_nc_f32(inputs.topk_weights + 4 * (token * shape.num_topk + lane))
        is_local = 0 <= expert < experts_per_rank
        st_na_s64(ring.topk_idx + 8 * (slot * shape.num_topk + lane), expert if is_local else -1)
        st_na_f32(ring.topk_weights + 4 * (slot * shape.num_topk + lane), weight if is_local else f32(0))
    for i in range(lane, shape.num_scales, 32):
        scale = inputs.x_scales + 4 * (token * sizes.scale_token_stride + i * sizes.scale_hidden_stride)
        st_na_s32(ring.scales + 4 * (slot * shape.num_scales + i), ld_nc_s32(scale))


@device_function
def send_tokens(out, inputs, peers, bounds, shape, sizes, team):
    """Sender: push this channel's tokens to one peer, num_max_send_tokens a chunk."""
    ring = locate_ring(buffer_of(peers, team.peer), shape, team.channel, peers.rank)
    announce_tokens(ring, inputs, team)
    token, end = channel_task_range(sizes.num_tokens, shape.num_channels, team.channel)
    tail = 0
    while token < end:
        if team.lane == 0:
            # Room for a full chunk, although fewer tokens may be left: counting them first would cost more.
            wait_free_slots(
                ring.head,
                tail,
                shape.num_slots,
                sizes.num_max_send_tokens,
                bounds,
                DISPATCH_SENDER_HEAD,
                team.peer,
                team.channel,
            )
        syncwarp(FULL_MASK)
        chunk_end = tail + sizes.num_max_send_tokens
        while tail < chunk_end and token < end:
            membership = token * shape.num_ranks + team.peer
            chosen = ld_nc_u8(inputs.is_token_in_rank + membership) != 0
            if team.lane == 0 and u32_mod(token, team.num_warps) == team.warp:
                st_weak_s32(out.send_head + 4 * membership, tail if chosen else -1)
            if chosen:
                if u32_mod(tail, team.num_warps) == team.warp:
                    fill_slot(ring, u32_mod(tail, shape.num_slots), inputs, token, shape, sizes, team)
                tail += 1
            token += 1
        team_barrier(team)
        if team.warp == 0 and team.lane == 0:
            st_release_sys_s32(ring.tail, tail)  # PAIR dispatch-tail: the chunk's slots


@device_function
def receive_offsets(out, ring, peers, bounds, shape, num_rows, team):
    """Receiver: where this channel's tokens go in recv_x, how many are coming, whether they fit.

    The same in every lane.
    """
    start = 0
    num_tokens = 0
    if team.lane == 0:
        start = wait_announced(ring.start, bounds, team.peer, team.channel)
        num_tokens = wait_announced(ring.end, bounds, team.peer, team.channel) - start
        if team.warp == 0:
            st_weak_s32(out.recv_channel_prefix_matrix + 4 * (team.peer * shape.num_channels + team.channel), start)
    start = shfl_idx_s32(FULL_MASK, start, 0)
    num_tokens = shfl_idx_s32(FULL_MASK, num_tokens, 0)
    if team.peer > 0:
        rank_prefix_matrix = buffer_of(peers, peers.rank)
        start += ld_weak_s32(rank_prefix_matrix + 4 * ((team.peer - 1) * shape.num_ranks + peers.rank))
    fits = start >= 0 and start + num_tokens <= num_rows
    if not fits and team.warp == 0 and team.lane == 0:
        report_fault(bounds, DISPATCH_RECEIVER_ROWS, team.peer, team.channel, start + num_tokens, num_rows)
    return start, num_tokens, fits


@device_function
def receive_chunk_metadata(out, ring, first, head, num_tokens, shape, team):
    """Copy what came with num_tokens tokens, from slot head on, to output rows first and up; the whole team."""
    thread = team.warp * 32 + team.lane
    num_threads = team.num_warps * 32
    for i in range(thread, num_tokens, num_threads):
        slot = u32_mod(head + i, shape.num_slots)
        st_weak_s32(out.recv_src_idx + 4 * (first + i), ld_na_s32(ring.src_idx + 4 * slot))
    for i in range(thread, num_tokens * shape.num_topk, num_threads):
        token = u32_div(i, shape.num_topk)
        k = i - token * shape.num_topk
        cell = u32_mod(head + token, shape.num_slots) * shape.num_topk + k
        row = (first + token) * shape.num_topk + k
        st_weak_s64(out.recv_topk_idx + 8 * row, ld_na_s64(ring.topk_idx + 8 * cell))
        st_weak_f32(out.recv_topk_weights + 4 * row, ld_na_f32(ring.topk_weights + 4 * cell))
    for i in range(thread, num_tokens * shape.num_scales, num_threads):
        token = u32_div(i, shape.num_scales)
        k = i - token * shape.num_scales
        cell = u32_mod(head + token, shape.num_slots) * shape.num_scales + k
        st_weak_s32(out.recv_x_scales + 4 * ((first + token) * shape.num_scales + k), ld_na_s32(ring.scales + 4 * cell))


@device_function
def receive_tokens(out, peers, bounds, shape, num_rows, team):
    """Receiver: drain one ring of this rank into the output rows that the prefix sums give it.

    Tokens that do not fit are drained and dropped: the sender must not hang on the receiver's fault.
    """
    ring = locate_ring(buffer_of(peers, peers.rank), shape, team.channel, team.peer)
    shared_tail = smem_base() + STAGE_STRIDE * u32_div(block_dim(), 32) + 4 * team.peer
    stage = stage_of(thread_idx() // 32)
    if has_tma():
        open_stage(stage, team.lane)
    parity = 0
    first, num_left, fits = receive_offsets(out, ring, peers, bounds, shape, num_rows, team)
    head = 0
    while num_left > 0:
        # One thread reads the tail for all: the warps of a team must agree on it.
        if team.warp == 0 and team.lane == 0:
            st_shared_s32(
                shared_tail, wait_tail_past(ring.tail, head, head + num_left, bounds, team.peer, team.channel)
            )
        team_barrier(team)
        tail = ld_shared_s32(shared_tail)
        num_tokens = tail - head
        num_kept = num_tokens if fits else 0
        for i in range(team.warp, num_kept, team.num_warps):
            src = ring.x + u32_mod(head + i, shape.num_slots) * shape.hidden_bytes
            dst = out.recv_x + (first + i) * shape.hidden_bytes
            if has_tma():
                if team.lane == 0:
                    fence_proxy_async_global()
                    parity = copy_through_stage(dst, src, shape.hidden_bytes, stage, parity)
                syncwarp(FULL_MASK)
            else:
                receive_row(dst, src, shape.hidden_bytes, team.lane)
        receive_chunk_metadata(out, ring, first, head, num_kept, shape, team)
        head = tail
        first += num_tokens
        num_left -= num_tokens
        team_barrier(team)
        if team.warp == team.num_warps - 1 and team.lane == 0:
            st_relaxed_sys_s32(ring.head, head)
    if has_tma() and team.lane == 0:
        tma_store_wait_all()


@device_function
def clean_unused_rows(out, peers, shape, num_worst_tokens):
    """Mark the rows past the received ones: expert -1, weight 0."""
    rank_prefix_matrix = buffer_of(peers, peers.rank)
    num_recv_tokens = ld_weak_s32(rank_prefix_matrix + 4 * ((shape.num_ranks - 1) * shape.num_ranks + peers.rank))
    begin = num_recv_tokens * shape.num_topk + block_idx() * block_dim() + thread_idx()
    for i in range(begin, num_worst_tokens * shape.num_topk, grid_dim() * block_dim()):
        st_weak_s64(out.recv_topk_idx + 8 * i, -1)
        st_weak_s32(out.recv_topk_weights + 4 * i, 0)


@kernel(max_threads=768)
def dispatch(
    out: DispatchOutputs, inputs: DispatchInputs, peers: Peers, bounds: Bounds, shape: RingShape, sizes: DispatchSizes
):
    """Grid: 2 * num_channels blocks. Block: a multiple of 32 * num_ranks. Shared memory: `dispatch_smem_bytes`."""
    team = join_team(shape.num_ranks)
    if block_idx() % 2 == 0:
        send_tokens(out, inputs, peers, bounds, shape, sizes, team)
    else:
        receive_tokens(out, peers, bounds, shape, sizes.num_recv_tokens, team)
    if sizes.num_worst_tokens > 0:
        clean_unused_rows(out, peers, shape, sizes.num_worst_tokens)
