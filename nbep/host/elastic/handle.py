"""What an elastic dispatch leaves behind for combine and for later dispatches along the same routes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from nbep.host.handles import Identity, OfThisProcess
from nbep.host.target.base import Array, MaybeArray

FORM = (
    "do_expand",
    "num_experts",
    "expert_alignment",
    "num_max_tokens_per_rank",
    "num_recv_tokens",
    "num_expanded_tokens",
)
# The arrays that kernels read, in the order of OfHandle
ARRAYS = (
    "topk_idx",
    "psum_of_ranks",
    "psum_num_recv_tokens_per_expert",
    "num_unaligned_recv_tokens_per_expert",
    "recv_src_metadata",
    "dst_buffer_slot_idx",
)


class OfHandle(NamedTuple):
    """The arrays of a handle that kernels read, or what launches take for them."""

    topk_idx: Any
    of_ranks: Any  # EPHandle.psum_of_ranks
    ends: Any
    counted: Any
    metadata: Any
    slots: Any


@dataclass(eq=False, repr=False)
class EPHandle(OfThisProcess):
    """The routing of one dispatch, as one rank sees it. Every rank's rows come in the order of (rank, token).

    Attributes:
        do_expand: whether there is a row for each (token, expert), or one for each token
        num_experts, expert_alignment, num_max_tokens_per_rank, num_sms: of the dispatch
        topk_idx: [num_tokens, num_topk] int64: a copy, unless do_handle_copy was False
        num_recv_tokens: tokens that came; without CPU sync, how many could
        num_expanded_tokens: rows for (token, expert), with what pads each expert; without CPU sync, how many could be
        num_recv_tokens_per_expert_list: aligned rows of each local expert; [] without CPU sync
        psum_num_recv_tokens_per_scaleup_rank: [num_ranks] int32: tokens from ranks 0 to r. In hybrid mode [ranks of a
            node]: tokens from the ranks of all nodes that have the indices 0 to i there
        psum_num_recv_tokens_per_expert: [num_local_experts] int32: where the rows of expert e end. Compact: with all
            padding, its own too; expanded: without its own, so the next expert begins at the next multiple of
            expert_alignment
        num_unaligned_recv_tokens_per_expert: [num_local_experts] int32: rows without padding
        recv_src_metadata: [num_recv_tokens, 2 + num_topk] int32 of each token that came: its rank times
            num_max_tokens_per_rank, and its index; rank * num_topk + its last choice of an expert here; the row of
            each choice of an expert here, -1 for others. -1 past the last token
        dst_buffer_slot_idx: [num_tokens, num_topk] int32: the token's index among those that go to the rank of a
            choice; -1 for choices that are unused
        token_metadata_at_forward: None; in hybrid mode [num_ranks] int32: tokens from ranks 0 to r
        channel_linked_list: None: no rank forwards

    Source:
        DeepEP deep_ep/buffers/elastic.py, EPHandle
    """

    do_expand: bool
    num_experts: int
    expert_alignment: int
    num_max_tokens_per_rank: int
    num_sms: int
    topk_idx: Array
    num_recv_tokens: int
    num_expanded_tokens: int
    num_recv_tokens_per_expert_list: list[int]
    psum_num_recv_tokens_per_scaleup_rank: Array
    psum_num_recv_tokens_per_expert: Array
    num_unaligned_recv_tokens_per_expert: Array
    recv_src_metadata: Array
    dst_buffer_slot_idx: Array
    token_metadata_at_forward: MaybeArray = None
    channel_linked_list: MaybeArray = None

    # The identity of the buffer, and which of its dispatches it is of, from 1 on; None and 0 for a handle that somebody
    # else has put together.
    owner: Identity | None = field(default=None, init=False)
    number: int = field(default=0, init=False)
    # recv_src_metadata as dispatch made it, and what torch says of writes to it
    _made: tuple[Array, int] | None = field(default=None, init=False)
    made_form: tuple[Any, ...] | None = field(default=None, init=False)  # `form` as dispatch made it
    # copies of `arrays`, where the host reads them and that dispatch has ended
    made: Mapping[str, Any] = field(default_factory=dict, init=False)

    def owned_by(self, owner: Identity, number: int) -> EPHandle:
        """The same, as made by a dispatch of the buffer of this identity."""
        self.owner, self.number, self.made, self.made_form = owner, number, {}, self.form
        self._made = self.recv_src_metadata, _num_writes(self.recv_src_metadata)
        return self

    def keep_contents(self, contents: Callable[[Array], Any]) -> None:
        """The dispatch that has made it has ended: copy what is in the arrays."""
        self.made = {name: contents(array).copy() for name, array in zip(ARRAYS, self.arrays, strict=True)}

    @property
    def form(self) -> tuple[Any, ...]:
        """The values of `FORM`, on which the launches of a call with this handle depend."""
        return tuple([getattr(self, name) for name in FORM])

    @property
    def is_rewritten(self) -> bool:
        """Whether recv_src_metadata is not as dispatch made it, as far as that is known without reading it.

        It is another array, or torch has written to it. What a kernel or NumPy writes in place is not known.
        """
        metadata = self.recv_src_metadata
        return self._made is None or metadata is not self._made[0] or _num_writes(metadata) != self._made[1]

    def __repr__(self) -> str:
        form = "expanded" if self.do_expand else "compact"
        sizes = f"{self.num_recv_tokens} tokens of {self.num_experts} experts"
        return f"<EPHandle of dispatch {self.number}, {form}, at most {sizes}>"

    @property
    def psum_of_ranks(self) -> Array:
        """[num_ranks] int32: tokens from ranks 0 to r. Rows lie in this order."""
        of_ranks = self.token_metadata_at_forward
        return self.psum_num_recv_tokens_per_scaleup_rank if of_ranks is None else of_ranks

    @property
    def arrays(self) -> OfHandle:
        """Those that kernels read."""
        return OfHandle(
            self.topk_idx,
            self.psum_of_ranks,
            self.psum_num_recv_tokens_per_expert,
            self.num_unaligned_recv_tokens_per_expert,
            self.recv_src_metadata,
            self.dst_buffer_slot_idx,
        )


def _num_writes(array: Array) -> int:
    """How often torch has written to an array in place; 0 where nothing counts that."""
    try:
        return getattr(array, "_version", 0)
    except RuntimeError:  # a tensor of torch.inference_mode
        return 0
