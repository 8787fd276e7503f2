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
from nbep.check.schedule_file import tree_in
from nbep.emulator.schedule.every import Every, Tree
from nbep.emulator.schedule.every_step import Replay
from nbep.emulator.schedule.strategies import Strategy
from nbep.puzzle.frame import Clue, Puzzle

RUNS, SECONDS = 400, 3.0  # at most, so that a check stays short
Attempt = Callable[[Puzzle, Strategy], Clue | None]


class Seen(NamedTuple):
    """What the schedules have shown.

    words: which were run
    clue, replay: of the one that went wrong, and what makes it again
    """

    words: str
    is_whole: bool
    clue: Clue | None = None
    replay: Replay | None = None


def explore(puzzle: Puzzle, attempt: Attempt) -> Seen:
    """Run every schedule of the puzzle made smaller, as far as there is time."""
    number, what = puzzle.few or (0, "")
    of = f" of {number} {what}" if what else ""
    if puzzle.has_too_many_schedules:
        return Seen("There are too many schedules to run each of them.", False)
    small, tree, end = puzzle.made_smaller(), Tree(), time.monotonic() + SECONDS
    while tree.begin():
        if clue := next_run(tree, lambda strategy: attempt(small, strategy)):
            return Seen(f"Schedule {tree.schedules + 1}{of} is wrong.", False, clue, tree.replay)
        if not tree.is_whole and (tree.schedules + tree.redundant >= RUNS or time.monotonic() > end):
            return Seen(f"There are too many schedules{of} to run each; {tree.schedules} were run.", False)
    return Seen(f"the only schedule{of}" if tree.schedules == 1 else f"all {tree.schedules} schedules{of}", True)


def write(replay: Replay, file: Path) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(replay._asdict()) + "\n")


def read(file: Path) -> Every:
    """The strategy that runs a schedule of a file again.

    Raises: ValueError if it is none
    """
    try:
        return Every(tree_in(json.loads(file.read_text())))
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise ValueError(f"{file}: no schedule of a puzzle: {error}") from None
