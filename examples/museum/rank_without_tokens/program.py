"""Four ranks tell each other how many tokens are to come. The last one has none to send, and leaves at once.

nbep check examples/museum/rank_without_tokens/program.py                   finds what is wrong
nbep check examples/museum/rank_without_tokens/program.py --repaired 1      the repaired form
"""

import numpy as np

import nbep
from nbep.device.jit import kernel
from nbep.device.primitives import ld_acquire_sys_s32, st_release_sys_s32, st_weak_s32, thread_idx, wait_expired
from nbep.device.protocols.peers import Peers, buffer_of
from nbep.device.types import I32, Out

NUM_RANKS = 4
COUNTS = 0  # COUNTS + 4 * r in a rank's memory: how many tokens rank r sends to it, plus 1
NEVER = 1 << 62


@kernel(max_threads=32)
def notify(counts: Out, peers: Peers, num_tokens: I32, repaired: I32):
    if num_tokens == 0 and not repaired:
        return  # nothing to send
    peer = thread_idx()
    if peer < peers.num_ranks:
        st_release_sys_s32(buffer_of(peers, peer) + COUNTS + 4 * peers.rank, num_tokens + 1)
        cell = buffer_of(peers, peers.rank) + COUNTS + 4 * peer
        while ld_acquire_sys_s32(cell) == 0:
            wait_expired(NEVER)
        st_weak_s32(counts + 4 * peer, ld_acquire_sys_s32(cell) - 1)


def tokens_of(rank, num_ranks):
    return 0 if rank == num_ranks - 1 else 10 + rank


def main(comm, repaired=0):
    cells = {f"count[{rank}]": COUNTS + 4 * rank for rank in range(comm.size)}
    memory = nbep.NodeMemory.create(comm, 128, timeout_ms=5000, cells=cells)
    counts = np.full(comm.size, -1, np.int32)
    comm.barrier()
    num_tokens = tokens_of(comm.rank, comm.size)
    memory.runtime.launch(memory.comm_stream, notify, 1, 32, 0, counts, memory.peers, num_tokens, repaired)
    memory.wait()
    memory.close()
    return counts.tolist()


def check(results, repaired=0):
    expected = [tokens_of(rank, len(results)) for rank in range(len(results))]
    assert all(counts == expected for counts in results), results
