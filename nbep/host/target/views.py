"""What a call was given as an array, looked at once."""

from __future__ import annotations

import math
from typing import Any, NamedTuple


class View(NamedTuple):
    """An array as its library tells of it.

    array     what the caller gave
    library   the adapter of the library that made it; None if this target does not take it as an array
    flaw      why an array of that library is none here: text behind the name of its class
    """

    array: Any
    library: Any
    flaw: str = ""

    @property
    def is_array(self) -> bool:
        return self.library is not None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def dtype_name(self) -> str:
        """NumPy's name of its dtype: "bfloat16", "float8_e4m3fn", "int64", "bool" ..."""
        return self.library.dtype_name(self.array)

    @property
    def itemsize(self) -> int:
        return self.array.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        """Of its elements; 0 without an array."""
        return math.prod(self.shape) * self.itemsize if self.is_array else 0

    @property
    def strides(self) -> tuple[int, ...]:
        """In elements."""
        return self.library.strides(self.array)

    @property
    def address(self) -> int:
        """Where it starts in its memory: of the device, or of the host for arrays that the host reads."""
        return self.library.pointer(self.array)

    @property
    def is_contiguous(self) -> bool:
        """Whether it is row-major without gaps."""
        return self.library.is_contiguous(self.array)

    @property
    def is_writeable(self) -> bool:
        """Whether it may be written, as far as its library says: torch's tensors say nothing of it."""
        return self.library.is_writeable(self.array)

    def fits(self, dtype: str, shape: tuple[int, ...]) -> bool:
        """Whether it is an array of this dtype and shape, row-major without gaps. Costs as little as can be."""
        return self.library is not None and self.library.fits(self.array, dtype, shape)


new_tuple: Any = tuple.__new__  # makes a NamedTuple at half the cost
NO_ARRAY = View(None, None)  # for an argument that is not given
