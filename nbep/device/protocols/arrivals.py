"""Waits of the low-latency mode: for what a peer adds to a cell of this rank, and for ranks that may never do it.

 cell      written by                   with                                  read by         with
 count     peer, through the network    atom_add_release_sys (direct)         receivers       ld_acquire_sys
           who gives up                 atom_cas_acq_rel_sys (0 to ABSENT)
 credit    peer, through the network    atom_add_release_sys (direct)         senders         ld_acquire_sys
 mask      who gives up                 atom_exch_acq_rel_sys                 any wait        ld_relaxed_gpu

Without enable_shrink (no mask) a wait that is over time reports a fault, as all others do. With it the wait masks the
rank that did not answer, and goes on without it. Several warps may read one count; all of them must come to the same
answer, or their rows would overlap. So who gives up says so in the count itself, and only while it is still 0.

Source: DeepEP csrc/kernels/legacy/internode_ll.cu after v1.2.1 (is_rank_masked, and the waits that mask a rank)
"""

from nbep.device.jit import device_function
from nbep.device.primitives import (
    atom_cas_acq_rel_sys_s32,
    atom_exch_acq_rel_sys_s32,
    ld_acquire_sys_s32,
    ld_relaxed_gpu_s32,
    wait_expired,
)
from nbep.device.protocols.waits import LOW_LATENCY_BARRIER, LOW_LATENCY_CREDIT, report_fault, start_wait

ABSENT = -(1 << 30)  # what adds to it later leaves it far below 0


@device_function
def is_masked(mask, rank):
    """Whether this rank goes on without another one. mask is 0 where none may be left out."""
    return mask != 0 and ld_relaxed_gpu_s32(mask + 4 * rank) != 0


@device_function
def mask_rank(mask, rank):
    """Go on without a rank from now on."""
    atom_exch_acq_rel_sys_s32(mask + 4 * rank, 1)


@device_function
def give_up(cell):
    """Settle that nothing comes, unless it has come: what the cell holds from now on."""
    seen = atom_cas_acq_rel_sys_s32(cell, 0, ABSENT)
    return seen if seen != 0 else ABSENT


@device_function
def is_there(value):
    """Whether what was waited for has come, and was not given up."""
    return value > ABSENT // 2


@device_function
def announced(value, most):
    """The number that travels as -n - 1; 0 if it was given up, and no more than `most`, whatever a fault has left."""
    return min(-value - 1, most) if is_there(value) else 0


@device_function
def wait_arrival(cell, bounds, mask, peer, site, index):
    """Wait until a peer has added to a cell; what it holds then, or ABSENT. index is for the report."""
    deadline = 0
    while True:
        value = ld_acquire_sys_s32(cell)  # PAIR network-amo
        if value != 0:
            return value
        if is_masked(mask, peer):
            return give_up(cell)
        if deadline == 0:
            deadline = start_wait(bounds)
        elif wait_expired(deadline):
            if mask == 0:
                report_fault(bounds, site, peer, index, -1, value)
                return ABSENT
            mask_rank(mask, peer)
            return give_up(cell)


@device_function
def wait_credit(cell, bounds, mask, peer, half):
    """Wait until a peer has received what it got in this half. Returns whether it may be filled again."""
    deadline = 0
    while True:
        value = ld_acquire_sys_s32(cell)  # PAIR network-amo
        if is_masked(mask, peer):
            return False
        if value > 0:
            return True
        if deadline == 0:
            deadline = start_wait(bounds)
        elif wait_expired(deadline):
            if mask == 0:
                report_fault(bounds, LOW_LATENCY_CREDIT, peer, half, 1, value)
            else:
                mask_rank(mask, peer)
            return False


@device_function
def wait_peer(signal, bounds, mask, peer):
    """Wait until a signal of `barrier_network` is 0 or less: the peer has come as often as this rank, or is masked."""
    deadline = 0
    while True:
        value = ld_acquire_sys_s32(signal)  # PAIR network-amo
        if value <= 0 or is_masked(mask, peer):
            return
        if deadline == 0:
            deadline = start_wait(bounds)
        elif wait_expired(deadline):
            if mask == 0:
                report_fault(bounds, LOW_LATENCY_BARRIER, peer, -1, 0, value)
            else:
                mask_rank(mask, peer)
            return
