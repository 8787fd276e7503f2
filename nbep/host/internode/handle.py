"""What dispatch between nodes leaves behind for combine and for cached dispatches."""

from __future__ import annotations

from dataclasses import dataclass

from nbep.host.handles import ArraysHandle, AsTuple
from nbep.host.target.base import Array


@dataclass(frozen=True, eq=False)
class InternodeHandle(ArraysHandle):
    """The routing of one internode dispatch, as one rank sees it. Unpacks, indexes and counts like DeepEP's 10-tuple.

    Tied to the buffer that made it and to that dispatch's num_sms, which is twice num_channels. num_rdma_ranks nodes of
    num_nvl_ranks ranks, num_ranks in all; this is the rank with nvl_rank l of its node.

    is_token_in_rank                 [num_tokens, num_ranks] bool
    rdma_channel_prefix_matrix       [num_rdma_ranks, num_channels] int32; [d, c]: tokens of channels 0 to c to node d
    gbl_channel_prefix_matrix        [num_ranks, num_channels] int32; [r, c]: tokens of channels 0 to c to rank r
    recv_rdma_channel_prefix_matrix  [num_rdma_ranks, num_channels] int32; [n, c]: those of rank (n, l) to this node
    recv_rdma_rank_prefix_sum        [num_rdma_ranks] int32; [n]: tokens of the ranks (0, l) to (n, l) to this node
    recv_gbl_channel_prefix_matrix   [num_ranks, num_channels] int32; [r, c]: first row of channel c of rank r
    recv_gbl_rank_prefix_sum         [num_ranks] int32; [r]: tokens of ranks 0 to r to this rank
    recv_src_meta                    [num_recv_tokens, words] int32: each received token's index on its source rank, the
                                     rdma_rank of that, then the bits of its goals; see layout.internode
    send_rdma_head                   [num_tokens, num_rdma_ranks] int32; [t, d]: index of token t among those of its
                                     channel to node d, or -1
    send_nvl_head                    [num_rdma_recv_tokens, num_nvl_ranks] int32; [i, k]: of what passed through this
                                     rank, by node and channel: the index among those of them for place k, or -1

    Combine rewrites both heads in place.
    """

    rewritten = "send_rdma_head", "send_nvl_head"

    is_token_in_rank: Array
    rdma_channel_prefix_matrix: Array
    gbl_channel_prefix_matrix: Array
    recv_rdma_channel_prefix_matrix: Array
    recv_rdma_rank_prefix_sum: Array
    recv_gbl_channel_prefix_matrix: Array
    recv_gbl_rank_prefix_sum: Array
    recv_src_meta: Array
    send_rdma_head: Array
    send_nvl_head: Array

    @property
    def num_channels(self) -> int:
        return int(self.rdma_channel_prefix_matrix.shape[1])

    def _numbers(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        numbers = self.recv_src_meta.shape[0], self.send_nvl_head.shape[0]
        return (self.is_token_in_rank.shape[0], self.num_channels), numbers


class InternodeTuple(AsTuple, InternodeHandle):
    """The same, of nbep.deep_ep."""
