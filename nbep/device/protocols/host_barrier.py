"""The barrier between ranks whose buffers lie in the host's memory: each cell has one writer, and no atomics are used.

 rank a: sent[b][a] = sent[a][a] + signal of its call          rank b: sent[a][b] = sent[b][b] + signal of its call
 rank a waits for sent[a][a] - sent[a][b] < ONE                rank b waits for sent[b][b] - sent[b][a] < ONE

 cell          written by    with              read by                     with
 sent[a][b]    rank b        st_release_sys    rank a                      ld_acquire_sys
 sent[a][a]    rank a        st_release_sys    rank a, at its next one     ld_weak, behind a syncthreads or a launch

The difference is what signal[a][b] is where the ranks add: see calls.py. Two GPUs that add to one cell of the host's
memory may lose what one of them adds: see docs/architecture.md, "Memory of the host". The sums are never reset, and may
wrap around.
"""

import nbep.device.primitives as ptx
from nbep.device.jit import device_function
from nbep.device.protocols import barriers
from nbep.device.protocols.barriers import BARRIER
from nbep.device.protocols.peers import DIGEST_BITS, ONE, HostPeers, barrier_signals_of
from nbep.device.protocols.waits import report_fault, wait_until


@device_function
def host_barrier_block(peers, bounds):
    """As `barrier.barrier_block`: wait for one block of every rank; what was written before is visible after."""
    meet_by_storing(peers, bounds, ONE, True)
    ptx.syncthreads()


@device_function
def meet_by_storing(peers, bounds, signal, may_meet):
    """Where the ranks' buffers are in the host's memory; see `barriers.meet_peer`."""
    sent = barrier_signals_of(peers, peers.rank)
    total = ptx.s32(ptx.ld_weak_s32(sent + 4 * peers.rank) + signal)
    # After this all threads know the sum, and thread `peer` speaks for all: its release covers what they wrote.
    ptx.syncthreads()
    peer = ptx.thread_idx()
    left = 0
    if peer < peers.num_ranks and may_meet:
        ptx.st_release_sys_s32(barrier_signals_of(peers, peer) + 4 * peers.rank, total)  # PAIR host-barrier
        left = wait_sum(sent + 4 * peer, total, bounds, peer)
    return left


@device_function
def has_met(seen, total):
    """Whether what is left of a sum counts 0 or less above DIGEST_BITS."""
    return ptx.s32(total - seen) >> DIGEST_BITS <= 0


@device_function
def wait_sum(cell, total, bounds, peer):
    """Wait until a peer has come to the barrier of this sum. Returns what is left; 0 if it never came."""
    seen, came = wait_until(ptx.ld_acquire_sys_s32, cell, has_met, total, bounds, ptx.wait_expired)  # PAIR host-barrier
    left = ptx.s32(total - seen)
    if not came:
        report_fault(bounds, BARRIER, peer, -1, 0, left >> DIGEST_BITS)
    return left if came else 0


barriers.barrier_block.versions[HostPeers] = host_barrier_block
barriers.meet_peer.versions[HostPeers] = meet_by_storing
