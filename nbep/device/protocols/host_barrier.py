"""The barrier between ranks whose buffers lie in the host's memory: each cell has one writer, and nobody adds.

 rank a: arrived[b][a] = n, its n-th barrier           rank b: arrived[a][b] = n
 rank a waits for arrived[a][b] >= n                   rank b waits for arrived[b][a] >= n

 cell             written by    with              read by                     with
 arrived[a][b]    rank b        st_release_sys    rank a                      ld_acquire_sys
 arrived[a][a]    rank a        st_release_sys    rank a, at its next one     ld_weak, behind a syncthreads or a launch

Two GPUs that add to one cell of the host's memory may lose what one of them adds: see docs/architecture.md, "Memory of
the host". The numbers are never reset. They may wrap around: what is compared is their difference.
"""

from nbep.device.jit import device_function
from nbep.device.primitives import (
    ld_acquire_sys_s32,
    ld_weak_s32,
    s32,
    st_release_sys_s32,
    syncthreads,
    thread_idx,
    wait_expired,
)
from nbep.device.protocols.peers import barrier_signals_of
from nbep.device.protocols.waits import BARRIER, report_fault, start_wait


@device_function
def host_barrier_block(peers, bounds):
    """As `barrier.barrier_block`: wait for one block of every rank; what was written before is visible after."""
    arrived = barrier_signals_of(peers, peers.rank)
    number = s32(ld_weak_s32(arrived + 4 * peers.rank) + 1)
    # After this all threads know the number, and thread `peer` speaks for all: its release covers what they wrote.
    syncthreads()
    peer = thread_idx()
    if peer < peers.num_ranks:
        st_release_sys_s32(barrier_signals_of(peers, peer) + 4 * peers.rank, number)  # PAIR host-barrier
        wait_arrived(arrived + 4 * peer, number, bounds, peer)
    syncthreads()


@device_function
def wait_arrived(cell, number, bounds, peer):
    """Wait until a peer has come to the barrier of this number."""
    deadline = 0
    while True:
        seen = ld_acquire_sys_s32(cell)  # PAIR host-barrier
        if s32(seen - number) >= 0:
            return
        if deadline == 0:
            deadline = start_wait(bounds)
        elif wait_expired(deadline):
            report_fault(bounds, BARRIER, peer, -1, number, seen)
            return
