"""Blocks write, meet at a counter, and one warp tells all peers: a lane for each, in rounds if there are more peers.

nbep check examples/museum/mori_597/program.py
"""

import nbep
from nbep.lang import (
    Bounds,
    Peers,
    Waiter,
    atom_add_release_gpu_s32,
    block_idx,
    buffer_of,
    device_function,
    is_at_least,
    is_set,
    kernel,
    ld_acquire_gpu_s32,
    ld_acquire_sys_s32,
    own_site,
    st_relaxed_gpu_s32,
    st_release_sys_s32,
    syncwarp,
    thread_idx,
    wait_or_report,
)

NUM_RANKS = 3
LANES, NUM_BLOCKS = 2, 2  # a warp of two lanes stands for one of 32 or 64
ARRIVED, SIGNAL = 0, 64
ALL = (1 << LANES) - 1
GRID = own_site("dispatch", "arrived", "its other blocks")
PEER = own_site("dispatch", "signal", "its signal")


@device_function
def wait_grid(own, rank, bounds):
    wait_or_report(ld_acquire_gpu_s32, own + ARRIVED, is_at_least, NUM_BLOCKS, bounds, Waiter(GRID, rank, 0))


@kernel(max_threads=LANES)
def dispatch(peers: Peers, bounds: Bounds):
    own = buffer_of(peers, peers.rank)
    lane = thread_idx()
    if lane == 0:
        atom_add_release_gpu_s32(own + ARRIVED, 1)
    if block_idx() > 0:
        return
    for first in range(0, peers.num_ranks, LANES):
        wait_grid(own, peers.rank, bounds)
        syncwarp(ALL)
        if lane == 0:
            st_relaxed_gpu_s32(own + ARRIVED, 0)  # for the next call
        syncwarp(ALL)
        if first + lane < peers.num_ranks:
            st_release_sys_s32(buffer_of(peers, first + lane) + SIGNAL + 4 * peers.rank, 1)
    for peer in range(lane, peers.num_ranks, LANES):
        cell = own + SIGNAL + 4 * peer
        wait_or_report(ld_acquire_sys_s32, cell, is_set, 1, bounds, Waiter(PEER, peer, 0))


def main(comm):
    signals = {f"signal[{rank}]": SIGNAL + 4 * rank for rank in range(comm.size)}
    memory = nbep.SharedMemory.create(comm, 256, timeout_ms=5000, cells={"arrived": ARRIVED, **signals})
    memory.runtime.load(dispatch)  # a GPU on which kernels wait may load none
    comm.barrier()
    memory.runtime.launch(memory.comm_stream, dispatch, NUM_BLOCKS, LANES, 0, memory.peers, memory.bounds)
    memory.wait()
    memory.close()
