"""`nbep.ElasticBuffer` as programs know DeepEP's.

 what a program does             nbep.ElasticBuffer                         this ElasticBuffer
 buffer.get_comm_stream()        nbep's stream                              torch.cuda.Stream, where torch is in use
 blocking call -> event          is done: event.current_stream_wait() goes  event.event is None
 topk_idx int32                  refused                                    is converted
 buffer.runtime                  none                                       the buffer; None after destroy

Source: DeepEP deep_ep/buffers/elastic.py
"""

from __future__ import annotations

import warnings
from typing import Any

from nbep.deep_ep.calls import is_int32, torch_stream, widened
from nbep.host.elastic.buffer import ElasticBuffer as NbepElasticBuffer
from nbep.host.events import EventOverlap

COMPACT_ROWS = (
    "dispatch: got a handle with do_expand=True, and do_expand=False: there comes one row for each token, as with "
    "DeepEP. Pass do_expand=True for a row for each choice, as the backward of an expanded combine needs"
)


class ElasticBuffer(NbepElasticBuffer):
    """See nbep.ElasticBuffer. Memory of a buffer that is dropped is given back when its ranks make their next one."""

    @property
    def runtime(self) -> ElasticBuffer | None:
        """What DeepEP's C++ object tells of itself, this object does."""
        return None if self._memory is None else self

    def get_comm_stream(self) -> Any:
        """The stream that this buffer's kernels run on; for torch one of its own class, which record_stream takes."""
        return torch_stream(super().get_comm_stream())

    def dispatch(
        self,
        x: Any,
        topk_idx: Any = None,
        topk_weights: Any = None,
        cumulative_local_expert_recv_stats: Any = None,
        num_experts: Any = None,
        num_max_tokens_per_rank: Any = None,
        expert_alignment: Any = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Any = None,
        previous_event_before_epilogue: Any = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: Any = None,
        do_handle_copy: bool = True,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
    ) -> Any:
        if topk_idx is not None and is_int32(topk_idx):
            topk_idx, previous_event = widened(topk_idx, previous_event)
        if handle is not None and getattr(handle, "do_expand", False) and not do_expand:
            warnings.warn(COMPACT_ROWS, RuntimeWarning, stacklevel=2)
        *received, event = super().dispatch(
            x,
            topk_idx,
            topk_weights,
            cumulative_local_expert_recv_stats,
            num_experts,
            num_max_tokens_per_rank,
            expert_alignment,
            num_sms,
            num_qps,
            previous_event,
            previous_event_before_epilogue,
            async_with_compute_stream,
            allocate_on_comm_stream,
            handle,
            do_handle_copy,
            do_cpu_sync,
            do_expand,
            do_zero_padding,
            use_tma_aligned_col_major_sf,
        )
        return (*received, event if async_with_compute_stream else EventOverlap())

    def combine(
        self,
        x: Any,
        handle: Any,
        topk_weights: Any = None,
        bias: Any = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Any = None,
        previous_event_before_epilogue: Any = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> Any:
        *combined, event = super().combine(
            x,
            handle,
            topk_weights,
            bias,
            num_sms,
            num_qps,
            previous_event,
            previous_event_before_epilogue,
            async_with_compute_stream,
            allocate_on_comm_stream,
        )
        return (*combined, event if async_with_compute_stream else EventOverlap())
