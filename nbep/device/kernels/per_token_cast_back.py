"""Cast back from FP8: every 128 columns of a token times their scale, rounded to bf16.

 warp: x_fp8[t, 128 b : 128 b + 128] * scales[t, b] --> x[t, 128 b : 128 b + 128]

 cell            written by   with      read by   with
 x_fp8, scales   no kernel    -         warp      ld_nc
 x               warp         st_weak   -         (the next kernel)

Source: DeepEP tests/utils.py, per_token_cast_back
"""

import nbep.device.primitives as ptx
from nbep.device.jit import kernel
from nbep.device.kernels.per_token_cast_to_fp8 import CastSizes, first_group, num_groups_in_flight
from nbep.device.protocols.fp8 import COLUMNS, scale4
from nbep.device.types import In, Out


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
