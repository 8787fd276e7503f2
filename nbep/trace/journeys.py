"""The way of one token between nodes: which slots and rows it fills, in dispatch and in combine.

 dispatch   slot of an RDMA ring for each node --> slot of an NVL ring for each rank there --> row of recv_x
 combine    slot of an NVL ring for each of those rows --> slot of an RDMA ring for each node --> row of combined_x

A slot's notes say in dispatch whose token it is. All else follows from the order: recv_x is sorted by source rank and
token, and in a ring the token with index i fills slot i % num_slots as the (i // num_slots)-th one.
"""

from __future__ import annotations

from collections.abc import Iterable

from nbep.trace.events import Event, Launch
from nbep.trace.internode import COMBINE, DISPATCH
from nbep.trace.recorder import Recorder


def journey(trace: Recorder, rank: int, token: int, call: int) -> list[Event]:
    """The fills of token `token` of a rank, in a dispatch and in the combine with the same number, by step.

    Raises: ValueError if the trace has no such dispatch, or the token goes nowhere
    """
    launch = next((each for each in trace.launches if (each.kernel, each.call) == (DISPATCH, call)), None)
    if launch is None:
        raise ValueError(f"call: the trace has no {DISPATCH} number {call}")
    sent = [event for event in trace.events("fill", kernel=DISPATCH) if event.call == call]
    own = [event for event in sent if event.token == (rank, token)]
    if not own:
        raise ValueError(f"rank, token: token {token} of rank {rank} goes nowhere in {DISPATCH} number {call}")
    channel = own[0].cell.channel
    rows = {event.cell.owner: _row(sent, event) for event in own if event.cell.src >= 0}
    own += [event for event in sent if event.cell.name == "recv_x" and rows.get(event.cell.owner) == event.cell.row]
    back = [event for event in trace.events("fill", kernel=COMBINE) if event.call == call]
    returned = next((each for each in trace.launches if (each.kernel, each.call) == (COMBINE, call)), None)
    if returned is not None:
        own += _back(sent, back, returned, rank, token, channel, rows)
    return sorted(own, key=lambda event: event.step)


def _row(sent: Iterable[Event], hop: Event) -> int:
    """The row of recv_x of a token that fills a slot of an NVL ring."""
    owner = hop.cell.owner
    tokens = {event.token for event in sent if event.cell.owner == owner and event.cell.src >= 0 and event.token}
    assert hop.token is not None
    return sum(token < hop.token for token in tokens)


def _back(
    sent: list[Event], back: list[Event], launch: Launch, rank: int, token: int, channel: int, rows: dict[int, int]
) -> Iterable[Event]:
    assert launch.shape is not None
    assert launch.rdma_shape is not None
    num_places = launch.num_nvl_ranks
    source, place = divmod(rank, num_places)
    for expert in rows:
        # The ring for what goes back to `rank` brings only that: its rows in their order, channel by channel.
        node, k = divmod(expert, num_places)
        index = _index(sent, expert, rank, token, channel)
        ring = [
            event
            for event in back
            if (event.cell.owner, event.cell.channel) == (node * num_places + place, channel)
            and event.cell.src == source * num_places + k
        ]
        yield from _nth(ring, index, launch.shape.num_slots)
    for node in {expert // num_places for expert in rows}:
        index = _index(sent, node * num_places + place, rank, token, channel, is_passing=True)
        ring = [
            event for event in back if (event.cell.owner, event.cell.channel, event.cell.node) == (rank, channel, node)
        ]
        yield from _nth(ring, index, launch.rdma_shape.num_slots)
    yield from (e for e in back if (e.cell.owner, e.cell.name, e.cell.row) == (rank, "combined_x", token))


def _index(sent: Iterable[Event], owner: int, rank: int, token: int, channel: int, is_passing: bool = False) -> int:
    """A token's index among those of its rank and channel that came to `owner`: for itself, or for its node."""
    return sum(
        event.cell.owner == owner
        and event.cell.channel == channel
        and (event.cell.node >= 0) == is_passing
        and event.token is not None
        and event.token[0] == rank
        and event.token[1] < token
        for event in sent
    )


def _nth(ring: list[Event], index: int, num_slots: int) -> list[Event]:
    """What fills the slot of an index; nothing if the run ended before."""
    lap, slot = divmod(index, num_slots)
    return [event for event in ring if event.cell.slot == slot][lap : lap + 1]
