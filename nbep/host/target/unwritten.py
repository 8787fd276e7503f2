"""What no kernel has written of the arrays that calls return: rows past those that came, and all of them before a hook.

The emulator fills new arrays with bytes of no meaning, the same in every run: what a kernel leaves unwritten must not
look right by chance. Under `checked` a kernel that reads such bytes stops the run; the host asks `unwritten_rows`.
"""

from __future__ import annotations

from typing import Any
from weakref import ref

import numpy as np

from nbep.emulator.machine.memory import Allocation, extent

UNWRITTEN = 0xCC  # every byte of a new array; -1.07e8 in bf16 and in float32
GRANULE = 16  # so many bytes in a row are no accident: 0xCC alone is -6 in e4m3


class Outputs:
    """The arrays that a rank's calls have made, as long as they are there."""

    def __init__(self) -> None:
        self._arrays: dict[int, Any] = {}

    def add(self, array: np.ndarray) -> None:
        array.reshape(-1).view(np.uint8)[:] = UNWRITTEN
        key = id(array)
        self._arrays[key] = ref(array, lambda _: self._arrays.pop(key, None))

    def hide_unwritten(self, array: np.ndarray, allocation: Allocation) -> None:
        """Let a kernel that reads bytes that were never written stop the run, if a call has made the array.

        allocation: the bytes of the array as a launch sees them
        """
        begin, end = extent(array)
        made = (found for each in list(self._arrays.values()) if (found := each()) is not None and found.size)
        if not any(low <= begin and end <= high for low, high in map(extent, made)):
            return
        data = np.frombuffer(allocation.memory, np.uint8)
        flags = np.ones(data.size, np.uint8)
        for first in range(0, data.size, GRANULE):
            flags[first : first + GRANULE] = (data[first : first + GRANULE] != UNWRITTEN).any()
        if not flags.all():
            allocation.hide(bytearray(flags.tobytes()))
            row_bytes = array.itemsize * (array.shape[-1] if array.ndim > 1 else 1)
            allocation.describe = lambda offset: (
                f"row {max(0, offset - allocation.base) // row_bytes}, which no call has written: it is past the rows "
                f"that came, or is read before the event or the hook of its call"
            )


def unwritten_rows(array: np.ndarray) -> np.ndarray:
    """See nbep.debug.unwritten."""
    if array.ndim == 0 or array.size == 0:
        return np.zeros(array.shape[:-1], bool)
    elements = np.ascontiguousarray(array).view(np.uint8).reshape(*array.shape, array.itemsize) == UNWRITTEN
    return elements.all(axis=-1) if array.ndim == 1 else elements.all(axis=(-1, -2))
