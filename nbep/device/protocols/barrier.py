"""The barrier between the ranks of a node.

 rank a: signal[a][b] += 1, signal[b][a] -= 1          rank b: signal[b][a] += 1, signal[a][b] -= 1
 rank a waits for signal[a][b] <= 0                    rank b waits for signal[b][a] <= 0

 cell             written by               with                    read by        with
 signal[a][b]     rank a (+)               atom_add_relaxed_sys    -              -
                  rank b (-)               atom_add_release_sys    rank a         ld_acquire_sys

signal[a][b] counts how far a is ahead of b. It needs no reset: each barrier adds and subtracts once.

DeepEP's barrier_block fences before the block's barrier and signals relaxed after it, spins on a volatile load and has
no acquire behind it; here the signal itself releases and the poll itself acquires.

The kernels of the normal mode meet by `meet_by_adding`: the same with another number in place of 1, which says what a
rank calls, too. See calls.py.

Source: DeepEP csrc/kernels/utils.cuh, barrier_block. Break it: notebooks/01_barrier.ipynb
"""

import nbep.device.primitives as ptx
from nbep.device.jit import device_function
from nbep.device.protocols import barriers
from nbep.device.protocols.barriers import BARRIER
from nbep.device.protocols.peers import DIGEST_BITS, Peers, barrier_signals_of
from nbep.device.protocols.waits import Waiter, report_fault, wait_or_report, wait_until


@device_function
def is_at_most(seen, wanted):
    return seen <= wanted


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
def barrier_block(peers, bounds):
    """Wait for one block of every rank; what their threads wrote before is visible to this block's threads after.

    All threads of the block call it; the block has at least num_ranks threads.
    """
    # After the block's barrier thread `peer` speaks for all threads: its release covers what they wrote.
    ptx.syncthreads()
    peer = ptx.thread_idx()
    if peer < peers.num_ranks:
        own_signal = barrier_signals_of(peers, peers.rank) + 4 * peer
        ptx.atom_add_relaxed_sys_s32(own_signal, 1)
        ptx.atom_add_release_sys_s32(barrier_signals_of(peers, peer) + 4 * peers.rank, -1)  # PAIR barrier-signal
        wait_signal_not_positive(own_signal, bounds, peer)
    ptx.syncthreads()


@device_function
def meet_by_adding(peers, bounds, signal, may_meet):
    """Where each rank's memory is on its own GPU; see `barriers.meet_peer`."""
    # After the block's barrier thread `peer` speaks for all threads: its release covers what they wrote.
    ptx.syncthreads()
    peer = ptx.thread_idx()
    left = 0
    if peer < peers.num_ranks and may_meet:
        own_signal = barrier_signals_of(peers, peers.rank) + 4 * peer
        ptx.atom_add_relaxed_sys_s32(own_signal, signal)
        ptx.atom_add_release_sys_s32(barrier_signals_of(peers, peer) + 4 * peers.rank, -signal)  # PAIR barrier-signal
        left = wait_call(own_signal, bounds, peer)
    return left


barriers.barrier_block.versions[Peers] = barrier_block
barriers.meet_peer.versions[Peers] = meet_by_adding
