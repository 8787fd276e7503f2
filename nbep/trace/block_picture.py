"""Memory as boxes, and which blocks touch what: a frame for each block, a square for each warp, one story in colour.

topk_idx          [ ][ ][#][ ]...
                       \\  |
+- block 0 ---------------+   +- block 1 ---+
| warp [ ]                |   | warp [ ]    |
| its shared memory [ ][#]|   |             |
+-------------------------+   +-------------+
                    |
totals            [ ][#]...
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from matplotlib.patches import Rectangle

from nbep.trace.style import FAINT, INK, SHADE, SMALL, TAIL_COLOR, TINY, Picture

SHARED = "shared memory"
GAP = 0.03  # between frames, of the width
Access = tuple[str, int, int, int]  # array, byte, block, warp


def block_picture(
    accesses: Iterable[Access],
    sizes: Mapping[str, int],
    rows: tuple[Collection[str], Collection[str]],
    shape: tuple[int, int],
    follow: Mapping[str, Collection[int]],
    item_bytes: Mapping[str, int],
) -> Picture:
    """sizes: bytes of each array. rows: what lies above the blocks, and below. shape: blocks, warps of each

    follow: the elements of each array that have a colour
    """
    grid, warps = shape
    above, below = ([name for name in names if name in sizes and name != SHARED] for names in rows)
    width = (1 + GAP) / grid
    heights = {name: float(len(above) - at) for at, name in enumerate(above)}
    heights |= {name: -2.2 - at for at, name in enumerate(below)}
    picture = Picture(9.5, 0.8 + 0.62 * (len(heights) + 2))
    axes = picture.subplots()

    def place(name: str, byte: int, block: int) -> tuple[float, float]:
        size = item_bytes.get(name, 4)
        across = (byte // size + 0.5) / max(sizes[name] // size, 1)
        if name == SHARED:
            return block * width + (width - GAP) * (0.05 + 0.9 * across), -1.0
        return across, heights[name]

    def of_warp(block: int, warp: int) -> tuple[float, float]:
        return block * width + (width - GAP) * (warp + 0.5) / warps, 0.0

    for block in range(grid):
        corner = block * width, -1.4
        axes.add_patch(Rectangle(corner, width - GAP, 1.85, fill=False, edgecolor=INK, linewidth=0.9))
        axes.text(corner[0] + 0.005, 0.3, f"block {block}", fontsize=TINY, color=INK, va="center")
        for warp in range(warps):
            axes.scatter(*of_warp(block, warp), s=90, marker="s", color="white", edgecolor=INK, zorder=3)
    places: dict[tuple[float, float], bool] = {}
    for name in heights:
        size = item_bytes.get(name, 4)
        for element in range(sizes[name] // size):
            places[place(name, size * element, 0)] = element in follow.get(name, ())
    for name, byte, block, warp in accesses:
        is_followed = byte // item_bytes.get(name, 4) in follow.get(name, ())
        ends = list(zip(place(name, byte, block), of_warp(block, warp), strict=True))
        color, line, depth = (TAIL_COLOR, 1.4, 2) if is_followed else (FAINT, 0.5, 1)
        axes.plot(*ends, color=color, linewidth=line, zorder=depth)
        places[place(name, byte, block)] = is_followed
    for (x, y), is_followed in places.items():
        axes.scatter(x, y, s=40, marker="s", color=TAIL_COLOR if is_followed else SHADE, edgecolor=INK, zorder=3)
    names = heights | {"warps": 0.0} | ({"their shared memory": -1.0} if SHARED in sizes else {})
    for name, y in names.items():
        axes.text(-0.015, y, name, ha="right", va="center", fontsize=SMALL, color=INK)
    axes.set_xlim(-0.16, 1.02)
    axes.axis("off")
    return picture


BOX_WIDTH, BOX_HEIGHT = 0.55, 0.34  # of a box, in inches
BOX_MARGIN = 1.9  # for the names


def box_picture(rows: Mapping[str, Sequence[object]], follow: object, title: str) -> Picture:
    """rows: what lies in the boxes of each; "" for an empty box. follow: the value that has a colour"""
    most = max(len(row) for row in rows.values())
    picture = Picture(BOX_MARGIN + BOX_WIDTH * max(most, 8), BOX_HEIGHT * (len(rows) + 1.2))
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
