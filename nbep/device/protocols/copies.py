"""Copies of rows by one warp, in 16-byte vectors.

A lane has up to UNROLL loads in flight before its first store: 24 warps of a block then keep 86 KB on the way, enough
to cover the latency of memory at the rate of a GPU's share of the links. A row of 7168 values is four such groups in
bf16, two in FP8.

Source: DeepEP csrc/kernels/utils.cuh, UNROLLED_WARP_COPY
"""

import nbep.device.primitives as ptx
from nbep.device.jit import device_function

VEC_BYTES = 16
WARP_BYTES = 32 * VEC_BYTES
UNROLL = 7  # vectors that a lane has in flight; the code below spells them out
REST_UNROLL = 4  # and those at the end of a row


@device_function
def copy_row(load, dst, src, num_bytes, lane):
    """Copy a row. Addresses and num_bytes are multiples of 16.

    load is ld_nc_v4 if nobody writes the row while the kernel runs, ld_na_v4 if the block has acquired it.

    The vectors of a whole group need no conditions: with them ptxas puts the first stores before the last loads. The
    addresses move: with an offset added to those of the row, LLVM keeps one sum for each vector, in two registers.
    """
    src += lane * VEC_BYTES
    dst += lane * VEC_BYTES
    left = num_bytes - lane * VEC_BYTES
    while left > (UNROLL - 1) * WARP_BYTES:
        a = load(src)
        b = load(src + WARP_BYTES)
        c = load(src + 2 * WARP_BYTES)
        d = load(src + 3 * WARP_BYTES)
        e = load(src + 4 * WARP_BYTES)
        f = load(src + 5 * WARP_BYTES)
        g = load(src + 6 * WARP_BYTES)
        ptx.st_na_v4(dst, a)
        ptx.st_na_v4(dst + WARP_BYTES, b)
        ptx.st_na_v4(dst + 2 * WARP_BYTES, c)
        ptx.st_na_v4(dst + 3 * WARP_BYTES, d)
        ptx.st_na_v4(dst + 4 * WARP_BYTES, e)
        ptx.st_na_v4(dst + 5 * WARP_BYTES, f)
        ptx.st_na_v4(dst + 6 * WARP_BYTES, g)
        src += UNROLL * WARP_BYTES
        dst += UNROLL * WARP_BYTES
        left -= UNROLL * WARP_BYTES
    while left > 0:
        # A vector that is not loaded must not wait for one that is, as a copy of `a` would.
        nothing = (0, 0, 0, 0)
        a = load(src)
        b = load(src + WARP_BYTES) if left > WARP_BYTES else nothing
        c = load(src + 2 * WARP_BYTES) if left > 2 * WARP_BYTES else nothing
        d = load(src + 3 * WARP_BYTES) if left > 3 * WARP_BYTES else nothing
        ptx.st_na_v4(dst, a)
        if left > WARP_BYTES:
            ptx.st_na_v4(dst + WARP_BYTES, b)
        if left > 2 * WARP_BYTES:
            ptx.st_na_v4(dst + 2 * WARP_BYTES, c)
        if left > 3 * WARP_BYTES:
            ptx.st_na_v4(dst + 3 * WARP_BYTES, d)
        src += REST_UNROLL * WARP_BYTES
        dst += REST_UNROLL * WARP_BYTES
        left -= REST_UNROLL * WARP_BYTES
