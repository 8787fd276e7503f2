"""Totals: cells that say how much has come, or has been freed, in all calls together. Nobody resets them.

 cell       written by                 with                             read by   with
 arrived    a peer, at each notify     amo_add (its call)               notify    ld_acquire_sys
 tail       a sending coordinator      amo_add (slots), behind them     readers   ld_acquire_sys
 head       a receiving coordinator    amo_add (slots), behind reads    senders   ld_acquire_sys

A cell that a network adds to must not be reset by its owner: of an add and a store at the same time one would be lost.
So where a ring inside a node begins each call with a tail of 0, a total counts on. What it was at the start of a call
is in the rank's own memory (`Progress`): both ends know how many tokens a call has, so both come to the same number.
s32 wraps: only differences mean anything.

The warps of a block fill the slots of a ring in turn, and nothing but the way to the receiver and back orders who fills
a slot behind who has filled it before. So a head releases and acquires, as a tail does; inside a node a team has a
barrier for that.

A head may still be on its way when the next call starts. Then less seems to be free than is, and that is safe.

Source: DeepEP csrc/kernels/internode.cu (rdma_channel_head, rdma_channel_tail, which each notify resets)
"""

from typing import NamedTuple

import nbep.device.primitives as ptx
from nbep.device.jit import device_function
from nbep.device.protocols.waits import DIGEST_BITS, INTERNODE_NOTIFY, ONE, report_fault, wait_or_report, wait_until
from nbep.device.types import Sym


class Progress(NamedTuple):
    """A rank's own memory: what the cells count at the start of a call."""

    sent: Sym  # [MAX_CHANNELS, num_rdma_ranks] s32: slots that this rank has filled at the ranks of other nodes
    received: Sym  # [MAX_CHANNELS, num_rdma_ranks] s32: slots of this rank that it has emptied
    rounds: Sym  # s32: notifies so far
    called: Sym  # s32: what this rank has added to the arrivals of its peers so far
    grid_arrivals: Sym  # s32, see `protocols.grid_barrier`


@device_function
def has_reached(seen, wanted):
    """Whether a total is at wanted or past it; only their difference means anything."""
    return ptx.s32(seen - wanted) >= 0


@device_function
def has_come(seen, wanted):
    """Whether a peer has added its call, which this rank expects to be ONE and the digest of its own."""
    return ptx.s32(seen - wanted) > -ONE


@device_function
def wait_total(cell, wanted, bounds, waiter):
    """Wait until a cell counts so many: what was put before is there. Returns what it counts, at least so many."""
    seen, came = wait_or_report(ptx.ld_acquire_sys_s32, cell, has_reached, wanted, bounds, waiter)  # PAIR network-amo
    return seen if came else wanted


@device_function
def wait_arrived(cell, wanted, bounds, peer):
    """Wait until a peer has added its call to a cell. Returns how far that is past wanted; 0 if it never came.

    See kernels.internode.meet_nodes: all that a peer had put before is there.
    """
    load = ptx.ld_acquire_sys_s32  # PAIR network-amo
    seen, came = wait_until(load, cell, has_come, wanted, bounds, ptx.wait_expired)
    ahead = ptx.s32(seen - wanted)
    if not came:
        report_fault(bounds, INTERNODE_NOTIFY, peer, -1, 1, (ahead >> DIGEST_BITS) + 2)  # arrivals for this call
    return ahead if came else 0


@device_function
def wait_total_free(head, base, slot, num_slots, bounds, waiter):
    """Wait until a ring's slot is free: the one num_slots before it has been. Returns the first that is not, or 0.

    base: what the head was at the start of the call
    """
    freed = slot + 1 - num_slots
    load = ptx.ld_acquire_sys_s32  # PAIR network-amo
    seen, came = wait_until(load, head, has_reached, base + freed, bounds, ptx.wait_expired)
    seen = ptx.s32(seen - base)
    if not came:
        report_fault(bounds, waiter.site, waiter.peer, waiter.channel, freed, seen)
    return seen + num_slots if came else 0
