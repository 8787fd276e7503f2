"""The last block sums up when all others are done, but waits for one block too many."""

import numpy as np
from numba import cuda


@cuda.jit
def last_block(parts, done, total):
    b = cuda.blockIdx.x
    if b < cuda.gridDim.x - 1:
        parts[b] = b
        cuda.threadfence()
        cuda.atomic.add(done, 0, 1)
    else:
        while cuda.atomic.add(done, 0, 0) < cuda.gridDim.x:
            pass
        cuda.threadfence()
        for part in parts:
            total[0] += part


last_block[4, 1](np.zeros(3, np.int32), np.zeros(1, np.int32), np.zeros(1, np.int32))
