"""A sender fills a ring in chunks. The warps of the forwarder share the rows of a chunk; a coordinator gives room back.

 cell            written by   read by
 tail            sender       forwarders: so many rows are there
 done[warp]      forwarder    coordinator: this warp has read all of its rows below
 head            coordinator  sender: so many rows may be overwritten, which is the least of all `done`

nbep check examples/museum/short_chunk/program.py                   finds what is wrong
nbep check examples/museum/short_chunk/program.py --repaired 1      the repaired form
"""

import nbep
from nbep.device.jit import kernel
from nbep.device.primitives import block_idx, ld_acquire_sys_s32, st_release_sys_s32, wait_expired
from nbep.device.protocols.peers import Peers, buffer_of
from nbep.device.types import I32

NUM_RANKS = 2
NUM_SLOTS, CHUNK, NUM_ROWS = 4, 2, 8
TAIL, HEAD, DONE = 0, 64, 128
NEVER = 1 << 62


@kernel(max_threads=1)
def send(peers: Peers):
    for end in range(CHUNK, NUM_ROWS + 1, CHUNK):
        while ld_acquire_sys_s32(buffer_of(peers, 0) + HEAD) < end - NUM_SLOTS:
            wait_expired(NEVER)
        st_release_sys_s32(buffer_of(peers, 1) + TAIL, end)


@kernel(max_threads=1)
def forward(peers: Peers, num_warps: I32):
    """Block w is warp w; the last block is the coordinator."""
    own = buffer_of(peers, 1)
    warp = block_idx()
    if warp < num_warps:
        for begin in range(0, NUM_ROWS, CHUNK):
            while ld_acquire_sys_s32(own + TAIL) < begin + CHUNK:
                wait_expired(NEVER)
            for row in range(begin + warp, begin + CHUNK, num_warps):
                st_release_sys_s32(own + DONE + 4 * warp, row + 1)
    else:
        least = 0
        while least < NUM_ROWS - num_warps + 1:
            least = NUM_ROWS
            for other in range(num_warps):
                least = min(least, ld_acquire_sys_s32(own + DONE + 4 * other))
            st_release_sys_s32(buffer_of(peers, 0) + HEAD, least)
            wait_expired(NEVER)  # and looks again


def main(comm, repaired=0):
    num_warps = CHUNK if repaired else CHUNK + 1  # a chunk has a row for each warp, or it is refused
    done = {f"done[{warp}]": DONE + 4 * warp for warp in range(num_warps)}
    memory = nbep.NodeMemory.create(comm, 256, timeout_ms=5000, cells={"tail": TAIL, "head": HEAD, **done})
    comm.barrier()
    if comm.rank == 0:
        memory.runtime.launch(memory.comm_stream, send, 1, 1, 0, memory.peers)
    else:
        memory.runtime.launch(memory.comm_stream, forward, num_warps + 1, 1, 0, memory.peers, num_warps)
    memory.wait()
    memory.close()
