"""Teams: warps of a block that fill or empty one ring together, and what the two ends of a ring wait for.

 cell             written by         with                    read by        with
 tail of a ring   warp 0 of a team   st_release_sys          the receiver   ld_acquire_sys
 head of a ring   the receiver       see the kernel          the sender     ld_relaxed_sys

The barrier of a team is one of the block's named ones: barrier 0 is syncthreads, so teams take 1 and up.
"""

from typing import NamedTuple

import nbep.device.primitives as ptx
from nbep.device.jit import device_function
from nbep.device.protocols.peers import Bounds, Peers
from nbep.device.protocols.waits import is_at_least, wait_or_report


class Team(NamedTuple):
    """The warps of a block that serve one peer on one channel; the peer may be their own rank."""

    sends: bool
    peer: int
    channel: int
    warp: int
    num_warps: int
    lane: int


@device_function
def team_barrier(team):
    """Wait for all warps of the team."""
    ptx.bar_sync(1 + team.peer, 32 * team.num_warps)


@device_function
def wait_expired_together(deadline):
    """Whether the deadline has passed for any lane of a warp that waits together."""
    return ptx.vote_any(ptx.FULL_MASK, ptx.wait_expired(deadline))


@device_function
def publish_tail(ring, tail, is_filled, team):
    """Let the receiver have all slots below tail: each warp's own writes are done before it comes to the barrier.

    Not if a warp has not filled its slots. Returns whether all have; the same in the whole team.
    """
    if ptx.has_tma() and team.lane == 0:
        ptx.tma_store_wait_all()
    is_filled = ptx.bar_red_and(1 + team.peer, 32 * team.num_warps, is_filled)
    if is_filled and team.warp == 0 and team.lane == 0:
        ptx.st_release_sys_s32(ring.tail, tail)  # PAIR dispatch-tail: the chunk's slots
    return is_filled


@device_function
def wait_free_slots(head, tail, num_slots, num_wanted, bounds, waiter):
    """Wait until a ring whose sender has filled tail slots so far has num_wanted free ones. Returns whether it has.

    The head is read relaxed: the slots' old bytes were consumed before the receiver moved it, and no data is read
    after it.
    """
    return wait_or_report(ptx.ld_relaxed_sys_s32, head, is_at_least, tail + num_wanted - num_slots, bounds, waiter)[1]


@device_function
def wait_tail_past(tail, head, last, bounds, waiter):
    """Wait until a ring's tail is past head; returns the tail. The slots below it are then readable.

    A failed wait returns last, the tail that the ring has when all is sent, so that the receiver's loop ends. Nor is
    it ever more: after a failed barrier the cell may hold anything, and rows up to last are all that the output has.
    """
    load = ptx.ld_acquire_sys_s32  # PAIR dispatch-tail
    seen, came = wait_or_report(load, tail, is_at_least, head + 1, bounds, waiter)
    return min(seen, last) if came else last


class Context(NamedTuple):
    """A kernel's arguments that are no arrays, and what this thread is there for.

    shape, sizes: those of the kernel's signature
    places: where the arrays lie in the symmetric memory, of a kernel without rings; else 0
    team: who works with this thread, for which peer and channel; -1 for what a kernel does not have
    """

    peers: Peers
    bounds: Bounds
    shape: tuple
    sizes: tuple
    places: tuple | int
    team: Team
