"""FP8 (e4m3) scaling of 128 columns: by one warp, four columns a lane, or by half a warp, eight columns a lane.

 amax = max |x|, at least MARGIN      scale_inv = amax * (1 / 448) (what travels)      x_fp8 = round(x * scale)

With round_scale, scale_inv is the next power of two, so that its exponent byte (UE8M0) says it all.

A NaN stays one, 0x7f, and counts for no scale. An infinity has scale 0 and scale_inv infinity: it becomes NaN and its
neighbours 0, and all 128 columns come back as NaN.

Source: DeepEP csrc/kernels/utils.cuh, calculate_fp8_scales
"""

import nbep.device.primitives as ptx
from nbep.device.jit import device_function

COLUMNS = 128  # that share a scale
E4M3_MAX = 448
MARGIN = 1e-4  # floor of amax: zeros must not divide by zero


@device_function
def log2_ceil(x):
    """Smallest n with 2**n >= x, for a positive normal float32."""
    bits = ptx.f32_bits_u32(x)
    exponent = ((bits >> 23) & 0xFF) - 127
    return exponent + 1 if (bits & 0x7FFFFF) != 0 else exponent


@device_function
def pow2(n):
    """2.0 ** n as a float32, for -126 <= n <= 127; 0 for -127, infinity for 128."""
    return ptx.u32_bits_f32((n + 127) << 23)


@device_function
def fp8_scales(amax, round_scale):
    """(scale, scale_inv) for values of at most amax."""
    amax = ptx.f32_max(amax, ptx.f32(MARGIN))
    scale_inv = ptx.f32_mul_rn(amax, ptx.f32(1 / E4M3_MAX))  # as DeepEP: a division has other bits
    scale = ptx.f32_div_rn(ptx.f32(E4M3_MAX), amax)
    if round_scale != 0:
        exponent = log2_ceil(scale_inv)
        scale = pow2(max(-exponent, -127))  # of infinity 128: 0, as without round_scale
        scale_inv = pow2(exponent)
    return scale, scale_inv


@device_function
def scale4(a, b, c, d, scale):
    return ptx.f32_mul_rn(a, scale), ptx.f32_mul_rn(b, scale), ptx.f32_mul_rn(c, scale), ptx.f32_mul_rn(d, scale)


@device_function
def to_e4m3x8(values, scale):
    """Eight float32, scaled and rounded to e4m3, in two words."""
    a, b, c, d = scale4(values[0], values[1], values[2], values[3], scale)
    e, f, g, h = scale4(values[4], values[5], values[6], values[7], scale)
    return ptx.f32x4_to_e4m3x4(a, b, c, d), ptx.f32x4_to_e4m3x4(e, f, g, h)
