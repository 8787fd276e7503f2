"""DeepEP's names: `import nbep.deep_ep as deep_ep` in place of `import deep_ep`.

    from nbep.deep_ep import Buffer, Config
    from nbep.deep_ep.utils import EventHandle, EventOverlap

or, for programs that are not to be edited, `nbep.deep_ep.install()` before their `import deep_ep`.

What differs from `nbep.Buffer` is in `buffer.py`; what differs from DeepEP is in docs/deep_ep.md.

Source: DeepEP v1.2.1, deep_ep/__init__.py; later versions for topk_idx_t
"""

from typing import Any

from nbep.deep_ep.buffer import Buffer
from nbep.deep_ep.installation import install
from nbep.deep_ep.utils import EventHandle, EventOverlap
from nbep.host.config import Config

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap", "install", "topk_idx_t"]

__version__ = "1.2.1"  # of the DeepEP whose interface this is


def __getattr__(name: str) -> Any:
    if name == "topk_idx_t":
        from nbep.deep_ep.cpp import topk_idx_dtype

        return topk_idx_dtype()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
