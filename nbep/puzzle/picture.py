"""The picture of a puzzle's run: who writes a cell and who waits for it, or which threads touch which elements."""

from __future__ import annotations

from pathlib import Path

from nbep.puzzle.check import attempt
from nbep.puzzle.frame import Puzzle
from nbep.trace import Trace
from nbep.trace.style import Picture
from nbep.trace.touches import Touches


def draw(puzzle: Puzzle, seed: int, memory_model: str) -> Picture:
    """One run as a picture.

    Raises: ValueError if nobody came to the cell that the picture is about
    """
    if puzzle.shows:
        trace = Trace()
        attempt(puzzle, seed, memory_model, trace)
        return trace.plot_cells(puzzle.shows)
    inputs = puzzle.parameter_names[len(puzzle.output_names) :][: len(puzzle.inputs(0))]
    touches = Touches(inputs, ["shared memory", *puzzle.output_names])
    attempt(puzzle, seed, memory_model, touches)
    return touches.plot()


def save(puzzle: Puzzle, path: Path, seed: int, memory_model: str) -> bool:
    """Save the picture of a run; whether there was anything to draw."""
    try:
        picture = draw(puzzle, seed, memory_model)
    except ValueError:
        return False
    path.parent.mkdir(exist_ok=True)
    picture.savefig(path)
    return True
