"""What dispatch leaves behind for combine and for cached dispatches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from nbep.host.target.base import Array

MAX_PLANS = 64  # of a handle


@dataclass(frozen=True, eq=False)
class DispatchHandle:
    """The routing of one intranode dispatch, as one rank sees it. Unpacks, indexes and counts like DeepEP's 6-tuple.

    Tied to the buffer that made it and to that dispatch's num_sms, which is twice num_channels.

    rank_prefix_matrix          [num_ranks, num_ranks] int32; [s, d]: tokens from ranks 0 to s to rank d
    channel_prefix_matrix       [num_ranks, num_channels] int32; [d, c]: tokens of channels 0 to c to rank d
    recv_channel_prefix_matrix  [num_ranks, num_channels] int32; [s, c]: received from rank s before channel c
    recv_src_idx                [num_recv_tokens] int32: each received token's index on its source rank
    is_token_in_rank            [num_tokens, num_ranks] bool
    send_head                   [num_tokens, num_ranks] int32; [t, r]: index of token t among those of its channel to
                                rank r, or -1; combine rewrites it in place
    """

    rank_prefix_matrix: Array
    channel_prefix_matrix: Array
    recv_channel_prefix_matrix: Array
    recv_src_idx: Array
    is_token_in_rank: Array
    send_head: Array
    # The identity of the buffer; None for arrays that somebody else has put together.
    owner: object | None = field(default=None, init=False, repr=False)
    plans: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)  # of calls with it; see host.plans

    def owned_by(self, owner: object) -> DispatchHandle:
        """The same, as made by the buffer of this identity: the arrays need not be checked again."""
        object.__setattr__(self, "owner", owner)
        return self

    def __iter__(self) -> Iterator[Array]:
        return iter(self._as_tuple())

    def __len__(self) -> int:
        return 6

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "plans": {}}  # they are for this process

    def __getitem__(self, index: Any) -> Any:
        return self._as_tuple()[index]

    def _as_tuple(self) -> tuple[Array, ...]:
        return (
            self.rank_prefix_matrix,
            self.channel_prefix_matrix,
            self.recv_channel_prefix_matrix,
            self.recv_src_idx,
            self.is_token_in_rank,
            self.send_head,
        )
