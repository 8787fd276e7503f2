"""What programs import from deep_ep_cpp: `import nbep.deep_ep.cpp as deep_ep_cpp`. Its Buffer is `Buffer.runtime`.

Source: DeepEP csrc/deep_ep.cpp, PYBIND11_MODULE
"""

import sys
from typing import Any

import numpy as np

from nbep.host import buffer
from nbep.host.config import Config
from nbep.host.events import EventHandle

__all__ = ["Config", "EventHandle", "get_low_latency_rdma_size_hint", "is_sm90_compiled"]

get_low_latency_rdma_size_hint = buffer.Buffer.get_low_latency_rdma_size_hint
is_sm90_compiled = buffer.Buffer.is_sm90_compiled


def topk_idx_dtype() -> Any:
    """The dtype of topk_idx: torch's where torch is in use, else NumPy's."""
    torch = sys.modules.get("torch")
    return np.dtype(np.int64) if torch is None else torch.int64


def __getattr__(name: str) -> Any:
    if name == "topk_idx_t":
        return topk_idx_dtype()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
