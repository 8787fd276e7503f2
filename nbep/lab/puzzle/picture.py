"""The picture of a puzzle's run: who writes a cell and who waits for it, or which threads touch which elements."""

from __future__ import annotations

from pathlib import Path

from nbep.lab.puzzle import check
from nbep.lab.puzzle.check import read_schedule
from nbep.lab.puzzle.frame import Clue, Puzzle
from nbep.lab.trace import Trace
from nbep.lab.trace.events import Event
from nbep.lab.trace.space_time import SHOWN_CELLS, Lanes, Touches, draw_lanes, show_steps, title
from nbep.lab.trace.style import INK, RANK_COLORS, SMALL, TINY, Picture, count_steps, plain_axes


def draw(puzzle: Puzzle, seed: int, memory_model: str, schedule: Path | None = None) -> Picture:
    """One run as a picture.

    Args: schedule: the file of one with few rows, in place of a seed
    Raises: ValueError if no thread came to the cell that the picture is about
    """
    if schedule is not None:
        puzzle = puzzle.made_smaller()

    def attempt(seed: int, tracer: Trace | Touches) -> Clue | None:
        strategy = "uniform" if schedule is None else read_schedule(schedule)
        return check.attempt(puzzle, seed, memory_model, tracer, strategy)

    if puzzle.ring:
        trace = Trace()
        wrong = attempt(seed, trace)
        for other in range(seed + 1, seed + 16):  # of right runs one in which the sender waits
            if wrong or any(event.rank == 0 for event in trace.events("wait", cell=puzzle.ring[1])):
                break
            trace = Trace()
            wrong = attempt(other, trace)
        return draw_ring(puzzle, trace)
    if puzzle.shows:
        trace = Trace()
        attempt(seed, trace)
        return trace.plot_cells(puzzle.shows)
    inputs = puzzle.parameter_names[len(puzzle.output_names) :][: len(puzzle.inputs(0))]
    touches = Touches(inputs, ["shared memory", *puzzle.output_names])
    attempt(seed, touches)
    return touches.plot()


def draw_ring(puzzle: Puzzle, trace: Trace) -> Picture:
    """The two ends of a ring: who moves its counters, who waits, and which row is in which slot.

    Raises: ValueError if neither counter was touched
    """
    tail, head = puzzle.ring
    events = [event for event in trace.events(SHOWN_CELLS) if event.cell.name in puzzle.ring]
    if not events:
        raise ValueError("puzzle: no thread came to its ring")
    picture = Picture(9.5, 4.2)
    lanes, slots = picture.subplots(2, 1, sharex=True, height_ratios=(1.7, 1.2))
    begin = min(event.step for event in events)
    margin = (trace.last_step - begin) // 20 + 1
    show_steps(lanes, begin - margin, trace.last_step + margin)
    names = ["sender\nrank 0", "receiver\nrank 1"]
    draw_lanes(lanes, Lanes(names, lambda event: event.rank, lambda _: True), events, trace.last_step)
    plain_axes(slots)
    for row, since, until in rows_in_slots(events, tail, head):
        slot, end = puzzle.num_slots - 1 - row % puzzle.num_slots, trace.last_step if until is None else until
        slots.barh(slot, end - since, 0.7, since, color=RANK_COLORS[row % len(RANK_COLORS)], alpha=0.5)
        slots.text((since + end) / 2, slot, str(row), fontsize=TINY, color=INK, ha="center", va="center")
    slots.set_yticks(
        range(puzzle.num_slots), [f"slot {puzzle.num_slots - 1 - slot}" for slot in range(puzzle.num_slots)]
    )
    slots.set_xlabel("")
    count_steps(slots)
    text = (
        "A bar is a row in its slot, from the tail that says that it is there to the head that says that it was read."
    )
    slots.set_title(text, loc="left", fontsize=SMALL, color=INK)
    title(lanes, "The ring from rank 0 to rank 1: its tail, its head, and who waits")
    return picture


def rows_in_slots(events: list[Event], tail: str, head: str) -> list[tuple[int, int, int | None]]:
    """Each row that was sent: its number, the step of the tail behind it, and that of the head, if it came."""
    since: dict[int, int] = {}
    until: dict[int, int] = {}
    for event in events:
        if event.what in ("store", "atomic"):
            steps = since if event.cell.name == tail else until
            for row in range(min(event.value, 1 << 12)):
                steps.setdefault(row, event.step)
    return [(row, step, until.get(row)) for row, step in since.items()]


def save(puzzle: Puzzle, path: Path, seed: int, memory_model: str, schedule: Path | None = None) -> bool:
    """Save the picture of a run; whether there was anything to draw."""
    try:
        picture = draw(puzzle, seed, memory_model, schedule)
    except ValueError:
        return False
    path.parent.mkdir(exist_ok=True)
    picture.savefig(path)
    return True
