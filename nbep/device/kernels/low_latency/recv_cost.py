"""How long receivers wait for each rank: `wait_recv_cost_stats` of dispatch and combine, to find stragglers with.

 cell                    written by                       with                   read by            with
 wait_recv_cost_stats    a thread for each expert         atom_add_relaxed_sys   the next kernel    plain
 counts[e], arrivals[r]  peers                            amo_add                the same thread    ld_relaxed_sys
 calls[r]                who announces                    amo_add                the same thread    ld_relaxed_sys
 counts, arrivals, calls next coordinator                 resets, see coordinator.py

As in DeepEP, each expert of every rank adds once, however many tokens it has: the cycles until all of them are there,
nothing if its rank is masked. With deduplicate all that belongs to the experts of a rank arrives together. In DeepEP's
combine an expert without tokens tells so when its rank begins to send. Here that is when the rank tells its call; where
calls are not compared, such an expert adds nothing.

One thread of a warp waits, as in DeepEP: lanes that wait together go on together, and each would read the time of the
slowest one. It acquires nothing. Without the statistics nothing waits here.

Source: DeepEP csrc/kernels/internode_ll.cu, wait_recv_cost; csrc/kernels/legacy/internode_ll.cu after v1.2.1 (masks)
"""

import nbep.device.primitives as ptx
from nbep.device.jit import device_function
from nbep.device.kernels.low_latency.arguments import arrival_cell, count_cell
from nbep.device.kernels.low_latency.coordinator import call_cell
from nbep.device.layout.low_latency import deduplicates, local_and_rank
from nbep.device.protocols.arrivals import LEAST_ABSENT, TAG, Expected, is_masked, leave_out
from nbep.device.protocols.waits import (
    LOW_LATENCY_CALL,
    LOW_LATENCY_COMBINE_COUNT,
    LOW_LATENCY_DISPATCH_COUNT,
    Waiter,
    wait_until,
)

LEAST_COUNT = -TAG  # what is negative and above it is complete
LEAST_WORD = -LEAST_ABSENT


@device_function
def has_ended(value, expected):
    """Whether a cell is complete, above a least number, or nothing comes any more."""
    is_complete = expected.number < value < 0
    return is_complete or value > LEAST_ABSENT or is_masked(expected.mask, expected.peer)


@device_function
def note_wait(ctx, out, cell, waiter):
    """Add the cycles until a cell of a rank is complete; one thread, alone in its warp."""
    peer = waiter.peer
    if is_masked(ctx.work.mask, peer):
        return
    start = ptx.clock64()
    # The load is relaxed: only the time counts. What the cell publishes is read by others.
    expected = Expected(ctx.work.mask, peer, LEAST_WORD if waiter.site == LOW_LATENCY_CALL else LEAST_COUNT)
    value, ended = wait_until(ptx.ld_relaxed_sys_s32, cell, has_ended, expected, ctx.bounds, ptx.wait_expired)
    if not ended:
        leave_out(ctx.bounds, Expected(ctx.work.mask, peer, -1), waiter, value)
    ptx.atom_add_relaxed_sys_s64(out.wait_recv_cost_stats + 8 * peer, ptx.clock64() - start)


@device_function
def note_sources(ctx, out):
    """Dispatch with deduplicate: all warps of all blocks take the experts in turn."""
    unit = ptx.block_idx() + ptx.grid_dim() * ctx.warp
    while unit < ctx.shape.num_experts:
        src = local_and_rank(ctx.shape, unit)[1]
        if ctx.lane == 0:
            note_wait(ctx, out, arrival_cell(ctx, src), Waiter(LOW_LATENCY_DISPATCH_COUNT, src, -1))
        unit += ptx.grid_dim() * (ptx.block_dim() // 32)


@device_function
def is_chosen(ctx, inputs, local_expert, peer):
    """Whether a token of this rank has chosen an expert, or with deduplicate one of its rank's; a whole warp."""
    first = peer * ctx.shape.num_local_experts
    past = first + ctx.shape.num_local_experts
    if not deduplicates(ctx.shape):
        first += local_expert
        past = first + 1
    found = False
    for cell in range(ctx.lane, ctx.sizes.num_tokens * ctx.sizes.num_topk, 32):
        found = found or first <= ptx.ld_nc_s64(inputs.topk_idx + 8 * cell) < past
    return ptx.vote_any(ptx.FULL_MASK, found)


@device_function
def note_owners(ctx, out, inputs):
    """Combine: the warps of all blocks take the experts in turn, but for the first of each, which lists rows."""
    unit = ptx.block_idx() + ptx.grid_dim() * (ctx.warp - 1)
    if ctx.warp == 0:
        unit = ctx.shape.num_experts
    while unit < ctx.shape.num_experts:
        local_expert, peer = local_and_rank(ctx.shape, unit)
        cell = call_cell(ctx, peer)
        site = LOW_LATENCY_CALL
        if is_chosen(ctx, inputs, local_expert, peer):
            cell = arrival_cell(ctx, peer) if deduplicates(ctx.shape) else count_cell(ctx, peer, local_expert)
            site = LOW_LATENCY_COMBINE_COUNT
        if ctx.lane == 0 and cell != 0:
            note_wait(ctx, out, cell, Waiter(site, peer, peer * ctx.shape.num_local_experts + local_expert))
        unit += ptx.grid_dim() * (ptx.block_dim() // 32 - 1)
