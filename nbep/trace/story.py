"""The story of one token, made from the events of a trace: where it lies, who moves it, what each of them waits for.

 x --sender--> slot --receiver--> recv_x --expert--> slot --receiver--> combined_x
               filled, published (tail, counts), taken, given back (head)

A *station* is a place where the token comes to lie, a *move* brings it to the next one. Each move has up to four
events: a wait for room before it, the fill, what publishes it, and the wait of whoever takes it on. From these a story
has its steps, a caption for each. A trace without such a token has the story of a value: a wait, the store that
ends it, and who goes on.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

from nbep.trace.events import OUTPUTS, Event, Line, Token
from nbep.trace.readings import readings
from nbep.trace.recorder import Recorder
from nbep.trace.way import BACK, Move, Scene, Station

MOST_STORIES = 24
MOST_STEPS = 10
LEAST_STATIONS = 5  # of a whole story inside a node
HANGS = "The run hangs"
HELPERS = re.compile(r"nbep[/\\]device[/\\](primitives|protocols|network|layout)[/\\]")


class Step(NamedTuple):
    """One picture of a story.

    at: the station where the token is; to: the one that it is being moved to, or at
    filled: whether what lies at `to` may be read
    who: rank and role that act; waits: rank and role that wait, or None
    weight: the steps with the least weight are left out if there are too many
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


@dataclass
class Story:
    """What the page tells of one token, or of one value. key: the token's rank, its index and its call."""

    title: str
    call: tuple[str, int]
    stations: list[Station] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    key: tuple[int, int, int] | None = None


def all_stories(trace: Recorder) -> list[Story]:
    """The stories of a run; the first one is the one that shows most."""
    scene = Scene(trace)
    stories = [_tell(scene, token, call, kernel) for kernel in BACK for token, call in scene.tokens(kernel)]
    told = sorted(stories, key=lambda story: (-_reach(story), -len(story.steps), story.steps[0].step))[:MOST_STORIES]
    for story in told:
        story.steps = _shortened(story.steps)
    return told or list(islice(_values(trace), 1))


def _reach(story: Story) -> int:
    """How many ranks it visits; where a run hangs, whether it stops on its way counts most."""
    is_stopped = story.steps[-1].title == HANGS and len(story.stations) < LEAST_STATIONS
    return len({station.rank for station in story.stations}) + MOST_STEPS * is_stopped


def _shortened(steps: list[Step]) -> list[Step]:
    """At most so many steps: those with the least weight are left out."""
    order = sorted(range(len(steps)), key=lambda i: (-steps[i].weight, i))
    return [steps[i] for i in sorted(order[:MOST_STEPS])]


# --- steps and their captions ---------------------------------------------------------------------------------------


def _tell(scene: Scene, token: Token, call: int, kernel: str) -> Story:
    """The story of a token, with all its steps."""
    fills = scene.way(token, call, kernel)
    story = Story(f"token {token.index} of rank {token.rank}", (kernel, call), key=(token.rank, token.index, call))
    story.stations.append(Station(token.rank, "x", f"row {token.index}"))
    moves = [scene.move(fill) for fill in fills]
    goal = next((fill.cell.owner for fill in fills if fill.cell.name == "recv_x"), fills[-1].cell.owner)
    begin = scene.begin(kernel, call, token.rank)
    how = f"It goes by way of rank {fills[0].cell.owner}. " if fills[0].cell.owner not in (goal, token.rank) else ""
    text = (
        f"Row {token.index} of x on rank {token.rank} is the coloured token. The router chose an expert on rank {goal} "
        f"for it, so the row must get into the memory of rank {goal}. {how}No CPU helps: threads on the GPUs do it all."
    )
    story.steps.append(Step(begin, "A token must travel", text, 0, 0, True, None, None, None, weight=9))
    for move in moves:
        story.stations.append(scene.station(move.fill))
        to = len(story.stations) - 1
        story.steps += _steps_of(scene, move, story.stations[to], to, move.fill.kernel != kernel)
    story.steps.sort(key=lambda step: step.step)
    hang = _hang(scene, moves)
    if hang is not None:
        story.steps.append(hang._replace(at=len(story.stations) - 1, to=len(story.stations) - 1))
    return story


def _steps_of(scene: Scene, move: Move, station: Station, to: int, is_back: bool) -> Iterator[Step]:
    """The steps of a move to station number `to`, from the one before it. is_back: on the way home"""
    fill, cell, at = move.fill, move.fill.cell, to - 1
    who = (fill.rank, fill.role)
    line = _line_of_role(fill)
    if cell.name in OUTPUTS:
        yield Step(fill.step, *_arrived(fill), at, to, True, who, None, line, weight=8)
        return
    where = f"{station.title} in {'its own memory' if fill.rank == cell.owner else f'the memory of rank {cell.owner}'}"
    if move.room is not None:
        waits, room = (move.room.rank, move.room.role), _line_of_role(move.room)
        yield Step(move.room.step, *_waits_for_room(scene, move), at, at, True, None, waits, room, weight=5)
    what, why = "row", "Nobody may read it yet: the parts of the row may arrive in any order."
    if is_back:
        what, why = "result", "As on the way there, nobody may read it yet."
    elif cell.node >= 0 or "nbep/device/network" in _file(fill):
        why += " The network brings it there while the thread goes on."
    text = f"{_who(fill)} writes the {what} straight into {where}. {why}"
    yield Step(fill.step, f"The {fill.role} fills the slot", text, at, to, False, who, None, line, weight=7)
    if move.wait is not None:
        text = (
            f"{_who(move.wait)} polls the counter `{move.wait.cell.name}`, which says how much is ready. It "
            f"sees {_number(move.wait)}. From the bytes of the row it could not tell whether all of them have come."
        )
        step = max(move.wait.step, fill.step)
        waits = (move.wait.rank, move.wait.role)
        yield Step(step, f"The {move.wait.role} waits", text, at, to, False, None, waits, _line_of_role(move.wait), 4)
    if move.publish is not None:
        yield _published(move.publish, to, is_back)
    if move.free is not None:
        text = (
            f"{_who(move.free)} stores `head` = {move.free.value}: it has copied the row, "
            f"and the slot may be filled again. Whoever fills this ring polls `head` before it writes."
        )
        free = (move.free.rank, move.free.role)
        yield Step(
            move.free.step,
            "The slot is free again",
            text,
            to + 1,
            to + 1,
            True,
            free,
            None,
            _line_of_role(move.free),
            3,
        )


def _waits_for_room(scene: Scene, move: Move) -> tuple[str, str]:
    """Title and text of a wait for a slot of a ring, or in low latency for a half of the buffer."""
    room = move.room
    assert room is not None
    assert room.until is not None
    lasts = f"The wait takes {room.until - room.step:,} steps."
    if room.cell.name == "credits":
        peer = move.fill.cell.owner
        return "It waits for a free half", (
            f"{_who(room)} polls `credits` in its own memory: rank {peer} counts there how often it has freed this "
            f"half of the buffer. The half still belongs to an earlier call, and rank {peer} has not yet received its "
            f"rows. {lasts}"
        )
    taken, num_slots = scene.taken_slots(move)
    if move.fill.cell.node >= 0:  # several warps fill such a ring, and its head counts over calls
        still = f"The ring has {num_slots} slots, and none of them is free for the next row."
    elif taken == num_slots:
        still = "Every slot holds a row that was not taken yet."
    else:
        still = (
            f"{taken} of the {num_slots} slots hold rows that were not taken yet: too few are free for the next rows."
        )
    where = "its own memory" if room.cell.owner == room.rank else f"the memory of rank {room.cell.owner}"
    return "It waits for a free slot", (
        f"{_who(room)} polls `head` in {where}. {still} It must wait: a store now would overwrite a row that is still "
        f"needed. {lasts}"
    )


def _published(publish: Event, to: int, is_back: bool) -> Step:
    name, is_added = publish.cell.name, publish.what == "atomic"
    verb = f"adds to `{name}`" if is_added else f"stores `{name}` = {_number(publish)}"
    if name != "tail":
        means = "all of it is there"
    elif is_added:
        means = "there are more rows than before"
    else:
        means = (
            "the first row of this ring is there"
            if publish.value == 1
            else f"{publish.value} rows of this ring are there"
        )
    why = "Whoever reads this value with *acquire* order also sees the row, so now it may be read."
    if is_back:
        why = "Release and acquire, as on the way there."
    order = " with *release* order" if "rel" in publish.order else ""
    text = f"{_who(publish)} {verb}{order}. It says: {means}. {why}"
    who = (publish.rank, publish.role)
    return Step(
        publish.step, f"`{name}` says that it is there", text, to, to, True, who, None, _line_of_role(publish), 6
    )


def _arrived(fill: Event) -> tuple[str, str]:
    cell = fill.cell
    if cell.name == "recv_x":
        text = (
            f"{_who(fill)} has seen that the row is there, and copies it to its place in recv_x, "
            f"where the experts of rank {cell.owner} find it. The way to the expert is done."
        )
        return "The token is at its expert's GPU", text
    text = (
        f"{_who(fill)} adds up the rows that came back for this token, one from each rank that it "
        f"was sent to, and writes the sum to combined_x. The token is home."
    )
    return "The results are added up", text


def _hang(scene: Scene, moves: Iterable[Move]) -> Step | None:
    """If the run stopped with somebody waiting: who waits for what."""
    stuck = [wait for wait in scene.waits if wait.until is None and "[byte" not in wait.cell.text]
    if not stuck:
        return None
    ours = {move.fill.cell.channel for move in moves}
    wait = min(stuck, key=lambda each: (each.cell.channel not in ours, each.cell.name != "tail", each.step))
    text = (
        f"{_who(wait)} waits for `{wait.cell.text}` of rank {wait.cell.owner} and sees "
        f"{_number(wait)}. Nothing changes it any more: the run hangs here."
    )
    step, waits = scene.trace.last_step, (wait.rank, wait.role)
    return Step(step, HANGS, text, 0, 0, True, None, waits, _line_of_role(wait), weight=9)


def _values(trace: Recorder) -> Iterator[Story]:
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
            Station(stored.rank, "value", f"{_number(stored)}"),
            Station(stored.cell.owner, stored.cell.name, stored.cell.text),
        ]
        name = stored.cell.text
        stores_text = f"{_who(stored)} writes {_number(stored)} to `{name}`."
        sees_text = f"Rank {seen.rank} sees {_number(seen)} and goes on."
        by, to = (stored.rank, stored.role), (seen.rank, seen.role)
        for wait in ended[stored, seen][-1:]:
            text = f"{_who(wait)} polls `{name}` of rank {stored.cell.owner} and sees {_number(wait)}."
            story.steps.append(Step(wait.step, "A wait", text, at, at, True, None, to, _line_of_role(wait), 9))
        story.steps += [
            Step(stored.step, "A store", stores_text, at, at + 1, True, by, None, _line_of_role(stored), 9),
            Step(seen.step, "It is seen", sees_text, at + 1, at + 1, True, to, None, _line_of_role(seen), 9),
        ]
    hang = _hang(Scene(trace), [])
    if hang is not None:
        story.stations = story.stations or [Station(hang.waits[0] if hang.waits else 0, "cell", "that nobody writes")]
        story.steps.append(hang)
    if story.steps:
        yield story


def _number(event: Event) -> str:
    from nbep.trace.page.data import value_of

    return str(value_of(event))


def _who(event: Event) -> str:
    return f"The {event.role} of rank {event.rank}"


def _file(event: Event) -> str:
    return event.at[0].file if event.at else ""


def _line_of_role(event: Event) -> Line | None:
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
