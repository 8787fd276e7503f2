"""Two ranks take numbers from one counter, which lies in rank 0: no rank may get a number that the other one has.

 rank 0: takes count numbers --\
                                +--> counter : rank 0
 rank 1: takes count numbers --/

With --atomic 0 a rank looks at the counter, and then stores what comes next: wrong if the other one comes between.

nbep check docs/examples/tickets.py --all
"""

import numpy as np

import nbep
from nbep.lang import (
    I32,
    Out,
    Peers,
    atom_add_relaxed_sys_s32,
    buffer_of,
    device_function,
    kernel,
    ld_relaxed_sys_s32,
    st_relaxed_sys_s32,
    st_weak_s32,
    thread_idx,
)

COUNTER, NUM_BYTES = 0, 128


@device_function
def next_number(counter, atomic):
    if atomic:
        return atom_add_relaxed_sys_s32(counter, 1)
    seen = ld_relaxed_sys_s32(counter)
    st_relaxed_sys_s32(counter, seen + 1)
    return seen


@kernel(max_threads=32)
def take(taken: Out, peers: Peers, count: I32, atomic: I32):
    if thread_idx() == 0:
        for i in range(count):
            st_weak_s32(taken + 4 * i, next_number(buffer_of(peers, 0) + COUNTER, atomic))


def main(comm, count=1, atomic=1):
    memory = nbep.SharedMemory.create(comm, NUM_BYTES, cells={"counter": COUNTER})
    taken = np.full(count, -1, np.int32)
    comm.barrier()
    memory.runtime.launch(memory.comm_stream, take, 1, 32, 0, taken, memory.peers, count, atomic)
    memory.wait()
    memory.close()
    return taken.tolist()


def check(results, count=1, atomic=1):
    """For `nbep check`: each number was taken once."""
    assert sorted(results[0] + results[1]) == list(range(2 * count)), f"the ranks took {results[0]} and {results[1]}"
