"""Rows of an `ElasticBuffer` that its ranks share: experts write there, and combine fetches from there.

rows = buffer.make_rows(num_rows, hidden)          collective
x = rows.like(recv_x)                              [len(recv_x), hidden] bf16, in the shared memory
experts write x; buffer.combine(x, handle)         no rank pushes: each fetches what it wants
"""

from __future__ import annotations

from typing import Any

from nbep.device.protocols.staging import VEC_BYTES
from nbep.host.arguments import integer, refuse
from nbep.host.shared_memory import SharedMemory
from nbep.host.target.base import Array

BF16_BYTES = 2


class SharedRows:
    """Room for num_rows rows of hidden bf16 values on each rank. ElasticBuffer.make_rows makes it.

    What `like` returns is the same memory in each call. It may be written again once the combine that takes it is done.
    """

    def __init__(self, memory: SharedMemory, num_rows: int, hidden: int):
        self.memory = memory
        self.num_rows, self.hidden = num_rows, hidden
        self.begin, self.end = memory.symmetric.span(memory.num_bytes)
        self.empty: Array = None  # the latest that `like` has made without rows: its address says nothing

    def like(self, array: Array, dtype: str = "bfloat16") -> Array:
        """Shared rows, as many as an array has, and of its library.

        Raises: ValueError if there are not so many
        """
        num_rows = array.shape[0]
        if num_rows > self.num_rows:
            refuse("array", f"{num_rows} rows", f"at most {self.num_rows}, as make_rows was told")
        made = self.memory.symmetric.array(
            self.memory.runtime.dtype_like(dtype, array), 0, num_rows * self.hidden
        ).reshape(num_rows, self.hidden)
        if num_rows == 0:
            self.empty = made
        return made

    def offset_of(self, array: Array) -> int:
        """How far behind the first row an array begins, in 16 bytes; -1 if it lies elsewhere, or is none."""
        if array is self.empty and array is not None:
            return 0
        view = self.memory.runtime.view(array)
        is_here = view.is_array and self.begin <= view.address < self.end
        return (view.address - self.begin) // VEC_BYTES if is_here else -1


def make_rows(group: Any, num_rows: Any, hidden: Any, timeout_ms: float) -> SharedRows:
    """See ElasticBuffer.make_rows."""
    num_rows, hidden = integer("num_rows", num_rows, 1), integer("hidden", hidden, 1)
    if hidden * BF16_BYTES % VEC_BYTES != 0:
        refuse("hidden", hidden, "a multiple of 8")
    num_bytes = -(-num_rows * hidden * BF16_BYTES // 128) * 128
    cells = {"x of shared rows": 0}
    return SharedRows(SharedMemory.create(group, num_bytes, timeout_ms=timeout_ms, cells=cells), num_rows, hidden)
