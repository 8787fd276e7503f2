"""A buffer has two halves, which calls use in turn. A handle knows which half comes next.

 cell      written by   with            read by  with
 flag[h]   peer         st_release_sys  owner    ld_acquire_sys: the row of half h is there
           owner        st_relaxed_sys: 0, one call before the half is used
 row[h]    peer         st_weak         owner    ld_weak, after the flag

nbep check examples/museum/nccl_2303/program.py
"""

from itertools import cycle

import numpy as np

import nbep
from nbep.lang import (
    FULL_MASK,
    I32,
    Bounds,
    Out,
    Peers,
    buffer_of,
    kernel,
    lane_id,
    ld_weak_s32,
    st_relaxed_sys_s32,
    st_release_sys_s32,
    st_weak_s32,
    syncwarp,
    wait_at_least,
)

NUM_RANKS = 2
FLAG, ROW = 0, 128


@kernel(max_threads=32)
def dispatch(out: Out, peers: Peers, bounds: Bounds, half: I32, value: I32):
    own, there = buffer_of(peers, peers.rank), buffer_of(peers, 1 - peers.rank)
    lane, row = lane_id(), ROW + 128 * half
    if lane == 0:
        st_relaxed_sys_s32(own + FLAG + 4 * (1 - half), 0)
    st_weak_s32(there + row + 4 * lane, value)
    syncwarp(FULL_MASK)
    if lane == 0:
        st_release_sys_s32(there + FLAG + 4 * half, 1)
        wait_at_least(own + FLAG + 4 * half, 1, bounds)
    syncwarp(FULL_MASK)
    st_weak_s32(out + 4 * lane, ld_weak_s32(own + row + 4 * lane))


class Handle:
    """What a caller makes for one number of tokens."""

    def __init__(self, memory):
        self.memory, self.halves = memory, cycle((0, 1))

    def dispatch(self, value):
        memory, out = self.memory, np.zeros(32, np.int32)
        arguments = out, memory.peers, memory.bounds, next(self.halves), value
        memory.runtime.launch(memory.comm_stream, dispatch, 1, 32, 0, *arguments)
        memory.wait()
        return int(out[0])


def main(comm):
    cells = {f"flag[{half}]": FLAG + 4 * half for half in range(2)}
    cells |= {f"row[{half}]": ROW + 128 * half for half in range(2)}
    memory = nbep.SharedMemory.create(comm, 512, timeout_ms=5000, cells=cells)
    comm.barrier()
    few, many = Handle(memory), Handle(memory)
    received = [handle.dispatch(number) for number, handle in enumerate((few, many, few, many), 1)]
    memory.close()
    return received


def check(results):
    assert results == [[1, 2, 3, 4]] * len(results), results
