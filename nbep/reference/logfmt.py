"""LogFMT: 128 columns of a row in 10 bits a value, a sign and a code of 9 bits, where their logarithms allow it.

 code 0: 0          code c: 2 ** (least + (c - 1) * step)          step = (greatest - least) / 510

greatest is the logarithm of the largest |x| of the 128 columns; least is that of the smallest, but no less than
greatest - 32. Columns are encoded if their largest |x| is below 1 and above their smallest; NaNs count for neither. A
value gets the code whose value is nearest: log2|x| is rounded up from where it passes the mean of two codes' values.

All arithmetic is in float32, each operation rounded; log2 and exp2 are the float32 nearest to the true ones. (Those of
GPUs are off by up to 2**-22, so there a value between two codes may get the other one.)
"""

from typing import Any, NamedTuple

import numpy as np

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
