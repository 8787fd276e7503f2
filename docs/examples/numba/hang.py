"""All blocks wait for each other, and one has left: it has nothing to do, and returns before it says that it came."""

import numpy as np
from numba import cuda


@cuda.jit
def two_phases(data, n, arrived, out):
    i = cuda.grid(1)
    if cuda.blockIdx.x * cuda.blockDim.x >= n:
        return
    data[i] *= 2
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        cuda.threadfence()
        cuda.atomic.add(arrived, 0, 1)
        while cuda.atomic.add(arrived, 0, 0) < cuda.gridDim.x:
            pass
        cuda.threadfence()
    cuda.syncthreads()
    out[i] = data[(i + 32) % n]


two_phases[4, 32](np.arange(96.0), 96, np.zeros(1, np.int32), np.zeros(96))
