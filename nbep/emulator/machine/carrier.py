"""What threads run on: greenlets, which take ten times as long to make as to use again.

A thread takes a carrier when it is made, and leaves it when it has left its kernel. `CURRENT` says who runs.
"""

from __future__ import annotations

import contextvars
import threading
from typing import Any

import numpy as np
from greenlet import greenlet

MOST_IDLE = 1024  # carriers kept by a thread of Python's; each has 16 KB of stack

# The running thread of a kernel; None in what is none.
CURRENT: contextvars.ContextVar[Any] = contextvars.ContextVar("thread", default=None)
_DEVICE_CONTEXT = contextvars.Context()
_DEVICE_CONTEXT.run(np.seterr, all="ignore")  # a GPU raises no floating-point warnings


class Carrier(greenlet):
    """Runs one thread after the other. thread: whom now"""

    __slots__ = ("thread",)

    def __init__(self) -> None:
        greenlet.__init__(self)
        self.gr_context = _DEVICE_CONTEXT.copy()  # type: ignore[misc]
        self.thread: Any = None

    def run(self) -> None:
        carriers = _idle.carriers
        while True:
            thread: Any = self.thread
            CURRENT.set(thread)
            thread.run()
            CURRENT.set(None)
            park = thread.park
            self.thread = thread.carrier = thread.switch = thread = None
            if len(carriers) >= MOST_IDLE:
                return
            carriers.append(self)
            park()


OF_CARRIERS = Carrier.run.__code__  # below all kernels


class _Idle(threading.local):
    """Carriers without a thread. A greenlet stays in the thread of Python's that has made it."""

    def __init__(self) -> None:
        self.carriers: list[Carrier] = []


_idle = _Idle()


def carrier_for(thread: Any, hub: greenlet) -> Carrier:
    """A carrier that runs `thread` when somebody switches to it; an error of the thread comes to the hub."""
    carriers = _idle.carriers
    carrier = carriers.pop() if carriers else Carrier()
    if carrier.parent is not hub:
        carrier.parent = hub
    carrier.thread = thread
    return carrier
