"""The picture of the two halves: which call is under way in each, and what the rank's other kernels do meanwhile.

half 0   |send|- - - - - - |recv|   o          |send|      o  a peer gives its credit: the half may be filled again
half 1            |send|- - - - - - - - |recv|
others                  |experts|
"""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from nbep.device.layout.low_latency import NUM_HALVES
from nbep.trace.events import Launch
from nbep.trace.recorder import Recorder
from nbep.trace.style import (
    FAINT,
    HEAD_COLOR,
    INK,
    RANK_COLORS,
    SMALL,
    TINY,
    WAIT_COLOR,
    Picture,
    count_steps,
    plain_axes,
)

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


def halves_picture(trace: Recorder) -> Picture:
    """One panel for each rank, a lane for each half and one for other kernels."""
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
        _draw_rank(axes, trace, rank, len(names) - 1)
    begin = min(launch.begin for launch in trace.launches)
    panels[0].set_xlim(begin, trace.last_step)
    count_steps(panels[-1])
    _legend(picture, {launch.phases for launch in calls})
    return picture


def _draw_rank(axes: Axes, trace: Recorder, rank: int, top: int) -> None:
    launches = [launch for launch in trace.launches if launch.rank == rank]
    for launch in launches:
        end = trace.last_step if launch.end is None else launch.end
        y = top - launch.half if launch.phases else 0
        color = PHASE_COLORS.get(launch.phases, OTHERS_COLOR)
        if launch.phases == "send":
            received = _received(launches, launch)
            until = trace.last_step if received is None else received.begin
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


def _received(launches: list[Launch], sent: Launch) -> Launch | None:
    """The launch that receives what another one has sent."""
    return next(
        (a for a in launches if a.phases == "receive" and (a.kernel, a.call) == (sent.kernel, sent.call)),
        None,
    )


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
