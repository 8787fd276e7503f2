"""Every schedule of a puzzle, with few rows, calls or the like: a wrong step that seeds seldom meet shows there.

docs/every_schedule.md says what "every" means.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from nbep.check.every import next_run
from nbep.check.schedule_file import BROKEN, tree_in
from nbep.emulator.schedule.every import Every, Tree
from nbep.emulator.schedule.every_loops import Endless
from nbep.emulator.schedule.every_step import Replay
from nbep.emulator.schedule.strategies import Strategy
from nbep.puzzle.frame import Clue, Puzzle

RUNS = 400  # at most, so that a check stays short
MINUTES = 2.0  # a check that takes longer says so, and is no proof
Attempt = Callable[[Puzzle, Strategy], Clue | None]


class Seen(NamedTuple):
    """What the schedules have shown.

    words: which were run
    is_whole: whether all were; is_over: whether as many were as there should be, and all were right
    clue, replay: of the one that went wrong, and what makes it again
    """

    words: str
    is_whole: bool
    is_over: bool = True
    clue: Clue | None = None
    replay: Replay | None = None


def explore(puzzle: Puzzle, attempt: Attempt, minutes: float = MINUTES) -> Seen:
    """Run every schedule of the puzzle made smaller, or as many as `RUNS`: the same ones on each machine."""
    number, what = puzzle.few or (0, "")
    of = f" of {number} {what}" if what else ""
    if puzzle.has_too_many_schedules:
        return Seen("There are too many schedules to run each of them.", False)
    small, tree = puzzle.made_smaller(), Tree()
    tree.end_time = time.monotonic() + 60 * minutes
    try:
        while tree.schedules + tree.redundant < RUNS and tree.begin():
            if clue := next_run(tree, lambda strategy: attempt(small, strategy)):
                return Seen(f"Schedule {tree.schedules + 1}{of} is wrong.", False, False, clue, tree.replay)
    except Endless as error:
        return Seen(f"A schedule{of} does not end: {error}", False, False)
    if tree.is_whole:
        return Seen(f"the only schedule{of}" if tree.schedules == 1 else f"all {tree.schedules} schedules{of}", True)
    if tree.schedules + tree.redundant >= RUNS:
        return Seen(f"There are too many schedules{of} to run each; {tree.schedules} were run.", False)
    ran = f"{tree.schedules} of at least {tree.schedules + max(tree.num_left, 1)} schedules{of} were run"
    return Seen(f"Out of time: {ran} in {minutes:g} minutes. For more time: --minutes N.", False, False)


def write(replay: Replay, file: Path) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(replay._asdict()) + "\n")


def read(file: Path) -> Every:
    """The strategy that runs a schedule of a file again.

    Raises: ValueError if it is none
    """
    try:
        return Every(tree_in(json.loads(file.read_text())))
    except BROKEN as error:
        raise ValueError(f"{file}: no schedule of a puzzle: {error}") from None
