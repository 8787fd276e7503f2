"""The picture of both hops between nodes: the roles on the way from one rank to another, on one timeline.

 dispatch   RDMA sender --RDMA ring--> forwarder --NVL ring--> NVL receiver; two coordinators tell tails and heads on
            RDMA sender --RDMA ring--> deliverer                             between ranks of the same place
 combine    NVL sender --NVL ring--> forwarder --RDMA ring--> RDMA receiver; three coordinators
            its own x --> forwarder --RDMA ring--> RDMA receiver             between ranks of the same place

The forwarder is on the rank that has the place of the one end and the node of the other.
"""

from __future__ import annotations

from typing import NamedTuple

from matplotlib.axes import Axes

from nbep.trace.events import Event, Launch
from nbep.trace.recorder import Recorder
from nbep.trace.space_time import WAITS, LaneOf, Lanes, draw_lanes, show_steps, title
from nbep.trace.style import RANK_COLORS, TINY, Picture, count_steps
from nbep.views.channel_picture import draw_fill
from nbep.views.internode import COMBINE, DISPATCH
from nbep.views.ring_fills import RingFill, notes_of, ring_fills
from nbep.views.token_path import journey

TOKEN_COLOR = RANK_COLORS[5]
LANE = 0.7  # inches
FILL = 0.75


class Lane(NamedTuple):
    """team: that of the role that is meant, -1 for all."""

    role: str
    rank: int
    team: int = -1


class Way(NamedTuple):
    """From rank src over rank via to rank dst: the lanes, and which cells of the two rings belong to it."""

    lanes: list[Lane]
    via: int
    slots: list[tuple[int, int, int]]  # owner, src and node of the cells of the rings
    heads: tuple[int, int]  # owner and node of the head of the RDMA ring
    columns: tuple[str, ...]  # how the names of the board's cells end
    rings: list[tuple[str, int, int, int]]  # level, owner, who fills it, and RingFill.node


def hops_picture(
    trace: Recorder, src: int, dst: int, channel: int, kernel: str, call: int, token: tuple[int, int] | None
) -> Picture:
    """The lanes of the roles, and below them how full the rings of both hops are."""
    launch = next((each for each in trace.launches if (each.kernel, each.call) == (kernel, call)), None)
    if launch is None or kernel not in (DISPATCH, COMBINE):
        raise ValueError(f"kernel, call: the trace has no {kernel} number {call} between nodes")
    way = _way(launch, src, dst)
    rings = [ring for key in way.rings for ring in ring_fills(trace, kernel) if _is(ring, key, channel, call)]
    if len(rings) != len(way.rings):
        raise ValueError(f"src, dst, channel: the trace has no rings from rank {src} to rank {dst}, channel {channel}")

    def lane_of(event: Event) -> int | None:
        if event.block // 2 != channel:
            return None
        for number, lane in enumerate(way.lanes):
            if (event.role, event.rank) == (lane.role, lane.rank) and lane.team in (-1, event.team):
                return number
        return None

    events = _events(trace, way, channel, kernel, call, lane_of)
    height = LANE * len(way.lanes) + 0.4
    picture = Picture(9.5, height + FILL * len(rings) + 1.2)
    axes, *below = picture.subplots(1 + len(rings), 1, sharex=True, height_ratios=[height] + [FILL] * len(rings))
    steps = [event.step for event in events] or [0, trace.last_step]
    is_stuck = any(event.what in WAITS and event.until is None for event in events)
    last = trace.last_step if is_stuck else max(steps)
    show_steps(axes, min(steps), last)
    names = [f"{lane.role}\nrank {lane.rank}" for lane in way.lanes]
    draw_lanes(axes, Lanes(names, lane_of, lambda event: event.cell.name in ("head", "tail")), events, last)
    if token is not None:
        _draw_token(axes, trace, token, kernel, call, lane_of, len(way.lanes))
    for panel, ring in zip(below, rings, strict=True):
        draw_fill(panel, ring)
        panel.set_ylabel(f"{ring.level} ring", fontsize=TINY)
    count_steps(below[-1])
    what = "" if token is None else f". Token {token[1]} of rank {token[0]} is the thick line"
    over = f" over rank {way.via}" if way.via not in (src, dst) else ""
    title(axes, f"{kernel}: from rank {src}{over} to rank {dst}, channel {channel}{what}")
    return picture


def _way(launch: Launch, src: int, dst: int) -> Way:
    places = notes_of(launch).num_nvl_ranks
    (src_node, src_place), (dst_node, dst_place) = divmod(src, places), divmod(dst, places)
    is_straight = src_place == dst_place  # then there is no second hop, or no first one
    if launch.kernel == DISPATCH:
        via = dst_node * places + src_place
        columns: tuple[str, ...] = (f"node {dst_node}", f"node {src_node}")
        if is_straight:
            lanes = [
                Lane("RDMA sender", src),
                Lane("sender coordinator", src),
                Lane("deliverer", dst),
                Lane("forwarder coordinator", dst),
            ]
            return Way(lanes, via, [(dst, -1, src_node)], (src, dst_node), columns, [("RDMA", dst, src, -1)])
        lanes = [
            Lane("RDMA sender", src),
            Lane("sender coordinator", src),
            Lane("forwarder", via, dst_place),
            Lane("forwarder coordinator", via),
            Lane("NVL receiver", dst, src_place),
        ]
        slots = [(via, -1, src_node), (dst, src_place, -1)]
        return Way(lanes, via, slots, (src, dst_node), columns, [("RDMA", via, src, -1), ("NVL", dst, via, -1)])
    via = src_node * places + dst_place
    lanes = [
        Lane("NVL sender", src),
        Lane("NVL coordinator", via),
        Lane("forwarder", via, dst_node),
        Lane("RDMA coordinator", via),
        Lane("RDMA receiver", dst),
        Lane("receiver coordinator", dst),
    ]
    slots = [(via, dst_node * places + src_place, -1), (dst, -1, src_node)]
    columns = f"place {src_place}", "sums", f"node {src_node}"
    if is_straight:
        return Way(lanes[2:], via, slots[1:], (via, dst_node), columns, [("RDMA", dst, via, -1)])
    return Way(lanes, via, slots, (via, dst_node), columns, [("NVL", via, src, dst_node), ("RDMA", dst, via, -1)])


def _is(ring: RingFill, key: tuple[str, int, int, int], channel: int, call: int) -> bool:
    return (ring.level, ring.rank, ring.src, ring.node) == key and (ring.channel, ring.call) == (channel, call)


def _events(trace: Recorder, way: Way, channel: int, kernel: str, call: int, lane_of: LaneOf) -> list[Event]:
    """What the lanes do to cells of the two rings, to the rows of the output and to the board."""
    hangs = [event for event in trace.hangs() if event.kernel == kernel]
    mine = [e for e in [*trace.events(kernel=kernel), *hangs] if e.call == call and lane_of(e) is not None]
    board = {e.cell for e in mine if e.what == "atomic" and e.cell.name == "board" and _is_of_way(e, way)}

    def belongs(event: Event) -> bool:
        cell = event.cell
        if cell.name == "board":
            return cell in board or (event.what in WAITS and event.until is None)
        if cell.row >= 0 or event.what == "hang":
            return True
        if cell.channel != channel:
            return False
        if cell.name == "head" and cell.node >= 0:
            return (cell.owner, cell.node) == way.heads
        return (cell.owner, cell.src, cell.node) in way.slots

    return [event for event in mine if belongs(event)]


def _is_of_way(event: Event, way: Way) -> bool:
    """Whether a cell of the board is about one of the way's rings: each role counts for one node, or place."""
    sides = {lane.rank: lane.role for lane in way.lanes}
    column = event.cell.text.rpartition(", ")[2].removesuffix("]")
    if len(way.columns) == 2:
        return column == way.columns[0 if event.role == "RDMA sender" else 1]
    return event.rank in sides and column in (way.columns[:2] if event.role == "forwarder" else way.columns[2:])


def _draw_token(
    axes: Axes, trace: Recorder, token: tuple[int, int], kernel: str, call: int, lane_of: LaneOf, num_lanes: int
) -> None:
    steps, heights = [], []
    for event in journey(trace, *token, call):
        lane = lane_of(event)
        if event.kernel == kernel and lane is not None:
            steps.append(event.step)
            heights.append(num_lanes - 1 - lane)
    axes.plot(steps, heights, color=TOKEN_COLOR, linewidth=2.2, alpha=0.75, marker="s", markersize=5, zorder=6)
