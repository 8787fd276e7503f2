"""Warps take turns. Who has the turn stores the tails of all destinations, one lane for each, and passes it on.

nbep check examples/museum/deepep_215/program.py
"""

import nbep
from nbep.lang import (
    FULL_MASK,
    Peers,
    buffer_of,
    kernel,
    ld_acquire_gpu_s32,
    st_release_gpu_s32,
    syncwarp,
    thread_idx,
    wait_expired,
)

NUM_RANKS = 1
NUM_WARPS, NUM_DESTINATIONS = 2, 2
NEXT, TAIL = 0, 64  # whose turn it is; TAIL + 4 * d: so many tokens for destination d are there
NEVER = 1 << 62


@kernel(max_threads=32 * (NUM_WARPS + 1))
def dispatch(peers: Peers):
    own = buffer_of(peers, peers.rank)
    warp, lane = thread_idx() // 32, thread_idx() % 32
    if warp < NUM_WARPS:  # a sender, with token number `warp`
        if lane == 0:
            while ld_acquire_gpu_s32(own + NEXT) != warp:
                wait_expired(NEVER)
        syncwarp(FULL_MASK)
        if lane < NUM_DESTINATIONS:
            st_release_gpu_s32(own + TAIL + 4 * lane, warp + 1)
        if lane == 0:
            st_release_gpu_s32(own + NEXT, warp + 1)
    elif lane < NUM_DESTINATIONS:  # the coordinator: sends when all tokens are there
        while ld_acquire_gpu_s32(own + TAIL + 4 * lane) < NUM_WARPS:
            wait_expired(NEVER)


def main(comm):
    tails = {f"tail[{d}]": TAIL + 4 * d for d in range(NUM_DESTINATIONS)}
    memory = nbep.SharedMemory.create(comm, 128, timeout_ms=5000, cells={"next": NEXT, **tails})
    comm.barrier()
    memory.runtime.launch(memory.comm_stream, dispatch, 1, 32 * (NUM_WARPS + 1), 0, memory.peers)
    memory.wait()
    memory.close()
