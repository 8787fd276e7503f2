"""In, Out and InOut: which way an array of the host is copied at a launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np


class ArgHint:
    def __init__(self, value: Any):
        self.value = value

    def prepare(self, stream: Any, back: list[Callable[[], None]]) -> Any:
        raise NotImplementedError


def wrap_arg(value: Any, default: Any = None) -> ArgHint:
    """The hint of an argument: InOut if it has none."""
    return value if isinstance(value, ArgHint) else (default or InOut)(value)


class In(ArgHint):
    """An array that kernels read."""

    def prepare(self, stream: Any, back: list[Callable[[], None]]) -> Any:
        from .launch import copied

        return copied(np.asarray(self.value), stream, back, False)


class Out(ArgHint):
    """An array that kernels write: what was in it does not come to them."""

    def prepare(self, stream: Any, back: list[Callable[[], None]]) -> Any:
        from .memory import DeviceNDArray

        order = "F" if self.value.flags.f_contiguous and not self.value.flags.c_contiguous else "C"
        device = DeviceNDArray.new(self.value.shape, self.value.dtype, order)
        back.append(lambda: device._read_into(self.value))
        return device


class InOut(ArgHint):
    """An array that goes both ways."""

    def prepare(self, stream: Any, back: list[Callable[[], None]]) -> Any:
        from .launch import copied

        return copied(self.value, stream, back, True)
