"""Put the cells of the low-latency mode back to how they were when the buffer was made, on all ranks together.

 cell                    written by       with                    read by      with
 barrier_signal[a][b]    rank b           amo_add                 rank a       ld_acquire_sys
 barriers[a][b]          rank a           st_weak                 rank a       ld_weak, behind a syncthreads or later
 all other cells:        their owner      st_weak, st_na,         peers, later behind the second barrier
   counts, arrivals,                      st_relaxed_sys
   calls, credits,
   slots, sums, state
   of a masked rank      their owner      atom_exch_acq_rel_sys   (ABSENT): that rank may still add

No rank sends before all have cleaned, and none cleans before all are done. Ranks that are masked are not waited for.

A signal is the number of the latest barrier that its rank has come to. All ranks clean equally often, so one that comes
late counts for the barrier that it comes to, and not for the next one. A masked rank gets no signal; when it is masked
no more, what is added next makes up for that.

Source: DeepEP csrc/kernels/internode_ll.cu, clean_low_latency_buffer; csrc/kernels/legacy/internode_ll.cu after v1.2.1
(barrier: a number, too)
"""

import nbep.device.layout.low_latency as layout
import nbep.device.primitives as ptx
from nbep.device.jit import device_function, kernel
from nbep.device.kernels.low_latency.arguments import Workspace, slot_words
from nbep.device.kernels.low_latency.calls import empty_word
from nbep.device.kernels.low_latency.coordinator import STATE_WORDS
from nbep.device.kernels.parts.arrivals import Expected, empty_cell, is_masked, leave_out, wait_for_peer
from nbep.device.network.seam import Network, amo_add, own_ptr
from nbep.device.protocols.waits import Bounds, Waiter, site
from nbep.device.types import I64

LOW_LATENCY_BARRIER = site(15, "clean_low_latency_buffer", "barrier_signal", "the peer's arrival at the barrier")


@device_function
def clear_vectors(address, num_vectors):
    """Zero 16 bytes at a time; a whole block."""
    for i in range(ptx.thread_idx(), num_vectors, ptx.block_dim()):
        ptx.st_na_v4(address + 16 * i, (0, 0, 0, 0))


@device_function
def empty_rank(network, num_rdma_bytes, rank, is_absent):
    """Empty the arrivals and the words of a rank, in both halves; one thread."""
    for half in range(layout.NUM_HALVES):
        empty_cell(own_ptr(network, layout.arrival_offset(num_rdma_bytes, network.num_ranks, half, rank)), is_absent)
        for index in range(layout.WORDS_OF_CALL):
            cell = layout.call_offset(num_rdma_bytes, network.num_ranks, half, rank, index)
            empty_word(own_ptr(network, cell), is_absent)


@device_function
def has_met(value, expected):
    return ptx.s32(value - expected.number) >= 0 or is_masked(expected.mask, expected.peer)


@device_function
def wait_peer(signal, wanted, bounds, mask, peer):
    """Wait until a peer has come to a barrier of `barrier_network`, by its number, or is masked."""
    expected = Expected(mask, peer, wanted)
    load = ptx.ld_acquire_sys_s32  # PAIR network-amo
    value, ended = wait_for_peer(load, signal, has_met, expected, bounds)
    if not ended:
        leave_out(bounds, expected, Waiter(LOW_LATENCY_BARRIER, peer, -1), value)


@device_function
def barrier_network(network, work, bounds, num_rdma_bytes):
    """Wait for one block of every rank that is not masked; all its threads call it."""
    number = ptx.s32(ptx.ld_weak_s32(work.barriers + 4 * network.rank) + 1)
    ptx.syncthreads()
    for peer in range(ptx.thread_idx(), network.num_ranks, ptx.block_dim()):
        if not is_masked(work.mask, peer):
            previous = ptx.ld_weak_s32(work.barriers + 4 * peer)
            ptx.st_weak_s32(work.barriers + 4 * peer, number)
            signal = layout.signal_offset(num_rdma_bytes, network.num_ranks, network.rank)
            amo_add(network, signal, ptx.s32(number - previous), peer, 0, True)
    for peer in range(ptx.thread_idx(), network.num_ranks, ptx.block_dim()):
        signal = own_ptr(network, layout.signal_offset(num_rdma_bytes, network.num_ranks, peer))
        wait_peer(signal, number, bounds, work.mask, peer)  # not if it is masked
    ptx.syncthreads()


@device_function
def reset_words(address, num_words, value):
    for i in range(ptx.thread_idx(), num_words, ptx.block_dim()):
        ptx.st_weak_s32(address + 4 * i, value)


@kernel(max_threads=256)
def clean_low_latency_buffer(network: Network, work: Workspace, bounds: Bounds, num_rdma_bytes: I64):
    """Grid: 1 block. Block: any multiple of 32."""
    barrier_network(network, work, bounds, num_rdma_bytes)
    for half in range(layout.NUM_HALVES):
        counts = own_ptr(network, layout.count_offset(num_rdma_bytes, network.num_ranks, half, 0, 0))
        for i in range(ptx.thread_idx(), layout.MAX_EXPERTS, ptx.block_dim()):
            empty_cell(counts + 4 * i, is_masked(work.mask, ptx.u32_mod(i, network.num_ranks)))
        first = own_ptr(network, layout.credit_offset(num_rdma_bytes, network.num_ranks, half, 0))
        reset_words(first, network.num_ranks, 1)
    for rank in range(ptx.thread_idx(), network.num_ranks, ptx.block_dim()):
        empty_rank(network, num_rdma_bytes, rank, is_masked(work.mask, rank))
    clear_vectors(work.slots, layout.NUM_HALVES * slot_words(network.num_ranks) // 4)
    clear_vectors(work.sums, layout.NUM_HALVES * slot_words(network.num_ranks) // 4)
    reset_words(work.state, STATE_WORDS, 0)
    barrier_network(network, work, bounds, num_rdma_bytes)
