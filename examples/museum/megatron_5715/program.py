"""The host writes what a step needs into one block of host memory, and a kernel copies it to the GPU's. Step by step.

nbep check examples/museum/megatron_5715/program.py
"""

import numpy as np

from nbep.lang import (
    I64,
    Out,
    kernel,
    ld_na_s32,
    st_weak_s32,
    thread_idx,
)

NUM_REQUESTS, NUM_STEPS = 32, 3


@kernel(max_threads=32)
def copy(indices: Out, staging: I64):
    st_weak_s32(indices + 4 * thread_idx(), ld_na_s32(staging + 4 * thread_idx()))


def main(comm):
    runtime = comm.runtime
    copies = runtime.create_stream("copies")
    staging = runtime.allocate_host_visible(4 * NUM_REQUESTS, "staging")
    steps = [np.zeros(NUM_REQUESTS, np.int32) for _ in range(NUM_STEPS)]

    for step, indices in enumerate(steps):
        staging.write(0, np.full(NUM_REQUESTS, step, np.int32))
        runtime.launch(copies, copy, 1, NUM_REQUESTS, 0, indices, staging.address)

    copies.synchronize()
    staging.free()
    return [indices.tolist() for indices in steps]


def check(results):
    for steps in results:
        assert steps == [[step] * NUM_REQUESTS for step in range(NUM_STEPS)], steps
