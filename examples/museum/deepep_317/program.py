"""A sender fills a ring in chunks. The warps of the forwarder share the rows of a chunk; a coordinator gives room back.

 cell            written by   read by
 tail            sender       forwarders: so many rows are there
 done[warp]      forwarder    coordinator: this warp has read all of its rows below
 head            coordinator  sender: so many rows may be overwritten, which is the least of all `done`

nbep check examples/museum/deepep_317/program.py
"""

import nbep
from nbep.lang import (
    I32,
    Bounds,
    Peers,
    Waiter,
    block_idx,
    buffer_of,
    is_at_least,
    kernel,
    ld_acquire_sys_s32,
    own_site,
    report_fault,
    st_release_sys_s32,
    start_wait,
    wait_expired,
    wait_or_report,
)

NUM_RANKS = 2
NUM_SLOTS, CHUNK, NUM_ROWS = 4, 2, 8
NUM_WARPS = 3
TAIL, HEAD, DONE = 0, 64, 128
ROOM = own_site("sender", "head", "free slots")
ROWS = own_site("forwarder", "tail", "the next chunk")
READ = own_site("coordinator", "done", "the warp that is behind the others")


@kernel(max_threads=1)
def send(peers: Peers, bounds: Bounds):
    for end in range(CHUNK, NUM_ROWS + 1, CHUNK):
        head = buffer_of(peers, 0) + HEAD
        wait_or_report(ld_acquire_sys_s32, head, is_at_least, end - NUM_SLOTS, bounds, Waiter(ROOM, 1, 0))
        st_release_sys_s32(buffer_of(peers, 1) + TAIL, end)


@kernel(max_threads=1)
def forward(peers: Peers, bounds: Bounds, num_warps: I32):
    """Block w is warp w; the last block is the coordinator."""
    own = buffer_of(peers, 1)
    warp = block_idx()
    if warp < num_warps:
        for begin in range(0, NUM_ROWS, CHUNK):
            waiter = Waiter(ROWS, 0, warp)
            wait_or_report(ld_acquire_sys_s32, own + TAIL, is_at_least, begin + CHUNK, bounds, waiter)
            for row in range(begin + warp, begin + CHUNK, num_warps):
                st_release_sys_s32(own + DONE + 4 * warp, row + 1)
    else:
        deadline = start_wait(bounds)
        while True:
            least = NUM_ROWS
            for other in range(num_warps):
                least = min(least, ld_acquire_sys_s32(own + DONE + 4 * other))
            st_release_sys_s32(buffer_of(peers, 0) + HEAD, least)
            if least > NUM_ROWS - num_warps:
                break
            if wait_expired(deadline):  # else it looks again
                report_fault(bounds, READ, peers.rank, 0, least + 1, least)
                break


def main(comm):
    num_warps = NUM_WARPS
    done = {f"done[{warp}]": DONE + 4 * warp for warp in range(num_warps)}
    memory = nbep.SharedMemory.create(comm, 256, timeout_ms=5000, cells={"tail": TAIL, "head": HEAD, **done})
    for kernel_function in (send, forward):  # a GPU on which kernels wait may load none
        memory.runtime.load(kernel_function)
    comm.barrier()
    if comm.rank == 0:
        memory.runtime.launch(memory.comm_stream, send, 1, 1, 0, memory.peers, memory.bounds)
    else:
        grid = num_warps + 1
        memory.runtime.launch(memory.comm_stream, forward, grid, 1, 0, memory.peers, memory.bounds, num_warps)
    memory.wait()
    memory.close()
