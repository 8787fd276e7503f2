"""Checks that the low-latency verbs share, all before anything is launched."""

from __future__ import annotations

from typing import Any

import numpy as np

from nbep.device.layout.low_latency import MAX_EXPERTS
from nbep.host import validate
from nbep.host.arguments import integer, refuse
from nbep.host.low_latency.handle import LowLatencyHandle
from nbep.host.low_latency.memory import LowLatencyCall, LowLatencyMemory
from nbep.host.node import NodeMemory
from nbep.host.target.base import Array


def mode_of(memory: NodeMemory, verb: str) -> LowLatencyMemory:
    """Raises: ValueError if the buffer was not made for the low-latency mode"""
    if memory.low_latency is None:
        raise ValueError(f"{verb}: the buffer has no low_latency_mode; make it with low_latency_mode=True")
    return memory.low_latency


def num_experts(mode: LowLatencyMemory, value: Any, name: str = "num_experts") -> int:
    """The value as an int."""
    value = integer(name, value, 1)
    if value % mode.num_ranks != 0 or value > MAX_EXPERTS:
        refuse(name, value, f"a multiple of {mode.num_ranks} (ranks) of at most {MAX_EXPERTS}")
    return value


def choices(topk_idx: Array, num_experts: int) -> None:
    """The contents of topk_idx; only if `may_read`."""
    validate.expert_indices(topk_idx, num_experts)
    ordered = np.sort(topk_idx, axis=1)
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    if twice.any():
        token, choice = (int(i[0]) for i in twice.nonzero())
        refuse(f"topk_idx[{token}]", topk_idx[token].tolist(), f"without expert {ordered[token, choice]} twice")


def handle(mode: LowLatencyMemory, value: Any) -> LowLatencyHandle:
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
        if value.num_topk != 0 and value.is_put_together:
            allowed = "the one that low_latency_dispatch with deduplicate returned"
            refuse("handle", "one that was put together", allowed)
        integer("handle.num_max_dispatch_tokens_per_rank", value.num_max_dispatch_tokens_per_rank, 1)
        integer("handle.hidden", value.hidden, 1)
        num_experts(mode, value.num_experts, "handle.num_experts")
    return value


def is_ready(mode: LowLatencyMemory, value: Any) -> bool:
    """Whether it is a handle as a dispatch of this buffer has made it, which has been received."""
    if not isinstance(value, LowLatencyHandle) or not value.is_as_made:
        return False
    call = value.call
    return call.owner is mode and call.is_received


def handle_contents(mode: LowLatencyMemory, value: LowLatencyHandle) -> None:
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
