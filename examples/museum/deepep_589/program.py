"""A combine on the comm stream, as a framework calls it from its compute stream.

nbep check examples/museum/deepep_589/program.py
"""

import numpy as np

import nbep
from nbep.lang import (
    I32,
    In,
    Out,
    kernel,
    ld_nc_s32,
    st_weak_s32,
    thread_idx,
)

NUM_TOKENS = 32
FILLED = -1  # in place of NaN


@kernel(max_threads=32)
def fill(out: Out, value: I32):
    """What torch.empty launches where fill_uninitialized_memory asks for it."""
    st_weak_s32(out + 4 * thread_idx(), value)


@kernel(max_threads=32)
def combine(out: Out, x: In):
    st_weak_s32(out + 4 * thread_idx(), ld_nc_s32(x + 4 * thread_idx()))


def main(comm):
    memory = nbep.SharedMemory.create(comm, 128, timeout_ms=5000)
    runtime, comm_stream = memory.runtime, memory.comm_stream
    compute = runtime.create_stream("compute")
    x, out = np.arange(NUM_TOKENS, dtype=np.int32), np.zeros(NUM_TOKENS, np.int32)

    comm_stream.wait(compute.record())
    runtime.launch(compute, fill, 1, NUM_TOKENS, 0, out, FILLED)  # out = torch.empty(...)
    runtime.launch(comm_stream, combine, 1, NUM_TOKENS, 0, out, x)

    comm_stream.synchronize()
    compute.synchronize()
    memory.close()
    return out.tolist()


def check(results):
    assert all(out == list(range(NUM_TOKENS)) for out in results), results
