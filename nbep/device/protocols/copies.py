"""Copies of rows by one warp, in 16-byte vectors.

Source: DeepEP csrc/kernels/utils.cuh, UNROLLED_WARP_COPY
"""

from nbep.device.jit import device_function
from nbep.device.primitives import ld_na_v4, ld_nc_v4, st_na_v4

VEC_BYTES = 16
WARP_BYTES = 32 * VEC_BYTES
UNROLL = 4  # vectors a lane has in flight


@device_function
def send_row(dst, src, num_bytes, lane):
    """Copy a row that nobody writes while the kernel runs. Addresses and num_bytes are multiples of 16."""
    offset = lane * VEC_BYTES
    while offset + (UNROLL - 1) * WARP_BYTES < num_bytes:
        a = ld_nc_v4(src + offset)
        b = ld_nc_v4(src + offset + WARP_BYTES)
        c = ld_nc_v4(src + offset + 2 * WARP_BYTES)
        d = ld_nc_v4(src + offset + 3 * WARP_BYTES)
        st_na_v4(dst + offset, a)
        st_na_v4(dst + offset + WARP_BYTES, b)
        st_na_v4(dst + offset + 2 * WARP_BYTES, c)
        st_na_v4(dst + offset + 3 * WARP_BYTES, d)
        offset += UNROLL * WARP_BYTES
    while offset < num_bytes:
        st_na_v4(dst + offset, ld_nc_v4(src + offset))
        offset += WARP_BYTES


@device_function
def receive_row(dst, src, num_bytes, lane):
    """Copy a row that a peer wrote before the tail that this warp's block has acquired. Otherwise as `send_row`."""
    offset = lane * VEC_BYTES
    while offset + (UNROLL - 1) * WARP_BYTES < num_bytes:
        a = ld_na_v4(src + offset)
        b = ld_na_v4(src + offset + WARP_BYTES)
        c = ld_na_v4(src + offset + 2 * WARP_BYTES)
        d = ld_na_v4(src + offset + 3 * WARP_BYTES)
        st_na_v4(dst + offset, a)
        st_na_v4(dst + offset + WARP_BYTES, b)
        st_na_v4(dst + offset + 2 * WARP_BYTES, c)
        st_na_v4(dst + offset + 3 * WARP_BYTES, d)
        offset += UNROLL * WARP_BYTES
    while offset < num_bytes:
        st_na_v4(dst + offset, ld_na_v4(src + offset))
        offset += WARP_BYTES
