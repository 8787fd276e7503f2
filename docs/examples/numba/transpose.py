"""A transpose through shared memory."""

import numpy as np
from numba import cuda, float64


@cuda.jit
def transpose(a, out):
    tile = cuda.shared.array((16, 17), float64)
    x, y = cuda.grid(2)
    tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
    tile[ty, tx] = a[y, x]
    cuda.syncthreads()
    out[cuda.blockIdx.x * 16 + ty, cuda.blockIdx.y * 16 + tx] = tile[tx, ty]


a = np.arange(64 * 64.0).reshape(64, 64)
out = np.zeros_like(a)
transpose[(4, 4), (16, 16)](a, out)
assert np.array_equal(out, a.T)
