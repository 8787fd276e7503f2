"""Arrivals: what a rank is told through a cell that peers add to, and ranks that may never tell it.

 cell              written by                   with                                 read by      with
 count, arrival    peers, through the network   amo_add (TAG, or what completes)     receivers    ld_acquire_sys
                   who gives up                 atom_cas_acq_rel_sys (ABSENT)
 count for itself  the same                     the same                             receivers    ld_relaxed_sys
 all of them       their owner, between calls   st_weak (0)                          receivers    of the next call
 word              a peer                       amo_add (-word - 1)                  receivers    ld_relaxed_sys
                   its owner, between calls     st_relaxed_sys (0)                   receivers    in the next call
 those above, of a masked rank: their owner    atom_exch_acq_rel_sys (ABSENT)
 sum               who knows a part of a count  atom_add_acq_rel_gpu                 the last one the same
 credit            peer, through the network    amo_add (1)                          senders      ld_acquire_sys
 mask              who gives up                 atom_exch_acq_rel_sys                any wait     ld_relaxed_gpu

A count says that n messages are there, and how many they are. Behind each message its sender adds TAG, whoever counted
them adds -n - 1 - n * TAG, in any order. So the cell is 0 before anything comes, and the sum is -n - 1 once all is
there, and only then: until then it is positive, or below -TAG. DeepEP adds tags in a counter of its own, and who
completes that sends -n - 1: one more atomic and one more fence behind the last message.

Without enable_shrink (no mask) a wait that is over time reports a fault, as all others do. With it the wait masks the
rank that did not answer, and goes on without it. Several warps may read one count; all of them must come to the same
answer, or their rows would overlap. So who gives up says so in the count itself, unless it is complete. A masked rank
may only be late. Its cells stay given up from call to call, and no other rank adds to them.

Source: DeepEP csrc/kernels/internode_ll.cu (FINISHED_SUM_TAG); csrc/kernels/legacy/internode_ll.cu after v1.2.1
(is_rank_masked, and the waits that mask a rank)
"""

from typing import NamedTuple

import nbep.device.primitives as ptx
from nbep.device.jit import device_function
from nbep.device.network.seam import amo_add, is_message
from nbep.device.protocols.waits import LOW_LATENCY_BARRIER, LOW_LATENCY_CREDIT, report_fault, start_wait

TAG = 1 << 14
MAX_TAGS = TAG - 2  # messages that one cell can count
ABSENT = 3 << 29  # what adds to it later leaves it above LEAST_ABSENT
LEAST_ABSENT = 1 << 30


class Told(NamedTuple):
    """A count of a peer: its offset there, and the cell of this rank where the parts of its value are added up."""

    cell: int
    sum_cell: int


@device_function
def is_masked(mask, rank):
    """Whether this rank goes on without another one. mask is 0 where none may be left out."""
    return mask != 0 and ptx.ld_relaxed_gpu_s32(mask + 4 * rank) != 0


@device_function
def mask_rank(mask, rank):
    """Go on without a rank from now on."""
    ptx.atom_exch_acq_rel_sys_s32(mask + 4 * rank, 1)


@device_function
def leave_out(bounds, mask, peer, site, index, expected, value):
    """Go on without a peer that has not come in time; report it where none may be left out."""
    if mask == 0:
        report_fault(bounds, site, peer, index, expected, value)
    else:
        mask_rank(mask, peer)


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
    """The number that a complete cell tells."""
    return -value - 1


@device_function
def announced(value, most):
    """The number that a complete cell tells, 0 if it was given up; no more than `most`, whatever a fault has left."""
    return min(number_of(value), most) if is_complete(value) else 0


@device_function
def tell(network, told, value, peer, queue, is_behind):
    """Add a part of what a count of a peer is told; one thread. is_behind: see amo_add

    sum_cell is 0 before the first part, and again after the last. Where an add is a message of its own, the parts are
    added up there, and who completes the sum sends it: one add for each count, as DeepEP does it.
    """
    if is_message(network, peer):
        total = ptx.atom_add_acq_rel_gpu_s32(told.sum_cell, value) + value  # PAIR arrival-sum
        if is_complete(total):
            ptx.st_weak_s32(told.sum_cell, 0)
            amo_add(network, told.cell, total, peer, queue, True)
    else:
        amo_add(network, told.cell, value, peer, queue, is_behind)


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
def empty_word(cell, is_absent):
    """The same for a cell that is added to once, relaxed, and read so."""
    if is_absent:
        ptx.atom_exch_acq_rel_sys_s32(cell, ABSENT)
    else:
        ptx.st_relaxed_sys_s32(cell, 0)


@device_function
def wait_arrival(cell, bounds, mask, peer, site, index):
    """Wait until a cell is complete; what it holds then, or ABSENT. index is for the report."""
    deadline = 0
    while True:
        value = ptx.ld_acquire_sys_s32(cell)  # PAIR network-amo
        if is_complete(value) or value > LEAST_ABSENT:
            return value
        if is_masked(mask, peer):
            return give_up(cell, value)
        if deadline == 0:
            deadline = start_wait(bounds)
        elif ptx.wait_expired(deadline):
            leave_out(bounds, mask, peer, site, index, -1, value)
            return ABSENT if mask == 0 else give_up(cell, value)


@device_function
def wait_number(cell, bounds, mask, peer, site, index):
    """Wait until a cell is told a number that counts no messages; what it holds then, or ABSENT."""
    deadline = 0
    while True:
        value = ptx.ld_relaxed_sys_s32(cell)  # the number is the message itself: nothing else is published by it
        if value != 0:
            return value
        if is_masked(mask, peer):
            return give_up(cell, value)
        if deadline == 0:
            deadline = start_wait(bounds)
        elif ptx.wait_expired(deadline):
            leave_out(bounds, mask, peer, site, index, -1, value)
            return ABSENT if mask == 0 else give_up(cell, value)


@device_function
def wait_credit(cell, uses, bounds, mask, peer, half):
    """Wait until a peer has freed this half more often than this rank has filled it. Returns whether it has."""
    deadline = 0
    while True:
        value = ptx.ld_acquire_sys_s32(cell)  # PAIR network-amo
        if is_masked(mask, peer):
            return False
        if ptx.s32(value - uses) > 0:
            return True
        if deadline == 0:
            deadline = start_wait(bounds)
        elif ptx.wait_expired(deadline):
            leave_out(bounds, mask, peer, LOW_LATENCY_CREDIT, half, uses + 1, value)
            return False


@device_function
def wait_peer(signal, wanted, bounds, mask, peer):
    """Wait until a peer has come to a barrier of `barrier_network`, by its number, or is masked."""
    deadline = 0
    while True:
        value = ptx.ld_acquire_sys_s32(signal)  # PAIR network-amo
        if ptx.s32(value - wanted) >= 0 or is_masked(mask, peer):
            return
        if deadline == 0:
            deadline = start_wait(bounds)
        elif ptx.wait_expired(deadline):
            leave_out(bounds, mask, peer, LOW_LATENCY_BARRIER, -1, wanted, value)
            return
