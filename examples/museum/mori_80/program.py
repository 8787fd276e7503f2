"""A dispatch and a combine, one after the other. Each puts a row into the peer's memory, and takes one from its own.

nbep check examples/museum/mori_80/program.py
"""

import numpy as np

import nbep
from nbep.lang import (
    FULL_MASK,
    Bounds,
    InOut,
    Out,
    Peers,
    buffer_of,
    device_function,
    kernel,
    lane_id,
    ld_weak_s32,
    st_release_sys_s32,
    st_weak_s32,
    syncwarp,
    wait_at_least,
)

NUM_RANKS = 2
DISPATCHED, COMBINED, STAGE = 0, 4, 128


@device_function
def exchange(peers, bounds, stage, flag, value):
    """Put a row into the peer's stage, wait for the peer's row, and return it."""
    own, there = buffer_of(peers, peers.rank), buffer_of(peers, 1 - peers.rank)
    lane = lane_id()
    st_weak_s32(there + stage + 4 * lane, value)
    syncwarp(FULL_MASK)
    if lane == 0:
        st_release_sys_s32(there + flag, 1)
        wait_at_least(own + flag, 1, bounds)
    syncwarp(FULL_MASK)
    return ld_weak_s32(own + stage + 4 * lane)


@kernel(max_threads=32)
def dispatch(experts: Out, peers: Peers, bounds: Bounds):
    st_weak_s32(experts + 4 * lane_id(), exchange(peers, bounds, STAGE, DISPATCHED, 100 + lane_id()))


@kernel(max_threads=32)
def combine(result: InOut, peers: Peers, bounds: Bounds):
    value = ld_weak_s32(result + 4 * lane_id())
    st_weak_s32(result + 4 * lane_id(), exchange(peers, bounds, STAGE, COMBINED, 2 * value))


def main(comm):
    cells = {"dispatched": DISPATCHED, "combined": COMBINED, "stage": STAGE}
    memory = nbep.SharedMemory.create(comm, 512, timeout_ms=5000, cells=cells)
    experts, result = np.zeros(32, np.int32), np.arange(32, dtype=np.int32)
    comm.barrier()
    memory.runtime.launch(memory.comm_stream, dispatch, 1, 32, 0, experts, memory.peers, memory.bounds)
    memory.runtime.launch(memory.comm_stream, combine, 1, 32, 0, result, memory.peers, memory.bounds)
    memory.wait()
    memory.close()
    return experts.tolist(), result.tolist()


def check(results):
    expected = ([100 + lane for lane in range(32)], [2 * lane for lane in range(32)])
    assert results == [expected] * len(results), results
