"""How long receivers wait for each rank: `wait_recv_cost_stats` of dispatch and combine, to find stragglers with.

 cell                    written by                       with                   read by            with
 wait_recv_cost_stats    a thread for each expert         atom_add_relaxed_sys   the next kernel    plain
 counts[e], arrivals[r]  peers                            amo_add                the same thread    ld_relaxed_sys
 calls[r]                who announces                    amo_add                the same thread    ld_relaxed_sys
 counts, arrivals, calls next keeper                      resets, see journal.py

As in DeepEP, each expert of every rank adds once, however many tokens it has: the cycles until all of them are there,
nothing if its rank is masked. In DeepEP's combine an expert without tokens tells so when its rank begins to send; here
that is when the rank announces its call. With deduplicate all that belongs to the experts of a rank arrives together.

One thread of a warp waits, as in DeepEP: lanes that wait together go on together,
and each would read the time of the slowest one. It acquires nothing.
Without the statistics nothing waits here.

Source: DeepEP csrc/kernels/internode_ll.cu, wait_recv_cost; csrc/kernels/legacy/internode_ll.cu after v1.2.1 (masks)
"""

import nbep.device.primitives as ptx
from nbep.device.jit import device_function
from nbep.device.layout.low_latency import arrival_offset, call_offset, count_offset, local_and_rank
from nbep.device.network.seam import own_ptr
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
def note_wait(out, work, bounds, cell, least, peer, site, index):
    """Add the cycles until a cell of a rank is complete; one thread, alone in its warp."""
    if is_masked(work.mask, peer):
        return
    start = ptx.clock64()
    # The load is relaxed: only the time counts. What the cell publishes is read by others.
    expected = Expected(work.mask, peer, least)
    value, ended = wait_until(ptx.ld_relaxed_sys_s32, cell, has_ended, expected, bounds, ptx.wait_expired)
    if not ended:
        leave_out(bounds, Expected(work.mask, peer, -1), Waiter(site, peer, index), value)
    ptx.atom_add_relaxed_sys_s64(out.wait_recv_cost_stats + 8 * peer, ptx.clock64() - start)


@device_function
def note_sources(out, network, work, bounds, call, shape, warp, lane):
    """Dispatch with deduplicate: all warps of all blocks take the experts in turn."""
    unit = ptx.block_idx() + ptx.grid_dim() * warp
    while unit < shape.num_experts:
        src = local_and_rank(shape, unit)[1]
        if lane == 0:
            arrival = own_ptr(network, arrival_offset(call.num_rdma_bytes, call.half, src))
            note_wait(out, work, bounds, arrival, LEAST_COUNT, src, LOW_LATENCY_DISPATCH_COUNT, -1)
        unit += ptx.grid_dim() * (ptx.block_dim() // 32)


@device_function
def is_chosen(inputs, shape, sizes, local_expert, peer, lane):
    """Whether a token of this rank has chosen an expert, or with deduplicate one of its rank's; a whole warp."""
    first = peer * shape.num_local_experts
    past = first + shape.num_local_experts
    if shape.deduplicate == 0:
        first += local_expert
        past = first + 1
    found = False
    for cell in range(lane, sizes.num_tokens * sizes.num_topk, 32):
        found = found or first <= ptx.ld_nc_s64(inputs.topk_idx + 8 * cell) < past
    return ptx.vote_any(ptx.FULL_MASK, found)


@device_function
def note_owners(out, inputs, network, work, bounds, call, shape, sizes, warp, lane):
    """Combine: the warps of all blocks take the experts in turn, but for the first of each, which lists rows."""
    unit = ptx.block_idx() + ptx.grid_dim() * (warp - 1)
    if warp == 0:
        unit = shape.num_experts
    while unit < shape.num_experts:
        local_expert, peer = local_and_rank(shape, unit)
        offset = call_offset(call.num_rdma_bytes, call.half, peer, 0)
        least = LEAST_WORD
        site = LOW_LATENCY_CALL
        if is_chosen(inputs, shape, sizes, local_expert, peer, lane):
            offset = count_offset(call.num_rdma_bytes, call.half, peer, local_expert)
            if shape.deduplicate != 0:
                offset = arrival_offset(call.num_rdma_bytes, call.half, peer)
            least = LEAST_COUNT
            site = LOW_LATENCY_COMBINE_COUNT
        if lane == 0:
            expert = peer * shape.num_local_experts + local_expert
            note_wait(out, work, bounds, own_ptr(network, offset), least, peer, site, expert)
        unit += ptx.grid_dim() * (ptx.block_dim() // 32 - 1)
