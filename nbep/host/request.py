"""A call of the normal mode is one object: what the caller passed, in the order of Buffer's signature."""

from __future__ import annotations

from typing import Any, NamedTuple

from nbep.host.config import Config
from nbep.host.events import EventOverlap
from nbep.host.target.base import Array, MaybeArray


class DispatchRequest(NamedTuple):
    """See Buffer.dispatch. num_sms: of the default config"""

    x: Any
    handle: Any
    num_tokens_per_rank: MaybeArray
    num_tokens_per_rdma_rank: MaybeArray
    is_token_in_rank: MaybeArray
    num_tokens_per_expert: MaybeArray
    topk_idx: MaybeArray
    topk_weights: MaybeArray
    expert_alignment: int
    num_worst_tokens: int
    config: Config | None
    previous_event: EventOverlap | None
    async_finish: bool
    allocate_on_comm_stream: bool
    zero_copy: bool
    num_sms: int


# What Buffer.dispatch returns
Dispatched = tuple[Any, MaybeArray, MaybeArray, list[int] | None, Any, EventOverlap]


class CombineRequest(NamedTuple):
    """See Buffer.combine."""

    x: Array
    handle: Any
    topk_weights: MaybeArray
    bias: Any
    config: Config | None
    previous_event: EventOverlap | None
    async_finish: bool
    allocate_on_comm_stream: bool
    zero_copy: bool
