"""A call of an `ElasticBuffer` is one object: what the caller passed, with the defaults of the buffer filled in."""

from __future__ import annotations

from typing import Any, NamedTuple

from nbep.host.elastic.handle import EPHandle
from nbep.host.target.base import Array, MaybeArray


class ElasticDispatchRequest(NamedTuple):
    """See ElasticBuffer.dispatch."""

    x: Any
    topk_idx: MaybeArray
    topk_weights: MaybeArray
    stats: MaybeArray
    num_experts: Any
    num_max_tokens_per_rank: Any
    expert_alignment: Any
    num_sms: int
    previous_event: Any
    previous_event_before_epilogue: Any
    async_finish: bool
    allocate_on_comm_stream: bool
    handle: EPHandle | None
    do_handle_copy: bool
    do_cpu_sync: bool
    do_expand: bool
    do_zero_padding: bool
    use_tma_aligned_col_major_sf: bool


class ElasticCombineRequest(NamedTuple):
    """See ElasticBuffer.combine."""

    x: Array
    handle: EPHandle
    topk_weights: MaybeArray
    bias: Any
    num_sms: int
    previous_event: Any
    previous_event_before_epilogue: Any
    async_finish: bool
    allocate_on_comm_stream: bool

    @property
    def arrays(self) -> tuple[Any, ...]:
        """x, topk_weights and both biases."""
        bias = self.bias
        return self.x, self.topk_weights, *(bias if isinstance(bias, tuple) else (bias, None))
