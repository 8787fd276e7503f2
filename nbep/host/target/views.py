"""What a call was given as an array, looked at once."""

from __future__ import annotations

import math
from typing import Any, NamedTuple


class View(NamedTuple):
    """An array as its library tells of it, or what is none.

    array       what the caller gave
    flaw        why an array of that library is none here: text behind the name of its class
    is_array    whether this target takes it as an array; if not, nothing is said of it below
    dtype_name  NumPy's: "bfloat16", "float8_e4m3fn", "int64", "bool" ...
    num_bytes   of its elements
    strides     in elements
    is_contiguous, is_writeable  row-major without gaps; not read-only, as far as its library says: torch does not
    address     where it starts in its memory: of the device, or of the host for arrays that the host reads
    """

    array: Any
    flaw: str = ""
    is_array: bool = False
    shape: tuple[int, ...] = ()
    dtype_name: str = ""
    itemsize: int = 0
    num_bytes: int = 0
    strides: tuple[int, ...] = ()
    is_contiguous: bool = True
    is_writeable: bool = True
    address: int = 0


def view_of(array: Any, library: Any) -> View:
    """An array without a flaw. library: the adapter of the library that made it"""
    shape, itemsize = tuple(array.shape), array.dtype.itemsize
    told = (each(array) for each in (library.strides, library.is_contiguous, library.is_writeable, library.pointer))
    return View(array, "", True, shape, library.dtype_name(array), itemsize, math.prod(shape) * itemsize, *told)


new_tuple: Any = tuple.__new__  # makes a NamedTuple at half the cost
NO_ARRAY = View(None)  # for an argument that is not given
