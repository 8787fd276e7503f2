"""A copy in reverse that loads an element before another thread has stored it."""

import numpy as np
from numba import cuda, int32


@cuda.jit
def reverse(values):
    tile = cuda.shared.array(32, int32)
    i = cuda.threadIdx.x
    tile[i] = values[i]
    values[i] = tile[31 - i]


values = np.arange(32, dtype=np.int32)
reverse[1, 32](values)
print(values)
