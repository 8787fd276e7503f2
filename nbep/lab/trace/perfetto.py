"""A run in the trace event format, which ui.perfetto.dev and chrome://tracing show.

 process    a rank, or the NIC of one
 thread     a role; where waits of a role overlap, it has several: "receiver", "receiver 2"
 slice      a launch, a wait, a store or a look that reads one; a step of the emulator is a microsecond
 flow       from a store to who reads it
 counter    how many slots of a ring are in use

The format: "Trace Event Format", by the authors of Catapult; phases X, s, f, C and M are used.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from nbep.emulator.machine.names import NIC_NUMBERS
from nbep.lab.trace.events import Event, Launch, Line, readings
from nbep.lab.trace.recorder import Recorder
from nbep.lab.trace.table import describe, who
from nbep.lab.trace.view import views

KERNELS = "kernels"
PACKAGE_PARENT = Path(__file__).resolve().parents[3]


class _Slice(NamedTuple):
    """What is shown as a bar: in one thread no two overlap."""

    begin: int
    end: int
    rank: int
    role: str
    name: str
    category: str
    args: dict[str, Any]


def timeline(trace: Recorder) -> dict[str, Any]:
    """The run as the format's JSON object."""
    events = sorted([*trace.events(), *trace.hangs()], key=lambda event: event.step)
    pairs = list(readings(events))
    last = max([trace.last_step, *(event.step for event in events)])
    shown = {i for pair in pairs for i in pair}
    shown |= {i for i, event in enumerate(events) if event.what != "see"}
    numbers = sorted(shown)
    slices = [_of_event(events[i], last) for i in numbers]
    launches = [_of_launch(launch, last) for launch in trace.launches]
    rows = _rows([*launches, *slices])
    places = dict(zip(numbers, rows[len(launches) :], strict=True))

    ids = {row: number for number, row in enumerate(sorted(set(rows), key=_order), 1)}
    meta = []
    for (rank, name), number in ids.items():
        meta.append(_meta("thread_name", rank, number, {"name": name}))
        meta.append(_meta("thread_sort_index", rank, number, {"sort_index": number}))
    for rank in dict.fromkeys(rank for rank, _ in ids):
        is_nic, number = divmod(rank, NIC_NUMBERS)  # a rank's NIC comes right after the rank
        meta.append(_meta("process_name", rank, 0, {"name": who(rank) if is_nic else f"rank {rank}"}))
        meta.append(_meta("process_sort_index", rank, 0, {"sort_index": 2 * number + is_nic}))
    body: list[dict[str, Any]] = []
    for each, row in zip([*launches, *slices], rows, strict=True):
        entry = {"ph": "X", "name": each.name, "cat": each.category, "pid": each.rank, "tid": ids[row]}
        body.append(entry | {"ts": each.begin, "dur": each.end - each.begin, "args": each.args})
    for number, (stored, seen) in enumerate(pairs, 1):
        for phase, i in (("s", stored), ("f", seen)):
            event = events[i]
            flow = {"ph": phase, "id": number, "name": "read", "cat": "read", "pid": event.rank, "ts": event.step}
            body.append(flow | {"tid": ids[places[i]]} | ({"bp": "e"} if phase == "f" else {}))
    return {
        "traceEvents": meta + sorted([*body, *_counters(trace)], key=lambda entry: entry["ts"]),
        "displayTimeUnit": "ms",
        "otherData": {"source": "nbep", "time": "1 us is one step of the emulator"},
    }


def _of_event(event: Event, last: int) -> _Slice:
    args: dict[str, Any] = {"block": event.block, "warp": event.thread // 32, "lane": event.thread % 32}
    args |= {"kernel": event.kernel, "call": event.call, "memory of": who(event.cell.owner)}
    if event.at:
        args["line"] = " < ".join(map(_line, event.at))
    end, name = event.step + 1, describe(event)
    if event.what in ("wait", "hang"):
        is_open = event.until is None
        end = last if event.until is None else event.until
        name = f"{'waits for ever for' if is_open else 'waits for'} {event.cell.text}"
        args["sees" if event.what == "wait" else "have come"] = str(event.value)
    return _Slice(event.step, max(end, event.step + 1), event.rank, event.role, name, event.what, args)


def _of_launch(launch: Launch, last: int) -> _Slice:
    args: dict[str, Any] = {"call": launch.call, "blocks": launch.grid, "threads of a block": launch.block}
    if launch.phases:
        args |= {"half": launch.half, "phases": launch.phases}
    end = last if launch.end is None else launch.end
    return _Slice(launch.begin, max(end, launch.begin + 1), launch.rank, KERNELS, launch.kernel, "launch", args)


def _rows(slices: list[_Slice]) -> list[tuple[int, str]]:
    """A thread for each slice: the first one of its role that is free when it begins."""
    rows: list[tuple[int, str]] = [(0, "")] * len(slices)
    ends: dict[tuple[int, str], list[int]] = {}
    for i in sorted(range(len(slices)), key=lambda i: (slices[i].begin, i)):
        each = slices[i]
        role = each.role
        busy = ends.setdefault((each.rank, role), [])
        number = next((n for n, end in enumerate(busy) if end <= each.begin), len(busy))
        busy[number : number + 1] = [each.end]
        rows[i] = each.rank, role if number == 0 else f"{role} {number + 1}"
    return rows


def _order(row: tuple[int, str]) -> tuple[int, bool, str, int]:
    """Kernels first; then roles by name, those of several threads by number."""
    rank, name = row
    role, _, number = name.rpartition(" ")
    return (rank, name != KERNELS, role, int(number)) if number.isdigit() else (rank, name != KERNELS, name, 1)


def _meta(name: str, rank: int, thread: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "ts": 0, "name": name, "pid": rank, "tid": thread, "args": args}


def _counters(trace: Recorder) -> Iterator[dict[str, Any]]:
    for counter in (counter for view in views() for counter in view.counters(trace)):
        for step, value in zip(counter.steps, counter.values, strict=True):
            args = {counter.what: value}
            yield {"ph": "C", "name": counter.title, "pid": counter.rank, "tid": 0, "ts": step, "args": args}


def _line(line: Line) -> str:
    path = Path(line.file)
    name = path.relative_to(PACKAGE_PARENT) if path.is_relative_to(PACKAGE_PARENT) else path.name
    return f"{name}:{line.number} ({line.function})"
