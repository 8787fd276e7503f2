"""A buffer's stream as torch knows streams."""

from __future__ import annotations

import sys
from typing import Any


def torch_stream(stream: Any) -> Any:
    """The stream; for torch one of its own class, which record_stream takes."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(stream, "cuda_stream"):
        return stream
    return torch.cuda.ExternalStream(stream.cuda_stream, device=stream.ordinal)
