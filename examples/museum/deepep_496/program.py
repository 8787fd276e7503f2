"""Two kernels that meet those of other ranks, on two streams.

nbep check examples/museum/deepep_496/program.py
"""

import nbep
from nbep.lang import (
    I32,
    Bounds,
    Peers,
    block_idx,
    buffer_of,
    kernel,
    ld_acquire_sys_s32,
    st_release_sys_s32,
    wait_expired,
)

NUM_SMS = 4  # of each rank
MOST_BLOCKS = 4
GATHERED, DISPATCHED = 0, 64  # + 4 * (r * MOST_BLOCKS + block): this block of rank r is there
NEVER = 1 << 62


@kernel(max_threads=1)
def all_gather(peers: Peers, num_blocks: I32):
    """A kernel of another library: an ordinary launch, whose blocks start one by one."""
    for peer in range(peers.num_ranks):
        st_release_sys_s32(buffer_of(peers, peer) + GATHERED + 4 * (peers.rank * MOST_BLOCKS + block_idx()), 1)
    for peer in range(peers.num_ranks):
        for block in range(num_blocks):
            while ld_acquire_sys_s32(buffer_of(peers, peers.rank) + GATHERED + 4 * (peer * MOST_BLOCKS + block)) == 0:
                wait_expired(NEVER)


@kernel(max_threads=1)
def dispatch(peers: Peers, bounds: Bounds, num_blocks: I32):
    """A kernel with Bounds is a cooperative launch: its blocks start together."""
    for peer in range(peers.num_ranks):
        st_release_sys_s32(buffer_of(peers, peer) + DISPATCHED + 4 * (peers.rank * MOST_BLOCKS + block_idx()), 1)
    for peer in range(peers.num_ranks):
        for block in range(num_blocks):
            while ld_acquire_sys_s32(buffer_of(peers, peers.rank) + DISPATCHED + 4 * (peer * MOST_BLOCKS + block)) == 0:
                wait_expired(NEVER)


def main(comm):
    memory = nbep.SharedMemory.create(comm, 128, timeout_ms=5000)
    runtime, comm_stream = memory.runtime, memory.comm_stream
    other_stream = runtime.create_stream("nccl")
    comm.barrier()

    def gather():
        runtime.launch(other_stream, all_gather, 2, 1, 0, memory.peers, 2)

    def send():
        runtime.launch(comm_stream, dispatch, 3, 1, 0, memory.peers, memory.bounds, 3)

    for launch in (gather, send) if comm.rank % 2 == 0 else (send, gather):
        launch()
    for stream in (other_stream, comm_stream):
        stream.synchronize()
    memory.close()
