"""What nbep forgives and DeepEP does not is taken back: a layer that rests on it works here, and not on cards.

nbep                                                       inside of `as_deep_ep()`
ElasticBuffer.dispatch waits for counts of no tokens       RuntimeError: DeepEP's times out
rows of a dispatch without CPU sync that did not come      a choice of expert 0 with weight 1: what was there before
  have choices of -1 and weights of 0
low-latency verbs after the normal mode                    RuntimeError: clean_low_latency_buffer must come between
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from nbep.deep_ep.buffer import Buffer
from nbep.deep_ep.elastic import ElasticBuffer

Verb = Callable[..., Any]


@contextmanager
def as_deep_ep() -> Iterator[None]:
    """For all buffers of nbep.deep_ep."""
    changes: list[tuple[type, str, Callable[[Verb], Verb]]] = [(ElasticBuffer, "dispatch", _elastic_dispatch)]
    changes += [(Buffer, verb, _marking(True)) for verb in ("dispatch", "combine")]
    changes += [(Buffer, verb, _low_latency) for verb in ("low_latency_dispatch", "low_latency_combine")]
    changes += [(Buffer, "clean_low_latency_buffer", _marking(False))]
    before = [(cls, verb, getattr(cls, verb)) for cls, verb, _ in changes]
    for cls, verb, change in changes:
        setattr(cls, verb, change(getattr(cls, verb)))
    try:
        yield
    finally:
        for cls, verb, original in before:
            setattr(cls, verb, original)


def _elastic_dispatch(original: Verb) -> Verb:
    @wraps(original)
    def dispatch(buffer: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        tokens = x[0] if isinstance(x, tuple) else x
        waits = kwargs.get("do_cpu_sync") is not False and kwargs.get("handle") is None
        if waits and len(tokens) == 0:
            raise RuntimeError("dispatch: x has no tokens, with CPU sync; DeepEP's waits for ever then: send one of -1")
        result = original(buffer, x, *args, **kwargs)
        _, topk_idx, weights, handle, event = result
        if kwargs.get("do_cpu_sync") is False and topk_idx is not None and event.event is None:
            num_rows = int(handle.psum_num_recv_tokens_per_scaleup_rank[-1])
            topk_idx[num_rows:] = 0
            if weights is not None:
                weights[num_rows:] = 1
        return result

    return dispatch


def _marking(is_dirty: bool) -> Callable[[Verb], Verb]:
    def change(original: Verb) -> Verb:
        @wraps(original)
        def verb(buffer: Any, *args: Any, **kwargs: Any) -> Any:
            buffer.is_dirty = is_dirty
            return original(buffer, *args, **kwargs)

        return verb

    return change


def _low_latency(original: Verb) -> Verb:
    @wraps(original)
    def verb(buffer: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(buffer, "is_dirty", False):
            raise RuntimeError(
                f"{original.__name__}: called after the normal mode; DeepEP needs clean_low_latency_buffer between"
            )
        return original(buffer, *args, **kwargs)

    return verb
