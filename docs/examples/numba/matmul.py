"""A product of matrices, tile by tile, as in Numba's documentation."""

import numpy as np
from numba import cuda, float32

TPB = 8


@cuda.jit
def matmul(a, b, c):
    tile_a = cuda.shared.array((TPB, TPB), float32)
    tile_b = cuda.shared.array((TPB, TPB), float32)
    x, y = cuda.grid(2)
    tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
    total = float32(0.0)
    for i in range(cuda.gridDim.x):
        tile_a[ty, tx] = 0
        tile_b[ty, tx] = 0
        if y < a.shape[0] and tx + i * TPB < a.shape[1]:
            tile_a[ty, tx] = a[y, tx + i * TPB]
        if x < b.shape[1] and ty + i * TPB < b.shape[0]:
            tile_b[ty, tx] = b[ty + i * TPB, x]
        cuda.syncthreads()
        for j in range(TPB):
            total += tile_a[ty, j] * tile_b[j, tx]
        cuda.syncthreads()
    if y < c.shape[0] and x < c.shape[1]:
        c[y, x] = total


a, b = np.arange(32 * 32).reshape(32, 32) / 100, np.ones((32, 32))
c = np.zeros((32, 32))
matmul[(4, 4), (TPB, TPB)](a, b, c)
assert np.allclose(c, a @ b)
