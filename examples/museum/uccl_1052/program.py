"""Ranks meet at a barrier, and then tell each other how many tokens come. Two batches do so, each on its own stream.

 cell          written by               with              read by  with
 signal[r]     its owner, and rank r    atom_add_release  owner    ld_acquire
 count[b, r]   rank r                   st_release        owner    ld_acquire: tokens of batch b, plus 1

nbep check examples/museum/uccl_1052/program.py
"""

import nbep
from nbep.lang import (
    I32,
    Peers,
    atom_add_release_sys_s32,
    buffer_of,
    device_function,
    kernel,
    ld_acquire_sys_s32,
    st_release_sys_s32,
    thread_idx,
    wait_expired,
)

NUM_RANKS = 2
SIGNAL, COUNT = 0, 64
NEVER = 1 << 62


@device_function
def barrier(peers, batch):
    """A thread for each peer."""
    peer = thread_idx()
    own = buffer_of(peers, peers.rank) + SIGNAL + 4 * peer
    atom_add_release_sys_s32(own, 1)
    atom_add_release_sys_s32(buffer_of(peers, peer) + SIGNAL + 4 * peers.rank, -1)
    while ld_acquire_sys_s32(own) > 0:
        wait_expired(NEVER)


@kernel(max_threads=NUM_RANKS)
def notify(peers: Peers, batch: I32):
    barrier(peers, batch)
    peer = thread_idx()
    count = COUNT + 4 * (batch * peers.num_ranks)
    st_release_sys_s32(buffer_of(peers, peer) + count + 4 * peers.rank, 10 * batch + 1)
    while ld_acquire_sys_s32(buffer_of(peers, peers.rank) + count + 4 * peer) == 0:
        wait_expired(NEVER)


def main(comm):
    cells = {f"signal[{r}]": SIGNAL + 4 * r for r in range(comm.size)}
    cells |= {f"count[{b}, {r}]": COUNT + 4 * (b * comm.size + r) for b in range(2) for r in range(comm.size)}
    memory = nbep.SharedMemory.create(comm, 128, timeout_ms=5000, cells=cells)
    streams = [memory.runtime.create_stream(f"batch {batch}") for batch in range(2)]
    memory.runtime.load(notify)  # a GPU on which kernels wait may load none
    comm.barrier()
    for batch, stream in enumerate(streams):
        memory.runtime.launch(stream, notify, 1, comm.size, 0, memory.peers, batch)
        if comm.rank > 0:  # this host needs the counts of a batch before it goes on
            stream.synchronize()
    for stream in streams:
        stream.synchronize()
    memory.close()
