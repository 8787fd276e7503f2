"""Puzzle 16, solved."""

from nbep.lang import (
    bf16x2_to_f32x2,
    device_function,
    f32,
    f32_add_rn,
    f32_mul_rn,
    f32x2_to_bf16x2,
    ld_nc_f32,
    ld_nc_s32,
)

NUM_TOPK, ROW_BYTES = 3, 128


@device_function
def combine_word(rows, indices, weights, lane):
    low, high = f32(0), f32(0)
    for k in range(NUM_TOPK):
        index = ld_nc_s32(indices + 4 * k)
        if index >= 0:
            weight = ld_nc_f32(weights + 4 * k)
            a, b = bf16x2_to_f32x2(ld_nc_s32(rows + ROW_BYTES * index + 4 * lane))
            low = f32_add_rn(low, f32_mul_rn(weight, a))
            high = f32_add_rn(high, f32_mul_rn(weight, b))
    return f32x2_to_bf16x2(low, high)


HINTS = (
    "Three indices: skip -1, load the word of this lane, and add both numbers in float32.",
    "The word is at rows + ROW_BYTES * index + 4 * lane; the weight at weights + 4 * k.",
    "Begin with f32(0) twice, and call f32x2_to_bf16x2 once, behind the loop.",
)
