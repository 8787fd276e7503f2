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
from nbep.trace.internode import DISPATCH as BETWEEN_NODES
from nbep.trace.journeys import journey
from nbep.trace.low_latency import DISPATCH as LOW_LATENCY
from nbep.trace.readings import readings
from nbep.trace.recorder import Recorder
from nbep.trace.rings import Place, ring_changes, ring_places, ring_title

INSIDE_A_NODE = "dispatch"
BACK = {INSIDE_A_NODE: "combine", LOW_LATENCY: "low_latency_combine", BETWEEN_NODES: "internode_combine"}
MOST_STORIES = 24
MOST_STEPS = 10
LEAST_STATIONS = 5  # of a whole story inside a node
HANGS = "The run hangs"
STORES = ("store", "atomic")
HELPERS = re.compile(r"nbep[/\\]device[/\\](primitives|protocols|network|layout)[/\\]")


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


class Move(NamedTuple):
    """A fill of a slot or a row, and what belongs to it; None where the trace has no such event."""

    fill: Event
    publish: Event | None = None
    room: Event | None = None  # the wait for a free slot, by who fills
    wait: Event | None = None  # the wait of who takes it on, which the publish ends
    free: Event | None = None  # the slot is given back


def all_stories(trace: Recorder) -> list[Story]:
    """The stories of a run; the first one is the one that shows most."""
    scene = _Scene(trace)
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


class _Scene:
    """What can be asked of the events of a trace."""

    def __init__(self, trace: Recorder):
        self.trace = trace
        self.fills = trace.events("fill")
        self.stores = trace.events(STORES)
        self.waits = trace.events("wait")
        self.changes = ring_changes(trace)
        self.rings = {
            (place, launch.kernel, launch.call): (num_slots, ring_title(place, source, node))
            for launch in trace.launches
            if launch.shape is not None
            for place, source, num_slots, node in ring_places(launch)
        }

    def tokens(self, kernel: str) -> Iterator[tuple[Token, int]]:
        """Tokens of a dispatch that go to another rank, each once for each call; the number of the call."""
        found: dict[tuple[int, int, int], Event] = {}
        for event in self.fills:
            if event.kernel == kernel and event.token is not None and set(event.token.goals) - {event.token.rank}:
                found.setdefault((event.token.rank, event.token.index, event.call), event)
        for event in list(found.values())[:MOST_STORIES]:
            assert event.token is not None
            yield event.token, event.call

    def of_call(self, kernel: str, call: int) -> list[Event]:
        return [event for event in self.fills if (event.kernel, event.call) == (kernel, call)]

    def begin(self, kernel: str, call: int, rank: int) -> int:
        return next(
            each.begin for each in self.trace.launches if (each.kernel, each.call, each.rank) == (kernel, call, rank)
        )

    # --- moves ------------------------------------------------------------------------------------------------------

    def move(self, fill: Event) -> Move:
        """A fill, with what belongs to it."""
        if fill.cell.name in OUTPUTS:
            return Move(fill)
        if fill.cell.name == "x":
            publish, free = self._ends_of_a_slot(fill)
        else:
            publish, free = self._arrival(fill), None
        wait = None if publish is None else self._wait_ended_by(publish)
        return Move(fill, publish, self._wait_for_room(fill), wait, free)

    def ring_of(self, fill: Event) -> tuple[Place, str, int]:
        """The ring whose slot a fill writes, as `rings` and `changes` name it."""
        cell = fill.cell
        if cell.node >= 0:
            place = Place(cell.owner, "RDMA", cell.channel, cell.node)
        else:
            place = Place(cell.owner, "NVL" if fill.kernel.startswith("internode") else "", cell.channel, cell.src)
        return place, fill.kernel, fill.call

    def station(self, fill: Event) -> Station:
        """Where a fill puts the token."""
        cell = fill.cell
        if cell.name in OUTPUTS:
            return Station(cell.owner, cell.name, cell.text.partition("[")[2].rstrip("]").replace("local ", ""))
        if cell.name == "x":
            level = "network ring" if cell.node >= 0 else "ring"
            _, title = self.rings.get(self.ring_of(fill), (1, ""))
            detail = f"{level} from rank {fill.rank}, channel {cell.channel}"
            return Station(cell.owner, f"slot {cell.slot}", detail, title, cell.slot, fill.kernel, fill.call)
        name = "slot" if cell.name == "message" else "place"
        return Station(cell.owner, f"{name} {cell.slot}", f"of the part for rank {fill.rank}")

    def _ends_of_a_slot(self, fill: Event) -> tuple[Event | None, Event | None]:
        """The tail that publishes a slot of a ring, and the head that gives it back."""
        cell, key = fill.cell, self.ring_of(fill)
        num_slots, _ = self.rings.get(key, (1, ""))
        before = [
            event
            for event in self.of_call(fill.kernel, fill.call)
            if event.cell.text == cell.text and event.cell.owner == cell.owner and event.step < fill.step
        ]
        index = len(before) * num_slots + cell.slot
        ends: dict[str, Event] = {}
        for step, name, to in self.changes.get(key, []):
            if to > index and name not in ends and step >= fill.step:
                ends[name] = next(event for event in self.stores if event.step == step and event.cell.name == name)
        return ends.get("tail"), ends.get("head")

    def _arrival(self, fill: Event) -> Event | None:
        """The last addition to the cell that says that a message or a row of low latency is there."""
        inside = fill.cell.text.partition("[")[2].rpartition(", ")[0]  # "half 0, local expert 1, src 0"
        names = (f"counts[{inside}]", f"arrivals[{re.sub('src', 'rank', inside)}]")
        found = [
            event
            for event in self.stores
            if event.cell.text in names
            and event.cell.owner == fill.cell.owner
            and (event.kernel, event.call) == (fill.kernel, fill.call)
            and event.step > fill.step
        ]
        return found[-1] if found else None

    def _wait_ended_by(self, publish: Event) -> Event | None:
        return next(
            (wait for wait in self._waits_for(publish) if wait.until is None or wait.until > publish.step), None
        )

    def _waits_for(self, publish: Event) -> list[Event]:
        return [wait for wait in self.waits if wait.cell == publish.cell and wait.step <= publish.step]

    def _wait_for_room(self, fill: Event) -> Event | None:
        """The wait of the same warp for a head or a credit of the peer, right before the fill."""
        mine = [
            wait
            for wait in self.waits
            if (wait.rank, wait.kernel, wait.call, wait.block) == (fill.rank, fill.kernel, fill.call, fill.block)
            and wait.cell.name in ("head", "credits")
            and wait.cell.channel == fill.cell.channel
            and wait.until is not None
            and wait.until <= fill.step
        ]
        between = [
            event
            for event in self.of_call(fill.kernel, fill.call)
            if (event.rank, event.block, event.thread // 32) == (fill.rank, fill.block, fill.thread // 32)
            and mine
            and (mine[-1].until or 0) < event.step < fill.step
        ]
        return mine[-1] if mine and not between else None

    # --- the way of a token -----------------------------------------------------------------------------------------

    def way(self, token: Token, call: int, kernel: str) -> list[Event]:
        """The fills of one token, there and back, for one of the ranks that it goes to."""
        if kernel == BETWEEN_NODES:
            return self._way_between_nodes(token, call)
        there = self.of_call(kernel, call)
        own = [event for event in there if event.token is not None and event.token[:2] == token[:2]]
        first = own[0]
        assert first.token is not None
        if kernel == LOW_LATENCY:
            return [first, *self._rest_of_low_latency(first, call)]
        return [first, *self._rest_inside_a_node(first, call)]

    def _way_between_nodes(self, token: Token, call: int) -> list[Event]:
        """To the farthest rank, and back from it."""
        fills = journey(self.trace, token.rank, token.index, call)
        places = next(launch.num_nvl_ranks for launch in self.trace.launches if launch.num_nvl_ranks)
        other = [goal for goal in token.goals if goal // places != token.rank // places] or list(token.goals)
        far = [goal for goal in other if goal % places != token.rank % places] or other
        goal, node = far[0], far[0] // places
        through = node * places + token.rank % places
        ways: dict[tuple[str, str, bool], Event] = {}
        for event in fills:
            cell, is_back = event.cell, event.kernel != BETWEEN_NODES
            level = "RDMA" if cell.node >= 0 else "NVL"
            ends_there = {
                ("x", "RDMA", False): cell.owner == through,
                ("x", "NVL", False): cell.owner == goal,
                ("recv_x", "NVL", False): cell.owner == goal,
                ("x", "NVL", True): event.rank == goal,
                ("x", "RDMA", True): cell.node == node,
                ("combined_x", "NVL", True): True,
            }.get((cell.name, level, is_back), False)
            if ends_there:
                ways.setdefault((cell.name, level, is_back), event)
        return sorted(ways.values(), key=lambda event: event.step)

    def _rest_inside_a_node(self, first: Event, call: int) -> Iterator[Event]:
        assert first.token is not None
        src, dst = first.token.rank, first.cell.owner
        there = [event for event in self.of_call(INSIDE_A_NODE, call) if event.cell.owner == dst]
        came = {event.token[:2]: event for event in there if event.token is not None}
        own = sum(event.cell.name == "recv_x" and event.role == "copier" for event in there)
        row = sum(key < first.token[:2] for key in came) + (own if src > dst else 0)
        yield from (event for event in there if event.cell.name == "recv_x" and event.cell.row == row)
        # Combine brings the rows of a channel back in the order in which they came.
        channel = first.cell.channel
        index = sum(key < first.token[:2] and key[0] == src for key, e in came.items() if e.cell.channel == channel)
        back = self.of_call(BACK[INSIDE_A_NODE], call)
        ring = [e for e in back if (e.cell.owner, e.cell.channel, e.cell.src) == (src, channel, dst)]
        slots = [
            launch.shape.num_slots for launch in self.trace.launches if launch.shape and launch.kernel == "combine"
        ]
        if slots:
            lap, slot = divmod(index, slots[0])
            yield from [event for event in ring if event.cell.slot == slot][lap : lap + 1]
        row = first.token.index
        yield from (e for e in back if (e.cell.owner, e.cell.name, e.cell.row) == (src, "combined_x", row))

    def _rest_of_low_latency(self, first: Event, call: int) -> Iterator[Event]:
        """recv_x has the same first bytes. With deduplicate rows of combine come once from a rank."""
        assert first.token is not None
        src, dst, index = first.token.rank, first.cell.owner, first.token.index
        expert = re.search(r"local expert (\d+)", first.cell.text)
        rows = [
            event
            for event in self.of_call(LOW_LATENCY, call)
            if (event.cell.owner, event.cell.name) == (dst, "recv_x")
            and event.step > first.step
            and event.first[: len(first.first)] == first.first
            and (expert is None or f"[local expert {expert[1]}," in event.cell.text)
        ]
        yield from rows[:1]
        back = self.of_call(BACK[LOW_LATENCY], call)
        came = [e for e in back if e.rank == dst and e.cell.owner == src and e.cell.text.endswith(f", token {index}]")]
        if expert is not None:
            came = [event for event in came if self._is_of_expert(event, dst, int(expert[1]), call)]
        yield from came[:1]
        yield from (e for e in back if (e.cell.owner, e.cell.name, e.cell.row) == (src, "combined_x", index))

    def _is_of_expert(self, event: Event, dst: int, local_expert: int, call: int) -> bool:
        """Whether a row of combine comes from a local expert of a rank: its number among all is in the row's name."""
        found = re.search(r"expert (\d+)", event.cell.text)
        experts = {
            int(number)
            for each in self.of_call(LOW_LATENCY, call)
            for number in re.findall(r"local expert (\d+)", each.cell.text)
        }
        share = max(experts) + 1
        return found is None or int(found[1]) == dst * share + local_expert


# --- steps and their captions ---------------------------------------------------------------------------------------


def _tell(scene: _Scene, token: Token, call: int, kernel: str) -> Story:
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
        story.steps += _steps_of(move, story.stations[to], to, move.fill.kernel != kernel)
    story.steps.sort(key=lambda step: step.step)
    hang = _hang(scene, moves)
    if hang is not None:
        story.steps.append(hang._replace(at=len(story.stations) - 1, to=len(story.stations) - 1))
    return story


def _steps_of(move: Move, station: Station, to: int, is_back: bool) -> Iterator[Step]:
    """The steps of a move to station number `to`, from the one before it. is_back: on the way home"""
    fill, cell, at = move.fill, move.fill.cell, to - 1
    who = (fill.rank, fill.role)
    line = _line_of_role(fill)
    if cell.name in OUTPUTS:
        yield Step(fill.step, *_arrived(fill), at, to, True, who, None, line, weight=8)
        return
    where = f"{station.title} in {'its own memory' if fill.rank == cell.owner else f'the memory of rank {cell.owner}'}"
    if move.room is not None:
        assert move.room.until is not None
        name = move.room.cell.name
        text = (
            f"{_who(fill)} polls `{name}` of rank {move.room.cell.owner}. Every slot holds a "
            f"row that nobody has taken yet. It must wait: a store now would overwrite a row that is still needed. The "
            f"wait takes {move.room.until - move.room.step:,} steps."
        )
        yield Step(
            move.room.step, "It waits for a free slot", text, at, at, True, None, who, _line_of_role(move.room), 5
        )
    what, why = "row", "Nobody may read it yet: the parts of the row may arrive in any order."
    if is_back:
        what, why = "result", "As on the way there, nobody may read it yet."
    elif cell.node >= 0 or "nbep/device/network" in _file(fill):
        why += " The network brings it there while the thread goes on."
    text = f"{_who(fill)} writes the {what} straight into {where}. {why}"
    yield Step(fill.step, f"The {fill.role} fills the slot", text, at, to, False, who, None, line, weight=7)
    if move.wait is not None:
        text = (
            f"{_who(move.wait)} polls `{move.wait.cell.name}`, and sees {_number(move.wait)}. "
            f"The slot is in its own memory, but it cannot know from the row itself whether all of it is there."
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


def _hang(scene: _Scene, moves: Iterable[Move]) -> Step | None:
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
    hang = _hang(_Scene(trace), [])
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
