"""Put the cells of the low-latency mode back to how they were when the buffer was made, on all ranks together.

 cell                    written by       with                    read by      with
 barrier_signal[a][b]    rank b           amo_add                 rank a       ld_acquire_sys
 barriers[a][b]          rank a           st_weak                 rank a       ld_weak, behind a syncthreads or later
 all other cells:        their owner      st_weak, st_na,         peers, later behind the second barrier
   counts, arrivals,                      st_relaxed_sys
   calls, credits,
   slots, sums, journal
   of a masked rank      their owner      atom_exch_acq_rel_sys   (ABSENT): that rank may still add

Nobody sends before all have cleaned, and nobody cleans before all are done. Ranks that are masked are not waited for.

A signal is the number of the latest barrier that its rank has come to. All ranks clean equally often, so one that comes
late counts for the barrier that it comes to, and not for the next one. A masked rank is told nothing; when it is masked
no more, what is added next makes up for that.

Source: DeepEP csrc/kernels/internode_ll.cu, clean_low_latency_buffer; csrc/kernels/legacy/internode_ll.cu after v1.2.1
(barrier: a number, too)
"""

import nbep.device.primitives as ptx
from nbep.device.jit import device_function, kernel
from nbep.device.kernels.low_latency.arguments import SLOT_WORDS, Workspace
from nbep.device.kernels.low_latency.coordinator import JOURNAL_WORDS
from nbep.device.layout.low_latency import (
    BARRIER_SIGNALS,
    CREDITS,
    MAX_LOCAL_EXPERTS,
    MAX_RANKS,
    NUM_HALVES,
    WORDS_OF_CALL,
    arrival_offset,
    call_offset,
    count_offset,
)
from nbep.device.network.seam import Network, amo_add, own_ptr
from nbep.device.protocols.arrivals import empty_cell, empty_word, is_masked, wait_peer
from nbep.device.protocols.peers import Bounds
from nbep.device.types import I64


@device_function
def clear_vectors(address, num_vectors):
    """Zero 16 bytes at a time; a whole block."""
    for i in range(ptx.thread_idx(), num_vectors, ptx.block_dim()):
        ptx.st_na_v4(address + 16 * i, (0, 0, 0, 0))


@device_function
def empty_rank(network, num_rdma_bytes, rank, is_absent):
    """Empty all cells of a rank, in both halves; a whole block."""
    for half in range(NUM_HALVES):
        counts = own_ptr(network, count_offset(num_rdma_bytes, half, rank, 0))
        if is_absent:
            for i in range(ptx.thread_idx(), MAX_LOCAL_EXPERTS, ptx.block_dim()):
                empty_cell(counts + 4 * i, True)
        else:
            clear_vectors(counts, MAX_LOCAL_EXPERTS // 4)
        if ptx.thread_idx() == 0:
            empty_cell(own_ptr(network, arrival_offset(num_rdma_bytes, half, rank)), is_absent)
            for index in range(WORDS_OF_CALL):
                empty_word(own_ptr(network, call_offset(num_rdma_bytes, half, rank, index)), is_absent)


@device_function
def barrier_network(network, work, bounds, num_rdma_bytes):
    """Wait for one block of every rank that is not masked; all its threads call it."""
    number = ptx.s32(ptx.ld_weak_s32(work.barriers + 4 * network.rank) + 1)
    ptx.syncthreads()
    peer = ptx.thread_idx()
    if peer < network.num_ranks and not is_masked(work.mask, peer):
        signals = num_rdma_bytes + BARRIER_SIGNALS
        told = ptx.ld_weak_s32(work.barriers + 4 * peer)
        ptx.st_weak_s32(work.barriers + 4 * peer, number)
        amo_add(network, signals + 4 * network.rank, ptx.s32(number - told), peer, 0, True)
        wait_peer(own_ptr(network, signals + 4 * peer), number, bounds, work.mask, peer)
    ptx.syncthreads()


@device_function
def reset_words(address, num_words, value):
    for i in range(ptx.thread_idx(), num_words, ptx.block_dim()):
        ptx.st_weak_s32(address + 4 * i, value)


@kernel(max_threads=256)
def clean_low_latency_buffer(network: Network, work: Workspace, bounds: Bounds, num_rdma_bytes: I64):
    """Grid: 1 block. Block: any multiple of 32 that is at least num_ranks."""
    barrier_network(network, work, bounds, num_rdma_bytes)
    for rank in range(network.num_ranks):
        empty_rank(network, num_rdma_bytes, rank, is_masked(work.mask, rank))
    reset_words(own_ptr(network, num_rdma_bytes + CREDITS), NUM_HALVES * MAX_RANKS, 1)
    clear_vectors(work.slots, NUM_HALVES * SLOT_WORDS // 4)
    clear_vectors(work.sums, NUM_HALVES * SLOT_WORDS // 4)
    reset_words(work.journal, JOURNAL_WORDS, 0)
    barrier_network(network, work, bounds, num_rdma_bytes)
