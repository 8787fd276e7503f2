"""The page of a trace: one HTML file that needs nothing else, neither a network nor a server.

here       the run as JSON: events in columns; rings, halves and queues, slot by slot
page.html  the parts of the page                        page.css   how they look
run.js     what can be asked of the data                rows.js    ranks, roles and warps
timeline.js, slots.js, now.js    draw, on canvases, what is there at a step        main.js   keys, pointer, slider
story.js   one token, step by step: what the page opens on; a view, or `stories_of_values`, has made it from the events

A *station* of a story is a place where what it is about comes to lie; a step has a caption. A trace in which no view
finds a story has that of values: a wait, the store that ends it, and who goes on.
"""

from __future__ import annotations

import html
import inspect
import json
import linecache
import os
import re
from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from itertools import islice
from math import inf
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from nbep.emulator.machine.names import NIC_NUMBERS
from nbep.lab.trace.events import Event, Line, readings
from nbep.lab.trace.recorder import Recorder
from nbep.lab.trace.table import EntryLife, all_lives
from nbep.lab.trace.view import views

MOST_STEPS = 10
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


SCRIPTS = ("run.js", "rows.js", "timeline.js", "slots.js", "now.js", "story.js", "main.js")


class Page:
    """A page of a run. A notebook shows it when it is the last value of a cell; `save` writes it to a file.

    Attributes: html: the whole page
    """

    def __init__(self, trace: Recorder, height: int = 760):
        self.html = page_html(trace)
        self._height = height

    def __repr__(self) -> str:
        return "<the page of a trace: a notebook shows it, save(path) writes it>"

    def save(self, path: str | PathLike[str]) -> Path:
        """Write the page; the path of the file."""
        path = Path(path)
        path.write_text(self.html, encoding="utf-8")
        return path

    def _repr_html_(self) -> str:
        style = f"width:100%;height:{self._height}px;border:0"
        return f'<iframe srcdoc="{html.escape(self.html)}" style="{style}"></iframe>'


def page_html(trace: Recorder) -> str:
    """The page as text: its parts put together, and the run in it."""
    # "<" would end the script; in JSON it stands in strings alone.
    data = json.dumps(page_data(trace), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    text = _part("page.html").replace("/* STYLE */", _part("page.css"))
    text = text.replace("/* SCRIPT */", "".join(map(_part, SCRIPTS)))
    return text.replace("/* DATA */", data)


def _part(name: str) -> str:
    return files(__name__).joinpath(name).read_text(encoding="utf-8")


# What the page shows, as JSON: events in columns, and tables of what their numbers mean.
#
# Steps are differences from the event before. Numbers of other columns are places in the tables of the same name:
#
#  threads   rank, role, block, warp: a row of the timeline
#  stacks    places in lines, innermost first; lines: place in sources, and the number in its file
#  exits     rank, call, block, warp, and the step at which all of it has left
#  readings  places of two events: a store, and the look that reads it


KINDS = ("store", "atomic", "fill", "see", "wait", "hang", "finding")
NOT_YET = -1
ALL = "all threads"  # the role of a kernel's threads that all do the same
LONGEST = 400  # lines of a source that the page carries
PARENT = Path(__file__).resolve().parents[4]


class _Table(dict[Hashable, int]):
    """Numbers values as they come."""

    def number(self, value: Hashable) -> int:
        return self.setdefault(value, len(self))


def page_data(trace: Recorder) -> dict[str, Any]:
    """All that the page knows of a run."""
    events = sorted([*trace.events(), *trace.hangs()], key=lambda event: event.step)
    calls, threads, cells, orders, stacks, lines = (_Table() for _ in range(6))
    launches = [
        [each.rank, calls.number((each.kernel, each.call)), each.begin, _until(each.end), each.half, each.phases]
        for each in trace.launches
    ]
    columns: dict[str, list[Any]] = {
        "step": [event.step - before.step for before, event in zip([*events[:1], *events], events, strict=False)],
        "kind": [KINDS.index(event.what) for event in events],
        "thread": [threads.number(_thread(event)) for event in events],
        "lane": [event.thread % 32 for event in events],
        "call": [calls.number((event.kernel, event.call)) for event in events],
        "cell": [cells.number((event.cell.owner, event.cell.text)) for event in events],
        "value": [value_of(event) for event in events],
        "order": [orders.number(event.order) for event in events],
        "until": [_until(event.until) if event.what in ("wait", "hang", "finding") else 0 for event in events],
        "stack": [stacks.number(tuple(map(lines.number, event.at))) for event in events],
    }
    if events:
        columns["step"][0] = events[0].step
    exits = [
        [rank, calls.number((kernel, call)), *place, step]
        for (rank, kernel, call, *place), step in trace.exits().items()
    ]
    arrows: dict[tuple[int, int], tuple[int, int]] = {}  # the first look of each warp at a store
    for stored, seen in readings(events):
        arrows.setdefault((stored, columns["thread"][seen]), (stored, seen))
    stories = [as_json(story, lines.number) for story in all_stories(trace)]
    every = list(lines)
    sources = _Table()
    numbered = [[sources.number((line.file, line.begin, line.function)), line.number] for line in lines]  # type: ignore
    return {
        "title": repr(trace).strip("<>"),
        "numRanks": trace.num_ranks,
        "lastStep": max([trace.last_step, *(event.step for event in events)]),
        "nicNumbers": NIC_NUMBERS,
        "kinds": KINDS,
        "launches": launches,
        "exits": exits,
        "calls": list(calls),
        "threads": list(threads),
        "cells": list(cells),
        "orders": list(orders),
        "stacks": list(stacks),
        "lines": numbered,
        "sources": [_source(*key) for key in sources],  # type: ignore[misc]
        "events": columns,
        "readings": {
            "stored": [stored for stored, _ in arrows.values()],
            "seen": [seen for _, seen in arrows.values()],
        },
        "stories": stories,
        "roleLines": [line_of_role(tuple(every[number] for number in stack)) for stack in stacks],  # type: ignore
        "slots": [
            {**each._asdict(), "changes": [list(column) for column in zip(*each.changes, strict=True)]}
            for each in all_slots(trace)
        ],
    }


def all_stories(trace: Recorder) -> list[Story]:
    """The stories of a run; the first one is the one that shows most."""
    stories = [story for view in views() for story in view.stories(trace)]
    stories = stories or list(islice(stories_of_values(trace), 1))
    return [
        with_finding(story, trace)
        for story in stories or [Story("how the run ends", ("", 0))][: trace.error is not None]
    ]


def _until(step: int | None) -> int:
    return NOT_YET if step is None else step


def _thread(event: Event) -> tuple[int, str, int, int]:
    role = ALL if event.role == event.kernel else event.role
    return event.rank, role, event.block, event.thread // 32


def _source(file: str, begin: int, function: str) -> dict[str, Any]:
    """A function as text; no text where the file is not there."""
    lines = linecache.getlines(file)[begin - 1 :]
    block = inspect.getblock(lines)[:LONGEST] if lines else []
    path = Path(file)
    name = str(path.relative_to(PARENT)) if path.is_relative_to(PARENT) else path.name
    return {"file": name, "function": function, "begin": begin, "text": "".join(block).rstrip("\n")}


# What is in slots over time: rings, the halves of the low-latency mode, and send queues.
#
# ring    a slot is being filled, then a tail publishes it, then a head gives it back
# half    a message or a row is there, until the launch ends that receives its call
# queue   an entry is reserved, then the doorbell rings for it, then it is done


EMPTY, FILLING, FULL = range(3)
Change = tuple[int, int, int, str]  # step, slot, state, and what is in the slot


class Slots(NamedTuple):
    """A row of slots, and what happens to them. source: the rank that fills them."""

    kind: str  # "ring", "half" or "queue"
    rank: int  # in whose memory they are
    title: str
    source: int
    kernel: str
    call: int
    begin: int
    end: int
    count: int  # type: ignore[assignment]  # hides the method of tuples, which is not called
    changes: list[Change]


def all_slots(trace: Recorder) -> list[Slots]:
    """Everything in a run that has slots, in the order in which it is shown."""
    return [*(slots for view in views() for slots in view.slots(trace)), *_queues(trace)]


def _queues(trace: Recorder) -> Iterator[Slots]:
    for (rank, peer, queue), lives in sorted(all_lives(trace).items()):
        count = _most_at_once(lives)
        changes: list[Change] = []
        for life in lives:
            text = f"entry {life.number}"
            for step, state in ((life.reserved, FILLING), (life.rung, FULL), (life.done, EMPTY)):
                if step is not None:
                    changes.append((step, life.number % count, state, text))
        changes.sort(key=lambda change: change[0])
        title = f"send queue {queue} to rank {peer}"
        yield Slots("queue", rank, title, rank, "", 0, changes[0][0], trace.last_step, count, changes)


def _most_at_once(lives: list[EntryLife]) -> int:
    """So many entries, from the first that is not done to the last that is reserved, that each has a place."""
    most, first = 1, 0
    for life in lives:
        while first < life.number and life.reserved is not None and (lives[first].done or inf) < life.reserved:
            first += 1
        most = max(most, life.number + 1 - first)
    return most
