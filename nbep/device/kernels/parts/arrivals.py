"""Arrivals: what a rank learns from a cell that peers add to, and peers that may never add.

 cell              written by                   with                                 read by      with
 count, arrival    peers, through the network   amo_add (TAG, or what completes)     receivers    ld_acquire_sys
                   who gives up                 atom_cas_acq_rel_sys (ABSENT)        note_wait    ld_relaxed_sys
 count for itself  the same                     the same                             receivers    ld_relaxed_sys
 count, arrival    their owner, between calls   st_weak (0)                          receivers    of the next call
 word              a peer                       amo_add (-word - 1)                  receivers    ld_relaxed_sys
 count, arrival of a masked rank: owner         atom_exch_acq_rel_sys (ABSENT)
 sum               who knows a part of a count  atom_add_acq_rel_gpu                 the last one the same
                   the last one                 st_weak 0                            the others   in the next call
 credit            peer, through the network    amo_add (1)                          senders      ld_acquire_sys
 mask              who gives up                 atom_exch_acq_rel_sys                any wait     ld_relaxed_gpu
 wait_recv_cost_stats  note_wait                atom_add_relaxed_sys                 -            the next kernel

A count says that n messages are there, and how many they are. Behind each message its sender adds TAG, whoever counted
them adds -n - 1 - n * TAG, in any order. So the cell is 0 before anything comes, and the sum is -n - 1 once all is
there, and only then: until then it is positive, or below -TAG. DeepEP adds tags in a counter of its own, and who
completes that sends -n - 1: one more atomic and one more fence behind the last message.

Without enable_shrink (no mask) a wait that times out reports a fault, as all others do. With it the wait masks the
rank that did not answer, and goes on without it. Several warps may read one count; all of them must come to the same
answer, or their rows would overlap. So who gives up says so in the count itself, unless it is complete. A masked rank
may only be late. Its cells stay given up from call to call, and no other rank adds to them.

Source: DeepEP csrc/kernels/internode_ll.cu (FINISHED_SUM_TAG); csrc/kernels/legacy/internode_ll.cu after v1.2.1
(is_rank_masked, and the waits that mask a rank); wait_recv_cost of both
"""

from typing import NamedTuple

import nbep.device.primitives as ptx
from nbep.device.jit import device_function
from nbep.device.network.seam import amo_add, is_message
from nbep.device.protocols.waits import Bounds, Waiter, report_fault, site, wait_until
from nbep.emulator.machine.source import wait_loop

LOW_LATENCY_CALL = site(37, "low-latency notify", "calls", "the peer's call")
LOW_LATENCY_CREDIT = site(10, "low-latency sender", "credit", "the peer's half of the buffer to be free again")

TAG = 1 << 14
MAX_TAGS = TAG - 2  # messages that one cell can count
ABSENT = 3 << 29  # what adds to it later leaves it above LEAST_ABSENT
LEAST_ABSENT = 1 << 30
CAME = 1  # how a wait has ended; 0 if it timed out
MASKED = 2


class Expected(NamedTuple):
    """What a wait needs to know to be over: of whom, and how far a counter has to be."""

    mask: int  # see `is_masked`
    peer: int
    number: int


@device_function
def is_masked(mask, rank):
    """Whether this rank goes on without another one. mask is 0 where none may be left out."""
    return mask != 0 and ptx.ld_relaxed_gpu_s32(mask + 4 * rank) != 0


@wait_loop
@device_function
def wait_for_peer(load, cell, holds, expected, bounds):
    """As wait_until, with no report to come from a wait that may leave its peer out."""
    bounds = Bounds(bounds.timeout_ns, bounds.claim, 0 if expected.mask != 0 else bounds.report)
    return wait_until(load, cell, holds, expected, bounds, ptx.wait_expired)


@device_function
def leave_out(bounds, expected, waiter, value):
    """Go on without a peer that has not come in time; report it where none may be left out."""
    if expected.mask == 0:
        report_fault(bounds, waiter.site, waiter.peer, waiter.channel, expected.number, value)
    else:
        ptx.atom_exch_acq_rel_sys_s32(expected.mask + 4 * waiter.peer, 1)


@device_function
def is_complete(value):
    """Whether all that a cell counts is there."""
    return -TAG < value < 0


@device_function
def completion(count):
    """What is added, besides a TAG for each, to complete a cell that counts so many."""
    return -count - 1 - count * TAG


@device_function
def number_of(value):
    """The number that a complete cell holds."""
    return -value - 1


@device_function
def announced(value, most):
    """The number that a complete cell holds, 0 if it was given up; no more than `most`, whatever a fault has left."""
    return min(number_of(value), most) if is_complete(value) else 0


@device_function
def notify(network, place, sum_cell, value, is_behind):
    """Add a part to a count at a peer; one thread. place: of the count. is_behind: see amo_add

    sum_cell, of this rank, is 0 before the first part, and again after the last. Where an add is a message of its own,
    the parts are added up there, and who completes the sum sends it: one add for each count, as DeepEP does it.
    """
    if is_message(network, place.peer):
        total = ptx.atom_add_acq_rel_gpu_s32(sum_cell, value) + value  # PAIR arrival-sum
        if is_complete(total):
            ptx.st_weak_s32(sum_cell, 0)
            amo_add(network, place.dst, total, place.peer, place.queue, True)
    else:
        amo_add(network, place.dst, value, place.peer, place.queue, is_behind)


@device_function
def give_up(cell, seen):
    """Settle that nothing comes, unless all is there: what holds from now on. seen is what the cell held."""
    while True:
        found = ptx.atom_cas_acq_rel_sys_s32(cell, seen, ABSENT)
        if found == seen:
            return ABSENT
        if is_complete(found) or found > LEAST_ABSENT:
            return found
        seen = found


@device_function
def empty_cell(cell, is_absent):
    """Make a cell ready for the next call: nothing has come.

    is_absent: its rank is masked. What that may still add is not for the next call: the cell stays given up
    """
    if is_absent:
        ptx.atom_exch_acq_rel_sys_s32(cell, ABSENT)
    else:
        ptx.st_weak_s32(cell, 0)


@device_function
def has_arrived(value, expected):
    """Whether all that a cell counts is there, or nothing comes any more."""
    if is_complete(value) or value > LEAST_ABSENT:
        return CAME
    return MASKED if is_masked(expected.mask, expected.peer) else 0


@device_function
def has_number(value, expected):
    if value != 0:
        return CAME
    return MASKED if is_masked(expected.mask, expected.peer) else 0


@device_function
def has_credit(value, expected):
    """Whether a counter is past a number."""
    if is_masked(expected.mask, expected.peer):
        return MASKED
    return CAME if ptx.s32(value - expected.number) > 0 else 0


@device_function
def wait_arrival(cell, bounds, mask, waiter):
    """Wait until a cell is complete; what it holds then, or ABSENT."""
    expected = Expected(mask, waiter.peer, -1)
    load = ptx.ld_acquire_sys_s32  # PAIR network-amo
    value, ended = wait_for_peer(load, cell, has_arrived, expected, bounds)
    return value if ended == CAME else end_arrival(cell, bounds, mask, waiter, value, ended)


@device_function
def wait_number(cell, bounds, mask, waiter):
    """Wait for a number in a cell that counts no messages; what it holds then, or ABSENT.

    The load is relaxed: the number is the message itself, and nothing else is published by it.
    """
    expected = Expected(mask, waiter.peer, -1)
    value, ended = wait_for_peer(ptx.ld_relaxed_sys_s32, cell, has_number, expected, bounds)
    return value if ended == CAME else end_arrival(cell, bounds, mask, waiter, value, ended)


@device_function
def end_arrival(cell, bounds, mask, waiter, value, ended):
    """What a cell holds of which nothing comes any more, as its wait has ended."""
    if ended != MASKED:
        leave_out(bounds, Expected(mask, waiter.peer, -1), waiter, value)
        if mask == 0:
            return ABSENT
    return give_up(cell, value)


@device_function
def wait_credit(cell, uses, bounds, mask, peer, half):
    """Wait until a peer has freed this half more often than this rank has filled it. Returns whether it has."""
    expected = Expected(mask, peer, uses)
    load = ptx.ld_acquire_sys_s32  # PAIR network-amo
    value, ended = wait_for_peer(load, cell, has_credit, expected, bounds)
    if ended == 0:
        leave_out(bounds, Expected(mask, peer, uses + 1), Waiter(LOW_LATENCY_CREDIT, peer, half), value)
    return ended == CAME


@device_function
def has_ended(value, expected):
    """As `has_arrived`, above a least number, and without telling how: the time counts."""
    is_complete = expected.number < value < 0
    return is_complete or value > LEAST_ABSENT or is_masked(expected.mask, expected.peer)


@device_function
def note_wait(stats, cell, bounds, mask, waiter):
    """Add the cycles until a cell of a rank is complete, nothing if the rank is masked; one thread, alone in its warp.

    So `wait_recv_cost_stats` find stragglers. As in DeepEP each expert of every rank adds once, however many tokens it
    has, and one thread of a warp waits: lanes that wait together would all read the time of the slowest one.
    """
    peer = waiter.peer
    if is_masked(mask, peer):
        return
    start = ptx.clock64()
    # The load is relaxed: only the time counts. What the cell publishes is read by others. A word may be below -TAG.
    expected = Expected(mask, peer, -LEAST_ABSENT if waiter.site == LOW_LATENCY_CALL else -TAG)
    value, ended = wait_for_peer(ptx.ld_relaxed_sys_s32, cell, has_ended, expected, bounds)
    if not ended:
        leave_out(bounds, Expected(mask, peer, -1), waiter, value)
    ptx.atom_add_relaxed_sys_s64(stats + 8 * peer, ptx.clock64() - start)
