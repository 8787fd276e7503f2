"""A copy is to wait for one replay; the event that it waits for has been recorded again, behind the next one.

nbep check examples/museum/event_recorded_again/program.py                   finds what is wrong
nbep check examples/museum/event_recorded_again/program.py --repaired 1      the repaired form
"""

import nbep
from nbep.device.jit import kernel
from nbep.device.primitives import ld_acquire_sys_s32, st_release_sys_s32
from nbep.device.protocols.own_sites import own_site
from nbep.device.protocols.peers import Bounds, Peers, buffer_of
from nbep.device.protocols.waits import Waiter, is_at_least, wait_or_report
from nbep.device.types import I32

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


def main(comm, repaired=0):
    cells = {"copied": COPIED, **{f"arrived[{rank}]": ARRIVED + 4 * rank for rank in range(comm.size)}}
    memory = nbep.NodeMemory.create(comm, 128, timeout_ms=5000, cells=cells)
    runtime = memory.runtime
    forward, copies = runtime.create_stream("forward"), runtime.create_stream("copies")
    for kernel_function in (replay, copy_result):  # a GPU on which kernels wait may load none
        memory.runtime.load(kernel_function)
    comm.barrier()

    runtime.launch(forward, replay, 1, 1, 0, memory.peers, memory.bounds, 1)
    read_done = forward.record()
    if repaired or comm.rank == 0:  # rank 0 is in time
        copies.wait(read_done)
    # The next batch is launched before this one is processed.
    runtime.launch(forward, replay, 1, 1, 0, memory.peers, memory.bounds, 2)
    forward.record(read_done)
    if not repaired and comm.rank != 0:
        copies.wait(read_done)  # which is the second record by now
    runtime.launch(copies, copy_result, 1, 1, 0, memory.peers, 1)

    copies.synchronize()
    forward.synchronize()
    memory.wait()  # raises what a kernel has reported
    memory.close()
