"""Four ranks tell each other how many tokens are to come.

nbep check examples/museum/uccl_940/program.py
"""

import numpy as np

import nbep
from nbep.lang import (
    I32,
    Bounds,
    Peers,
    Waiter,
    buffer_of,
    is_set,
    kernel,
    ld_acquire_sys_s32,
    own_site,
    st_release_sys_s32,
    thread_idx,
    wait_or_report,
)

NUM_RANKS = 4
COUNTS = 0  # COUNTS + 4 * r in a rank's memory: how many tokens rank r sends to it, plus 1
COUNT = own_site("notify", "count", "its number of tokens")


@kernel(max_threads=32)
def notify(peers: Peers, bounds: Bounds, num_tokens: I32):
    if num_tokens == 0:
        return
    peer = thread_idx()
    if peer < peers.num_ranks:
        st_release_sys_s32(buffer_of(peers, peer) + COUNTS + 4 * peers.rank, num_tokens + 1)
        cell = buffer_of(peers, peers.rank) + COUNTS + 4 * peer
        wait_or_report(ld_acquire_sys_s32, cell, is_set, 1, bounds, Waiter(COUNT, peer, 0))


def tokens_of(rank, num_ranks):
    return 0 if rank == num_ranks - 1 else 10 + rank


def main(comm):
    cells = {f"count[{rank}]": COUNTS + 4 * rank for rank in range(comm.size)}
    memory = nbep.SharedMemory.create(comm, 128, timeout_ms=5000, cells=cells)
    memory.runtime.load(notify)  # a GPU on which kernels wait may load none
    comm.barrier()
    num_tokens = tokens_of(comm.rank, comm.size)
    memory.runtime.launch(memory.comm_stream, notify, 1, 32, 0, memory.peers, memory.bounds, num_tokens)
    memory.wait()
    counts = memory.symmetric.read(COUNTS, comm.size, np.int32) - 1
    memory.close()
    return counts.tolist()


def check(results):
    expected = [tokens_of(rank, len(results)) for rank in range(len(results))]
    assert all(counts == expected for counts in results), results
