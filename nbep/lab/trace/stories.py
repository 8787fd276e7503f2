"""Stories on the page of a trace: what it tells, step by step. Those of tokens are of a view.

A *station* is a place where what the story is about comes to lie; a step has a caption. A trace in which no view finds
a story has that of values: a wait, the store that ends it, and who goes on.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from nbep.lab.trace.events import Event, Line, readings
from nbep.lab.trace.recorder import Recorder

MOST_STEPS = 10
PARENT = Path(__file__).resolve().parents[3]
HANGS = "The run hangs"
HELPERS = re.compile(r"nbep[/\\]device[/\\](primitives|protocols|network|layout|kernels[/\\]parts)[/\\]")


class Station(NamedTuple):
    """A place where the token lies: in whose memory, and what it is. ring: the title of its ring, if it is a slot."""

    rank: int
    title: str  # "slot 2", "recv_x"
    detail: str  # "of the ring from rank 0"
    ring: str = ""
    slot: int = -1
    kernel: str = ""
    call: int = 0


class Step(NamedTuple):
    """One picture of a story.

    at: the station where the token is; to: the one that it is being moved to, or at
    filled: whether what lies at `to` may be read
    who: rank and role that act; waits: rank and role that wait, or None
    weight: the steps with the least weight are left out if there are too many
    report: what has stopped the run
    """

    step: int
    title: str
    text: str
    at: int
    to: int
    filled: bool
    who: tuple[int, str] | None
    waits: tuple[int, str] | None
    line: Line | None
    weight: int = 0
    report: str = ""


@dataclass
class Story:
    """What the page tells of one token, or of one value. key: the token's rank, its index and its call."""

    title: str
    call: tuple[str, int]
    stations: list[Station] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    key: tuple[int, int, int] | None = None


def hang_of(trace: Recorder, waits: Sequence[Event], channels: Collection[int] = ()) -> Step | None:
    """If the run stopped with somebody waiting: who waits for what, preferably on one of these channels."""
    stuck = [wait for wait in waits if wait.until is None and "[byte" not in wait.cell.text]
    if not stuck:
        return None
    wait = min(stuck, key=lambda each: (each.cell.channel not in channels, each.cell.name != "tail", each.step))
    text = (
        f"{who_of(wait)} waits for `{wait.cell.text}` of rank {wait.cell.owner} and sees "
        f"{number_of(wait)}. Nothing changes it any more: the run hangs here."
    )
    who = wait.rank, wait.role
    return Step(trace.last_step, HANGS, text, 0, 0, True, None, who, line_of(wait), weight=9)


def with_finding(story: Story, trace: Recorder) -> Story:
    """The same with a last step that says what has stopped the run, if something has."""
    error = trace.error
    if error is None:
        return story
    report = str(error).replace(f"{PARENT}{os.sep}", "").replace(f"{Path.cwd()}{os.sep}", "")
    if story.steps and story.steps[-1].title == HANGS:
        return replace(story, steps=[*story.steps[:-1], story.steps[-1]._replace(report=report)])
    finding = next(iter(trace.events("finding")), None)
    who = None if finding is None else (finding.rank, finding.role)
    at = story.steps[-1].to if story.steps else 0
    stations = story.stations or [Station(0 if who is None else who[0], "the run", "")]
    text = f"{type(error).__name__} stops the run here."
    line = None if finding is None else line_of(finding)
    step = Step(trace.last_step, "The finding", text, at, at, True, who, None, line, 9, report)
    return replace(story, stations=stations, steps=[*story.steps, step])


def stories_of_values(trace: Recorder) -> Iterator[Story]:
    """Where no token can be followed: values that somebody waited for, each stored and then seen."""
    events = trace.events()
    waits = [event for event in events if event.what == "wait"]
    story = Story("values that ranks wait for", ("", 0))
    pairs = [(events[pair.stored], events[pair.seen]) for pair in readings(events)]
    ended = {
        pair: [w for w in waits if w.cell == pair[0].cell and w.rank == pair[1].rank and w.step <= pair[0].step]
        for pair in pairs
    }
    for stored, seen in [pair for pair in pairs if ended[pair]] or pairs:
        if len(story.steps) > MOST_STEPS - 3:
            break
        at = len(story.stations)
        story.call = (stored.kernel, stored.call)
        story.stations += [
            Station(stored.rank, "value", f"{number_of(stored)}"),
            Station(stored.cell.owner, stored.cell.name, stored.cell.text),
        ]
        name = stored.cell.text
        stores_text = f"{who_of(stored)} writes {number_of(stored)} to `{name}`."
        sees_text = f"Rank {seen.rank} sees {number_of(seen)} and goes on."
        by, to = (stored.rank, stored.role), (seen.rank, seen.role)
        for wait in ended[stored, seen][-1:]:
            text = f"{who_of(wait)} polls `{name}` of rank {stored.cell.owner} and sees {number_of(wait)}."
            story.steps.append(Step(wait.step, "A wait", text, at, at, True, None, to, line_of(wait), 9))
        story.steps += [
            Step(stored.step, "A store", stores_text, at, at + 1, True, by, None, line_of(stored), 9),
            Step(seen.step, "It is seen", sees_text, at + 1, at + 1, True, to, None, line_of(seen), 9),
        ]
    hang = hang_of(trace, waits)
    if hang is not None:
        story.stations = story.stations or [Station(hang.waits[0] if hang.waits else 0, "cell", "without a store")]
        story.steps.append(hang)
    if story.steps:
        yield story


def number_of(event: Event) -> str:
    return str(value_of(event))


def value_of(event: Event) -> int | str:
    """A value as it is shown."""
    value = event.cell.value(event.value)
    return int(value) if isinstance(value, int) and abs(value) < 1 << 53 else str(value)


def who_of(event: Event) -> str:
    return f"The {event.role} of rank {event.rank}"


def line_of(event: Event) -> Line | None:
    """The line of the role itself; None if the trace knows only that of a helper, as of a bulk copy."""
    return next((line for line in event.at if not HELPERS.search(line.file)), None)


def line_of_role(lines: tuple[Line, ...]) -> int:
    """Of lines, innermost first, the place of the first that is in no helper; 0 if all are."""
    return next((place for place, line in enumerate(lines) if not HELPERS.search(line.file)), 0)


def as_json(story: Story, number_of_line: Any) -> dict[str, Any]:
    """A story for the page. number_of_line: the place of a line in the page's table."""
    steps = [{**step._asdict(), "line": -1 if step.line is None else number_of_line(step.line)} for step in story.steps]
    return {
        "title": story.title,
        "kernel": story.call[0],
        "call": story.call[1],
        "key": story.key,
        "stations": [station._asdict() for station in story.stations],
        "steps": steps,
    }
