"""Pictures of nbep's kernels over time: how full rings are, both ends of one, low-latency calls, halves, and hops."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from nbep.device.layout.low_latency import NUM_HALVES
from nbep.lab.trace.events import Event, Launch
from nbep.lab.trace.recorder import Recorder
from nbep.lab.trace.space_time import BY_RANK, WAITS, LaneOf, Lanes, draw_lanes, show_steps, title
from nbep.lab.trace.style import (
    FAINT,
    HEAD_COLOR,
    INK,
    RANK_COLORS,
    SHADE,
    SMALL,
    TINY,
    WAIT_COLOR,
    Picture,
    count_steps,
    plain_axes,
)
from nbep.specimens.views.internode import COMBINE, DISPATCH
from nbep.specimens.views.intranode import OUTPUTS
from nbep.specimens.views.ring_fills import RingFill, notes_of, ring_fills
from nbep.specimens.views.token_path import journey

LEFT = (
    "A ring of combine may end above zero: all is received then, no sender waits for another head, so none is stored."
)
ROW_GAP = 0.35  # between rows, in heights of a full ring


def plot_rings(trace: Recorder, kernel: str | None = None, *, ranks: Collection[int] | None = None) -> Picture:
    """How full every ring is over time: a panel for each receiving rank, a row for each (channel, source).

    Args:   ranks: panels for these alone
    Raises: ValueError if no kernel with rings ran
    """
    rings = [ring for ring in ring_fills(trace, kernel) if ranks is None or ring.rank in ranks]
    if not rings:
        what = "of a kernel with rings" if kernel is None else f"of `{kernel}` with rings"
        raise ValueError(f"kernel, ranks: the trace has no launch {what}")
    shown = sorted({ring.rank for ring in rings})
    rows = {rank: sorted({_row(ring) for ring in rings if ring.rank == rank}) for rank in shown}
    num_rows = max(map(len, rows.values()))
    num_columns = min(len(shown), 2)
    num_lines = -(-len(shown) // num_columns)
    row_height = max(0.16, min(0.3, 1.8 / num_rows))
    picture = Picture(5.2 * num_columns + 0.6, 0.7 + num_lines * (0.75 + row_height * num_rows))
    grid = picture.subplots(num_lines, num_columns, sharex=True, squeeze=False)
    for axes, rank in zip(grid.flat, shown, strict=False):
        launches = [launch for launch in trace.launches if launch.rank == rank and notes_of(launch).shape is not None]
        if kernel is not None:
            launches = [launch for launch in launches if launch.kernel == kernel]
        _draw_rank(axes, rank, rows[rank], [ring for ring in rings if ring.rank == rank], launches, trace.last_step)
    for axes in grid.flat[len(shown) :]:
        axes.set_visible(False)
    for axes in grid[-1]:
        count_steps(axes)
    capacities = sorted({ring.capacity for ring in rings})
    slots = " or ".join(map(str, capacities)) + (" slot" if capacities == [1] else " slots")
    picture.suptitle(
        f"Fill of the ring buffers over time. A row is one ring; the grey line above it is its capacity, {slots}."
        + ("" if any(ring.level for ring in rings) else " What a rank sends to itself takes no ring.")
        + ("\n" + LEFT if any(ring.left for ring in rings) else ""),
        fontsize=SMALL + 2,
        color=INK,
        x=0.01,
        ha="left",
    )
    return picture


Row = tuple[str, int, int, int]


def _row(ring: RingFill) -> Row:
    return ring.level, ring.channel, ring.node, ring.src


def _draw_rank(
    axes: Axes, rank: int, rows: list[Row], rings: list[RingFill], launches: list[Launch], last_step: int
) -> None:
    plain_axes(axes)
    # First row on top.
    base = {row: (len(rows) - 1 - i) * (1 + ROW_GAP) for i, row in enumerate(rows)}
    top = len(rows) * (1 + ROW_GAP)
    for launch in launches:
        end = last_step if launch.end is None else launch.end
        axes.axvspan(launch.begin, end, color=SHADE, linewidth=0, zorder=0)
        axes.text(
            (launch.begin + end) / 2, top, launch.kernel, fontsize=TINY, color=INK, ha="center", va="bottom", zorder=4
        )
    for ring in rings:
        y = base[_row(ring)]
        color = RANK_COLORS[ring.src % len(RANK_COLORS)]
        heights = [y + fill / ring.capacity for fill in ring.fill]
        axes.plot([ring.steps[0], ring.steps[-1]], [y + 1, y + 1], color=FAINT, linewidth=0.6, zorder=2)
        axes.fill_between(ring.steps, y, heights, step="post", color=color, alpha=0.35, linewidth=0, zorder=1)
        axes.step(ring.steps, heights, where="post", color=color, linewidth=0.9, zorder=3)
    axes.set_yticks([y + 0.5 for y in base.values()])
    texts = (f"{level} from rank {src}, channel {channel}, for node {node}" for level, channel, node, src in rows)
    axes.set_yticklabels([text.removesuffix(", for node -1").strip() for text in texts], fontsize=TINY)
    axes.set_ylim(-0.2, top + 0.2)
    axes.set_title(f"rank {rank} receives", fontsize=SMALL + 1, color=INK, loc="left", pad=12)


CALL_ROLES = ("sender", "counter", "receiver")  # of the low-latency kernels, from top to bottom
CALL_CELLS = ("counts", "arrivals", "credits", "message", "row", *OUTPUTS)


def plot_channel(
    trace: Recorder, src: int = 0, dst: int = 1, channel: int = 0, kernel: str = "dispatch", *, call: int = 0
) -> Picture:
    """The two ends of one ring: tails and heads from store to sight, waits, and the fill.

    Args:   kernel: "dispatch" or "combine"; call: which one, if there were several
    Raises: ValueError if the trace has no such ring
    """
    ring = next(
        (
            ring
            for ring in ring_fills(trace, kernel)
            if (ring.rank, ring.src, ring.channel, ring.call) == (dst, src, channel, call)
        ),
        None,
    )
    if ring is None:
        what = f"{kernel} number {call} with a ring of channel {channel} from rank {src} to rank {dst}"
        raise ValueError(f"src, dst, channel, kernel, call: the trace has no {what}")

    roles = ["sender", *(["coordinator"] if kernel == "combine" else []), "receiver"]
    ranks = [src if role == "sender" else dst for role in roles]
    names = [f"{role}\nrank {rank}" for role, rank in zip(roles, ranks, strict=True)]

    def lane_of(event: Event) -> int | None:
        if event.role in roles and event.block // 2 == channel and event.rank == ranks[roles.index(event.role)]:
            return roles.index(event.role)
        return None

    def belongs(event: Event) -> bool:
        if (event.kernel, event.call) != (kernel, call) or lane_of(event) is None:
            return False
        if event.what == "hang":
            return True
        cell = event.cell
        if cell.name == "shared":  # combine's lane s passes on, or waits for, what rank s sends
            return event.thread % 32 == src and (event.what == "wait" or event.order in ("release", "acquire"))
        return (cell.owner, cell.src, cell.channel) == (dst, src, channel)

    events = [event for event in [*trace.events(), *trace.hangs()] if belongs(event)]
    picture = Picture(9.5, 1.6 + 0.75 * len(roles) + 1.0)
    lanes, below = picture.subplots(2, 1, sharex=True, height_ratios=(0.75 * len(roles) + 0.4, 1.0))
    begin, end = min([ring.steps[0], *(event.step for event in events)]), ring.steps[-1]
    show_steps(lanes, begin, end)
    # A shared tail has the value of the tail that it passes on.
    drawn = Lanes(names, lane_of, lambda event: event.cell.name != "shared")
    draw_lanes(lanes, drawn, events, end)
    draw_fill(below, ring)
    count_steps(below)
    title(lanes, f"{kernel}: the ring from rank {src} to rank {dst}, channel {channel}")
    return picture


def plot_call(
    trace: Recorder,
    kernel: str = "low_latency_dispatch",
    *,
    call: int = 0,
    ranks: Collection[int] | None = None,
    follow: Sequence[str] = (),
) -> Picture:
    """One low-latency call: what its roles put and tell each other, and where they wait. A lane for each role.

    Args:   ranks: what these do alone, where there are many
            follow: words that the names of cells must hold to keep their colour: ["local expert 0", "src 1"]
    Raises: ValueError if the trace has no such call
    """
    launches = [launch for launch in trace.launches if launch.phases and (launch.kernel, launch.call) == (kernel, call)]
    if not launches:
        raise ValueError(f"kernel, call: the trace has no {kernel} number {call} of the low-latency mode")
    events = [
        event
        for event in [*trace.events(), *trace.hangs()]
        if (event.kernel, event.call) == (kernel, call)
        and (event.cell.name in CALL_CELLS or event.what == "hang")
        and event.role in CALL_ROLES
        and (ranks is None or event.rank in ranks)
    ]
    there = {(event.rank, event.role) for event in events}
    lanes = [(rank, role) for rank in range(trace.num_ranks) for role in CALL_ROLES if (rank, role) in there]
    picture = Picture(9.5, 1.2 + 0.6 * len(lanes))
    axes = picture.subplots()
    end = max(trace.last_step if launch.end is None else launch.end for launch in launches)
    show_steps(axes, min(launch.begin for launch in launches), end)

    def is_labelled(event: Event) -> bool:
        return event.cell.name != "credits" and event.value < 0

    names = [f"{role}\nrank {rank}" for rank, role in lanes]
    by_rank = len({rank for rank, _ in lanes}) > 2

    def is_grey(event: Event) -> bool:
        return any(word not in event.cell.text for word in follow)

    drawn = Lanes(names, lambda event: lanes.index((event.rank, event.role)), is_labelled, by_rank, is_grey)
    draw_lanes(axes, drawn, events, end)
    count_steps(axes)
    text = (
        f" In colour: {' '.join(follow)}"
        if follow
        else BY_RANK
        if by_rank
        else " Labelled: what counts and arrivals tell"
    )
    title(axes, f"{kernel} {call}, half {launches[0].half}.{text}")
    return picture


def draw_fill(axes: Axes, ring: RingFill) -> None:
    plain_axes(axes)
    color = RANK_COLORS[ring.src % len(RANK_COLORS)]
    axes.axhline(ring.capacity, color=FAINT, linewidth=0.8, linestyle="--")
    axes.fill_between(ring.steps, 0, ring.fill, step="post", color=color, alpha=0.35, linewidth=0)
    axes.step(ring.steps, ring.fill, where="post", color=color, linewidth=0.9)
    axes.set_ylim(0, ring.capacity * 1.15)
    axes.set_yticks([0, ring.capacity], ["0", "1 slot" if ring.capacity == 1 else f"{ring.capacity} slots"])
    axes.set_ylabel("fill", fontsize=SMALL, color=INK)
    if ring.left:
        text = f"{ring.left} received and left here: no sender waits for another head"
        place = (ring.steps[-1], ring.fill[-1])
        axes.annotate(text, place, (-2, 3), textcoords="offset points", ha="right", fontsize=TINY, color=INK)


# The picture of both hops between nodes: the roles on the way from one rank to another, on one timeline.
#
#  dispatch   RDMA sender --RDMA ring--> forwarder --NVL ring--> NVL receiver; two coordinators tell tails and heads on
#             RDMA sender --RDMA ring--> deliverer                             between ranks of the same place
#  combine    NVL sender --NVL ring--> forwarder --RDMA ring--> RDMA receiver; three coordinators
#             its own x --> forwarder --RDMA ring--> RDMA receiver             between ranks of the same place
#
# The forwarder is on the rank that has the place of the one end and the node of the other.


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


def plot_hops(
    trace: Recorder,
    src: int = 0,
    dst: int = 3,
    channel: int = 0,
    kernel: str = "internode_dispatch",
    *,
    call: int = 0,
    token: tuple[int, int] | None = None,
) -> Picture:
    """Between nodes: the roles on the way from one rank to another on one timeline, and the fill of both rings.

    Args:   kernel: "internode_dispatch" or "internode_combine"; call: which one, if there were several
            token: its rank and its index there; a thick line follows it
    Raises: ValueError if the trace has no such way
    """
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


# The two halves:
#
# half 0   |send|- - - - - - |recv|   o          |send|      o  a peer gives its credit: the half may be filled again
# half 1            |send|- - - - - - - - |recv|
# others                  |experts|


SEND_COLOR, RECEIVE_COLOR, BOTH_COLOR, OTHERS_COLOR = RANK_COLORS[0], RANK_COLORS[2], RANK_COLORS[4], FAINT
PHASE_COLORS = {"send": SEND_COLOR, "receive": RECEIVE_COLOR, "send and receive": BOTH_COLOR, "free": HEAD_COLOR}
WORDS = {
    "send": "send phase",
    "receive": "receive phase",
    "send and receive": "both in one launch",
    "free": "frees the half",
}
UNDER_WAY_COLOR = "#dbe5f1"
HEIGHT = 0.3
SHORT = "low_latency_"


def plot_halves(trace: Recorder) -> Picture:
    """Low-latency calls over time: which half each takes, when it sends and receives, and what else the rank does.

    Raises: ValueError if the trace has no low-latency call
    """
    calls = [launch for launch in trace.launches if launch.phases]
    if not calls:
        raise ValueError("trace: it has no low-latency call")
    others = any(not launch.phases for launch in trace.launches)
    names = [f"half {half}" for half in range(NUM_HALVES)] + (["other kernels"] if others else [])
    ranks = range(trace.num_ranks)
    picture = Picture(9.5, 0.9 + (0.35 + 0.42 * len(names)) * len(ranks))
    panels = picture.subplots(len(ranks), 1, sharex=True, squeeze=False)[:, 0]
    for rank, axes in zip(ranks, panels, strict=True):
        plain_axes(axes)
        axes.set_yticks(range(len(names)), names[::-1])
        axes.set_ylim(-0.5, len(names) - 0.3)
        axes.set_title(f"rank {rank}", loc="left", fontsize=SMALL, color=INK)
        _draw_halves(axes, trace, rank, len(names) - 1)
    begin = min(launch.begin for launch in trace.launches)
    panels[0].set_xlim(begin, trace.last_step)
    count_steps(panels[-1])
    _legend(picture, {launch.phases for launch in calls})
    return picture


def _draw_halves(axes: Axes, trace: Recorder, rank: int, top: int) -> None:
    launches = [launch for launch in trace.launches if launch.rank == rank]
    for launch in launches:
        end = trace.last_step if launch.end is None else launch.end
        y = top - launch.half if launch.phases else 0
        color = PHASE_COLORS.get(launch.phases, OTHERS_COLOR)
        if launch.phases == "send":
            received = "receive", launch.kernel, launch.call
            until = next((a.begin for a in launches if (a.phases, a.kernel, a.call) == received), trace.last_step)
            axes.broken_barh([(end, max(until - end, 1))], (y - HEIGHT / 2, HEIGHT), color=UNDER_WAY_COLOR, linewidth=0)
        axes.broken_barh([(launch.begin, max(end - launch.begin, 1))], (y - HEIGHT / 2, HEIGHT), color=color)
        if launch.phases not in ("receive", "free"):
            name = launch.kernel.removeprefix(SHORT)
            text = f"{name} {launch.call}" if launch.phases else name
            axes.text(launch.begin, y + HEIGHT / 2 + 0.04, text, fontsize=TINY, color=INK)
    for event in trace.events("wait", rank=rank):
        if event.cell.name in ("counts", "arrivals", "credits"):
            launch = next(a for a in launches if a.begin <= event.step and (a.end is None or event.step < a.end))
            end = trace.last_step if event.until is None else event.until
            below = top - launch.half - HEIGHT / 2
            axes.broken_barh([(event.step, max(end - event.step, 1))], (below, HEIGHT / 4), color=WAIT_COLOR)
    for event in trace.events("atomic", cell="credits"):
        if event.cell.owner == rank and event.rank != rank and event.order == "release":
            half = int(event.cell.text.partition("half ")[2].partition(",")[0])
            axes.plot([event.step], [top - half], marker="o", markersize=4, color=HEAD_COLOR, linewidth=0, zorder=4)


def _legend(picture: Picture, phases: set[str]) -> None:
    """What the colours mean, for those that are there."""
    handles: list[Line2D | Patch] = [
        Patch(color=color, label=WORDS[name]) for name, color in PHASE_COLORS.items() if name in phases
    ]
    if "send" in phases:
        handles.append(Patch(color=UNDER_WAY_COLOR, label="under way, no kernel"))
    handles += [
        Patch(color=WAIT_COLOR, label="waits"),
        Line2D([], [], color=HEAD_COLOR, marker="o", markersize=4, linewidth=0, label="a peer's credit comes"),
    ]
    picture.legend(handles=handles, fontsize=TINY, frameon=False, ncols=len(handles), loc="outside upper left")
