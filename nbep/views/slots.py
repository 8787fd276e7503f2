"""What is in the slots of rings and of halves over time, for the page of a trace: see trace.page.slots."""

from __future__ import annotations

from collections.abc import Iterator

from nbep.trace.events import Event, Launch
from nbep.trace.page.slots import EMPTY, FILLING, FULL, Change, Slots
from nbep.trace.recorder import Recorder
from nbep.views.ring_fills import Place, notes_of, ring_changes, ring_places, ring_title


def slots_of(trace: Recorder) -> Iterator[Slots]:
    """Rings, then halves."""
    yield from _rings(trace)
    yield from _halves(trace)


def _end(trace: Recorder, launch: Launch) -> int:
    return trace.last_step if launch.end is None else launch.end


def _rings(trace: Recorder) -> Iterator[Slots]:
    fills: dict[tuple[Place, str, int], list[Event]] = {}
    for event in trace.events("fill", cell="x["):
        if event.cell.slot >= 0:
            key = Place.of(event.cell, event.kernel), event.kernel, event.call
            fills.setdefault(key, []).append(event)
    changes = ring_changes(trace)
    for launch in sorted(trace.launches, key=lambda launch: (launch.begin, launch.rank)):
        if notes_of(launch).shape is None:
            continue
        for place, source, count, node in ring_places(launch):
            key = place, launch.kernel, launch.call
            mine = _ring_changes(fills.get(key, []), changes.get(key, []), count)
            if not mine:
                continue
            title = ring_title(place, source, node)
            begin = min(launch.begin, mine[0][0])
            yield Slots(
                "ring", launch.rank, title, source, launch.kernel, launch.call, begin, _end(trace, launch), count, mine
            )


def _ring_changes(fills: list[Event], moves: list[tuple[int, str, int]], count: int) -> list[Change]:
    steps = [(event.step, 0, event) for event in fills] + [(step, 1, (name, to)) for step, name, to in moves]
    changes: list[Change] = []
    reached = {"tail": 0, "head": 0}
    for step, _, what in sorted(steps, key=lambda item: item[:2]):
        if isinstance(what, Event):
            token = what.token
            text = "" if token is None else f"token {token.index} of rank {token.rank}"
            changes.append((step, what.cell.slot, FILLING, text))
            continue
        name, to = what
        # Where nothing more can come, combine's head is past every tail.
        to = to if name == "tail" else min(to, reached["tail"])
        state = FULL if name == "tail" else EMPTY
        changes += [(step, index % count, state, f"index {index}") for index in range(reached[name], to)]
        reached[name] = max(reached[name], to)
    return changes


def _halves(trace: Recorder) -> Iterator[Slots]:
    calls = {(each.kernel, each.call, each.half): each for each in trace.launches if each.phases}
    messages: dict[tuple[str, int, int], list[Event]] = {}
    for event in trace.events("fill"):
        if event.cell.name in ("message", "row"):
            messages.setdefault((event.kernel, event.call, event.cell.owner), []).append(event)
    for kernel, call, half in calls:
        launches = [each for each in trace.launches if (each.kernel, each.call, each.half) == (kernel, call, half)]
        for rank in sorted({launch.rank for launch in launches}):
            events = messages.get((kernel, call, rank), [])
            mine = [launch for launch in launches if launch.rank == rank]
            ends = [launch.end for launch in mine if "receive" in launch.phases]
            end = trace.last_step if not ends or ends[-1] is None else ends[-1]
            numbers = {cell: i for i, cell in enumerate(sorted({event.cell for event in events}))}
            changes = [(event.step, numbers[event.cell], FULL, event.cell.text) for event in events]
            changes += [(end, number, EMPTY, "") for number in numbers.values()]
            begin = min([mine[0].begin, *(event.step for event in events)])
            title = f"half {half}: {kernel.removeprefix('low_latency_')} {call}"
            if numbers:
                yield Slots("half", rank, title, rank, kernel, call, begin, end, len(numbers), sorted(changes))
