"""The part of a buffer's symmetric memory that peers fill without rings, and which half of it the next dispatch takes.

 dispatch 0 (half 0): recv_x is the caller's ..................|
 dispatch 1 (half 1):               recv_x is the caller's ....|.......
 dispatch 2 (half 0):                                          takes what dispatch 0 had

What a combine lays out is used within one call, so there is room for one.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from nbep.device.layout.direct import (
    FIXED,
    NUM_HALVES,
    DirectShape,
    HalfPlaces,
    RowPlaces,
    describe_direct,
    num_direct_bytes_needed,
    place_half,
)
from nbep.device.layout.intranode import MAX_TOPK
from nbep.device.protocols.peers import Peers
from nbep.host.arguments import integer, refuse
from nbep.host.target.base import Array, Runtime
from nbep.host.target.checked_arrays import Lease
from nbep.host.target.memory import Span, SymmetricMemory

MAX_ARRAYS = 256
MAX_SMS = 256  # that a size hint has room for


class DirectMemory:
    """See above.

    Attributes: peers: of the areas, an argument of the kernels; num_bytes: of the part, which starts at `start`
    """

    peers: Peers

    def __init__(self, runtime: Runtime, symmetric: SymmetricMemory, start: int, num_bytes: int, num_ranks: int):
        self._runtime = runtime
        self._symmetric = symmetric
        self._num_ranks = num_ranks
        self.start = start
        self.num_bytes = num_bytes
        self.area = Span(runtime, symmetric, start + FIXED, num_bytes - FIXED)  # in which arrays may lie
        self._num_dispatches = 0
        self._leases: list[Lease | None] = [None] * NUM_HALVES
        self.arrays: dict[Any, Array] = {}  # kept for later calls
        self._half: tuple[HalfPlaces, DirectShape, int] | None = None  # of the latest dispatch
        self.rows: RowPlaces | None = None  # of the latest combine

    def open(self, bases: np.ndarray, peers: Peers) -> None:
        """bases: of the symmetric memories of all ranks; peers: of the rings' part."""
        self._symmetric.write(self.start, np.where(bases != 0, bases + self.start + FIXED, 0))
        table = self._symmetric.address + self.start
        self.peers = peers._replace(buffer_ptrs=table)

    @property
    def next_half(self) -> int:
        return self._num_dispatches % NUM_HALVES

    def place_halves(self, shape: DirectShape) -> list[HalfPlaces]:
        """Where dispatches find their arrays in either half.

        Raises: ValueError if there is no room for a row
        """
        places = [place_half(self.num_bytes, half, self._num_ranks, shape) for half in range(NUM_HALVES)]
        if places[0].num_rows == 0:
            refuse("num_zero_copy_bytes", f"{self.num_bytes} at construction", "enough for a row; see the size hint")
        return places

    def begin_dispatch(self, places: HalfPlaces, shape: DirectShape) -> Lease:
        """The next dispatch takes its half: what is in there is not the caller's any more."""
        number, half = self._num_dispatches, self.next_half
        before = self._leases[half]
        if before is not None:
            before.end(f"zero-copy dispatch {number}")
        lease = self._leases[half] = Lease(f"what zero-copy dispatch {number} received", self._symmetric.writes)
        self._num_dispatches += 1
        self._half = places, shape, half
        return lease

    def array(self, place: int, num_rows: int, shape: tuple[int, ...], dtype: str, like: Array, lease: Lease) -> Array:
        """An array that begins at a place of the area, of the kind of `like`. There is room for num_rows.

        To make one costs the host as much as a launch, so that of all rows is kept, and each call gets a view of it.
        The emulator takes all that the host has seen for written, so there each call gets its own.
        """
        offset, row = self.start + FIXED + place, math.prod(shape[1:])
        if self._runtime.host_reads_arrays:
            flat = self._symmetric.array(self._runtime.dtype_like(dtype, like), offset, shape[0] * row)
            return self._runtime.lend(flat.reshape(shape), lease)
        key = place, num_rows, row, dtype, type(like)
        found = self.arrays.get(key)
        if found is None:
            if len(self.arrays) >= MAX_ARRAYS:
                self.arrays.clear()
            found = self._symmetric.array(self._runtime.dtype_like(dtype, like), offset, num_rows * row)
            found = self.arrays[key] = found.reshape((num_rows, *shape[1:]))
        return found[: shape[0]]

    def describe(self, offset: int) -> str:
        """Name the cell at an offset of the symmetric memory."""
        return describe_direct(self._half, self.rows, self._num_ranks, offset - self.start - FIXED)


def size_hint(num_max_tokens_per_rank: int, hidden: int, num_ranks: int, num_topk: int = MAX_TOPK) -> int:
    """See Buffer.get_zero_copy_size_hint."""
    num_tokens = integer("num_max_tokens_per_rank", num_max_tokens_per_rank, 0)
    num_ranks = integer("num_ranks", num_ranks, 1)
    row = 2 * integer("hidden", hidden, 1)  # FP8 with its scales takes less
    num_topk = integer("num_topk", num_topk, 0)
    shape = DirectShape(MAX_SMS // 2, row, num_topk, 0, 1)
    return num_direct_bytes_needed(num_ranks * num_tokens, num_ranks, shape)
