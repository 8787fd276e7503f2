"""A sum in shared memory whose last steps lack a barrier: 16 threads of one warp "run together anyway"."""

import numpy as np
from numba import cuda, float32


@cuda.jit
def block_sum(values, out):
    part = cuda.shared.array(64, float32)
    i = cuda.threadIdx.x
    part[i] = values[i]
    cuda.syncthreads()
    step = 32
    while step > 0:
        if i < step:
            part[i] += part[i + step]
        if step > 16:
            cuda.syncthreads()
        step //= 2
    if i == 0:
        out[0] = part[0]


values = np.arange(64, dtype=np.float32)
out = np.zeros(1, np.float32)
block_sum[1, 64](values, out)
print(out[0], "expected", values.sum())
