"""LogFMT: 128 columns of a row in 10 bits a value instead of 16, where their logarithms allow it.

 row of a message   meta: for each 128 columns the largest and the smallest |x|, two bf16 in a word
                    then 128 columns after the other: 160 bytes if they are encoded, else their 256 bytes as bf16
 160 bytes          the low 8 bits of 128 codes; then for each 8 values their signs (8 bits) and 9th code bits (8 bits)

 code 0: 0          code c: 2 ** (log2(min) + (c - 1) * step)          step = (log2(max) - log2(min)) / 510

The smallest is taken for no less than 2**-32 of the largest. Columns are encoded if their largest is below 1 and above
their smallest. Both sides decide so from the meta, and find from it where each 128 columns stand. The code of x is the
one whose value is nearest to x, not to its logarithm: hence the addend in `encoding`.

DeepEP packs nine bits after each other and decides for 1024 columns at once; here a lane finds its eight values in ten
bytes of its own, and each 128 columns go their own way. Not part of any interface: the layout may change.

Source: DeepEP csrc/kernels/internode_ll.cu, logfmt_encode, decode_and_accumulate; DeepSeek-V3 insights, LogFMT-nBit
"""

import nbep.device.primitives as ptx
from nbep.device.jit import device_function

LARGEST_CODE = 511
RANGE_LOG2 = 32
ENCODED_BYTES = 160
PLAIN_BYTES = 256
HIGH_BITS = 128  # where the signs and 9th bits begin in what is encoded


@device_function
def is_encoded(meta):
    """Whether 128 columns with this word of the meta are encoded."""
    largest, smallest = ptx.bf16x2_to_f32x2(meta)
    return largest < ptx.f32(1) and smallest < largest


@device_function
def log_range(meta):
    """The least logarithm that has a code, and the step from one code to the next."""
    largest, smallest = ptx.bf16x2_to_f32x2(meta)
    high = ptx.f32_log2_approx(largest)
    low = ptx.f32_max(ptx.f32_log2_approx(smallest), ptx.f32_add_rn(high, ptx.f32(-RANGE_LOG2)))
    return low, ptx.f32_div_rn(ptx.f32_add_rn(high, -low), ptx.f32(LARGEST_CODE - 1))


@device_function
def encoding(low, step):
    """What the logarithm of a value is multiplied with, and what is added, before the floor of it is its code."""
    per_step = ptx.f32_div_rn(ptx.f32(1), step)
    # Between two codes lies the mean of their values, not of their logarithms.
    middle = ptx.f32_log2_approx(ptx.f32_mul_rn(ptx.f32_add_rn(ptx.f32(1), ptx.f32_exp2_approx(step)), ptx.f32(0.5)))
    return per_step, ptx.f32_add_rn(
        ptx.f32_add_rn(ptx.f32(2), -ptx.f32_mul_rn(middle, per_step)), -ptx.f32_mul_rn(low, per_step)
    )


@device_function
def encode_value(x, per_step, addend):
    """The code of |x|."""
    code = ptx.f32_floor_u32(
        ptx.f32_max(ptx.f32_add_rn(ptx.f32_mul_rn(ptx.f32_log2_approx(ptx.f32_abs(x)), per_step), addend), ptx.f32(0))
    )
    return min(code, LARGEST_CODE)


@device_function
def decode_value(code, is_negative, low, step):
    x = ptx.f32(0)
    if code != 0:
        x = ptx.f32_exp2_approx(ptx.f32_add_rn(low, ptx.f32_mul_rn(ptx.f32(code - 1), step)))
    return -x if is_negative else x


@device_function
def sign_bit(x):
    return ptx.f32_bits_u32(x) >> 31


@device_function
def encode_four(values, per_step, addend):
    """Four values: their codes' low bytes in a word, and in another their signs from bit 0 and 9th bits from bit 8."""
    a = encode_value(values[0], per_step, addend)
    b = encode_value(values[1], per_step, addend)
    c = encode_value(values[2], per_step, addend)
    d = encode_value(values[3], per_step, addend)
    low = (a & 255) | ((b & 255) << 8) | ((c & 255) << 16) | ((d & 255) << 24)
    signs = sign_bit(values[0]) | (sign_bit(values[1]) << 1) | (sign_bit(values[2]) << 2) | (sign_bit(values[3]) << 3)
    ninth = (a >> 8) | ((b >> 8) << 1) | ((c >> 8) << 2) | ((d >> 8) << 3)
    return low, signs | (ninth << 8)


@device_function
def decode_four(low, signs, ninth, least, step):
    """The inverse; signs and ninth have four bits each."""
    return (
        decode_value((low & 255) | ((ninth & 1) << 8), signs & 1 != 0, least, step),
        decode_value(((low >> 8) & 255) | ((ninth & 2) << 7), signs & 2 != 0, least, step),
        decode_value(((low >> 16) & 255) | ((ninth & 4) << 6), signs & 4 != 0, least, step),
        decode_value(((low >> 24) & 255) | ((ninth & 8) << 5), signs & 8 != 0, least, step),
    )


@device_function
def pack_meta(largest, smallest):
    """The word of the meta of two bf16 that are given as float32."""
    return (ptx.f32_bits_u32(largest) >> 16) | (ptx.f32_bits_u32(smallest) & 0xFFFF0000)
