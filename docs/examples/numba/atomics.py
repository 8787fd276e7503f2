"""A histogram with atomics."""

import numpy as np
from numba import cuda


@cuda.jit
def count(values, counts):
    for i in range(cuda.grid(1), values.size, cuda.gridsize(1)):
        cuda.atomic.add(counts, values[i], 1)


values = np.arange(512) % 10
counts = np.zeros(10, np.int32)
count[4, 64](values, counts)
assert (counts == np.bincount(values)).all()
