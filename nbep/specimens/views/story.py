"""The story of one token, made from the events of a trace: where it lies, who moves it, what each of them waits for.

 x --sender--> slot --receiver--> recv_x --expert--> slot --receiver--> combined_x
               filled, published (tail, counts), taken, given back (head)

A *station* is a place where the token comes to lie, a *move* brings it to the next one. Each move has up to four
events: a wait for room before it, the fill, what publishes it, and the wait of whoever takes it on. From these a story
has its steps, a caption for each.
"""

from __future__ import annotations

from collections.abc import Iterator

from nbep.lab.trace.events import Event, Token
from nbep.lab.trace.page import HANGS, MOST_STEPS, Station, Step, Story, hang_of, line_of, number_of, who_of
from nbep.lab.trace.recorder import Recorder
from nbep.specimens.views.rings import OUTPUTS
from nbep.specimens.views.token_path import BACK, Move, Scene

MOST_STORIES = 24
LEAST_STATIONS = 5  # of a whole story inside a node


def all_stories(trace: Recorder) -> list[Story]:
    """The stories of a run; the first one is the one that shows most."""
    scene = Scene(trace)
    stories = [_tell(scene, token, call, kernel) for kernel in BACK for token, call in scene.tokens(kernel)]
    chosen = sorted(stories, key=lambda story: (-_reach(story), -len(story.steps), story.steps[0].step))[:MOST_STORIES]
    for story in chosen:
        order = sorted(range(len(story.steps)), key=lambda i: (-story.steps[i].weight, i))  # the lightest are left out
        story.steps = [story.steps[i] for i in sorted(order[:MOST_STEPS])]
    return chosen


def _reach(story: Story) -> int:
    """How many ranks it visits; where a run hangs, whether it stops on its way counts most."""
    is_stopped = story.steps[-1].title == HANGS and len(story.stations) < LEAST_STATIONS
    return len({station.rank for station in story.stations}) + MOST_STEPS * is_stopped


# --- steps and their captions ---------------------------------------------------------------------------------------


def _tell(scene: Scene, token: Token, call: int, kernel: str) -> Story:
    """The story of a token, with all its steps."""
    fills = scene.way(token, call, kernel)
    story = Story(f"token {token.index} of rank {token.rank}", (kernel, call), key=(token.rank, token.index, call))
    story.stations.append(Station(token.rank, "x", f"row {token.index}"))
    moves = [scene.move(fill) for fill in fills]
    dst = next((fill.cell.owner for fill in fills if fill.cell.name == "recv_x"), fills[-1].cell.owner)
    begin = scene.begin(kernel, call, token.rank)
    how = f"It goes by way of rank {fills[0].cell.owner}. " if fills[0].cell.owner not in (dst, token.rank) else ""
    text = (
        f"Row {token.index} of x on rank {token.rank} is the coloured token. The router chose an expert on rank {dst} "
        f"for it, so the row must get into the memory of rank {dst}. {how}No CPU helps: threads on the GPUs do it all."
    )
    story.steps.append(Step(begin, "A token must travel", text, 0, 0, True, None, None, None, weight=9))
    for move in moves:
        story.stations.append(scene.station(move.fill))
        to = len(story.stations) - 1
        story.steps += _steps_of(scene, move, story.stations[to], to, move.fill.kernel != kernel)
    story.steps.sort(key=lambda step: step.step)
    hang = hang_of(scene.trace, scene.waits, {move.fill.cell.channel for move in moves})
    if hang is not None:
        story.steps.append(hang._replace(at=len(story.stations) - 1, to=len(story.stations) - 1))
    return story


def _steps_of(scene: Scene, move: Move, station: Station, to: int, is_back: bool) -> Iterator[Step]:
    """The steps of a move to station number `to`, from the one before it. is_back: on the way home"""
    fill, cell, at = move.fill, move.fill.cell, to - 1
    if cell.name in OUTPUTS:
        yield _step(fill, *_arrived(fill), at, to, True, 8)
        return
    where = f"{station.title} in {'its own memory' if fill.rank == cell.owner else f'the memory of rank {cell.owner}'}"
    if move.room is not None:
        yield _step(move.room, *_waits_for_room(scene, move), at, at, True, 5)
    what, why = "row", "No thread may read it yet: the parts of the row may arrive in any order."
    if is_back:
        what, why = "result", "As on the way there, no thread may read it yet."
    elif cell.node >= 0 or (fill.at and "nbep/device/network" in fill.at[0].file):
        why += " The network brings it there while the thread goes on."
    text = f"{who_of(fill)} writes the {what} straight into {where}. {why}"
    yield _step(fill, f"The {fill.role} fills the slot", text, at, to, False, 7)
    if move.wait is not None:
        text = (
            f"{who_of(move.wait)} polls the counter `{move.wait.cell.name}`, which says how much is ready. It "
            f"sees {number_of(move.wait)}. From the bytes of the row it could not tell whether all of them have come."
        )
        waits = _step(move.wait, f"The {move.wait.role} waits", text, at, to, False, 4)
        yield waits._replace(step=max(waits.step, fill.step))
    if move.publish is not None:
        yield _published(move.publish, to, is_back)
    if move.free is not None:
        text = (
            f"{who_of(move.free)} stores `head` = {move.free.value}: it has copied the row, "
            f"and the slot may be filled again. Whoever fills this ring polls `head` before it writes."
        )
        yield _step(move.free, "The slot is free again", text, to + 1, to + 1, True, 3)


def _step(event: Event, title: str, text: str, at: int, to: int, filled: bool, weight: int) -> Step:
    """What one event shows: somebody acts, or waits."""
    who, is_wait = (event.rank, event.role), event.what == "wait"
    acts, waits = (None, who) if is_wait else (who, None)
    return Step(event.step, title, text, at, to, filled, acts, waits, line_of(event), weight)


def _waits_for_room(scene: Scene, move: Move) -> tuple[str, str]:
    """Title and text of a wait for a slot of a ring, or in low latency for a half of the buffer."""
    room = move.room
    assert room is not None
    assert room.until is not None
    lasts = f"The wait takes {room.until - room.step:,} steps."
    if room.cell.name == "credits":
        peer = move.fill.cell.owner
        return "It waits for a free half", (
            f"{who_of(room)} polls `credits` in its own memory: rank {peer} counts there how often it has freed this "
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
        f"{who_of(room)} polls `head` in {where}. {still} It must wait: a store now would overwrite a row that is "
        f"still needed. {lasts}"
    )


def _published(publish: Event, to: int, is_back: bool) -> Step:
    name, is_added = publish.cell.name, publish.what == "atomic"
    verb = f"adds to `{name}`" if is_added else f"stores `{name}` = {number_of(publish)}"
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
    text = f"{who_of(publish)} {verb}{order}. It says: {means}. {why}"
    return _step(publish, f"`{name}` says that it is there", text, to, to, True, 6)


def _arrived(fill: Event) -> tuple[str, str]:
    cell = fill.cell
    if cell.name == "recv_x":
        text = (
            f"{who_of(fill)} has seen that the row is there, and copies it to its place in recv_x, "
            f"where the experts of rank {cell.owner} find it. The way to the expert is done."
        )
        return "The token is at its expert's GPU", text
    text = (
        f"{who_of(fill)} adds up the rows that came back for this token, one from each rank that it "
        f"was sent to, and writes the sum to combined_x. The token is home."
    )
    return "The results are added up", text
