"""Replays on one stream, copies of their results on another one, and an event between the two.

nbep check examples/museum/sglang_31072/program.py
"""

import nbep
from nbep.lang import (
    I32,
    Bounds,
    Peers,
    Waiter,
    buffer_of,
    is_at_least,
    kernel,
    ld_acquire_sys_s32,
    own_site,
    st_release_sys_s32,
    wait_or_report,
)

COPIED, ARRIVED = 0, 64  # in a rank's memory: batches whose results are copied; ARRIVED + 4 * r: replays of rank r
BATCH = own_site("replay", "copied", "the copy of the batch before")
PEER = own_site("replay", "arrived", "its replay")


@kernel(max_threads=32)
def replay(peers: Peers, bounds: Bounds, number: I32):
    """Batch `number` needs the results of the one before, and then all ranks meet, as in an all-to-all."""
    own = buffer_of(peers, peers.rank)
    waiter = Waiter(BATCH, peers.rank, 0)
    wait_or_report(ld_acquire_sys_s32, own + COPIED, is_at_least, number - 1, bounds, waiter)
    for peer in range(peers.num_ranks):
        st_release_sys_s32(buffer_of(peers, peer) + ARRIVED + 4 * peers.rank, number)
    for peer in range(peers.num_ranks):
        cell = own + ARRIVED + 4 * peer
        wait_or_report(ld_acquire_sys_s32, cell, is_at_least, number, bounds, Waiter(PEER, peer, 0))


@kernel(max_threads=32)
def copy_result(peers: Peers, number: I32):
    st_release_sys_s32(buffer_of(peers, peers.rank) + COPIED, number)


def main(comm):
    cells = {"copied": COPIED, **{f"arrived[{rank}]": ARRIVED + 4 * rank for rank in range(comm.size)}}
    memory = nbep.SharedMemory.create(comm, 128, timeout_ms=5000, cells=cells)
    runtime = memory.runtime
    forward, copies = runtime.create_stream("forward"), runtime.create_stream("copies")
    for kernel_function in (replay, copy_result):  # a GPU on which kernels wait may load none
        memory.runtime.load(kernel_function)
    comm.barrier()

    runtime.launch(forward, replay, 1, 1, 0, memory.peers, memory.bounds, 1)
    read_done = forward.record()
    if comm.rank == 0:  # the host of rank 0 is faster
        copies.wait(read_done)
    runtime.launch(forward, replay, 1, 1, 0, memory.peers, memory.bounds, 2)
    forward.record(read_done)
    if comm.rank != 0:
        copies.wait(read_done)
    runtime.launch(copies, copy_result, 1, 1, 0, memory.peers, 1)

    copies.synchronize()
    forward.synchronize()
    memory.wait()  # raises what a kernel has reported
    memory.close()
