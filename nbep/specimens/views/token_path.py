"""The way of a token through a trace: the places where it comes to lie, and the events that belong to each move.

In all modes: a fill of a slot or of a row of an output, the wait for room before it, what publishes it, the wait that
this ends, and what gives the slot back. `views.story` makes steps and captions of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from nbep.lab.trace.events import STORES, Cell, Event, Launch, Token
from nbep.lab.trace.page import Station
from nbep.lab.trace.recorder import Recorder
from nbep.lab.trace.table import Text, event_table
from nbep.specimens.views.low_latency import DISPATCH as LOW_LATENCY
from nbep.specimens.views.ring_fills import Place, notes_of, ranks_of_node, ring_changes, ring_places, ring_title
from nbep.specimens.views.rings import COMBINE, DISPATCH, OUTPUTS

# --- Between nodes: which slots and rows one token fills, in dispatch and in combine ----------------------------------
#  dispatch   slot of an RDMA ring for each node --> slot of an NVL ring for each other rank there --> row of recv_x
#  combine    slot of an NVL ring for those rows --> slot of an RDMA ring for each node --> row of combined_x
#
# The notes in a slot say in dispatch whose token it is, and where it goes. All else follows from the order: recv_x is
# sorted by source rank and token, and the token with index i of a ring is the (i // num_slots)-th that fills its slot.


def journey_table(trace: Recorder, rank: int = 0, token: int = 0, *, call: int = 0) -> Text:
    """The way of one token between nodes, a line for each slot and row that it fills: dispatch, then combine.

    Args:   call: which dispatch, and which combine
    Raises: ValueError if the trace has no such dispatch, or the token goes nowhere
    """
    return event_table(journey(trace, rank, token, call), None)


def journey(trace: Recorder, rank: int, token: int, call: int) -> list[Event]:
    """The fills of token `token` of a rank, in a dispatch and in the combine with the same number, by step.

    Raises: ValueError if the trace has no such dispatch, or the token goes nowhere
    """
    if not any((launch.kernel, launch.call) == (DISPATCH, call) for launch in trace.launches):
        raise ValueError(f"call: the trace has no {DISPATCH} number {call}")
    sent = [event for event in trace.events("fill", kernel=DISPATCH) if event.call == call]
    own = [event for event in sent if event.token is not None and event.token[:2] == (rank, token)]
    if not own:
        raise ValueError(f"rank, token: token {token} of rank {rank} goes nowhere in {DISPATCH} number {call}")
    tokens = {event.token: event.cell.channel for event in sent if event.token is not None}
    which = own[0].token
    assert which is not None
    rows = {dst: sum(each < which for each in tokens if dst in each.destinations) for dst in which.destinations}
    own += [event for event in sent if event.cell.name == "recv_x" and rows.get(event.cell.owner) == event.cell.row]
    for launch in trace.launches:
        if (launch.kernel, launch.call, launch.rank) == (COMBINE, call, rank):
            back = [event for event in trace.events("fill", kernel=COMBINE) if event.call == call]
            before = [each for each, channel in tokens.items() if channel == tokens[which] and each[0] == rank]
            own += _back(back, launch, which, tokens[which], [each for each in before if each < which])
    return sorted(own, key=lambda event: event.step)


def _back(back: list[Event], launch: Launch, token: Token, channel: int, before: list[Token]) -> Iterator[Event]:
    """In combine. before: the tokens of the same rank and channel that come before it"""
    shape, rdma_shape, num_nvl_ranks = notes_of(launch)
    assert shape is not None
    assert rdma_shape is not None
    source, nvl_rank = divmod(token.rank, num_nvl_ranks)
    on_channel = [event for event in back if event.cell.channel == channel]
    for dst in token.destinations:
        # A ring for each rank that rows go back to: it brings only those.
        node, k = divmod(dst, num_nvl_ranks)
        key = (node * num_nvl_ranks + nvl_rank, source * num_nvl_ranks + k)
        ring = [event for event in on_channel if (event.cell.owner, event.cell.src) == key]
        yield from _nth(ring, sum(dst in each.destinations for each in before), shape.num_slots)
    for node in {dst // num_nvl_ranks for dst in token.destinations}:
        ring = [event for event in on_channel if (event.cell.owner, event.cell.node) == (token.rank, node)]
        index = sum(any(dst // num_nvl_ranks == node for dst in each.destinations) for each in before)
        yield from _nth(ring, index, rdma_shape.num_slots)
    row = (token.rank, "combined_x", token.index)
    yield from (event for event in back if (event.cell.owner, event.cell.name, event.cell.row) == row)


def _nth(ring: Iterable[Event], index: int, num_slots: int) -> list[Event]:
    """What fills the slot of an index; nothing if the run ended before, or the rows take no ring."""
    lap, slot = divmod(index, num_slots)
    return [event for event in ring if event.cell.slot == slot][lap : lap + 1]


INSIDE_A_NODE = "dispatch"
BACK = {INSIDE_A_NODE: "combine", LOW_LATENCY: "low_latency_combine", DISPATCH: "internode_combine"}
MOST_TOKENS = 24  # of a dispatch whose ways are looked at


class Move(NamedTuple):
    """A fill of a slot or a row, and what belongs to it; None where the trace has no such event."""

    fill: Event
    publish: Event | None = None
    room: Event | None = None  # the wait for a free slot, by who fills
    wait: Event | None = None  # the wait of who takes it on, which the publish ends
    free: Event | None = None  # the slot is given back


class Scene:
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
            for place, source, num_slots, node in ring_places(launch)
        }

    def tokens(self, kernel: str) -> Iterator[tuple[Token, int]]:
        """Tokens of a dispatch that go to another rank, each once for each call; the number of the call."""
        found: dict[tuple[int, int, int], Event] = {}
        for event in self.fills:
            if (
                event.kernel == kernel
                and event.token is not None
                and set(event.token.destinations) - {event.token.rank}
            ):
                found.setdefault((event.token.rank, event.token.index, event.call), event)
        for event in list(found.values())[:MOST_TOKENS]:
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
        wait = None
        if publish is not None:
            waits = (wait for wait in self.waits if wait.cell == publish.cell and wait.step <= publish.step)
            wait = next((wait for wait in waits if wait.until is None or wait.until > publish.step), None)
        return Move(fill, publish, self._wait_for_room(fill), wait, free)

    def ring_of(self, fill: Event) -> tuple[Place, str, int]:
        """The ring whose slot a fill writes, as `rings` and `changes` name it."""
        return Place.of(fill.cell, fill.kernel), fill.kernel, fill.call

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

    def _wait_for_room(self, fill: Event) -> Event | None:
        """The wait for the head of this ring, or for a credit of this peer, right before the fill."""
        mine = [
            wait
            for wait in self.waits
            if (wait.rank, wait.kernel, wait.call, wait.block) == (fill.rank, fill.kernel, fill.call, fill.block)
            and self._says_what_is_free(wait.cell, fill)
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

    def _says_what_is_free(self, cell: Cell, fill: Event) -> bool:
        """Whether a cell tells the one who fills a slot that it is free."""
        at = fill.cell
        if cell.name == "credits":  # of a peer, in the memory of whoever sends to it
            return cell.owner == fill.rank and cell.text.endswith(f"peer {at.owner}]")
        if cell.name != "head" or cell.channel != at.channel:
            return False
        if at.node < 0:  # beside the slots
            return cell.node < 0 and (cell.owner, cell.src) == (at.owner, at.src)
        num_nvl_ranks = ranks_of_node(self.trace)
        return (cell.owner, cell.node) == (fill.rank, at.owner // num_nvl_ranks)  # with whoever sends to that node

    def taken_slots(self, move: Move) -> tuple[int, int]:
        """Slots of a ring inside a node with rows that were not taken when the wait for room began; of how many."""
        room, cell, ring = move.room, move.fill.cell, self.ring_of(move.fill)
        assert room is not None
        before = [
            event
            for event in self.of_call(move.fill.kernel, move.fill.call)
            if event.cell.name == "x"
            and event.cell.owner == cell.owner
            and self.ring_of(event) == ring
            and event.step < room.step
        ]
        return len(before) - int(room.value or 0), self.rings.get(ring, (1, ""))[0]

    # --- the way of a token -----------------------------------------------------------------------------------------

    def way(self, token: Token, call: int, kernel: str) -> list[Event]:
        """The fills of one token, there and back, for one of the ranks that it goes to."""
        if kernel == DISPATCH:
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
        num_nvl_ranks = ranks_of_node(self.trace)
        everywhere = list(token.destinations)
        other = [dst for dst in everywhere if dst // num_nvl_ranks != token.rank // num_nvl_ranks] or everywhere
        far = [dst for dst in other if dst % num_nvl_ranks != token.rank % num_nvl_ranks] or other
        dst, node = far[0], far[0] // num_nvl_ranks
        through = node * num_nvl_ranks + token.rank % num_nvl_ranks
        ways: dict[tuple[str, str, bool], Event] = {}
        for event in fills:
            cell, is_back = event.cell, event.kernel != DISPATCH
            level = "RDMA" if cell.node >= 0 else "NVL"
            ends_there = {
                ("x", "RDMA", False): cell.owner == through,
                ("x", "NVL", False): cell.owner == dst,
                ("recv_x", "NVL", False): cell.owner == dst,
                ("x", "NVL", True): event.rank == dst,
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
        shapes = [notes_of(launch).shape for launch in self.trace.launches if launch.kernel == BACK[INSIDE_A_NODE]]
        slots = [shape.num_slots for shape in shapes if shape is not None]
        if slots:
            yield from _nth(ring, index, slots[0])
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
