"""Reductions: over the lanes of a warp, and over rows of bf16.

Source: DeepEP csrc/kernels/utils.cuh, warp_reduce; csrc/kernels/intranode.cu, combine ("Reduce all-to-all results")
"""

import nbep.device.primitives as ptx
from nbep.device.jit import device_function


@device_function
def warp_sum_s32(mask, value):
    """Sum over the 32 lanes of a warp; every lane gets it."""
    value += ptx.shfl_xor_s32(mask, value, 16)
    value += ptx.shfl_xor_s32(mask, value, 8)
    value += ptx.shfl_xor_s32(mask, value, 4)
    value += ptx.shfl_xor_s32(mask, value, 2)
    return value + ptx.shfl_xor_s32(mask, value, 1)


@device_function
def warp_prefix_sum_s32(mask, value, lane):
    """In lane i the sum over lanes 0 to i of a warp."""
    value += value_below(mask, value, lane, 1)
    value += value_below(mask, value, lane, 2)
    value += value_below(mask, value, lane, 4)
    value += value_below(mask, value, lane, 8)
    return value + value_below(mask, value, lane, 16)


@device_function
def value_below(mask, value, lane, distance):
    """The value of the lane so far below; 0 if there is none."""
    below = ptx.shfl_up_s32(mask, value, distance)
    return below if lane >= distance else 0


@device_function
def abs_max4(a, b, c, d):
    return ptx.f32_max(ptx.f32_max(ptx.f32_abs(a), ptx.f32_abs(b)), ptx.f32_max(ptx.f32_abs(c), ptx.f32_abs(d)))


@device_function
def abs_max8(values):
    low = abs_max4(values[0], values[1], values[2], values[3])
    return ptx.f32_max(low, abs_max4(values[4], values[5], values[6], values[7]))


@device_function
def half_warp_max_f32(mask, value):
    """Maximum over the 16 lanes of either half of a warp; every lane gets that of its own half."""
    value = ptx.f32_max(value, ptx.shfl_xor_f32(mask, value, 8))
    value = ptx.f32_max(value, ptx.shfl_xor_f32(mask, value, 4))
    value = ptx.f32_max(value, ptx.shfl_xor_f32(mask, value, 2))
    return ptx.f32_max(value, ptx.shfl_xor_f32(mask, value, 1))


@device_function
def zero_f32x8():
    """The sum of no rows: eight zeros."""
    zero = ptx.f32(0)
    return zero, zero, zero, zero, zero, zero, zero, zero


@device_function
def unpack_bf16x8(words):
    """Eight bf16 values in four words, as float32."""
    a0, a1 = ptx.bf16x2_to_f32x2(words[0])
    a2, a3 = ptx.bf16x2_to_f32x2(words[1])
    a4, a5 = ptx.bf16x2_to_f32x2(words[2])
    a6, a7 = ptx.bf16x2_to_f32x2(words[3])
    return a0, a1, a2, a3, a4, a5, a6, a7


@device_function
def to_bf16x8(total):
    """Round eight float32 sums to bf16, packed in four words."""
    return (
        ptx.f32x2_to_bf16x2(total[0], total[1]),
        ptx.f32x2_to_bf16x2(total[2], total[3]),
        ptx.f32x2_to_bf16x2(total[4], total[5]),
        ptx.f32x2_to_bf16x2(total[6], total[7]),
    )
