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

from nbep.deep_ep.calls import taken_as_deep_ep, torch_stream
from nbep.host.elastic.buffer import ElasticBuffer as NbepElasticBuffer
from nbep.host.elastic.handle import EPHandle
from nbep.host.events import EventHandle, EventOverlap

__all__ = ["EPHandle", "ElasticBuffer", "EventHandle", "EventOverlap"]

COMPACT_ROWS = (
    "dispatch: got a handle with do_expand=True, and do_expand=False: there comes one row for each token, as with "
    "DeepEP. Pass do_expand=True for a row for each choice, as the backward of an expanded combine needs"
)


def _warn_of_compact_rows(handle: Any, do_expand: bool) -> None:
    """At the line of the dispatch."""
    if getattr(handle, "do_expand", False) and not do_expand:
        warnings.warn(COMPACT_ROWS, RuntimeWarning, stacklevel=3)


class ElasticBuffer(NbepElasticBuffer):
    """See nbep.ElasticBuffer. Memory of a buffer that is dropped is given back when its ranks make their next one."""

    _is_deep_eps = True

    @property
    def runtime(self) -> ElasticBuffer | None:
        """What DeepEP's C++ object tells of itself, this object does."""
        return None if self._memory is None else self

    def get_comm_stream(self) -> Any:
        """The stream that this buffer's kernels run on; for torch one of its own class, which record_stream takes."""
        return torch_stream(super().get_comm_stream())

    dispatch = taken_as_deep_ep(
        NbepElasticBuffer.dispatch,
        "warn_of_compact_rows(handle, do_expand)",
        warn_of_compact_rows=_warn_of_compact_rows,
    )
    combine = taken_as_deep_ep(NbepElasticBuffer.combine)
