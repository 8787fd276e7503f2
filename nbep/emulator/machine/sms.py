"""The SMs of a rank: each holds one block, so a launch with more blocks than free SMs waits for some to end."""

from __future__ import annotations

import sys
from collections import deque
from typing import Any

UNLIMITED = sys.maxsize


class Sms:
    """Blocks take an SM, or their share of it, when they start, and give it back when their last thread has left.

    Launches take SMs in the order in which their streams reach them: block by block, or, for one that starts together
    (a cooperative launch), all of its blocks at once. Those behind wait for the first.
    """

    def __init__(self, number: int = UNLIMITED):
        self.number = number
        self.held = 0
        self.waiting: deque[Any] = deque()  # launches with blocks that have not started

    def start(self, launch: Any) -> None:
        """Start the blocks of a launch, or have them wait."""
        self.waiting.append(launch)
        self.fill()

    def fill(self) -> None:
        """Start as many of the waiting blocks as there are free SMs."""
        while self.waiting:
            launch = self.waiting[0]
            needed = launch.grid if launch.starts_together else 1
            if self.held + needed * launch.share > self.number:
                return
            self.held += needed * launch.share
            for _ in range(needed):
                launch.start_block()
            if len(launch.blocks) == launch.grid:
                self.waiting.popleft()

    def block_left(self, launch: Any) -> None:
        """A block has given its SM back."""
        self.held -= launch.share
        if self.waiting:
            launch.world.submit(self.fill)
