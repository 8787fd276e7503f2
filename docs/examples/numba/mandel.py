"""Much arithmetic, few accesses."""

import numpy as np
from numba import cuda


@cuda.jit(device=True)
def escapes(x, y, most):
    c = complex(x, y)
    z = 0j
    for i in range(most):
        z = z * z + c
        if z.real * z.real + z.imag * z.imag >= 4:
            return i
    return most


@cuda.jit
def mandel(image):
    x, y = cuda.grid(2)
    if x < image.shape[0] and y < image.shape[1]:
        image[x, y] = escapes(-2 + 3 * x / image.shape[0], -1 + 2 * y / image.shape[1], 60)


image = np.zeros((64, 64), np.int32)
mandel[(4, 4), (16, 16)](image)
assert image.max() == 60
