"""The symmetric memory of an `ElasticBuffer`, and how large it has to be."""

from __future__ import annotations

from typing import Any

import numpy as np

from nbep.device.alignment import align_up
from nbep.device.layout.elastic import (
    DATA,
    ElasticPlaces,
    ElasticShape,
    ElasticSlots,
    describe_elastic,
    make_slots,
    num_combine_bytes,
    num_dispatch_bytes,
    place_arrays,
)
from nbep.device.layout.intranode import MAX_NVL_PEERS, MAX_TOPK
from nbep.host.arguments import integer, refuse
from nbep.host.target.memory import SymmetricMemory

BUFFER_ALIGNMENT = 2 << 20
COLUMNS_OF_LEAST_SCALE = 32


class ElasticMemory:
    """num_bytes: from DATA on."""

    def __init__(self, symmetric: SymmetricMemory, num_bytes: int, num_ranks: int):
        self.num_bytes = num_bytes
        self._num_ranks = num_ranks
        self._dispatched: tuple[ElasticPlaces, ElasticShape] | None = None  # of the latest dispatch
        self._slots: ElasticSlots | None = None  # of the latest combine, if that came later
        symmetric.write(0, np.zeros(DATA // 4, np.int32))

    def place(self, shape: ElasticShape) -> ElasticPlaces:
        """Where a dispatch lays out its tokens.

        Raises: ValueError if there is no room for them
        """
        self._check(num_dispatch_bytes(shape, self._num_ranks), shape)
        return place_arrays(self.num_bytes, shape, self._num_ranks)

    def slots(self, num_max_tokens: int, hidden_bytes: int, num_topk: int, one_each: bool) -> ElasticSlots:
        """Where the rows of a combine go.

        Raises: ValueError if there is no room for them
        """
        slots = make_slots(num_max_tokens, hidden_bytes, num_topk, self._num_ranks, one_each)
        self._check(num_combine_bytes(slots), slots)
        return slots

    def _check(self, needed: int, shape: ElasticShape | ElasticSlots) -> None:
        if needed > self.num_bytes:
            tokens, row = shape.num_max_tokens, shape.hidden_bytes
            allowed = f"at least {needed} for num_max_tokens_per_rank={tokens} and rows of {row} bytes"
            refuse("num_bytes", f"{self.num_bytes} at construction", f"{allowed}; see get_buffer_size_hint")

    def begin_dispatch(self, places: ElasticPlaces, shape: ElasticShape) -> None:
        self._dispatched, self._slots = (places, shape), None

    def begin_combine(self, slots: ElasticSlots) -> None:
        self._slots = slots

    def describe(self, offset: int) -> str:
        """Name the cell at an offset of the symmetric memory."""
        return describe_elastic(self._dispatched, self._slots, offset)


def size_of(group: Any) -> int:
    """Ranks of a communicator of mpi4py, of nbep.spawn, or of a process group of torch."""
    size = group.size
    return size() if callable(size) else size


def size_hint(
    num_ranks: int,
    num_max_tokens_per_rank: Any,
    hidden: Any,
    num_topk: Any,
    use_fp8_dispatch: bool,
    allow_multiple_reduction: bool,
) -> int:
    """See ElasticBuffer.get_buffer_size_hint."""
    tokens = integer("num_max_tokens_per_rank", num_max_tokens_per_rank, 1)
    hidden = integer("hidden", hidden, 1)
    num_topk = integer("num_topk", num_topk, 0) or MAX_TOPK
    if num_topk > MAX_TOPK:
        refuse("num_topk", num_topk, f"at most {MAX_TOPK}")
    num_scales = -(-hidden // COLUMNS_OF_LEAST_SCALE) if use_fp8_dispatch else 0
    shape = ElasticShape(tokens, hidden if use_fp8_dispatch else 2 * hidden, num_topk, num_scales)
    dispatch_bytes = num_dispatch_bytes(shape, min(num_ranks, MAX_NVL_PEERS))
    # With fewer choices than ranks a place is a choice's: never more of them than ranks.
    slots = make_slots(tokens, 2 * hidden, num_topk, num_ranks, not allow_multiple_reduction)
    return align_up(max(dispatch_bytes, num_combine_bytes(slots)), BUFFER_ALIGNMENT)
