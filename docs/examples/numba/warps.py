"""Sums of warps by shuffles."""

import numpy as np
from numba import cuda


@cuda.jit
def warp_sums(values, out):
    i = cuda.grid(1)
    value = values[i]
    step = 16
    while step > 0:
        value += cuda.shfl_down_sync(0xFFFFFFFF, value, step)
        step //= 2
    if cuda.laneid == 0:
        out[i // 32] = value


values = np.arange(1024)
out = np.zeros(32, np.int64)
warp_sums[8, 128](values, out)
assert (out == values.reshape(32, 32).sum(1)).all()
