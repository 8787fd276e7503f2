"""Copies of rows by one warp, in 16-byte vectors.

A lane has UNROLL loads in flight before its first store: 24 warps of a block then keep 86 KB on the way, enough to
cover the latency of memory at the rate of a GPU's share of the links. A row of 7168 values is four such groups in bf16,
two in FP8.

Source: DeepEP csrc/kernels/utils.cuh, UNROLLED_WARP_COPY
"""

from nbep.device.jit import device_function
from nbep.device.primitives import st_na_v4

VEC_BYTES = 16
WARP_BYTES = 32 * VEC_BYTES
UNROLL = 7  # vectors a lane has in flight; the code below spells them out


@device_function
def copy_row(load, dst, src, num_bytes, lane):
    """Copy a row. Addresses and num_bytes are multiples of 16.

    load is ld_nc_v4 if nobody writes the row while the kernel runs, ld_na_v4 if the block has acquired it.
    """
    offset = lane * VEC_BYTES
    while offset < num_bytes:
        left = num_bytes - offset
        src_vec = src + offset
        # A vector that is not loaded must not wait for one that is, as a copy of `a` would.
        nothing = (0, 0, 0, 0)
        a = load(src_vec)
        b = load(src_vec + WARP_BYTES) if left > WARP_BYTES else nothing
        c = load(src_vec + 2 * WARP_BYTES) if left > 2 * WARP_BYTES else nothing
        d = load(src_vec + 3 * WARP_BYTES) if left > 3 * WARP_BYTES else nothing
        e = load(src_vec + 4 * WARP_BYTES) if left > 4 * WARP_BYTES else nothing
        f = load(src_vec + 5 * WARP_BYTES) if left > 5 * WARP_BYTES else nothing
        g = load(src_vec + 6 * WARP_BYTES) if left > 6 * WARP_BYTES else nothing
        dst_vec = dst + offset
        st_na_v4(dst_vec, a)
        if left > WARP_BYTES:
            st_na_v4(dst_vec + WARP_BYTES, b)
        if left > 2 * WARP_BYTES:
            st_na_v4(dst_vec + 2 * WARP_BYTES, c)
        if left > 3 * WARP_BYTES:
            st_na_v4(dst_vec + 3 * WARP_BYTES, d)
        if left > 4 * WARP_BYTES:
            st_na_v4(dst_vec + 4 * WARP_BYTES, e)
        if left > 5 * WARP_BYTES:
            st_na_v4(dst_vec + 5 * WARP_BYTES, f)
        if left > 6 * WARP_BYTES:
            st_na_v4(dst_vec + 6 * WARP_BYTES, g)
        offset += UNROLL * WARP_BYTES
