"""Values that no program should pass, and some that look odd but are fine."""

import random
from typing import Any

import ml_dtypes
import numpy as np

ODD = (
    None, 0, 1, -1, 2, 3, 7, 128, 1 << 31, 1 << 63, 1 << 70, 1.5, float("nan"), float("inf"), "x", "",
    b"y", True, False,
    object(), [], (), {}, [1, 2], (1, 2), (1, 2, 3, 4, 5, 6), np.float32(2), np.int64(2), np.array(3), np.zeros(0),
    np.bool_(True), np.dtype(object), int, len, lambda: 0, range(3), 1j, slice(None), Ellipsis, NotImplemented,
)  # fmt: skip
DTYPES = (
    np.int32, np.int64, np.float32, np.float64, np.float16, np.uint8, bool, object, ">i8", ">f4", ">i4", "S3", "M8[s]",
    ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.complex64,
)  # fmt: skip


def odd_value(rng: random.Random) -> Any:
    return rng.choice(ODD)


def odd_array(rng: random.Random, array: np.ndarray) -> Any:
    """An array that was changed, most often into a wrong one."""
    kind = rng.randrange(10)
    if kind == 0:
        try:
            return np.zeros(array.shape, rng.choice(DTYPES))
        except TypeError:
            return None
    if kind == 1:
        return array.byteswap().view(array.dtype.newbyteorder()) if array.dtype.kind in "iuf" else array.tolist()
    if kind == 2:
        return np.concatenate([array, array]) if rng.random() < 0.5 else array[:-1]
    if kind == 3:
        return array[..., None] if rng.random() < 0.5 else array.reshape(-1)
    if kind == 4:
        return np.repeat(array, 2, axis=-1)[..., ::2]  # strided
    if kind == 5:
        return array.T if rng.random() < 0.5 else array[::-1]
    if kind == 6:
        return array.tolist()
    if kind == 7:
        return np.array([array], object)
    if kind == 8:
        return np.ma.masked_array(array) if rng.random() < 0.5 else np.zeros((0, *array.shape[1:]), array.dtype)
    # The same numbers are drawn for an array of any size: ranks keep in step.
    changed, at, value = array.copy(), rng.random(), rng.choice([77, -5, 1 << 20 if array.dtype.kind == "i" else 3])
    if changed.size:
        changed.reshape(-1)[int(at * changed.size)] = value
    return changed
