"""Rank 0 stores a row in the memory of rank 1 and raises a flag. Rank 1 waits for the flag and sums up the row.

nbep check examples/museum/deepep_621/program.py
"""

import numpy as np

import nbep
from nbep.lang import (
    FULL_MASK,
    Bounds,
    Out,
    Peers,
    buffer_of,
    fence_mbarrier_init,
    fence_proxy_async_shared,
    kernel,
    lane_id,
    ld_shared_s32,
    mbarrier_arrive_expect_tx,
    mbarrier_init,
    mbarrier_try_wait_parity,
    smem_base,
    st_release_sys_s32,
    st_weak_s32,
    syncwarp,
    tma_load_1d,
    wait_at_least,
)

NUM_RANKS = 2
ROW_BYTES = 128
FLAG, ROW = 0, 128


@kernel(max_threads=32)
def combine(out: Out, peers: Peers, bounds: Bounds):
    lane = lane_id()
    there = buffer_of(peers, 1)
    if peers.rank == 0:
        st_weak_s32(there + ROW + 4 * lane, 10 * lane)
        syncwarp(FULL_MASK)
        if lane == 0:
            st_release_sys_s32(there + FLAG, 1)
        return
    stage = smem_base()
    full = stage + ROW_BYTES
    if lane == 0:
        mbarrier_init(full, 1)
        fence_mbarrier_init()
        fence_proxy_async_shared()
        wait_at_least(there + FLAG, 1, bounds)
        tma_load_1d(stage, there + ROW, ROW_BYTES, full)
        mbarrier_arrive_expect_tx(full, ROW_BYTES)
    syncwarp(FULL_MASK)
    while not mbarrier_try_wait_parity(full, 0):
        pass
    st_weak_s32(out + 4 * lane, ld_shared_s32(stage + 4 * lane))


def main(comm):
    memory = nbep.SharedMemory.create(comm, 256, timeout_ms=5000, cells={"flag": FLAG, "row": ROW})
    out = np.full(32, -1, np.int32)
    comm.barrier()
    memory.runtime.launch(memory.comm_stream, combine, 1, 32, ROW_BYTES + 16, out, memory.peers, memory.bounds)
    memory.wait()
    memory.close()
    return out.tolist()


def check(results):
    assert results[1] == [10 * lane for lane in range(32)], results
