"""What the page shows, as JSON: events in columns, and tables of what their numbers mean.

Steps are differences from the event before. Numbers of other columns are places in the tables of the same name:

 threads   rank, role, block, warp: a row of the timeline
 stacks    places in lines, innermost first; lines: place in sources, and the number in its file
 exits     rank, call, block, warp, and the step at which all of it has left
 readings  places of two events: a store, and the look that reads it
"""

from __future__ import annotations

import inspect
import linecache
from collections.abc import Hashable, Iterable
from itertools import islice
from pathlib import Path
from typing import Any

from nbep.emulator.machine.names import NIC_NUMBERS
from nbep.trace.events import Event
from nbep.trace.page.slots import all_slots
from nbep.trace.readings import readings
from nbep.trace.recorder import Recorder
from nbep.trace.stories import Story, as_json, line_of_role, stories_of_values, value_of, with_finding
from nbep.trace.view import views

KINDS = ("store", "atomic", "fill", "see", "wait", "hang", "finding")
NOT_YET = -1
ALL = "all threads"  # the role of a kernel's threads that all do the same
LONGEST = 400  # lines of a source that the page carries
PARENT = Path(__file__).resolve().parents[3]


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
    arrows = _one_for_each_warp(readings(events), columns["thread"])
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
        "readings": {"stored": [pair[0] for pair in arrows], "seen": [pair[1] for pair in arrows]},
        "stories": stories,  # see `trace.stories`
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


def _one_for_each_warp(pairs: Iterable[tuple[int, int]], threads: list[int]) -> list[tuple[int, int]]:
    """The first look of each warp at a store: where 32 lanes look, one arrow says it."""
    first: dict[tuple[int, int], tuple[int, int]] = {}
    for stored, seen in pairs:
        first.setdefault((stored, threads[seen]), (stored, seen))
    return list(first.values())


def _source(file: str, begin: int, function: str) -> dict[str, Any]:
    """A function as text; no text where the file is not there."""
    lines = linecache.getlines(file)[begin - 1 :]
    block = inspect.getblock(lines)[:LONGEST] if lines else []
    path = Path(file)
    name = str(path.relative_to(PARENT)) if path.is_relative_to(PARENT) else path.name
    return {"file": name, "function": function, "begin": begin, "text": "".join(block).rstrip("\n")}
