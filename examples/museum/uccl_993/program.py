"""Two ranks set up their memory and then tell each other something.

nbep check examples/museum/uccl_993/program.py
"""

import nbep
from nbep.lang import (
    Bounds,
    Peers,
    buffer_of,
    kernel,
    st_relaxed_sys_s32,
    st_release_sys_s32,
    wait_at_least,
)

NUM_RANKS = 2
FLAG = 0


@kernel(max_threads=1)
def clean(peers: Peers):
    st_relaxed_sys_s32(buffer_of(peers, peers.rank) + FLAG, 0)


@kernel(max_threads=1)
def dispatch(peers: Peers, bounds: Bounds):
    peer = (peers.rank + 1) % peers.num_ranks
    st_release_sys_s32(buffer_of(peers, peer) + FLAG, 1)
    wait_at_least(buffer_of(peers, peers.rank) + FLAG, 1, bounds)


def main(comm):
    memory = nbep.SharedMemory.create(comm, 128, timeout_ms=5000, cells={"flag": FLAG})
    comm.barrier()
    memory.runtime.launch(memory.comm_stream, clean, 1, 1, 0, memory.peers)
    memory.runtime.launch(memory.comm_stream, dispatch, 1, 1, 0, memory.peers, memory.bounds)
    memory.wait()
    memory.close()
