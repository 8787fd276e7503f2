"""The way of one token between nodes: which slots and rows it fills, in dispatch and in combine.

 dispatch   slot of an RDMA ring for each node --> slot of an NVL ring for each other rank there --> row of recv_x
 combine    slot of an NVL ring for those rows --> slot of an RDMA ring for each node --> row of combined_x

The notes in a slot say in dispatch whose token it is, and where it goes. All else follows from the order: recv_x is
sorted by source rank and token, and the token with index i of a ring is the (i // num_slots)-th that fills its slot.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from nbep.trace.events import Event, Launch, Token
from nbep.trace.recorder import Recorder
from nbep.views.internode import COMBINE, DISPATCH
from nbep.views.ring_fills import notes_of


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
    rows = {goal: sum(each < which for each in tokens if goal in each.goals) for goal in which.goals}
    own += [event for event in sent if event.cell.name == "recv_x" and rows.get(event.cell.owner) == event.cell.row]
    for launch in trace.launches:
        if (launch.kernel, launch.call, launch.rank) == (COMBINE, call, rank):
            back = [event for event in trace.events("fill", kernel=COMBINE) if event.call == call]
            before = [each for each, channel in tokens.items() if channel == tokens[which] and each[0] == rank]
            own += _back(back, launch, which, tokens[which], [each for each in before if each < which])
    return sorted(own, key=lambda event: event.step)


def _back(back: list[Event], launch: Launch, token: Token, channel: int, before: list[Token]) -> Iterator[Event]:
    """In combine. before: the tokens of the same rank and channel that come before it"""
    shape, rdma_shape, places = notes_of(launch)
    assert shape is not None
    assert rdma_shape is not None
    source, place = divmod(token.rank, places)
    on_channel = [event for event in back if event.cell.channel == channel]
    for goal in token.goals:
        # A ring for each rank that rows go back to: it brings only those.
        node, k = divmod(goal, places)
        key = (node * places + place, source * places + k)
        ring = [event for event in on_channel if (event.cell.owner, event.cell.src) == key]
        yield from _nth(ring, sum(goal in each.goals for each in before), shape.num_slots)
    for node in {goal // places for goal in token.goals}:
        ring = [event for event in on_channel if (event.cell.owner, event.cell.node) == (token.rank, node)]
        index = sum(any(goal // places == node for goal in each.goals) for each in before)
        yield from _nth(ring, index, rdma_shape.num_slots)
    row = (token.rank, "combined_x", token.index)
    yield from (event for event in back if (event.cell.owner, event.cell.name, event.cell.row) == row)


def _nth(ring: Iterable[Event], index: int, num_slots: int) -> list[Event]:
    """What fills the slot of an index; nothing if the run ended before, or the rows take no ring."""
    lap, slot = divmod(index, num_slots)
    return [event for event in ring if event.cell.slot == slot][lap : lap + 1]
