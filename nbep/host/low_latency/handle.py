"""What low_latency_dispatch leaves behind for low_latency_combine."""

from __future__ import annotations

from typing import Any

from nbep.host.calls import Unknown
from nbep.host.handles import AsTuple, Unpacks
from nbep.host.target.arrays import Parts
from nbep.host.target.base import Array, MaybeArray

# The arrays of a dispatch that are made as one piece of memory; the last four only with deduplicate
SRC_INFO, LAYOUT_RANGE, NUM_MESSAGES, MESSAGE_SRC_IDX, MESSAGE_ROWS, MESSAGE_WEIGHTS = range(6)
NO_MESSAGES = (0, 0, 0, 0)  # addresses of what is not there


class LowLatencyHandle(Unpacks):
    """The routing of one dispatch, as one rank sees it. Unpacks, indexes and counts like DeepEP's 5-tuple.

    src_info      [num_local_experts, num_ranks * num_max_dispatch_tokens_per_rank] int32: of each row of recv_x the
                  token's index at its source
    layout_range  [num_local_experts, num_ranks] int64: first row of a source << 32 | number of its rows
    num_max_dispatch_tokens_per_rank, hidden, num_experts: of the dispatch

    num_topk      with deduplicate: choices of a token; 0 without
    topk_weights  with deduplicate: those that went with the tokens
    """

    __slots__ = ("_arguments", "_arrays", "call", "sizes", "topk_weights")

    def __init__(
        self,
        arrays: Parts | tuple[Array, Array],
        sizes: tuple[int, ...],
        call: Any = None,
        topk_weights: MaybeArray = None,
        arguments: Any = None,
    ):
        """sizes: the three of the dispatch, and with deduplicate num_topk
        arguments: of the arrays of a dispatch that has just been made, for the combine kernel
        """
        self._arrays = arrays
        self.sizes = sizes
        self.call = call  # the dispatch; None for a plain tuple
        self.topk_weights = topk_weights
        self._arguments: tuple[Any, ...] | None = arguments

    @property
    def src_info(self) -> Array:
        return self._arrays[0] if isinstance(self._arrays, tuple) else self._arrays.array(SRC_INFO)

    @property
    def layout_range(self) -> Array:
        return self._arrays[1] if isinstance(self._arrays, tuple) else self._arrays.array(LAYOUT_RANGE)

    @property
    def num_max_dispatch_tokens_per_rank(self) -> int:
        return self.sizes[0]

    @property
    def hidden(self) -> int:
        return self.sizes[1]

    @property
    def num_experts(self) -> int:
        return self.sizes[2]

    @property
    def num_topk(self) -> int:
        return self.sizes[3] if len(self.sizes) > 3 else 0

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy is as good, but its arrays are checked again: they may have moved to another device."""
        return type(self), (self._arrays, self.sizes, self.call, self.topk_weights)

    @property
    def origin(self) -> object:
        """Which dispatch it is of, for the comparison of ranks."""
        return Unknown() if self.call is None else f"that of {self.call}"

    @property
    def is_as_made(self) -> bool:
        """Whether all of it is what its dispatch has put together."""
        return self._arguments is not None

    @property
    def is_put_together(self) -> bool:
        """Whether its arrays are not those of a dispatch, nor copies of them."""
        return isinstance(self._arrays, tuple)

    @property
    def arguments(self) -> tuple[Any, ...]:
        """What the combine kernel takes of it: recv_src_info, recv_layout_range, and of messages."""
        if self._arguments is not None:
            return self._arguments
        if isinstance(self._arrays, tuple):
            return *self._arrays, *NO_MESSAGES
        arguments = self._arrays.arguments
        return arguments if self.num_topk else (*arguments, *NO_MESSAGES)

    @property
    def arrays(self) -> Any:
        """What keeps them alive."""
        return self._arrays

    def _as_tuple(self) -> tuple[Any, ...]:
        return (self.src_info, self.layout_range, *self.sizes[:3])


class LowLatencyTuple(AsTuple, LowLatencyHandle):
    """The same, of nbep.deep_ep."""

    __slots__ = ()
