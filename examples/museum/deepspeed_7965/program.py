"""An array is filled, copied on another stream, and given back to its pool.

nbep check examples/museum/deepspeed_7965/program.py
"""

import numpy as np

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


class Pool:
    """What allocators of frameworks do: a block that comes back is handed out again."""

    def __init__(self):
        self.blocks = []

    def take(self):
        return self.blocks.pop() if self.blocks else np.zeros(NUM_TOKENS, np.int32)

    def give_back(self, block):
        self.blocks.append(block)


@kernel(max_threads=32)
def fill(x: Out, value: I32):
    st_weak_s32(x + 4 * thread_idx(), value)


@kernel(max_threads=32)
def copy(out: Out, x: In):
    st_weak_s32(out + 4 * thread_idx(), ld_nc_s32(x + 4 * thread_idx()))


def main(comm):
    runtime = comm.runtime
    compute, copies = runtime.create_stream("compute"), runtime.create_stream("copies")
    pool, out = Pool(), np.zeros(NUM_TOKENS, np.int32)

    x = pool.take()
    runtime.launch(compute, fill, 1, NUM_TOKENS, 0, x, 1)
    copies.wait(compute.record())
    runtime.launch(copies, copy, 1, NUM_TOKENS, 0, out, x)
    pool.give_back(x)
    y = pool.take()
    runtime.launch(compute, fill, 1, NUM_TOKENS, 0, y, -1)

    copies.synchronize()
    compute.synchronize()
    return out.tolist()


def check(results):
    assert all(out == [1] * NUM_TOKENS for out in results), results
