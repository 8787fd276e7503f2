"""A clock for waits between processes: it does not run while this process stands still.

A job that is stopped as a whole and goes on has missed nothing: its peers stood still, too. By the time of day all
of its waits would have timed out.
"""

from __future__ import annotations

import time

LONGEST_STEP_NS = 100_000_000  # far above the pauses between two looks at the clock


class RunningClock:
    """Nanoseconds, of which no more than LONGEST_STEP_NS pass between two looks. For one thread."""

    def __init__(self) -> None:
        self._latest = time.monotonic_ns()
        self._skipped = 0

    def now(self) -> int:
        latest = time.monotonic_ns()
        step = latest - self._latest
        if step > LONGEST_STEP_NS:
            self._skipped += step - LONGEST_STEP_NS
        self._latest = latest
        return latest - self._skipped
