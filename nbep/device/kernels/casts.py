"""Cast to FP8 and back: every 128 columns of a token have a scale of their own.

 to FP8   warp: x[t, 128 b : 128 b + 128] --max over the warp--> scales[t, b] --> x_fp8[t, 128 b : 128 b + 128]
 back     warp: x_fp8[t, 128 b : 128 b + 128] * scales[t, b] --> x[t, 128 b : 128 b + 128], rounded to bf16

 cell                      written by   with      read by   with
 x, or x_fp8 and scales    no kernel    -         warp      ld_nc
 x_fp8, or x               warp         st_weak   -         (the next kernel)
 scales                    lane 0       st_weak   -         (the next kernel)

Source: DeepEP tests/utils.py, per_token_cast_to_fp8, per_token_cast_back; csrc/kernels/utils.cuh, calculate_fp8_scales
"""

from typing import NamedTuple

import nbep.device.primitives as ptx
from nbep.device.jit import device_function, kernel
from nbep.device.protocols.fp8 import COLUMNS, fp8_scales, scale4
from nbep.device.protocols.reduce import abs_max4
from nbep.device.types import I32, In, Out


class CastOutputs(NamedTuple):
    x_fp8: Out  # [num_tokens, hidden] e4m3
    scales: Out  # [num_tokens, hidden / 128] f32, any strides


class CastSizes(NamedTuple):
    """Strides count scales, not bytes. round_scale is 0 or 1."""

    num_tokens: I32
    hidden: I32
    scale_token_stride: I32
    scale_hidden_stride: I32
    round_scale: I32


@device_function
def warp_max_f32(mask, value):
    """Maximum over the 32 lanes of a warp; every lane gets it."""
    value = ptx.f32_max(value, ptx.shfl_xor_f32(mask, value, 16))
    value = ptx.f32_max(value, ptx.shfl_xor_f32(mask, value, 8))
    value = ptx.f32_max(value, ptx.shfl_xor_f32(mask, value, 4))
    value = ptx.f32_max(value, ptx.shfl_xor_f32(mask, value, 2))
    return ptx.f32_max(value, ptx.shfl_xor_f32(mask, value, 1))


@device_function
def first_group():
    """The first (token, 128 columns) of this warp."""
    return ptx.block_idx() * ptx.u32_div(ptx.block_dim(), 32) + ptx.thread_idx() // 32


@device_function
def num_groups_in_flight():
    """How far a warp's next (token, 128 columns) is from its last."""
    return ptx.grid_dim() * ptx.u32_div(ptx.block_dim(), 32)


@kernel(max_threads=1024)
def per_token_cast_to_fp8(out: CastOutputs, x: In, sizes: CastSizes):
    """Grid: any. Block: any multiple of 32. hidden is a multiple of 128."""
    lane = ptx.thread_idx() % 32
    groups_per_token = ptx.u32_div(sizes.hidden, COLUMNS)
    for group in range(first_group(), sizes.num_tokens * groups_per_token, num_groups_in_flight()):
        token = ptx.u32_div(group, groups_per_token)
        column = group - token * groups_per_token
        element = group * COLUMNS + 4 * lane
        packed = ptx.ld_nc_v2(x + 2 * element)
        a, b = ptx.bf16x2_to_f32x2(packed[0])
        c, d = ptx.bf16x2_to_f32x2(packed[1])
        scale, scale_inv = fp8_scales(warp_max_f32(ptx.FULL_MASK, abs_max4(a, b, c, d)), sizes.round_scale)
        a, b, c, d = scale4(a, b, c, d, scale)
        ptx.st_weak_u32(out.x_fp8 + element, ptx.f32x4_to_e4m3x4(a, b, c, d))
        if lane == 0:
            cell = token * sizes.scale_token_stride + column * sizes.scale_hidden_stride
            ptx.st_weak_f32(out.scales + 4 * cell, scale_inv)


@kernel(max_threads=1024)
def per_token_cast_back(x: Out, x_fp8: In, scales: In, sizes: CastSizes):
    """Grid: any. Block: any multiple of 32. round_scale is not used."""
    lane = ptx.thread_idx() % 32
    groups_per_token = ptx.u32_div(sizes.hidden, COLUMNS)
    for group in range(first_group(), sizes.num_tokens * groups_per_token, num_groups_in_flight()):
        token = ptx.u32_div(group, groups_per_token)
        column = group - token * groups_per_token
        element = group * COLUMNS + 4 * lane
        scale = ptx.ld_nc_f32(scales + 4 * (token * sizes.scale_token_stride + column * sizes.scale_hidden_stride))
        a, b, c, d = ptx.e4m3x4_to_f32x4(ptx.u32(ptx.ld_nc_s32(x_fp8 + element)))
        a, b, c, d = scale4(a, b, c, d, scale)
        ptx.st_weak_v2(x + 2 * element, (ptx.f32x2_to_bf16x2(a, b), ptx.f32x2_to_bf16x2(c, d)))
