r"""Space-time pictures: a lane for each role, what it publishes, when the other side sees it, and where it waits.

lane a  ---*-----------------*------      * publishes, and the arrow ends where the other lane first sees the value
            \     ==waits==   ^           a wait is a bar below its lane, so that no mark hides it
lane b  -----v--------*------/------      o publishes, and no thread is seen to read it
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from nbep.lab.trace.events import STORES, Event, Launch, readings
from nbep.lab.trace.recorder import Recorder
from nbep.lab.trace.style import (
    FAINT,
    HEAD_COLOR,
    INK,
    OTHER_COLOR,
    RANK_COLORS,
    SHARED_COLOR,
    SMALL,
    STUCK_COLOR,
    TAIL_COLOR,
    TINY,
    WAIT_COLOR,
    Picture,
    count_steps,
    plain_axes,
)

WAIT_TOP, WAIT_HEIGHT = -0.07, 0.13  # of a wait's bar below its lane, in distances of lanes
LEAST_WIDTH = 0.0025  # of a wait's bar, in widths of the picture
MAX_LABELS = 32  # publishes that still get their value written beside them
MERGED = 0.012  # labels closer than this share of the width for each character become one
COLORS = {
    "tail": TAIL_COLOR,
    "head": HEAD_COLOR,
    "shared": SHARED_COLOR,
    "board": SHARED_COLOR,
    "counts": TAIL_COLOR,
    "arrivals": OTHER_COLOR,
    "credits": HEAD_COLOR,
}
BY_RANK = " An arrow has the colour of the rank that stores."
WORDS = {"shared": "shared tail"}
WAITS = ("wait", "hang")
SHOWN_CELLS = ("store", "atomic", "see", "wait")  # what happens to the cells of a cell picture
LaneOf = Callable[[Event], int | None]
Test = Callable[[Event], bool]


class Arrow(NamedTuple):
    """A value's way: from who stored it to who was first to see it, in another lane if anybody there did.

    seen is None if no other thread did.
    """

    stored: Event
    seen: Event | None


def cell_picture(trace: Recorder, cell: str, kernel: str | None, only: Collection[int] | None) -> Picture:
    """Which rank writes the cells whose names begin with `cell`, who sees it, and who waits for it."""
    events = [e for e in trace.events(SHOWN_CELLS, cell=cell, kernel=kernel) if only is None or e.rank in only]
    if not events:
        names = dict.fromkeys(event.cell.name for event in trace.events(SHOWN_CELLS, kernel=kernel))
        raise ValueError(f"cell: got {cell!r}; the trace has events at {', '.join(names) or 'no cell'}")
    ranks = [rank for rank in range(trace.num_ranks) if only is None or rank in only]
    kernels = {event.kernel for event in events}
    launches = [launch for launch in trace.launches if launch.kernel in kernels and launch.rank in ranks]
    picture = Picture(9.5, 1.2 + 0.75 * len(ranks))
    axes = picture.subplots()
    # What happens is often a small part of a launch: the bars of the launches go on beyond the picture.
    begin, end = min(event.step for event in events), max(_end(event, trace.last_step) for event in events)
    margin = (end - begin) // 8 + 1
    show_steps(axes, begin - margin, end + margin)

    def is_labelled(event: Event) -> bool:
        return len(ranks) == 2 and event.rank != event.cell.owner

    by_rank = len(ranks) > 2
    lanes = Lanes([f"rank {rank}" for rank in ranks], lambda event: ranks.index(event.rank), is_labelled, by_rank)
    draw_lanes(axes, lanes, events, trace.last_step, launches)
    count_steps(axes)
    labelled = " Labelled: what a rank writes into the other's memory." if len(ranks) == 2 else ""
    title(axes, f"Who writes {cell}, and who waits for it.{BY_RANK if by_rank else labelled}")
    return picture


def arrows_of(events: Sequence[Event], lane_of: LaneOf) -> list[Arrow]:
    """Each store, with the first look that reads it: one from another lane, or else one of another thread."""
    first: dict[int, Event] = {}
    for stored, seen in readings(events):
        best = first.get(stored)
        lane = lane_of(events[stored])
        if best is None or (lane_of(best) == lane and lane_of(events[seen]) != lane):
            first[stored] = events[seen]
    return [Arrow(event, first.get(i)) for i, event in enumerate(events) if event.what in STORES]


class Lanes(NamedTuple):
    """A horizontal line for each name, the first on top.

    is_labelled: whether a store's value is written beside it
    by_rank: a store has its rank's colour, not its cell's; is_grey: or none at all
    """

    names: list[str]
    lane_of: LaneOf
    is_labelled: Test
    by_rank: bool = False
    is_grey: Test = lambda event: False


def draw_lanes(axes: Axes, lanes: Lanes, events: list[Event], last_step: int, launches: Sequence[Launch] = ()) -> None:
    """What happens in each lane. launches: bars in the lanes `rank 0`, `rank 1`, ..."""
    names, lane_of, is_labelled, by_rank, is_grey = lanes
    plain_axes(axes)
    top = len(names) - 1

    def height(event: Event) -> float:
        lane = lane_of(event)
        assert lane is not None
        return top - lane

    for lane in range(len(names)):
        axes.axhline(lane, color=FAINT, linewidth=0.6, zorder=0)
    for launch in launches:
        end = last_step if launch.end is None else launch.end
        lane = top - names.index(f"rank {launch.rank}")
        begin, last = max(launch.begin, axes.get_xlim()[0]), min(end, axes.get_xlim()[1])
        if begin < last:
            axes.plot([begin, last], [lane] * 2, color=FAINT, linewidth=3, solid_capstyle="butt")
            axes.text(begin, lane + 0.22, launch.kernel, fontsize=TINY, color=INK)
    for event in events:
        if event.what in WAITS:
            begin, until = axes.get_xlim()
            width = max(_end(event, last_step) - event.step, LEAST_WIDTH * (until - begin))
            place = height(event) + WAIT_TOP - WAIT_HEIGHT, WAIT_HEIGHT
            color = WAIT_COLOR if event.until is not None else STUCK_COLOR
            axes.broken_barh([(event.step, width)], place, color=color, linewidth=0, zorder=1)
        elif event.what == "fill":
            axes.plot([event.step] * 2, [height(event), height(event) + 0.1], color=INK, linewidth=0.7, zorder=3)
    arrows = arrows_of(events, lane_of)
    for arrow in sorted(arrows, key=lambda arrow: not is_grey(arrow.stored)):
        _draw_arrow(axes, arrow, height, by_rank, is_grey(arrow.stored))
    if not by_rank:
        labelled = [arrow.stored for arrow in arrows if is_labelled(arrow.stored) and not is_grey(arrow.stored)]
        _draw_labels(axes, labelled, height)
    axes.set_yticks(range(len(names)))
    axes.set_yticklabels(reversed(names))
    axes.set_ylim(-0.45, top + 0.5)
    if by_rank:
        for label, name in zip(axes.get_yticklabels(), reversed(names), strict=True):
            label.set_color(_rank_color(int(name.rpartition(" ")[2])))
    _legend(axes, events, arrows, by_rank)


def _end(event: Event, last_step: int) -> int:
    """Where an event ends: a wait that nothing ended lasts as long as the run."""
    if event.what not in WAITS:
        return event.step
    return last_step if event.until is None else event.until


def _rank_color(rank: int) -> str:
    return RANK_COLORS[rank % len(RANK_COLORS)]


def _draw_arrow(axes: Axes, arrow: Arrow, height: Callable[[Event], float], by_rank: bool, is_grey: bool) -> None:
    stored, seen = arrow
    color = FAINT if is_grey else _rank_color(stored.rank) if by_rank else COLORS.get(stored.cell.name, OTHER_COLOR)
    y = height(stored)
    depth = -2 if is_grey else 0
    hollow: dict[str, Any] = {} if seen is not None else {"markerfacecolor": "white"}
    axes.plot([stored.step], [y], marker="o", markersize=4, color=color, zorder=4 + depth, **hollow)
    if seen is not None:
        axes.annotate(
            "",
            (seen.step, height(seen)),
            (stored.step, y),
            arrowprops={"arrowstyle": "-|>", "color": color, "linewidth": 0.8, "shrinkA": 2, "shrinkB": 1},
            zorder=3 + depth,
        )


def _draw_labels(axes: Axes, stores: list[Event], height: Callable[[Event], float]) -> None:
    """The stored values, where there are not too many; those that would overlap are written together."""
    begin, end = axes.get_xlim()

    def place(event: Event) -> tuple[float, str]:
        return height(event), event.cell.name if event.cell.name in COLORS else ""

    groups: list[list[Event]] = []
    for stored in sorted(stores, key=lambda event: (place(event), event.step)):
        last = groups[-1][-1] if groups else None
        room = MERGED * (end - begin)
        if last is not None and place(last) == place(stored) and stored.step - last.step < room * len(_value(last)):
            groups[-1].append(stored)
        else:
            groups.append([stored])
    if len(groups) > MAX_LABELS:
        return
    for group in groups:
        first = group[0]
        text = ", ".join(_value(event) for event in group)
        # Heads go up to the sender, so their labels are below; announcements come before the tokens' marks, above them.
        below = first.cell.name == "head"
        distance = 14 if first.cell.name in ("start", "end") or below else 5
        axes.annotate(
            text,
            (first.step, height(first)),
            (0, -distance if below else distance),
            textcoords="offset points",
            ha="left" if len(text) > 3 else "center",
            va="top" if below else "bottom",
            fontsize=TINY,
            color=COLORS.get(first.cell.name, OTHER_COLOR),
            zorder=5,
        )


def _value(event: Event) -> str:
    if event.cell.name in ("start", "end"):
        return f"{event.cell.name} {event.value}"
    return str(event.cell.value(event.value))


def _legend(axes: Axes, events: list[Event], arrows: list[Arrow], by_rank: bool) -> None:
    """What the marks mean, for those that are there."""
    handles: list[Line2D | Patch] = []
    dot: dict[str, Any] = {"marker": "o", "markersize": 4, "linewidth": 0.8}
    colors: dict[str, list[str]] = {}
    for stored, _ in arrows:
        names = colors.setdefault(INK if by_rank else COLORS.get(stored.cell.name, OTHER_COLOR), [])
        name = WORDS.get(stored.cell.name, stored.cell.name)
        if name not in names:
            names.append(name)
    for color, names in colors.items():
        handles.append(Line2D([], [], color=color, label=" and ".join(names) + ": stored, then seen", **dot))
    if any(seen is None for _, seen in arrows):
        handles.append(Line2D([], [], color=INK, markerfacecolor="white", label="unread", **(dot | {"linewidth": 0})))
    if any(event.what == "fill" for event in events):
        is_ring = any(event.cell.name == "x" for event in events)
        label = "token put into a slot" if is_ring else "message or row written"
        handles.append(Line2D([], [], color=INK, marker="|", linestyle="", label=label))
    waits = [event for event in events if event.what in WAITS]
    if any(event.until is not None for event in waits):
        handles.append(Patch(color=WAIT_COLOR, label="waits"))
    if any(event.until is None for event in waits):
        handles.append(Patch(color=STUCK_COLOR, label="waits for ever"))
    legend = axes.legend(
        handles=handles,
        fontsize=TINY,
        frameon=False,
        ncols=len(handles),
        loc="lower left",
        bbox_to_anchor=(0, 1),
        borderaxespad=0,
        columnspacing=1.1,
        handlelength=1.6,
        handletextpad=0.5,
    )
    legend.set_in_layout(False)


def title(axes: Axes, text: str) -> None:
    """Above the legend."""
    axes.set_title(text, loc="left", pad=20, fontsize=SMALL + 2, color=INK)


def show_steps(axes: Axes, begin: int, end: int) -> None:
    margin = 0.01 * max(end - begin, 1)
    axes.set_xlim(begin - margin, end + margin)


# Which threads read and write which elements: for kernels that work on arrays and send no signals
#
#     touches = Touches(reads=["topk_idx"], writes=["totals"])
#     nbep.spawn(main, 2, tracer=touches)
#     touches.plot()


MOST_MARKS = 64  # of an array, and of threads: beyond, several share a place
THREADS = "threads"


class Touches:
    """A tracer that keeps what the threads of rank 0 touch, themselves or by bulk copies.

    Args: reads, writes  names of arrays, those of the launch's parameters; "shared memory" is that of a block
    """

    def __init__(self, reads: Sequence[str], writes: Sequence[str]):
        self.reads = reads
        self.writes = writes
        self.num_threads = 0  # of the largest launch that touched something
        self.shape = 1, 1  # blocks of that launch, warps of each
        self.places: dict[tuple[str, int, int, int], None] = {}  # (array, byte, block, warp): an ordered set
        self.found: dict[tuple[str, bool, int, int], None] = {}  # (array, is a store, byte, thread): an ordered set
        self.sizes: dict[str, int] = {}

    def on_load(self, thread: Any, allocation: Any, offset: int, *_: Any) -> None:
        self._keep(thread, allocation, offset, False)

    def on_store(self, thread: Any, allocation: Any, offset: int, *_: Any) -> None:
        self._keep(thread, allocation, offset, True)

    def on_atomic(self, thread: Any, allocation: Any, offset: int, *_: Any) -> None:
        self._keep(thread, allocation, offset, True)

    def on_copy(self, thread: Any, allocation: Any, offset: int, data: bytes, *_: Any) -> None:
        for at in range(offset, offset + len(data), 4):
            self._keep(thread, allocation, at, True)

    def _keep(self, thread: Any, allocation: Any, offset: int, is_store: bool) -> None:
        if thread.rank == 0 and allocation.name in (*self.reads, *self.writes):
            self.sizes[allocation.name] = allocation.nbytes
            launch = thread.block.launch
            self.shape = launch.grid, (launch.block + 31) // 32
            self.num_threads = max(self.num_threads, launch.grid * launch.block)
            index = thread.block_idx * launch.block + thread.thread_idx
            self.found[allocation.name, is_store, offset, index] = None
            self.places[allocation.name, offset, thread.block_idx, thread.warp] = None

    def plot(self) -> Picture:
        """Rows of squares: what is read, the threads, what is written. A line for each access."""
        rows = [name for name in self.reads if name in self.sizes]
        rows = [*rows, THREADS, *(name for name in self.writes if name in self.sizes)]
        sizes = {name: max(self.sizes[name] // 4, 1) for name in self.sizes} | {THREADS: max(self.num_threads, 1)}
        picture = Picture(9.5, 0.5 + 0.9 * len(rows))
        axes = picture.subplots()

        def x(name: str, index: int) -> float:
            return (index + 0.5) / sizes[name]

        for name, is_store, offset, thread in self.found:
            ends = [x(name, offset // 4), x(THREADS, thread)], [-rows.index(name), -rows.index(THREADS)]
            color = HEAD_COLOR if is_store else TAIL_COLOR
            axes.plot(*ends, color=color, linewidth=0.5, alpha=0.6, zorder=1)
        for name in rows:
            count = min(MOST_MARKS, sizes[name])
            places = [(index + 0.5) / count for index in range(count)]
            axes.scatter(places, [-rows.index(name)] * count, s=26, marker="s", color="white", edgecolor=INK, zorder=2)
            axes.text(-0.01, -rows.index(name), name, ha="right", va="center", fontsize=SMALL, color=INK)
        axes.set_title("rank 0: read (blue), written (red)", loc="left", fontsize=TINY, color=FAINT)
        axes.set_xlim(-0.12, 1.02)
        axes.axis("off")
        return picture
