"""A run again, under pdb: it stops at the step that fails, with all threads where they stand."""

from __future__ import annotations

import pdb
from types import FrameType, TracebackType
from typing import Any

from nbep.check.runs import Run, World, perform, text_of
from nbep.emulator import DeadlockError
from nbep.emulator.machine.source import kernel_frame
from nbep.emulator.schedule.strategies import Strategy


def debug(run: Run, strategy: Strategy | None = None) -> bool:
    """Run it with pdb at the step that fails. Returns whether one did."""
    seen = World()

    def stop(error: BaseException) -> None:
        print(text_of(error))
        trace = stop_of(error, seen.world)
        if trace is not None:
            pdb.post_mortem(trace)

    return perform(run, stop, seen, strategy) is not None


def stop_of(error: BaseException, world: Any) -> TracebackType | None:
    """Where pdb stops: at the kernel's line that failed; in a deadlock, at that of a thread that waits for a cell."""
    if isinstance(error, DeadlockError):
        waiting = [thread for thread in world.polling if thread.gr_frame is not None]
        return trace_of(kernel_frame(waiting[0].gr_frame)) if waiting else error.__traceback__
    frames = []
    trace = error.__traceback__
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    while len(frames) > 1 and kernel_frame(frames[-1].tb_frame) is not frames[-1].tb_frame:
        frames.pop()
    result: TracebackType | None = None
    for part in reversed(frames):
        result = TracebackType(result, part.tb_frame, part.tb_lasti, part.tb_lineno)
    return result


def trace_of(frame: FrameType | None) -> TracebackType | None:
    """A traceback that ends at a frame which is not running."""
    result: TracebackType | None = None
    while frame is not None:
        result = TracebackType(result, frame, frame.f_lasti, frame.f_lineno)
        frame = frame.f_back
    return result
