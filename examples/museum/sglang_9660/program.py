"""A kernel multiplies tile by tile and counts each finished one. A second kernel sends tiles as they are counted.

nbep check examples/museum/sglang_9660/program.py
"""

import nbep
from nbep.lang import (
    Peers,
    atom_add_relaxed_gpu_s32,
    buffer_of,
    kernel,
    ld_acquire_gpu_s32,
    ld_weak_s32,
    st_weak_s32,
    syncthreads,
    thread_idx,
    wait_expired,
)

NUM_RANKS = 2
THREADS = 32
SIGNAL, TILE, SENT = 0, 128, 512
NEVER = 1 << 62


@kernel(max_threads=THREADS)
def multiply(peers: Peers):
    memory = buffer_of(peers, peers.rank)
    st_weak_s32(memory + TILE + 4 * thread_idx(), 7 * thread_idx())
    syncthreads()
    if thread_idx() == 0:
        atom_add_relaxed_gpu_s32(memory + SIGNAL, 1)  # atomicAdd


@kernel(max_threads=THREADS)
def send(peers: Peers):
    memory = buffer_of(peers, peers.rank)
    if thread_idx() == 0:
        while ld_acquire_gpu_s32(memory + SIGNAL) < 1:
            wait_expired(NEVER)
    syncthreads()
    peer = buffer_of(peers, (peers.rank + 1) % peers.num_ranks)
    st_weak_s32(peer + SENT + 4 * thread_idx(), ld_weak_s32(memory + TILE + 4 * thread_idx()))


def main(comm):
    cells = {"signal": SIGNAL, "tile": TILE, "sent": SENT}
    memory = nbep.SharedMemory.create(comm, 1024, timeout_ms=5000, cells=cells)
    comm.barrier()
    compute = memory.runtime.create_stream("compute")
    memory.runtime.launch(compute, multiply, 1, THREADS, 0, memory.peers)
    memory.runtime.launch(memory.comm_stream, send, 1, THREADS, 0, memory.peers)
    compute.synchronize()
    memory.wait()
    memory.close()
