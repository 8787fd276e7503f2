"""What every low-latency launch begins with: its coordinator ends the calls before it, on this rank and for its peers.

 cell              written by        with                  read by            with
 state             coordinator       st_weak               the next one       ld_weak
 slots[h]          senders           atom_add_relaxed_gpu  -                  -
                   coordinator       st_weak (0)           senders            of a later launch
 counts, arrivals  peers             amo_add               receivers          ld_acquire_sys
                   coordinator       st_weak (1)           peers' next use    behind the credit
   of a masked rank  coordinator     atom_exch_acq_rel_sys (ABSENT): it gets no credit, and may still add
 credit[h, peer]   peer's coordinator  amo_add             senders            ld_acquire_sys
 credit[h, own]    coordinator       amo_add               receivers (2)      ld_acquire_sys

 (1) The receive phase that read the cells is a launch that has ended, and the peer adds to them again only after it has
     the credit, which the coordinator adds behind its stores.
 (2) Of a launch that sends, too: two calls may be received in either order, so the launch before may have read the same
     cells. One thread of each block waits, a barrier tells the others.

A credit counts how often the peer has freed the half, which is free at first. It is never counted down: only the
network writes it. A call may fill the half once the credits are ahead of how often this rank has.

The coordinator is the last warp of the last block, which has the least other work where that does not divide evenly.
The launch state lies on the device, so that a CUDA graph replays the right steps.

 send phase in half h    takes the credits of h, one of each peer        the next launch counts the use of h,
                         and slots of h                                  and zeroes the slots
 receive phase in half h empties the counts of h                         the next launch zeroes them and gives a credit
 neither                                                                 (where no call may come: see host/low_latency)

DeepEP zeroes the counts of the other half in every send phase. That is enough as long as a rank receives each call
before it sends the next: what it allows. With credits two calls may be on their way, one in each half.

Source: DeepEP csrc/kernels/internode_ll.cu ("The first SM is also responsible for cleaning the next buffer")
"""

import nbep.device.layout.low_latency as layout
import nbep.device.primitives as ptx
from nbep.device.jit import by_type, device_function
from nbep.device.kernels.low_latency.arguments import RECV_PHASE, SEND_PHASE, Call, slot_words
from nbep.device.kernels.parts.arrivals import empty_cell, is_masked, wait_credit
from nbep.device.network.seam import amo_add, own_ptr, sends_from_buffer
from nbep.device.protocols.waits import report_fault, site

LOW_LATENCY_HALF = site(13, "low-latency sender", "state", "calls that take the two halves in turn")

# Words of the launch state
SENT_HALF = 0  # one more than the half that the launch before has sent in; 0 if it has not
RECEIVED_HALF = 1  # the same for its receive phase
NUM_SLOTS = 2  # of experts, in the call that was sent
NUM_COUNTS = 3  # of all ranks, in the call that was received
NEXT_HALF = 4  # that the next send phase takes; UNCLEAN if clean_low_latency_buffer has to come first
USES = 5  # of each half: send phases that have ended
STATE_WORDS = 7
UNCLEAN = layout.NUM_HALVES


@device_function
def is_last_block():
    return ptx.block_idx() == ptx.grid_dim() - 1


@device_function
def end_earlier_calls(ctx):
    """Coordinator: take and give the credits of the launch before; write down what this one does. The whole warp."""
    # All loads begin before the first of them is used.
    sent = ptx.ld_weak_s32(ctx.work.state + 4 * SENT_HALF)
    received = ptx.ld_weak_s32(ctx.work.state + 4 * RECEIVED_HALF)
    num_slots = ptx.ld_weak_s32(ctx.work.state + 4 * NUM_SLOTS)
    num_counts = ptx.ld_weak_s32(ctx.work.state + 4 * NUM_COUNTS)
    uses_0 = ptx.ld_weak_s32(ctx.work.state + 4 * USES) if ctx.lane == 0 else 0
    uses_1 = ptx.ld_weak_s32(ctx.work.state + 4 * (USES + 1)) if ctx.lane == 0 else 0
    if sent != 0:
        if ctx.lane == 0:
            ptx.st_weak_s32(ctx.work.state + 4 * (USES + sent - 1), ptx.s32((uses_0 if sent == 1 else uses_1) + 1))
        slots = ctx.work.slots + 4 * (sent - 1) * slot_words(ctx.network.num_ranks)
        clear_slots(ctx, slots, num_slots)
        clear_slots(ctx, slots + 4 * layout.MAX_EXPERTS, ctx.network.num_ranks)
    if received != 0:
        empty_half(ctx, received - 1, num_counts)
    ptx.syncwarp(ptx.FULL_MASK)
    if ctx.lane == 0:
        write_state(ctx)


@device_function
def clear_slots(ctx, slots, num_slots):
    """Coordinator: no token has a place any more. The whole warp."""
    for i in range(ctx.lane, num_slots, 32):
        ptx.st_weak_s32(slots + 4 * i, 0)


@device_function
def empty_half(ctx, half, num_counts):
    """Coordinator: empty the cells of the call that was received in a half, then let all who may send in it again."""
    num_bytes, num_ranks = ctx.call.num_rdma_bytes, ctx.network.num_ranks
    counts = own_ptr(ctx.network, layout.count_offset(num_bytes, num_ranks, half, 0, 0))
    for i in range(ctx.lane, num_counts, 32):
        empty_cell(counts + 4 * i, is_masked(ctx.work.mask, layout.local_and_rank(ctx.shape, i)[1]))
    for rank in range(ctx.lane, num_ranks, 32):
        is_absent = is_masked(ctx.work.mask, rank)
        empty_cell(own_ptr(ctx.network, layout.arrival_offset(num_bytes, num_ranks, half, rank)), is_absent)
        empty_call(ctx, half, rank, is_absent)
    ptx.syncwarp(ptx.FULL_MASK)
    for rank in range(ctx.lane, num_ranks, 32):
        if not is_masked(ctx.work.mask, rank):
            amo_add(ctx.network, layout.credit_offset(num_bytes, num_ranks, half, ctx.network.rank), 1, rank, 0, True)


@device_function
def credit_cell(ctx, peer):
    """Where a peer says how often it has freed the half of this call."""
    offset = layout.credit_offset(ctx.call.num_rdma_bytes, ctx.network.num_ranks, ctx.call.half, peer)
    return own_ptr(ctx.network, offset)


@device_function
def may_send(ctx, peer):
    """Whether the peer is there and its half of the buffer is free; one thread."""
    uses = ptx.ld_weak_s32(ctx.work.state + 4 * (USES + ctx.call.half))
    credit = credit_cell(ctx, peer)
    return wait_credit(credit, uses, ctx.bounds, ctx.work.mask, peer, ctx.call.half)


@device_function
def wait_send_area(ctx):
    """Wait until nothing is read any more that has left from this half before: until all peers have given credits.

    One warp of a block, before it sends. Threads that synchronise with it may write there, too.
    """
    if sends_from_buffer(ctx.network):
        uses = ptx.ld_weak_s32(ctx.work.state + 4 * (USES + ctx.call.half))
        for rank in range(ctx.lane, ctx.network.num_ranks, 32):
            other = credit_cell(ctx, rank)
            wait_credit(other, uses, ctx.bounds, ctx.work.mask, rank, ctx.call.half)
        ptx.syncwarp(ptx.FULL_MASK)


@device_function
def may_warp_send(ctx, peer):
    """The same of a warp. Its lanes then know what the peer has done before it gave the credit."""
    is_free = ptx.vote_any(ptx.FULL_MASK, ctx.lane == 0 and may_send(ctx, peer))
    ptx.syncwarp(ptx.FULL_MASK)
    return is_free


@device_function
def wait_coordinator(ctx):
    """Wait until the counts of this half are empty: the own rank's credit says so, too. One thread."""
    may_send(ctx, ctx.network.rank)


@device_function
def end_send_phase(ctx):
    """The block has sent all it has to. If it receives next, it waits for its coordinator before. A whole block."""
    if ptx.thread_idx() == ptx.block_dim() - 32 and ctx.call.phases & RECV_PHASE != 0:
        wait_coordinator(ctx)
    ptx.syncthreads()


@device_function
def write_state(ctx):
    """Coordinator: for the coordinator of the next launch; one thread."""
    sends = ctx.call.phases & SEND_PHASE != 0
    receives = ctx.call.phases & RECV_PHASE != 0
    ptx.st_weak_s32(ctx.work.state + 4 * SENT_HALF, ctx.call.half + 1 if sends else 0)
    ptx.st_weak_s32(ctx.work.state + 4 * RECEIVED_HALF, ctx.call.half + 1 if receives else 0)
    if receives:
        ptx.st_weak_s32(ctx.work.state + 4 * NUM_COUNTS, ctx.shape.num_experts)
    if sends:
        ptx.st_weak_s32(ctx.work.state + 4 * NUM_SLOTS, ctx.shape.num_experts)
        expected = ptx.ld_weak_s32(ctx.work.state + 4 * NEXT_HALF)
        if expected != ctx.call.half:
            report_fault(ctx.bounds, LOW_LATENCY_HALF, -1, -1, expected, ctx.call.half)
        ptx.st_weak_s32(ctx.work.state + 4 * NEXT_HALF, 1 - ctx.call.half)


# Whether calls are compared is the type of the call: for a plain Call nothing of it is in the binary. See calls.py.


@device_function
def is_notifier():
    """Whether this is the warp that sends and compares calls, beside the coordinator in the last block."""
    return ptx.thread_idx() // 32 == ptx.block_dim() // 32 - 2


@by_type("call", Call)
def notify_call(ctx, peer):
    """Tell a peer what this rank calls; one thread, which may send to it."""


@by_type("call", Call)
def compare_calls(ctx):
    """Wait for what all peers call, and report what differs from this rank's own call. One warp."""


@by_type("call", Call)
def empty_call(ctx, half, peer, is_absent):
    """Coordinator: empty the words of a peer's call; one thread. is_absent: the peer is masked"""
