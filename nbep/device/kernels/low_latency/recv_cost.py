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
from nbep.device.kernels.low_latency.coordinator import LOW_LATENCY_CALL
from nbep.device.protocols.arrivals import LEAST_ABSENT, TAG, Expected, is_masked, leave_out
from nbep.device.protocols.waits import wait_until

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
