"""DeepEP's names: `import nbep.deep_ep as deep_ep` in place of `import deep_ep`.

    from nbep.deep_ep import Buffer, Config
    from nbep.deep_ep.utils import EventHandle, EventOverlap

What differs from `nbep.Buffer` is in `buffer.py`; what differs from DeepEP is in docs/deep_ep.md.

Source: DeepEP v1.2.1, deep_ep/__init__.py; later versions for topk_idx_t
"""

from typing import Any

from nbep.deep_ep.buffer import Buffer
from nbep.deep_ep.utils import EventHandle, EventOverlap
from nbep.host.config import Config

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap", "topk_idx_t"]


def __getattr__(name: str) -> Any:
    if name == "topk_idx_t":
        from nbep.deep_ep.cpp import topk_idx_dtype

        return topk_idx_dtype()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
