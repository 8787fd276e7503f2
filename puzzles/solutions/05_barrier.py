"""Puzzle 5, solved: meet, thread r tells rank r, thread 0 waits for all, meet again."""

from nbep.device.jit import device_function
from nbep.device.primitives import atom_add_release_sys_s32, syncthreads, thread_idx
from nbep.device.protocols.peers import buffer_of
from nbep.puzzle import wait_at_least

ARRIVED = 0


@device_function
def barrier(peers, bounds):
    syncthreads()
    if thread_idx() < peers.num_ranks:
        atom_add_release_sys_s32(buffer_of(peers, thread_idx()) + ARRIVED, 1)
    if thread_idx() == 0:
        wait_at_least(buffer_of(peers, peers.rank) + ARRIVED, peers.num_ranks, bounds)
    syncthreads()
