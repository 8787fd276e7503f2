"""Pictures of nbep's kernels over time: how full rings are, both ends of one, and the halves."""

from __future__ import annotations

from collections.abc import Collection

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from nbep.device.layout.low_latency import NUM_HALVES
from nbep.lab.trace.events import Event, Launch
from nbep.lab.trace.recorder import Recorder
from nbep.lab.trace.space_time import Lanes, draw_lanes, show_steps, title
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
from nbep.specimens.views.ring_fills import RingFill, notes_of, ring_fills

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
