"""What low_latency_dispatch leaves behind for low_latency_combine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from nbep.host.runtime.base import Array, MaybeArray


class Messages(NamedTuple):
    """Where the messages of one dispatch with deduplicate went; T is num_ranks * num_max_dispatch_tokens_per_rank.

    num_messages  [num_ranks] int32: that came from each rank
    src_idx       [num_ranks, num_max_dispatch_tokens_per_rank] int32: the token's index at its source
    rows          [num_ranks, num_max_dispatch_tokens_per_rank, num_topk] int32: local expert * T + row, or -1
    weights       the same, float32: of the choice
    """

    num_messages: MaybeArray = None
    src_idx: MaybeArray = None
    rows: MaybeArray = None
    weights: MaybeArray = None


@dataclass(eq=False, slots=True)
class LowLatencyHandle:
    """The routing of one dispatch, as one rank sees it. Unpacks, indexes and counts like DeepEP's 5-tuple.

    src_info      [num_local_experts, num_ranks * num_max_dispatch_tokens_per_rank] int32: of each row of recv_x the
                  token's index at its source
    layout_range  [num_local_experts, num_ranks] int64: first row of a source << 32 | number of its rows
    """

    src_info: Array
    layout_range: Array
    num_max_dispatch_tokens_per_rank: int
    hidden: int
    num_experts: int
    messages: Messages | None = field(default=None, repr=False)  # with deduplicate
    topk_weights: MaybeArray = field(default=None, repr=False)  # that went with them
    call: Any = field(default=None, repr=False)  # the dispatch; None for a plain tuple

    def __iter__(self) -> Iterator[Any]:
        return iter(self._as_tuple())

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: Any) -> Any:
        return self._as_tuple()[index]

    def _as_tuple(self) -> tuple[Any, ...]:
        return (
            self.src_info,
            self.layout_range,
            self.num_max_dispatch_tokens_per_rank,
            self.hidden,
            self.num_experts,
        )
