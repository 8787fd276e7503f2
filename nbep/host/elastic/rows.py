"""Rows of an `ElasticBuffer` that its ranks share: dispatch and combine fetch them from where the caller wrote them.

rows = buffer.make_rows(num_rows, hidden)          collective
x = rows.like(recv_x)                              [len(recv_x), hidden] bf16, in memory that peers map
experts write x; buffer.combine(x, handle)         no rank pushes: each fetches what it wants

x = rows.like((values, scales))                    FP8 values of dispatch, and their scales behind all of them
"""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

from nbep.device.alignment import ALIGNMENT_BYTES, align_up
from nbep.device.kernels.intranode.offer_rows import LayPlaces
from nbep.device.layout.intranode import MAX_TOPK
from nbep.device.protocols.staging import VEC_BYTES
from nbep.host.arguments import integer, refuse
from nbep.host.shared_memory import SharedMemory
from nbep.host.target.base import Array
from nbep.host.target.checked_arrays import Lease, LentArray
from nbep.host.target.memory import Span
from nbep.host.target.streams import Event

BF16_BYTES, SCALE_BYTES = 2, 4


class SharedRows:
    """Room for num_rows rows of hidden bf16 values on each rank. ElasticBuffer.make_rows makes it.

    What `like` returns is the same memory in each call. It may be used again once the call that takes it is done, until
    the buffer makes other rows, or is destroyed. Where the emulator sees another use, it is an error.

    places: of x, and of top-k weights, which combine brings here for itself
    """

    def __init__(self, memory: SharedMemory, num_rows: int, hidden: int, places: LayPlaces):
        self.memory, self.num_rows, self.hidden, self.places = memory, num_rows, hidden, places
        self._x = Span(memory.runtime, memory.symmetric, 0, places.topk_weights)
        self._leases: WeakSet[Lease] = WeakSet()  # of what `like` has returned
        self._empty: tuple[Array, ...] = ()  # the latest made without rows: an address says nothing

    def like(self, array: Any, dtype: str = "bfloat16") -> Any:
        """Shared rows, as many as an array has, and of its library. dtype: NumPy's name of any that x may have

        array: or (x, scales) as dispatch takes them: then a pair like both, with scales by row

        Raises: ValueError if there are not so many, or x and its scales take more room than bf16 values
        """
        lease = Lease("shared rows", self.memory.symmetric.writes)
        self._leases.add(lease)
        if not isinstance(array, tuple):
            return self._lend(lease, array, dtype, 0, self.hidden)
        x, scales = map(self.memory.runtime.view, array)
        num_scales, begin = scales.shape[1], align_up(self.num_rows * self.hidden * x.itemsize, VEC_BYTES)
        room = (self.places.topk_weights - begin) // (SCALE_BYTES * self.num_rows)
        if num_scales > room:
            refuse(
                "array",
                f"{num_scales} scales a row of {x.dtype_name}",
                f"at most {max(room, 0)}, where bf16 values would end",
            )
        of_x = self._lend(lease, array[0], x.dtype_name, 0, self.hidden)
        return of_x, self._lend(lease, array[1], scales.dtype_name, begin, num_scales)

    def _lend(self, lease: Lease, array: Array, dtype: str, begin: int, num_columns: int) -> Array:
        num_rows, runtime = array.shape[0], self.memory.runtime
        if num_rows > self.num_rows:
            refuse("array", f"{num_rows} rows", f"at most {self.num_rows}, as make_rows was told")
        made = self.memory.symmetric.array(runtime.dtype_like(dtype, array), begin, num_rows * num_columns)
        made = runtime.lend(made.reshape(num_rows, num_columns), lease)
        if num_rows == 0:
            self._empty = (*self._empty[-1:], made)
        return made

    def offset_of(self, array: Array) -> int:
        """How far behind the first row an array begins, in bytes; -1 if it lies elsewhere."""
        if any(array is each for each in self._empty):
            return 0
        return self._x.offset_of(array)

    def take(self, x: Any, end: Event | None) -> None:
        """A call takes an array that lies here, and its scales, until that event."""
        for each in x if isinstance(x, tuple) else (x,):
            if isinstance(each, LentArray) and each._lease is not None:
                each._lease.begins_with = end

    def close(self, by: str) -> None:
        """Give the memory back. Collective."""
        for lease in self._leases:
            lease.end(by)
        self.memory.close()


def make_rows(group: Any, num_rows: Any, hidden: Any, timeout_ms: float) -> SharedRows:
    """See ElasticBuffer.make_rows."""
    num_rows, hidden = integer("num_rows", num_rows, 1), integer("hidden", hidden, 1)
    if hidden * BF16_BYTES % VEC_BYTES != 0:
        refuse("hidden", hidden, "a multiple of 8")
    places = LayPlaces(0, align_up(num_rows * hidden * BF16_BYTES, ALIGNMENT_BYTES))
    num_bytes = places.topk_weights + align_up(4 * MAX_TOPK * num_rows, ALIGNMENT_BYTES)
    cells = {"x of shared rows": 0, "topk_weights of shared rows": places.topk_weights}
    memory = SharedMemory.create(group, num_bytes, timeout_ms=timeout_ms, cells=cells)
    return SharedRows(memory, num_rows, hidden, places)
