"""A histogram that counts with `+=`."""

import numpy as np
from numba import cuda


@cuda.jit
def count(values, counts):
    i = cuda.grid(1)
    if i < values.size:
        counts[values[i]] += 1


values = np.arange(256) % 4
counts = np.zeros(4, np.int32)
count[4, 64](values, counts)
print(counts)
