"""Names of dtypes."""

from __future__ import annotations

from typing import Any

ROW_DTYPES = ("bfloat16", "float16", "float32", "float8_e4m3fn")


def native_name(dtype: Any) -> str:
    """NumPy's name of a NumPy dtype; one in the other order of bytes has another name than any that nbep takes."""
    return dtype.name if dtype.isnative else f"byte-swapped {dtype.name}"
