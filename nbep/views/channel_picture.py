"""Space-time pictures of nbep's kernels: the two ends of a ring, and the roles of a low-latency call."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from matplotlib.axes import Axes

from nbep.trace.events import Event
from nbep.trace.recorder import Recorder
from nbep.trace.space_time import BY_RANK, Lanes, draw_lanes, show_steps, title
from nbep.trace.style import FAINT, INK, RANK_COLORS, SMALL, TINY, Picture, count_steps, plain_axes
from nbep.views.intranode import OUTPUTS
from nbep.views.ring_fills import RingFill, ring_fills

CALL_ROLES = ("sender", "counter", "receiver")  # of the low-latency kernels, from top to bottom
CALL_CELLS = ("counts", "arrivals", "credits", "message", "row", *OUTPUTS)


def channel_picture(trace: Recorder, src: int, dst: int, channel: int, kernel: str, call: int) -> Picture:
    """What the two ends of one ring do, and the ring's fill below."""
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


def call_picture(
    trace: Recorder, kernel: str, call: int, only: Collection[int] | None, follow: Sequence[str] = ()
) -> Picture:
    """What the roles of one low-latency call do: a lane for each role of each rank.

    follow: words in the names of the cells that keep their colour; the others are grey. None given: all keep it
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
        and (only is None or event.rank in only)
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
