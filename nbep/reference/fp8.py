"""Casting to FP8 and LogFMT and back, and the dtypes of everything here."""

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

BF16 = np.dtype(ml_dtypes.bfloat16)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
E4M3_MAX = np.float32(448)
E4M3_NAN, BF16_NAN = np.uint8(0x7F).view(E4M3), np.uint16(0x7FFF).view(BF16)  # a GPU's conversions know one NaN
AMAX_FLOOR = np.float32(1e-4)
COLUMNS_PER_SCALE = 128


def _scales_of(amax: np.float32, round_scale: bool) -> tuple[np.float32, np.float32]:
    """(factor that x is multiplied by, factor that undoes it)."""
    amax = max(amax, AMAX_FLOOR)
    if np.isinf(amax):
        return np.float32(0), np.float32(np.inf)
    scale, scale_inv = E4M3_MAX / amax, amax * (1 / E4M3_MAX)  # DeepEP, and torch on a GPU, multiply by a constant
    if round_scale:
        mantissa, exponent = np.frexp(scale_inv)  # scale_inv = mantissa * 2 ** exponent, 0.5 <= mantissa < 1
        log2_ceil = int(exponent) - 1 if mantissa == 0.5 else int(exponent)
        scale, scale_inv = np.ldexp(np.float32(1), -log2_ceil), np.ldexp(np.float32(1), log2_ceil)
    return scale, scale_inv


def per_token_cast_to_fp8(x: np.ndarray, round_scale: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Cast to e4m3 with a scale for every 128 columns of a token.

    Args:     x [num_tokens, hidden] bf16, hidden a multiple of 128; round_scale makes scales powers of two
    Returns:  x_fp8 [num_tokens, hidden] e4m3, rounded to nearest even and clamped to 448;
              scales [num_tokens, hidden / 128] float32
              A NaN stays NaN, and is left out of its scale. Where there is an infinity, that is NaN, the scale is
              infinity and the other columns are 0: cast back, all of them are NaN
    """
    num_tokens, hidden = x.shape
    x_fp8 = np.zeros((num_tokens, hidden), E4M3)
    scales = np.zeros((num_tokens, hidden // COLUMNS_PER_SCALE), np.float32)
    for token in range(num_tokens):
        for group in range(hidden // COLUMNS_PER_SCALE):
            columns = slice(group * COLUMNS_PER_SCALE, (group + 1) * COLUMNS_PER_SCALE)
            values = x[token, columns].astype(np.float32)
            scale, scales[token, group] = _scales_of(np.fmax.reduce(np.abs(values), initial=0), round_scale)
            with np.errstate(invalid="ignore"):  # infinity * 0
                scaled = values * scale
            x_fp8[token, columns] = np.clip(scaled, -E4M3_MAX, E4M3_MAX).astype(E4M3)
            x_fp8[token, columns][np.isnan(scaled)] = E4M3_NAN
    return x_fp8, scales


def per_token_cast_back(x_fp8: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Undo per_token_cast_to_fp8 up to rounding: [num_tokens, hidden] e4m3 -> [num_tokens, hidden] bf16."""
    factors = np.repeat(scales.astype(np.float32), COLUMNS_PER_SCALE, axis=1)
    with np.errstate(invalid="ignore", over="ignore"):
        x = x_fp8.astype(np.float32) * factors
    return np.where(np.isnan(x), BF16_NAN, x.astype(BF16))


def pack_ue8m0(scales: np.ndarray) -> np.ndarray:
    """The exponents of scales that are powers of two, four in a word, the first in its low byte.

    Args:     scales [..., num_scales] float32, num_scales a multiple of 4
    Returns:  [..., num_scales / 4] int32
    """
    exponents = (np.ascontiguousarray(scales).view(np.uint32) >> 23).astype("<u4").astype(np.uint8)
    return exponents.view(np.int32)


def unpack_ue8m0(words: np.ndarray) -> np.ndarray:
    """The inverse: [..., n] int32 -> [..., 4 * n] float32."""
    exponents = np.ascontiguousarray(words).view(np.uint8)
    return (exponents.astype(np.uint32) << 23).view(np.float32)


def calc_diff(x: np.ndarray, y: np.ndarray) -> float:
    """0 if x and y are the same; about the mean square of their difference relative to that of x + 1 and y + 1.

    0, too, if they have no elements.
    """
    if x.size == 0:
        return 0.0
    x, y = x.astype(np.float64) + 1, y.astype(np.float64) + 1
    return float(1 - 2 * (x * y).sum() / (x * x + y * y).sum())


# LogFMT: 128 columns of a row in 10 bits a value, a sign and a code of 9 bits, where their logarithms allow it.
#
#  code 0: 0          code c: 2 ** (least + (c - 1) * step)          step = (greatest - least) / 510
#
# greatest is the logarithm of the largest |x| of the 128 columns; least is that of the smallest, but no less than
# greatest - 32. Columns are encoded if their largest |x| is below 1 and above their smallest; NaNs count for neither.
# A value gets the code whose value is nearest: log2|x| is rounded up from where it passes the mean of two codes'
# values. All arithmetic is in float32, each operation rounded; log2 and exp2 are the float32 nearest to the true ones.
# (Those of GPUs are off by up to 2**-22, so there a value between two codes may get the other one.)


LOGFMT_COLUMNS = 128
LARGEST_CODE = 511
RANGE_LOG2 = np.float32(32)


class LogfmtScale(NamedTuple):
    """Of 128 columns."""

    least: np.float32
    step: np.float32


def _log2(x: np.ndarray | np.floating) -> Any:
    with np.errstate(divide="ignore"):
        return np.log2(x.astype(np.float64)).astype(np.float32)


def _exp2(x: np.ndarray | np.floating) -> Any:
    return np.exp2(x.astype(np.float64)).astype(np.float32)


def logfmt_scale(columns: np.ndarray) -> LogfmtScale | None:
    """The scale of 128 columns; None if they are not encoded."""
    magnitudes = np.abs(columns.astype(np.float32))
    largest, smallest = np.fmax.reduce(magnitudes), np.fmin.reduce(magnitudes)
    if not (largest < 1 and smallest < largest):
        return None
    greatest = _log2(largest)
    least = np.maximum(_log2(smallest), greatest - RANGE_LOG2)
    return LogfmtScale(least, (greatest - least) / np.float32(LARGEST_CODE - 1))


def encode_logfmt(columns: np.ndarray, scale: LogfmtScale) -> tuple[np.ndarray, np.ndarray]:
    """Codes and signs of 128 columns.

    Returns: codes [128] int, 0 to 511; is_negative [128] bool
    """
    x = columns.astype(np.float32)
    per_step = np.float32(1) / scale.step
    middle = _log2((np.float32(1) + _exp2(scale.step)) * np.float32(0.5))  # of 1 and the next code's value
    addend = (np.float32(2) - middle * per_step) - scale.least * per_step
    codes = np.floor(np.fmax(_log2(np.abs(x)) * per_step + addend, np.float32(0)))
    return np.minimum(codes, LARGEST_CODE).astype(np.int64), np.signbit(x)


def decode_logfmt(codes: np.ndarray, is_negative: np.ndarray, scale: LogfmtScale) -> np.ndarray:
    """The values [128] float32 of codes and signs."""
    values = _exp2(scale.least + (codes - 1).astype(np.float32) * scale.step)
    values = np.where(codes == 0, np.float32(0), values)
    return np.where(is_negative, -values, values)


def through_logfmt(x: np.ndarray) -> np.ndarray:
    """What is left of a row after it has travelled in LogFMT: [hidden] bf16 -> [hidden] float32."""
    out = x.astype(np.float32)
    for first in range(0, len(x), LOGFMT_COLUMNS):
        columns = x[first : first + LOGFMT_COLUMNS]
        scale = logfmt_scale(columns)
        if scale is not None:
            out[first : first + LOGFMT_COLUMNS] = decode_logfmt(*encode_logfmt(columns, scale), scale)
    return out
