"""Teams: warps of a block that fill or empty one ring together.

 cell             written by         with                    read by        with
 tail of a ring   warp 0 of a team   st_release_sys          the receiver   ld_acquire_sys

The barrier of a team is one of the block's named ones: barrier 0 is syncthreads, so teams take 1 and up.
"""

from typing import NamedTuple

import nbep.device.primitives as ptx
from nbep.device.jit import device_function


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
