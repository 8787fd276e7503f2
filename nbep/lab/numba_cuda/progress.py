"""Says on stderr how far kernels are that take long, from a thread of its own: the run itself notices nothing."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from nbep.emulator.machine.source import kernel_frame

from . import session
from .reports import describe, kernel_name, line

FIRST_S = 5.0  # until the first word, then twice as long each time


@contextmanager
def shown() -> Iterator[None]:
    """Meanwhile say how far kernels are."""
    over = threading.Event()
    threading.Thread(target=_tell, args=(over, threading.get_ident()), daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _tell(over: threading.Event, runs_in: int) -> None:
    began, wait = time.monotonic(), FIRST_S
    while not over.wait(wait):
        wait = time.monotonic() - began
        with suppress(Exception):  # the run goes on meanwhile: what is looked at may be gone
            for text in how_far(wait, sys._current_frames().get(runs_in)):
                print(f"nbep: after {wait:.3g} s: {text}", file=sys.stderr, flush=True)


def how_far(seconds: float, frame: Any) -> Iterator[str]:
    """A line for each kernel under way. frame: where the thread of Python is that runs it"""
    world = session.latest_world()  # without the lock, which the thread that runs kernels has
    for launch in [] if world is None else list(world.launches):
        left = launch.grid - launch.live
        waiting = launch.grid - len(launch.blocks)
        text = f"{kernel_name(launch.name, launch.number)}: {left} of {launch.grid} blocks have left"
        text += f", {waiting} wait for an SM" if waiting else ""
        if left:
            more = seconds * launch.live / left
            text += f"; at this pace it takes {f'{more:.0f} s' if more < 7200 else f'{more / 3600:.0f} hours'} more"
        here, current = kernel_frame(frame), world.current
        if here is not None and "_t" in here.f_code.co_varnames and current.block.launch is launch:
            text += f"; {describe(current)} is at {line((here.f_code, here.f_lasti))}"
        yield text
