"""The picture of a puzzle's run: who writes a cell and who waits for it, or which threads touch which elements."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nbep.puzzle.check import attempt
from nbep.puzzle.frame import Puzzle
from nbep.trace import Trace
from nbep.trace.style import FAINT, HEAD_COLOR, INK, SMALL, TAIL_COLOR, TINY, Picture

MOST_CELLS = 64  # of an array, and threads: beyond, several share a place


SHARED = "shared memory"


class Touches:
    """A tracer that keeps which thread of rank 0 has touched which bytes of which array, itself or by a bulk copy."""

    def __init__(self, names: list[str], block_dim: int):
        self.names = names
        self.block_dim = block_dim
        self.found: dict[tuple[str, bool, int, int], None] = {}  # (array, is a store, byte, thread): an ordered set
        self.sizes: dict[str, int] = {}

    def on_load(self, thread: Any, allocation: Any, offset: int, *_: Any) -> None:
        self._keep(thread, allocation, offset, False)

    def on_store(self, thread: Any, allocation: Any, offset: int, *_: Any) -> None:
        self._keep(thread, allocation, offset, True)

    def on_atomic(self, thread: Any, allocation: Any, offset: int, *_: Any) -> None:
        self._keep(thread, allocation, offset, True)

    def on_copy(self, thread: Any, allocation: Any, offset: int, data: bytes) -> None:
        for at in range(offset, offset + len(data), 4):
            self._keep(thread, allocation, at, True)

    def _keep(self, thread: Any, allocation: Any, offset: int, is_store: bool) -> None:
        if thread.rank == 0 and allocation.name in self.names:
            self.sizes[allocation.name] = allocation.nbytes
            index = thread.block_idx * self.block_dim + thread.thread_idx
            self.found[allocation.name, is_store, offset, index] = None


def draw(puzzle: Puzzle, seed: int, memory_model: str) -> Picture:
    """One run as a picture."""
    if not puzzle.shows:
        return touches_picture(puzzle, seed, memory_model)
    trace = Trace()
    attempt(puzzle, seed, memory_model, trace)
    return trace.plot_cells(puzzle.shows)


def touches_picture(puzzle: Puzzle, seed: int, memory_model: str) -> Picture:
    """Rank 0's arrays and threads: a line from what is read to its reader, and from a writer to what it writes."""
    names = list(puzzle.kernel.__annotations__)
    outputs = puzzle.output_names
    inputs = names[len(outputs) : len(outputs) + len(puzzle.inputs(0))]
    touches = Touches([*outputs, *inputs, SHARED], puzzle.block)
    attempt(puzzle, seed, memory_model, touches)
    places = [name for name in inputs if name in touches.sizes]
    below = [name for name in (SHARED, *outputs) if name in touches.sizes]
    rows = [*places, "threads", *below]
    picture = Picture(9.5, 0.5 + 0.9 * len(rows))
    axes = picture.subplots()
    num_threads = puzzle.grid * puzzle.block

    def at(name: str, index: float, count: int) -> tuple[float, float]:
        return (index + 0.5) / count, -rows.index(name)

    for name, is_store, offset, thread in touches.found:
        x0, y0 = at(name, offset // 4, max(touches.sizes[name] // 4, 1))
        x1, y1 = at("threads", thread, num_threads)
        axes.plot([x0, x1], [y0, y1], color=HEAD_COLOR if is_store else TAIL_COLOR, linewidth=0.5, alpha=0.6, zorder=1)
    for name in rows:
        count = min(MOST_CELLS, num_threads if name == "threads" else max(touches.sizes[name] // 4, 1))
        xs = [(index + 0.5) / count for index in range(count)]
        axes.scatter(xs, [-rows.index(name)] * count, s=26, marker="s", color="white", edgecolor=INK, zorder=2)
        axes.text(-0.01, -rows.index(name), name, ha="right", va="center", fontsize=SMALL, color=INK)
    axes.set_title("rank 0: read (blue), written (red)", loc="left", fontsize=TINY, color=FAINT)
    axes.set_xlim(-0.12, 1.02)
    axes.axis("off")
    return picture


def save(puzzle: Puzzle, path: Path, seed: int, memory_model: str) -> bool:
    """Save the picture of a run; whether there was anything to draw."""
    try:
        picture = draw(puzzle, seed, memory_model)
    except ValueError:  # nobody came to the cell
        return False
    path.parent.mkdir(exist_ok=True)
    picture.savefig(path)
    return True
