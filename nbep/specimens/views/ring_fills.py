"""How full each ring is over time, from the stores to its head and tail.

There is a ring for each channel and each other rank of the node: what a rank gives to itself takes none. Between nodes
there are RDMA rings too, one for each channel and node, the own node among them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple

from nbep.lab.trace.events import Cell, Event, Launch
from nbep.lab.trace.page import EMPTY, FILLING, FULL, Slots
from nbep.lab.trace.page import Change as SlotChange
from nbep.lab.trace.recorder import Recorder
from nbep.specimens.views.rings import COMBINE, NO_RINGS, RingNotes


class RingFill(NamedTuple):
    """One ring during one launch of its owner: a step function.

    A ring of `rank` carries what `src` sends on `channel`. steps[i] is when the fill became fill[i] slots; the first is
    the launch or the first token, the last one the launch's end. Combine leaves tokens in its rings: once its
    receivers are done, no sender waits for another head.
    """

    rank: int
    kernel: str
    call: int
    channel: int
    src: int
    capacity: int
    steps: list[int]
    fill: list[int]
    num_tokens: int
    level: str = ""  # between nodes "NVL" or "RDMA"
    node: int = -1  # of an NVL ring of combine between nodes: to which node its rows go back
    has_ended: bool = True  # whether the launch has

    @property
    def title(self) -> str:
        """What it is called in a timeline, and on the page of a trace."""
        return ring_title(Place(self.rank, self.level, self.channel, self.src), self.src, self.node)

    @property
    def left(self) -> int:
        """Tokens that stay in the ring, all received: of combine, as said above."""
        return self.fill[-1] if self.has_ended else 0

    @property
    def peak(self) -> int:
        return max(self.fill)

    def at(self, step: int) -> int:
        """The fill at a step; 0 outside the launch."""
        latest = bisect_right(self.steps, step) - 1
        return 0 if latest < 0 else self.fill[latest]


class Place(NamedTuple):
    """A ring: in whose memory, at which level, and the number of who fills it: the cells' `src`, or `node`."""

    rank: int
    level: str
    channel: int
    number: int

    @classmethod
    def of(cls, cell: Cell, kernel: str) -> Place:
        """The ring of a slot, or of a cell that lies beside the slots, in a kernel's launch."""
        if cell.node >= 0:
            return cls(cell.owner, "RDMA", cell.channel, cell.node)
        return cls(cell.owner, "NVL" if kernel.startswith("internode") else "", cell.channel, cell.src)


def ring_title(place: Place, source: int, node: int) -> str:
    """What a ring is called on the page of a trace."""
    for_node = f", for node {node}" if node >= 0 else ""
    return f"{place.level} ring from rank {source}, channel {place.channel}{for_node}".strip()


def notes_of(launch: Launch) -> RingNotes:
    """The rings that a launch was given; none where no view of nbep's knows it."""
    return launch.notes if isinstance(launch.notes, RingNotes) else NO_RINGS


def ranks_of_node(trace: Recorder) -> int:
    """Of the mode between nodes; 0 if the trace has none of its launches."""
    return max((notes_of(launch).num_nvl_ranks for launch in trace.launches), default=0)


Change = tuple[int, str, int]  # step, "head" or "tail", and what it is since the launch


def ring_fills(trace: Recorder, kernel: str | None = None) -> list[RingFill]:
    """The fill of every ring during every launch that has rings, or during those of one kernel."""
    changes = ring_changes(trace)
    rings = []
    for launch in sorted(trace.launches, key=lambda launch: (launch.rank, launch.begin)):
        if notes_of(launch).shape is None or (kernel is not None and launch.kernel != kernel):
            continue
        end = trace.last_step if launch.end is None else launch.end
        for place, src, capacity, node in ring_places(launch):
            mine = changes.get((place, launch.kernel, launch.call), [])
            rings.append(_ring_fill(launch, place, src, capacity, node, end, mine))
    return rings


def ring_places(launch: Launch) -> Iterator[tuple[Place, int, int, int]]:
    """The rings that end at a launch's rank: who fills each, its slots, and `RingFill.node`."""
    shape, rdma_shape, num_nvl_ranks = notes_of(launch)
    if shape is None:
        return
    rank = launch.rank
    first = rank - rank % num_nvl_ranks if num_nvl_ranks else 0  # of this node
    for channel in range(shape.num_channels):
        for number in range(shape.num_ranks):
            if num_nvl_ranks and number % num_nvl_ranks != rank % num_nvl_ranks:
                node = number // num_nvl_ranks if launch.kernel == COMBINE else -1
                place = Place(rank, "NVL", channel, number)
                yield place, first + number % num_nvl_ranks, shape.num_slots, node
            elif not num_nvl_ranks and number != rank:
                yield Place(rank, "", channel, number), number, shape.num_slots, -1
    if rdma_shape is not None:
        for channel in range(rdma_shape.num_channels):
            for node in range(rdma_shape.num_ranks):
                src = node * num_nvl_ranks + rank % num_nvl_ranks
                yield Place(rank, "RDMA", channel, node), src, rdma_shape.num_slots, -1


def ring_changes(trace: Recorder) -> dict[tuple[Place, str, int], list[Change]]:
    """What happened to the head and the tail of each ring in each call.

    An RDMA ring has its head where its slots are filled from, and both count on from call to call.
    """
    num_nvl_ranks = ranks_of_node(trace)
    changes: dict[tuple[Place, str, int], list[Change]] = {}
    begun: dict[tuple[object, str, int], int] = {}  # a total at the start of a call
    totals: dict[object, int] = {}
    for event in trace.events(["store", "atomic"]):
        cell = event.cell
        if cell.name not in ("head", "tail"):
            continue
        if cell.node >= 0:
            begin = begun.setdefault((cell, event.kernel, event.call), totals.get(cell, 0))
            totals[cell] = event.value
            change = event.step, cell.name, event.value - begin
            place = Place.of(cell, event.kernel)
            if cell.name == "head":
                node, nvl_rank = divmod(cell.owner, num_nvl_ranks)
                place = Place(cell.node * num_nvl_ranks + nvl_rank, "RDMA", cell.channel, node)
        else:
            change = event.step, cell.name, event.value
            place = Place.of(cell, event.kernel)
        changes.setdefault((place, event.kernel, event.call), []).append(change)
    return changes


def _ring_fill(
    launch: Launch, place: Place, src: int, capacity: int, node: int, end: int, changes: list[Change]
) -> RingFill:
    # A peer may start sooner than the owner.
    steps, fill = [min([launch.begin, *(step for step, _, _ in changes)])], [0]
    cells = {"head": 0, "tail": 0}
    for step, name, value in changes:
        cells[name] = value
        # Where nothing more can come, combine's head is past every tail.
        now = max(cells["tail"] - cells["head"], 0)
        if now != fill[-1]:
            steps.append(step)
            fill.append(now)
    steps.append(max(end, steps[-1]))
    fill.append(fill[-1])
    return RingFill(
        launch.rank,
        launch.kernel,
        launch.call,
        place.channel,
        src,
        capacity,
        steps,
        fill,
        cells["tail"],
        place.level,
        node,
        launch.end is not None,
    )


# What is in the slots of rings and of halves over time, for the page of a trace: see trace.page


def _end(trace: Recorder, launch: Launch) -> int:
    return trace.last_step if launch.end is None else launch.end


def slots_of_rings(trace: Recorder) -> Iterator[Slots]:
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


def _ring_changes(fills: list[Event], moves: list[tuple[int, str, int]], count: int) -> list[SlotChange]:
    steps = [(event.step, 0, event) for event in fills] + [(step, 1, (name, to)) for step, name, to in moves]
    changes: list[SlotChange] = []
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


def slots_of_halves(trace: Recorder) -> Iterator[Slots]:
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
