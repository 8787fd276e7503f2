"""How the pictures look. Importing this loads matplotlib, without pyplot: no screen, no global state."""

from __future__ import annotations

import io
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

# One colour for each source rank: muted, and apart for colour-blind readers too.
RANK_COLORS = ("#4477aa", "#cc6677", "#228833", "#b8860b", "#66a5c9", "#aa3377", "#777777", "#8c564b")
INK = "#333333"
FAINT = "#b0b0b0"
SHADE = "#f3f3f3"
TAIL_COLOR = "#4477aa"
HEAD_COLOR = "#cc6677"
SHARED_COLOR = "#9bb8d3"
OTHER_COLOR = "#228833"
WAIT_COLOR = "#cfcfcf"
STUCK_COLOR = "#e58f8f"
SMALL = 8
TINY = 7


class Picture(Figure):
    """A matplotlib figure that a notebook shows when it is the last value of a cell."""

    def __init__(self, width: float, height: float):
        super().__init__(figsize=(width, height), dpi=110, layout="constrained")
        FigureCanvasAgg(self)

    def _repr_png_(self) -> bytes:
        png = io.BytesIO()
        self.savefig(png, format="png")
        return png.getvalue()


def plain_axes(axes: Axes) -> None:
    """Keep only the lines that say something."""
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
    axes.tick_params(labelsize=SMALL, labelcolor=INK, color=FAINT, length=3)
    axes.tick_params(axis="y", length=0)


def count_steps(axes: Axes) -> None:
    """Steps as 0, 50k, 100k."""

    def short(value: float, _position: Any) -> str:
        return f"{value / 1000:g}k" if axes.get_xlim()[1] >= 20_000 else f"{value:g}"

    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(short))
    axes.set_xlabel("emulator steps (primitive calls)", fontsize=SMALL, color=INK)
