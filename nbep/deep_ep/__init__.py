"""DeepEP's names: `import nbep.deep_ep as deep_ep` in place of `import deep_ep`.

    from nbep.deep_ep import Buffer, Config
    from nbep.deep_ep.utils import EventHandle, EventOverlap

or, for programs that are not to be edited, `nbep.deep_ep.install()` before their `import deep_ep`.

What differs from `nbep.Buffer` is in `buffer.py`; what differs from DeepEP is in docs/deep_ep.md.

Source: DeepEP v1.2.1, deep_ep/__init__.py; later versions for topk_idx_t; 2.1.0 for ElasticBuffer
"""

from typing import Any

from nbep.deep_ep.buffer import Buffer
from nbep.deep_ep.elastic import ElasticBuffer
from nbep.deep_ep.installation import install
from nbep.deep_ep.utils import EventHandle, EventOverlap
from nbep.host.config import Config
from nbep.host.elastic.buffer import get_logical_domain_size, get_physical_domain_size
from nbep.host.elastic.handle import EPHandle

__all__ = [
    "Buffer",
    "Config",
    "EPHandle",
    "ElasticBuffer",
    "EventHandle",
    "EventOverlap",
    "get_logical_domain_size",
    "get_physical_domain_size",
    "install",
    "topk_idx_t",
]

__version__ = "2.1.0"  # of the DeepEP whose interface this is; Buffer is that of 1.2.1, which 2.1.0 keeps


def __getattr__(name: str) -> Any:
    if name == "topk_idx_t":
        from nbep.deep_ep.cpp import topk_idx_dtype

        return topk_idx_dtype()
    if name == "_C":  # so that `import deep_ep._C as _C` finds it
        from nbep.deep_ep import cpp

        return cpp
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
