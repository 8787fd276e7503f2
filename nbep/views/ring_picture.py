"""The picture of all rings: one panel for each rank, one row for each ring that ends there."""

from __future__ import annotations

from collections.abc import Collection

from matplotlib.axes import Axes

from nbep.trace.events import Launch
from nbep.trace.recorder import Recorder
from nbep.trace.style import FAINT, INK, RANK_COLORS, SHADE, SMALL, TINY, Picture, count_steps, plain_axes
from nbep.views.ring_fills import RingFill, notes_of, ring_fills

LEFT = (
    "A ring of combine may end above zero: all is received then, no sender waits for another head, so none is stored."
)
ROW_GAP = 0.35  # between rows, in heights of a full ring


def ring_picture(trace: Recorder, kernel: str | None, only: Collection[int] | None) -> Picture:
    """The fill of every ring over time. only: of these ranks"""
    rings = [ring for ring in ring_fills(trace, kernel) if only is None or ring.rank in only]
    if not rings:
        what = "of a kernel with rings" if kernel is None else f"of `{kernel}` with rings"
        raise ValueError(f"kernel, ranks: the trace has no launch {what}")
    ranks = sorted({ring.rank for ring in rings})
    rows = {rank: sorted({_row(ring) for ring in rings if ring.rank == rank}) for rank in ranks}
    num_rows = max(map(len, rows.values()))
    num_columns = min(len(ranks), 2)
    num_lines = -(-len(ranks) // num_columns)
    row_height = max(0.16, min(0.3, 1.8 / num_rows))
    picture = Picture(5.2 * num_columns + 0.6, 0.7 + num_lines * (0.75 + row_height * num_rows))
    grid = picture.subplots(num_lines, num_columns, sharex=True, squeeze=False)
    for axes, rank in zip(grid.flat, ranks, strict=False):
        launches = [launch for launch in trace.launches if launch.rank == rank and notes_of(launch).shape is not None]
        if kernel is not None:
            launches = [launch for launch in launches if launch.kernel == kernel]
        _draw_rank(axes, rank, rows[rank], [ring for ring in rings if ring.rank == rank], launches, trace.last_step)
    for axes in grid.flat[len(ranks) :]:
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


def _label(row: Row) -> str:
    level, channel, node, src = row
    whose = f", for node {node}" if node >= 0 else ""
    return f"{level} from rank {src}, channel {channel}{whose}".strip()


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
    axes.set_yticklabels([_label(row) for row in rows], fontsize=TINY)
    axes.set_ylim(-0.2, top + 0.2)
    axes.set_title(f"rank {rank} receives", fontsize=SMALL + 1, color=INK, loc="left", pad=12)
