"""A first kernel: out[i] = slope * x[i] + 1.

python docs/examples/lines.py
"""

import numpy as np

import nbep
from nbep.lang import (
    F32,
    I32,
    In,
    Out,
    block_dim,
    block_idx,
    device_function,
    f32,
    kernel,
    ld_nc_f32,
    st_weak_f32,
    thread_idx,
)


@device_function
def line(x, slope):
    return x * slope + f32(1)


@kernel(max_threads=64)
def lines(out: Out, x: In, slope: F32, num_values: I32):
    i = block_idx() * block_dim() + thread_idx()
    if i < num_values:
        st_weak_f32(out + 4 * i, line(ld_nc_f32(x + 4 * i), slope))


def main(comm):
    x = np.arange(100, dtype=np.float32)
    out = np.zeros_like(x)
    stream = comm.runtime.create_stream("stream")
    comm.runtime.launch(stream, lines, 2, 64, 0, out, x, 0.5, len(x))
    stream.synchronize()
    assert (out == 0.5 * x + 1).all()
    return out


if __name__ == "__main__":
    print(nbep.spawn(main, num_ranks=1, target="emulator")[0][:6])
