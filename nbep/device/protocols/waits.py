"""Bounded waits. A wait that times out reports who waited for whom and lets its kernel run to its end.

 cell      written by                     with                    read by     with
 claim     first fault of a rank: site    atom_cas_acq_rel_sys    any wait    ld_relaxed_gpu (has_timed_out)
 report    the one that got the claim     st_relaxed_sys,         the host    plain, after status is not 0
                                          status st_release_sys

A failed wait does not trap: a trap takes the CUDA context with it, and with the context the chance to destroy the
buffer. Instead the caller goes on as if the condition held, every later wait of the rank ends at once (`start_wait`
sees the claim), the kernel spoils its outputs at its end (see spoil.py), and the host raises from the report. So the
caller of a wait has to keep its addresses in range. Senders and forwarders stop instead, do not start if the rank has
failed before, and meet no peer at a barrier then: what they went on to send would overrun the rings of peers that are
only late. Those miss the rest, and time out with a report of their own.

Source: DeepEP csrc/kernels/intranode.cu, the `NUM_TIMEOUT_CYCLES` checks (which print and trap); its
receivers' waits for `start` and `end` have no such check
"""

from typing import NamedTuple

import nbep.device.primitives as ptx
from nbep.device.jit import device_function

# Sites: which role waits for which cell. The host turns them into words with SITES. Numbers from OWN_SITES up are for
# kernels that are not nbep's, and their words may be added to SITES.
BARRIER = 1
DISPATCH_SENDER_HEAD = 2
DISPATCH_RECEIVER_OFFSETS = 3
DISPATCH_RECEIVER_TAIL = 4
COMBINE_SENDER_HEAD = 5
COMBINE_RECEIVER_TAIL = 6
COMBINE_COORDINATOR = 7
DISPATCH_RECEIVER_ROWS = 8
GRID_BARRIER = 9
LOW_LATENCY_CREDIT = 10
LOW_LATENCY_DISPATCH_COUNT = 11
LOW_LATENCY_COMBINE_COUNT = 12
LOW_LATENCY_HALF = 13
LOW_LATENCY_CHOICE = 14
LOW_LATENCY_BARRIER = 15
IBGDA_TURN = 16
IBGDA_COMPLETION = 17
IBGDA_ERROR = 18
NETWORK_PUSH = 19
INTERNODE_NOTIFY = 20
RDMA_SENDER_HEAD = 21
RDMA_SENDER_COORDINATOR = 22
FORWARDER_RDMA_TAIL = 23
FORWARDER_NVL_HEAD = 24
FORWARDER_COORDINATOR = 25
NVL_RECEIVER_TAIL = 26
NVL_SENDER_HEAD = 27
FORWARDER_NVL_TAIL = 28
FORWARDER_RDMA_HEAD = 29
RDMA_RECEIVER_TAIL = 30
RDMA_RECEIVER_COORDINATOR = 31
DIRECT_ARRIVED = 32
DIRECT_LANDED = 33
CALL_TOLD = 34
CALLS_DIFFER = 35
NODE_CALL = 36
LOW_LATENCY_CALL = 37
LOW_LATENCY_CALLS_DIFFER = 38
OWN_SITES = 100
OF_NODE = (BARRIER, CALL_TOLD)  # whose peer counts the ranks of the node

SITES = {
    BARRIER: ("notify", "barrier_signal", "the peer's arrival at the barrier"),
    DISPATCH_SENDER_HEAD: ("dispatch sender", "head", "free slots in the peer's ring"),
    DISPATCH_RECEIVER_OFFSETS: ("dispatch receiver", "start/end", "the peer's announcement of its tokens"),
    DISPATCH_RECEIVER_TAIL: ("dispatch receiver", "tail", "the peer's next chunk of tokens"),
    COMBINE_SENDER_HEAD: ("combine sender", "head", "free slots in the peer's ring"),
    COMBINE_RECEIVER_TAIL: ("combine receiver", "tail", "the peer's next chunk of tokens"),
    COMBINE_COORDINATOR: ("combine coordinator", "heads", "the receivers of its own block"),
    GRID_BARRIER: ("grid barrier", "arrivals", "the other blocks of its own launch"),
    DISPATCH_RECEIVER_ROWS: ("dispatch receiver", "recv_x", "rows for all tokens"),
    LOW_LATENCY_CREDIT: ("low-latency sender", "credit", "the peer's half of the buffer to be free again"),
    LOW_LATENCY_DISPATCH_COUNT: ("low-latency dispatch receiver", "count", "the peer's tokens and their number"),
    LOW_LATENCY_COMBINE_COUNT: ("low-latency combine receiver", "count", "the rows of the peer's experts"),
    LOW_LATENCY_HALF: ("low-latency sender", "journal", "calls that take the two halves in turn"),
    LOW_LATENCY_BARRIER: ("clean_low_latency_buffer", "barrier_signal", "the peer's arrival at the barrier"),
    LOW_LATENCY_CHOICE: ("low-latency dispatch sender", "topk_idx", "experts that are there, each once for a token"),
    LOW_LATENCY_CALL: ("low-latency notify", "calls", "the peer's call"),
    LOW_LATENCY_CALLS_DIFFER: ("low-latency notify", "calls", "the same call on all ranks"),
    IBGDA_TURN: ("sender on a queue pair", "READY", "the entries before its own to be written"),
    IBGDA_COMPLETION: ("sender on a queue pair", "completion", "the NIC to be done with an entry"),
    IBGDA_ERROR: ("sender on a queue pair", "completion", "an entry that the NIC has refused"),
    INTERNODE_NOTIFY: ("internode notify", "arrived", "the peer's arrival, and its counts if it sends some"),
    RDMA_SENDER_HEAD: ("internode dispatch RDMA sender", "head", "free slots in the peer's RDMA ring"),
    RDMA_SENDER_COORDINATOR: ("internode dispatch sender coordinator", "done", "the senders of its own block"),
    FORWARDER_RDMA_TAIL: (
        "internode dispatch forwarder",
        "tail",
        "the next tokens in an RDMA ring, the peer's among them",
    ),
    FORWARDER_NVL_HEAD: ("internode dispatch forwarder", "head", "free slots in the peer's NVL ring"),
    FORWARDER_COORDINATOR: ("internode forwarder coordinator", "heads", "the forwarders of its own block"),
    NVL_RECEIVER_TAIL: ("internode dispatch NVL receiver", "tail", "the peer's next chunk of tokens"),
    NVL_SENDER_HEAD: ("internode combine NVL sender", "head", "free slots in the peer's NVL ring"),
    FORWARDER_NVL_TAIL: ("internode combine forwarder", "tail", "the peer's next chunk of rows"),
    FORWARDER_RDMA_HEAD: ("internode combine forwarder", "head", "free slots in the peer's RDMA ring"),
    RDMA_RECEIVER_TAIL: ("internode combine RDMA receiver", "tail", "the peer's next sums"),
    RDMA_RECEIVER_COORDINATOR: ("internode combine coordinator", "heads", "the RDMA receivers of its own block"),
    DIRECT_ARRIVED: ("direct dispatch receiver", "arrived", "all blocks of the peer to have sent their tokens"),
    DIRECT_LANDED: ("direct combine receiver", "landed", "the peer's row of a token"),
    CALL_TOLD: ("notify", "told", "the peer to say what it has called: something else than this rank"),
    CALLS_DIFFER: ("notify", "call", "the same call on all ranks"),
    NODE_CALL: ("internode notify", "call", "the peer to say what it has called: something else than this rank"),
    NETWORK_PUSH: ("network_push", "arrived", "the neighbour's messages, or its word that all have arrived"),
}

# A signal of a barrier counts above these bits; below is the digest of a call. See protocols.calls.
DIGEST_BITS = 24
ONE = 1 << DIGEST_BITS

REPORT_WORDS = 8
REPORT_BYTES = 4 * REPORT_WORDS


class FaultReport(NamedTuple):
    """The words of `Bounds.report`, s32 each, in this order. status is written last; 0 means that nothing failed."""

    status: int
    site: int
    peer: int
    expected: int
    seen: int
    block: int
    thread: int
    channel: int


@device_function
def has_fault(bounds):
    """Whether this rank has reported anything."""
    return ptx.ld_relaxed_gpu_s32(bounds.claim) != 0


@device_function
def has_timed_out(bounds):
    """Whether a wait of this rank was over time."""
    site = ptx.ld_relaxed_gpu_s32(bounds.claim)
    return site != 0 and site != DISPATCH_RECEIVER_ROWS


@device_function
def start_wait(bounds):
    """Deadline of a wait that did not succeed at once: now + timeout, or past if a wait of this rank failed before."""
    if has_timed_out(bounds):
        return ptx.deadline_after(0) - 1
    return ptx.deadline_after(bounds.timeout_ns)


@device_function
def report_fault(bounds, site, peer, channel, expected, seen):
    """Tell the host which wait was over time. Only the first one of a rank is told."""
    ptx.fault_reported()
    claimed = ptx.atom_cas_acq_rel_sys_s32(bounds.claim, 0, site)
    if claimed == DISPATCH_RECEIVER_ROWS:
        # That was no wait: now later waits need not wait either.
        ptx.atom_cas_acq_rel_sys_s32(bounds.claim, claimed, site)
    if claimed == 0:
        ptx.st_relaxed_sys_s32(bounds.report + 4, site)
        ptx.st_relaxed_sys_s32(bounds.report + 8, peer)
        ptx.st_relaxed_sys_s32(bounds.report + 12, expected)
        ptx.st_relaxed_sys_s32(bounds.report + 16, seen)
        ptx.st_relaxed_sys_s32(bounds.report + 20, ptx.block_idx())
        ptx.st_relaxed_sys_s32(bounds.report + 24, ptx.thread_idx())
        ptx.st_relaxed_sys_s32(bounds.report + 28, channel)
        ptx.st_release_sys_s32(bounds.report, 1)  # the host polls it


class Waiter(NamedTuple):
    """Who waits, for a report: its site, the peer that it waits for or -1, and which cell of the site or -1."""

    site: int
    peer: int
    channel: int


@device_function
def wait_until(load, cell, holds, wanted, bounds, expired):
    """Poll a cell until holds(load(cell), wanted). Returns what it held, and what `holds` said: false if it timed out.

    The order of the load is that of the wait: a `# PAIR` tag stands where it is named. Nobody asks for a deadline
    before the first look has failed: most waits are over then. Reports of the emulator name the line that calls this.
    expired: ptx.wait_expired, or `wait_expired_together`
    """
    deadline = 0
    while True:
        seen = load(cell)
        found = holds(seen, wanted)
        if found:
            return seen, found
        if deadline == 0:
            deadline = start_wait(bounds)
        elif expired(deadline):
            return seen, found


@device_function
def wait_or_report(load, cell, holds, wanted, bounds, waiter):
    """The same of one thread, which reports that it timed out: what it wanted, and what it saw."""
    seen, found = wait_until(load, cell, holds, wanted, bounds, ptx.wait_expired)
    if not found:
        report_fault(bounds, waiter.site, waiter.peer, waiter.channel, wanted, seen)
    return seen, found


@device_function
def wait_expired_together(deadline):
    """Whether the deadline has passed for any lane of a warp that waits together."""
    return ptx.vote_any(ptx.FULL_MASK, ptx.wait_expired(deadline))


# What waits are for.


@device_function
def is_at_least(seen, wanted):
    return seen >= wanted


@device_function
def is_at_most(seen, wanted):
    return seen <= wanted


@device_function
def is_set(seen, wanted):
    """Whether a cell that starts at 0 holds anything; wanted is for the report."""
    return seen != 0


@device_function
def has_met(seen, wanted):
    """Whether what counts above DIGEST_BITS is no more than wanted."""
    return seen >> DIGEST_BITS <= wanted


@device_function
def wait_signal_not_positive(signal, bounds, peer):
    """Wait until a barrier signal is 0 or less: the peer has arrived at least as often as this rank."""
    waiter = Waiter(BARRIER, peer, -1)
    wait_or_report(ptx.ld_acquire_sys_s32, signal, is_at_most, 0, bounds, waiter)  # PAIR barrier-signal


@device_function
def wait_call(signal, bounds, peer):
    """Wait until a barrier signal counts 0 or less; it counts above DIGEST_BITS. Returns it; 0 if it never came."""
    load = ptx.ld_acquire_sys_s32  # PAIR barrier-signal
    value, came = wait_until(load, signal, has_met, 0, bounds, ptx.wait_expired)
    if not came:
        report_fault(bounds, BARRIER, peer, -1, 0, value >> DIGEST_BITS)
    return value if came else 0


@device_function
def wait_told(cell, bounds, peer):
    """Wait until a peer has said what it has called. Returns whether it has."""
    waiter = Waiter(CALL_TOLD, peer, -1)
    return wait_or_report(ptx.ld_acquire_sys_s32, cell, is_set, 1, bounds, waiter)[1]  # PAIR call-told


@device_function
def wait_node_call(cell, bounds, peer):
    """Wait until a rank of another node has said a word of its call. Returns whether it has.

    The load is relaxed: the word is the message itself, and nothing else is published by it.
    """
    return wait_or_report(ptx.ld_relaxed_sys_s32, cell, is_set, 1, bounds, Waiter(NODE_CALL, peer, -1))[1]


@device_function
def wait_free_slots(head, tail, num_slots, num_wanted, bounds, waiter):
    """Wait until a ring whose sender has filled tail slots so far has num_wanted free ones. Returns whether it has.

    The head is read relaxed: the slots' old bytes were consumed before the receiver moved it, and no data is read
    after it.
    """
    return wait_or_report(ptx.ld_relaxed_sys_s32, head, is_at_least, tail + num_wanted - num_slots, bounds, waiter)[1]


@device_function
def wait_announced(cell, bounds, peer, channel):
    """Wait for a count that travels as -n - 1, so that 0 means "not here yet". Returns n; 0 if it never came.

    The load is relaxed: the count is the message itself, and nothing else is published by it.
    """
    waiter = Waiter(DISPATCH_RECEIVER_OFFSETS, peer, channel)
    value, came = wait_or_report(ptx.ld_relaxed_sys_s32, cell, is_set, -1, bounds, waiter)
    return -value - 1 if came else 0


@device_function
def wait_tail_past(tail, head, last, bounds, waiter):
    """Wait until a ring's tail is past head; returns the tail. The slots below it are then readable.

    A failed wait returns last, the tail that the ring has when all is sent, so that the receiver's loop ends. Nor is
    it ever more: after a failed barrier the cell may hold anything, and rows up to last are all that the output has.
    """
    load = ptx.ld_acquire_sys_s32  # PAIR dispatch-tail
    seen, came = wait_or_report(load, tail, is_at_least, head + 1, bounds, waiter)
    return min(seen, last) if came else last


@device_function
def wait_shared_tail_past(tail, index, bounds, peer, channel):
    """Wait until the tail that the block's coordinator keeps in shared memory is past index."""
    load = ptx.ld_acquire_cta_shared_s32  # PAIR combine-shared-tail
    wait_or_report(load, tail, is_at_least, index + 1, bounds, Waiter(COMBINE_RECEIVER_TAIL, peer, channel))


@device_function
def wait_blocks_arrived(cell, num_blocks, bounds, peer):
    """Wait until so many blocks of a peer have sent all that they have: it can be read then."""
    waiter = Waiter(DIRECT_ARRIVED, peer, -1)
    wait_or_report(ptx.ld_acquire_sys_s32, cell, is_at_least, num_blocks, bounds, waiter)  # PAIR direct-arrived


@device_function
def wait_landed(cell, bounds, peer, row):
    """Wait until a peer has pushed the chunk of rows that a cell stands for: they can be read then."""
    waiter = Waiter(DIRECT_LANDED, peer, -1)
    wait_or_report(ptx.ld_acquire_sys_s32, cell, is_set, row, bounds, waiter)  # PAIR direct-landed


@device_function
def wait_arrivals(arrivals, wanted, bounds):
    """Wait until as many blocks of this rank's launch have arrived at a grid barrier."""
    waiter = Waiter(GRID_BARRIER, -1, -1)
    wait_or_report(ptx.ld_acquire_gpu_s32, arrivals, is_at_least, wanted, bounds, waiter)  # PAIR grid-barrier


@device_function
def wait_pushed(cell, wanted, bounds, peer, queue):
    """Wait until a peer has added to a cell so often: what it had put before is there."""
    waiter = Waiter(NETWORK_PUSH, peer, queue)
    wait_or_report(ptx.ld_acquire_sys_s32, cell, is_at_least, wanted, bounds, waiter)  # PAIR network-amo
