"""What dispatch leaves behind for combine and for cached dispatches."""

from __future__ import annotations

from dataclasses import dataclass

from nbep.host.handles import ArraysHandle, AsTuple
from nbep.host.target.base import Array


@dataclass(frozen=True, eq=False)
class DispatchHandle(ArraysHandle):
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

    rewritten = ("send_head",)

    rank_prefix_matrix: Array
    channel_prefix_matrix: Array
    recv_channel_prefix_matrix: Array
    recv_src_idx: Array
    is_token_in_rank: Array
    send_head: Array

    @property
    def num_channels(self) -> int:
        return int(self.channel_prefix_matrix.shape[1])

    def _numbers(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (self.is_token_in_rank.shape[0], self.num_channels), (self.recv_src_idx.shape[0],)


class DispatchTuple(AsTuple, DispatchHandle):
    """The same, of nbep.deep_ep."""
