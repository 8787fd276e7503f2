"""NVL receivers: the last step of internode dispatch. See dispatch.py.

 (d, k): NVL ring[channel, l] --receiver--> recv_x[i]     from every other rank l of the node

 cell               written by         with                    read by       with
 tail of NVL ring   forwarder (d, l)   st_release_sys          warp 0        ld_acquire_sys
 slot of NVL ring   forwarder (d, l)   bulk copy, or st_na     receivers     bulk copy, ld_na, after tail
 batch of a team    warp 0, lane 0     st_shared_s32           the team      ld_shared_s32, after bar_sync
 head of NVL ring   last warp          st_relaxed_sys (1)      forwarders    ld_relaxed_sys
 recv_ arrays       receivers          bulk copy, st_na, weak  -             the next kernel

 (1) All loads of the slots returned before the barrier that stands before it.

A ring brings tokens of all nodes, in the order in which they came to the forwarder; those of one node are in their own
order. So lane n counts the rows of node n, and a token's row is that of its node's next: recv_x is sorted by source
rank, whatever came first.

Source: DeepEP csrc/kernels/internode.cu, dispatch (WarpRole::kNVLReceivers)
"""

import nbep.device.primitives as ptx
from nbep.device.jit import device_function
from nbep.device.kernels.internode.arguments import neighbor_at, rows_from
from nbep.device.kernels.internode.coordinator import batch_of
from nbep.device.kernels.parts.header import Experts, clean_choices, read_header_for
from nbep.device.kernels.parts.spoil import DISPATCH_RECEIVER_ROWS
from nbep.device.layout.internode import rings_offset
from nbep.device.layout.intranode import Header, locate_header, locate_ring, slot_bytes
from nbep.device.protocols.copies import Row, begin_copy, end_copy
from nbep.device.protocols.peers import buffer_of
from nbep.device.protocols.reduce import warp_sum_s32
from nbep.device.protocols.teams import team_barrier, wait_tail_past
from nbep.device.protocols.waits import Waiter, report_fault, site

NVL_RECEIVER_TAIL = site(26, "internode dispatch NVL receiver", "tail", "the peer's next chunk of tokens")


@device_function
def locate_output(out, row, shape):
    """Where the header of an output row goes."""
    return Header(
        out.recv_topk_idx + 8 * row * shape.num_topk,
        out.recv_topk_weights + 4 * row * shape.num_topk,
        out.recv_x_scales + 4 * row * shape.num_scales,
        out.recv_src_meta + 4 * row * shape.num_src_idx,
    )


@device_function
def receive_token(ctx, out, src, row, stage, parity):
    """Copy the slot that has its row at src to an output row; one warp. Returns the parity of the stage's next copy.

    The slot may be of either ring: all have one form.
    """
    shape = ctx.nvl
    token = Row(src, shape.hidden_bytes, 0)
    begin_copy(token, stage, ctx.lane)
    num_experts = ptx.u32_div(ctx.sizes.num_experts, ctx.here.num_rdma_ranks * ctx.here.num_nvl_ranks)
    experts = Experts(neighbor_at(ctx, ctx.here.nvl_rank) * num_experts, num_experts)
    keeps_source = out.recv_src_meta != 0
    header = locate_header(src, shape)
    read_header_for(locate_output(out, row, shape), header, experts, keeps_source, shape, ctx.lane)
    return end_copy(ptx.ld_na_v4, out.recv_x + row * shape.hidden_bytes, token, stage, parity, ctx.lane)


@device_function
def next_rows(ctx, slots, first, count, next_row, end_row):
    """The rows of up to 32 slots, in lane j that of slot first + j; and in lane n the next row of node n.

    -1 where there is no row: behind the last one of the output, or after a wait that timed out.
    """
    source = -1
    if ctx.lane < count:
        row = slots + ptx.u32_mod(first + ctx.lane, ctx.nvl.num_slots) * slot_bytes(ctx.nvl)
        source = ptx.ld_na_s32(locate_header(row, ctx.nvl).src_idx + 4)
    mine = -1
    for node in range(ctx.here.num_rdma_ranks):
        same = ptx.vote_ballot(ptx.FULL_MASK, source == node)
        row = ptx.shfl_idx_s32(ptx.FULL_MASK, next_row, node) + ptx.popc_u32(same & ((1 << ctx.lane) - 1))
        if row < ptx.shfl_idx_s32(ptx.FULL_MASK, end_row, node) and source == node:
            mine = row
        if ctx.lane == node:
            next_row += ptx.popc_u32(same)
    return mine, next_row


@device_function
def output_rows(ctx, inputs, team):
    """Where the rows of this channel begin and end that come over local rank team.peer: in lane n those of node n.

    The end is that of recv_x if it comes first; then that is reported to the host.
    """
    begin = end = 0
    if ctx.lane < ctx.here.num_rdma_ranks:
        rank = ctx.lane * ctx.here.num_nvl_ranks + team.peer
        begin, end = rows_from(ctx, inputs, rank)
        if end > ctx.sizes.num_recv_tokens:
            if team.warp == 0:
                channel, num_rows = ctx.here.channel, ctx.sizes.num_recv_tokens
                report_fault(ctx.bounds, DISPATCH_RECEIVER_ROWS, rank, channel, end, num_rows)
            end = ctx.sizes.num_recv_tokens
    return begin, end


@device_function
def tokens_of_ring(ctx, inputs, team):
    """How many tokens come over local rank team.peer on this channel, from all nodes; the same in every lane."""
    count = 0
    if ctx.lane < ctx.here.num_rdma_ranks:
        begin, end = rows_from(ctx, inputs, ctx.lane * ctx.here.num_nvl_ranks + team.peer)
        count = end - begin
    return warp_sum_s32(ptx.FULL_MASK, count)


@device_function
def receive_tokens(ctx, out, inputs, team, stage):
    """Receiver: drain one ring of this rank into the rows that the prefix sums give its tokens.

    Tokens that do not fit are drained and dropped: the sender must not hang on the receiver's fault.
    """
    lane, shape = ctx.lane, ctx.nvl
    rings = buffer_of(ctx.peers, ctx.here.nvl_rank) + rings_offset(ctx.here.num_rdma_ranks, ctx.here.num_nvl_ranks)
    ring = locate_ring(rings, shape, ctx.here.channel, team.peer)
    shared_tail = batch_of(team)
    next_row, end_row = output_rows(ctx, inputs, team)
    num_left = tokens_of_ring(ctx, inputs, team)
    parity = 0
    head = 0
    while num_left > 0:
        # One thread reads the tail for all: the warps of a team must agree on it.
        if team.warp == 0 and lane == 0:
            waiter = Waiter(NVL_RECEIVER_TAIL, neighbor_at(ctx, team.peer), ctx.here.channel)
            tail = wait_tail_past(ring.tail, head, head + num_left, ctx.bounds, waiter)
            ptx.st_shared_s32(shared_tail, tail)
        team_barrier(team)
        tail = ptx.ld_shared_s32(shared_tail)
        if ptx.has_tma() and lane == 0:
            ptx.fence_proxy_async_global()  # what the tail published, before the bulk copies that read it
        num_left -= tail - head
        first = head
        while first < tail:
            rows, next_row = next_rows(ctx, ring.x, first, tail - first, next_row, end_row)
            is_own = rows >= 0 and ptx.u32_mod(first + lane, team.num_warps) == team.warp
            own = ptx.vote_ballot(ptx.FULL_MASK, is_own)
            while own != 0:
                j = ptx.ffs_u32(own) - 1
                own &= own - 1
                src = ring.x + ptx.u32_mod(first + j, shape.num_slots) * slot_bytes(shape)
                row = ptx.shfl_idx_s32(ptx.FULL_MASK, rows, j)
                parity = receive_token(ctx, out, src, row, stage, parity)
            first += 32
        head = tail
        team_barrier(team)
        if team.warp == team.num_warps - 1 and lane == 0:
            ptx.st_relaxed_sys_s32(ring.head, head)
    if ptx.has_tma() and lane == 0:
        ptx.tma_store_wait_all()


@device_function
def clean_unused_rows(ctx, out, inputs):
    """Mark the rows past the received ones: expert -1, weight 0."""
    num_topk = ctx.nvl.num_topk
    last = ctx.here.num_rdma_ranks * ctx.here.num_nvl_ranks - 1
    num_recv_tokens = ptx.ld_nc_s32(inputs.recv_gbl_rank_prefix_sum + 4 * last)
    end = ctx.sizes.num_worst_tokens * num_topk
    clean_choices(out.recv_topk_idx, out.recv_topk_weights, num_recv_tokens * num_topk, end)
