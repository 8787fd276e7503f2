"""What is in slots over time: rings, the halves of the low-latency mode, and send queues.

ring    a slot is being filled, then a tail publishes it, then a head gives it back
half    a message or a row is there, until the launch ends that receives its call
queue   an entry is reserved, then the doorbell rings for it, then it is done
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from nbep.trace.events import Event, Launch
from nbep.trace.queues import EntryLife, all_lives
from nbep.trace.recorder import Recorder
from nbep.trace.rings import Place, ring_changes, ring_places, ring_title

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
    count: int  # type: ignore[assignment]  # hides the method of tuples, which nobody calls
    changes: list[Change]


def all_slots(trace: Recorder) -> list[Slots]:
    """Everything in a run that has slots, in the order in which it is shown."""
    return [*_rings(trace), *_halves(trace), *_queues(trace)]


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
        if launch.shape is None:
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
        while first < life.number and _is_before(lives[first].done, life.reserved):
            first += 1
        most = max(most, life.number + 1 - first)
    return most


def _is_before(done: int | None, reserved: int | None) -> bool:
    return done is not None and reserved is not None and done < reserved
