"""Two ranks clean their flags, each on its own, and then raise each other's.

nbep check examples/museum/cleaned_flag/program.py                   finds what is wrong
nbep check examples/museum/cleaned_flag/program.py --repaired 1      the repaired form
"""

import nbep
from nbep.device.jit import kernel
from nbep.device.primitives import (
    atom_add_release_sys_s32,
    ld_acquire_sys_s32,
    st_relaxed_sys_s32,
    st_release_sys_s32,
    wait_expired,
)
from nbep.device.protocols.peers import Peers, buffer_of
from nbep.device.types import I32

NUM_RANKS = 2
FLAG, ARRIVED = 0, 64
NEVER = 1 << 62


@kernel(max_threads=1)
def clean(peers: Peers, repaired: I32):
    st_relaxed_sys_s32(buffer_of(peers, peers.rank) + FLAG, 0)
    if repaired:  # nobody leaves before all have cleaned
        for peer in range(peers.num_ranks):
            atom_add_release_sys_s32(buffer_of(peers, peer) + ARRIVED, 1)
        while ld_acquire_sys_s32(buffer_of(peers, peers.rank) + ARRIVED) != peers.num_ranks:
            wait_expired(NEVER)


@kernel(max_threads=1)
def dispatch(peers: Peers):
    peer = (peers.rank + 1) % peers.num_ranks
    st_release_sys_s32(buffer_of(peers, peer) + FLAG, 1)
    while ld_acquire_sys_s32(buffer_of(peers, peers.rank) + FLAG) == 0:
        wait_expired(NEVER)


def main(comm, repaired=0):
    memory = nbep.NodeMemory.create(comm, 128, timeout_ms=5000, cells={"flag": FLAG, "arrived": ARRIVED})
    comm.barrier()
    memory.runtime.launch(memory.comm_stream, clean, 1, 1, 0, memory.peers, repaired)
    memory.runtime.launch(memory.comm_stream, dispatch, 1, 1, 0, memory.peers)
    memory.wait()
    memory.close()
