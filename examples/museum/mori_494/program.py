"""One block meets the other ranks, and lets the other blocks of its own go on.

 cell       written by         with            read by       with
 signal[r]  block 0 of rank r  st_release_sys  block 0       ld_acquire_sys
 open       block 0            st_release_gpu  other blocks  ld_acquire_gpu: the ranks have met

nbep check examples/museum/mori_494/program.py
"""

import nbep
from nbep.lang import (
    Bounds,
    Peers,
    Waiter,
    block_idx,
    buffer_of,
    is_at_least,
    is_set,
    kernel,
    ld_acquire_gpu_s32,
    ld_acquire_sys_s32,
    own_site,
    st_relaxed_gpu_s32,
    st_release_gpu_s32,
    st_release_sys_s32,
    wait_or_report,
)

NUM_RANKS, NUM_BLOCKS = 2, 3
OPEN, SIGNAL = 0, 64
WAY = own_site("combine", "open", "block 0 to open the way")
PEER = own_site("combine", "signal", "its signal")


@kernel(max_threads=1)
def combine(peers: Peers, bounds: Bounds):
    own = buffer_of(peers, peers.rank)
    if block_idx() == 0:
        for peer in range(peers.num_ranks):
            st_release_sys_s32(buffer_of(peers, peer) + SIGNAL + 4 * peers.rank, 1)
        for peer in range(peers.num_ranks):
            cell = own + SIGNAL + 4 * peer
            wait_or_report(ld_acquire_sys_s32, cell, is_set, 1, bounds, Waiter(PEER, peer, 0))
        st_release_gpu_s32(own + OPEN, 1)
    else:
        wait_or_report(ld_acquire_gpu_s32, own + OPEN, is_at_least, 1, bounds, Waiter(WAY, peers.rank, 0))
    # Here each block combines its rows.
    if block_idx() == 0:
        st_relaxed_gpu_s32(own + OPEN, 0)  # for the next call


def main(comm):
    signals = {f"signal[{rank}]": SIGNAL + 4 * rank for rank in range(comm.size)}
    memory = nbep.SharedMemory.create(comm, 128, timeout_ms=5000, cells={"open": OPEN, **signals})
    memory.runtime.load(combine)  # a GPU on which kernels wait may load none
    comm.barrier()
    memory.runtime.launch(memory.comm_stream, combine, NUM_BLOCKS, 1, 0, memory.peers, memory.bounds)
    memory.wait()
    memory.close()
