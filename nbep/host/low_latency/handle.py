"""What low_latency_dispatch leaves behind for low_latency_combine, and checks that the low-latency verbs share."""

from __future__ import annotations

from typing import Any

import numpy as np

from nbep.device.layout.low_latency import MAX_EXPERTS
from nbep.host import validate
from nbep.host.arguments import integer, refuse
from nbep.host.handles import AsTuple, Unpacks
from nbep.host.low_latency.memory import LowLatencyCall, LowLatencyMemory
from nbep.host.node import NodeMemory
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

    __slots__ = ("_arguments", "arrays", "call", "sizes", "topk_weights")

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
        self.arrays: Any = arrays  # a tuple if they are not those of a dispatch, nor copies of them
        self.sizes = sizes
        self.call = call  # the dispatch; None for a plain tuple
        self.topk_weights = topk_weights
        self._arguments: tuple[Any, ...] | None = arguments

    @property
    def src_info(self) -> Array:
        return self.arrays[0] if isinstance(self.arrays, tuple) else self.arrays.array(SRC_INFO)

    @property
    def layout_range(self) -> Array:
        return self.arrays[1] if isinstance(self.arrays, tuple) else self.arrays.array(LAYOUT_RANGE)

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
        return type(self), (self.arrays, self.sizes, self.call, self.topk_weights)

    @property
    def is_as_made(self) -> bool:
        """Whether all of it is what its dispatch has put together."""
        return self._arguments is not None

    @property
    def arguments(self) -> tuple[Any, ...]:
        """What the combine kernel takes of it: recv_src_info, recv_layout_range, and of messages."""
        if self._arguments is not None:
            return self._arguments
        if isinstance(self.arrays, tuple):
            return *self.arrays, *NO_MESSAGES
        arguments = self.arrays.arguments
        return arguments if self.num_topk else (*arguments, *NO_MESSAGES)

    def _as_tuple(self) -> tuple[Any, ...]:
        return (self.src_info, self.layout_range, *self.sizes[:3])


class LowLatencyTuple(AsTuple, LowLatencyHandle):
    """The same, of nbep.deep_ep."""

    __slots__ = ()


# --- Checks, all before anything is launched


def mode_of(memory: NodeMemory, verb: str) -> LowLatencyMemory:
    """Raises: ValueError if the buffer was not made for the low-latency mode"""
    if memory.low_latency is None:
        raise ValueError(f"{verb}: the buffer has no low_latency_mode; make it with low_latency_mode=True")
    return memory.low_latency


def checked_num_experts(mode: LowLatencyMemory, value: Any, name: str = "num_experts") -> int:
    """The value as an int."""
    value = integer(name, value, 1)
    if value % mode.num_ranks != 0 or value > MAX_EXPERTS:
        refuse(name, value, f"a multiple of {mode.num_ranks} (ranks) of at most {MAX_EXPERTS}")
    return value


def check_choices(topk_idx: Array, num_experts: int) -> None:
    """The contents of topk_idx; only if `may_read`."""
    validate.expert_indices(topk_idx, num_experts)
    ordered = np.sort(topk_idx, axis=1)
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    if twice.any():
        token, choice = (int(i[0]) for i in twice.nonzero())
        refuse(f"topk_idx[{token}]", topk_idx[token].tolist(), f"without expert {ordered[token, choice]} twice")


def checked_handle(mode: LowLatencyMemory, value: Any) -> LowLatencyHandle:
    """A handle of low_latency_dispatch. A plain tuple of its five parts is taken too, but its buffer is not known.

    Raises: ValueError if it is none, of another buffer, or its dispatch has not been received
    """
    if not isinstance(value, LowLatencyHandle) and isinstance(value, (tuple, list)) and len(value) == 5:
        src_info, layout_range, *sizes = value
        value = LowLatencyHandle((src_info, layout_range), (sizes[0], sizes[1], sizes[2]))
    if not isinstance(value, LowLatencyHandle):
        refuse("handle", type(value).__name__, "the handle that low_latency_dispatch returned, or a tuple of its parts")
    if value.call is not None and not isinstance(value.call, LowLatencyCall):
        refuse("handle.call", type(value.call).__name__, "that of low_latency_dispatch, or None")
    if value.call is not None and value.call.owner is not mode:
        refuse("handle", "the handle of another buffer", f"a handle that this buffer made on rank {mode.rank}")
    if value.call is not None and not value.call.is_received:
        refuse("handle", f"that of {value.call}, whose hook has not been called", "of a dispatch that is received")
    if not value.is_as_made:
        if value.num_topk != 0 and isinstance(value.arrays, tuple):
            allowed = "the one that low_latency_dispatch with deduplicate returned"
            refuse("handle", "one that was put together", allowed)
        integer("handle.num_max_dispatch_tokens_per_rank", value.num_max_dispatch_tokens_per_rank, 1)
        integer("handle.hidden", value.hidden, 1)
        checked_num_experts(mode, value.num_experts, "handle.num_experts")
    return value


def is_ready(mode: LowLatencyMemory, value: Any) -> bool:
    """Whether it is a handle as a dispatch of this buffer has made it, which has been received."""
    if not isinstance(value, LowLatencyHandle) or not value.is_as_made:
        return False
    call = value.call
    return call.owner is mode and call.is_received


def check_contents(mode: LowLatencyMemory, value: LowLatencyHandle) -> None:
    """What the arrays of a handle say; only if `may_read`."""
    contents = mode.runtime.contents
    layout_range, src_info = contents(value.layout_range), contents(value.src_info)
    begins, counts = layout_range >> 32, layout_range & 0xFFFFFFFF
    num_rows = mode.num_ranks * value.num_max_dispatch_tokens_per_rank
    wrong = (begins < 0) | (counts > value.num_max_dispatch_tokens_per_rank) | (begins + counts > num_rows)
    if wrong.any():
        expert, rank = (int(i[0]) for i in wrong.nonzero())
        got = f"{counts[expert, rank]} rows from {begins[expert, rank]} on"
        allowed = f"at most {value.num_max_dispatch_tokens_per_rank} of {num_rows} rows, as dispatch made it"
        refuse(f"handle.layout_range[{expert}, {rank}]", got, allowed)
    for expert, rank in zip(*counts.nonzero(), strict=True):
        rows = src_info[expert, begins[expert, rank] :][: counts[expert, rank]]
        if ((rows < 0) | (rows >= value.num_max_dispatch_tokens_per_rank)).any():
            allowed = f"tokens below {value.num_max_dispatch_tokens_per_rank} of rank {rank}, as dispatch made it"
            refuse(f"handle.src_info[{expert}]", rows.tolist(), allowed)
