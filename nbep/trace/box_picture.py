"""Memory as boxes: a row for each name, with what lies in it. One value has a colour, the rest is grey."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nbep.trace.style import FAINT, INK, SHADE, SMALL, TAIL_COLOR, Picture

WIDTH, HEIGHT = 0.55, 0.34  # of a box, in inches
MARGIN = 1.9  # for the names


def box_picture(rows: Mapping[str, Sequence[object]], follow: object, title: str) -> Picture:
    """rows: what lies in the boxes of each; "" for an empty box. follow: the value that has a colour"""
    most = max(len(row) for row in rows.values())
    picture = Picture(MARGIN + WIDTH * max(most, 8), HEIGHT * (len(rows) + 1.2))
    axes = picture.subplots()
    for y, (name, row) in enumerate(rows.items()):
        axes.text(-0.15, y, name, ha="right", va="center", fontsize=SMALL, color=INK)
        for x, value in enumerate(row):
            is_followed = value != "" and value == follow
            color = TAIL_COLOR if is_followed else "white" if value == "" else SHADE
            axes.barh(y, 0.94, 0.78, x, color=color, edgecolor=FAINT, linewidth=0.7)
            text = "white" if is_followed else INK
            axes.text(x + 0.47, y, str(value), ha="center", va="center", fontsize=SMALL, color=text)
    axes.set_xlim(-0.2, max(most, 8))
    axes.set_ylim(len(rows) - 0.45, -0.55)
    axes.set_title(title, loc="left", fontsize=SMALL, color=INK)
    axes.axis("off")
    return picture
