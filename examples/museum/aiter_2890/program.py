"""Ranks add up each other's numbers. Each tells the others that its numbers are there, and waits for theirs.

nbep check examples/museum/aiter_2890/program.py
"""

import numpy as np

import nbep
from nbep.lang import (
    Out,
    Peers,
    buffer_of,
    kernel,
    ld_acquire_gpu_s32,
    ld_weak_s32,
    st_release_sys_s32,
    st_weak_s32,
    syncthreads,
    thread_idx,
    wait_expired,
)

NUM_RANKS = 2
THREADS = 32
START, DATA = 0, 128  # START + 4 * r: rank r has begun
NEVER = 1 << 62


@kernel(max_threads=THREADS)
def all_reduce(out: Out, peers: Peers):
    lane = thread_idx()
    own = buffer_of(peers, peers.rank)
    st_weak_s32(own + DATA + 4 * lane, 10 * peers.rank + lane)
    syncthreads()
    if lane < peers.num_ranks:
        st_release_sys_s32(buffer_of(peers, lane) + START + 4 * peers.rank, 1)
        while ld_acquire_gpu_s32(own + START + 4 * lane) < 1:
            wait_expired(NEVER)
    syncthreads()
    total = 0
    for peer in range(peers.num_ranks):
        total += ld_weak_s32(buffer_of(peers, peer) + DATA + 4 * lane)
    st_weak_s32(out + 4 * lane, total)


def main(comm):
    cells = {f"start[{rank}]": START + 4 * rank for rank in range(comm.size)}
    memory = nbep.SharedMemory.create(comm, 512, timeout_ms=5000, cells={**cells, "data": DATA})
    out = np.full(THREADS, -1, np.int32)
    comm.barrier()
    memory.runtime.launch(memory.comm_stream, all_reduce, 1, THREADS, 0, out, memory.peers)
    memory.wait()
    memory.close()
    return out.tolist()


def check(results):
    size = len(results)
    expected = [sum(10 * rank + lane for rank in range(size)) for lane in range(THREADS)]
    assert all(out == expected for out in results), results
