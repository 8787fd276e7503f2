"""The model's pictures: times over ranks, the error of each row, and what each link needs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import NullFormatter, ScalarFormatter

from nbep.lab.trace.style import FAINT, INK, RANK_COLORS, SMALL, TINY, Picture, plain_axes
from research.model.predictions import RANKS, TITLES, Compared, Predicted
from research.model.published import work_of
from research.model.times import Links, loads_of, time_of
from research.model.traffic import HOME, LINKS, NETWORK, NVLINK
from research.model.work import COMBINE, DISPATCH, VERBS

COLORS = dict(zip(VERBS, RANK_COLORS, strict=False))
LINK_COLORS = {HOME: FAINT, NVLINK: RANK_COLORS[2], NETWORK: RANK_COLORS[0]}


def save_all(folder: Path, links: Links, compared: Sequence[Compared], predicted: Sequence[Predicted]) -> list[Path]:
    """Write the pictures as SVG and return their paths; without published rows there is no picture of errors."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures = {"times": times_picture(compared, predicted), "links": links_picture(links, predicted)}
    if compared:
        pictures["errors"] = errors_picture(compared)
    paths = []
    for name, picture in pictures.items():
        paths.append(folder / f"model_{name}.svg")
        picture.savefig(paths[-1], format="svg", metadata={"Date": None})
    return paths


def times_picture(compared: Sequence[Compared], predicted: Sequence[Predicted]) -> Picture:
    """A panel for each mode: the model's times as lines; of the published ones, the fitted are full circles."""
    modes = list(dict.fromkeys(row.mode for row in predicted))
    picture = Picture(4.2 * len(modes), 3.4)
    for i, mode in enumerate(modes):
        axes = picture.add_subplot(1, len(modes), i + 1)
        for verb in (DISPATCH, COMBINE):
            points = {(row.ranks, row.us) for row in predicted if (row.mode, row.verb) == (mode, verb)}
            points |= {(row.ranks, row.us) for row in compared if (row.mode, row.verb) == (mode, verb)}
            axes.plot(*zip(*sorted(points), strict=True), color=COLORS[verb], lw=1.2, label=verb)
            for row in compared:
                if (row.mode, row.verb) == (mode, verb):
                    face = COLORS[verb] if row.is_fitted else "white"
                    axes.plot(row.ranks, row.published_us, "o", ms=5, mfc=face, mec=COLORS[verb])
        _finish(axes, f"{TITLES[mode]} (○ published, ● fitted to it)")
    return picture


def errors_picture(compared: Sequence[Compared]) -> Picture:
    """A bar for each published row; those of fitted rows are pale."""
    picture = Picture(7, 0.24 * len(compared) + 1)
    axes = picture.add_subplot()
    places = range(len(compared))
    names = [f"{TITLES[row.mode]}, {row.verb}, {row.ranks}" for row in compared]
    colors = [FAINT if row.is_fitted else RANK_COLORS[0] for row in compared]
    axes.barh(places, [100 * row.error for row in compared], color=colors, height=0.6)
    axes.axvline(0, color=INK, lw=0.8)
    plain_axes(axes)
    axes.set_yticks(places, names, fontsize=TINY)
    axes.invert_yaxis()
    axes.set_xlabel("error of the time in %; grey: the rows that were fitted", fontsize=SMALL, color=INK)
    return picture


def links_picture(links: Links, predicted: Sequence[Predicted]) -> Picture:
    """What each link needs for what crosses it, over ranks: a panel for each mode and verb."""
    panels = list(dict.fromkeys((row.mode, row.verb) for row in predicted))
    picture = Picture(3.6 * len(VERBS), 2.6 * len(panels) / len(VERBS))
    for i, (mode, verb) in enumerate(panels):
        axes = picture.add_subplot(-(-len(panels) // len(VERBS)), len(VERBS), i + 1)
        ranks = [row.ranks for row in predicted if (row.mode, row.verb) == (mode, verb)]
        times = [time_of(loads_of(work_of(mode, n), verb), links) for n in ranks]
        for link in LINKS:
            axes.plot(ranks, [time.links.get(link, 0.0) for time in times], color=LINK_COLORS[link], lw=1.2, label=link)
        axes.plot(ranks, [time.us for time in times], color=INK, lw=0.8, ls=":", label="call")
        _finish(axes, f"{TITLES[mode]}, {verb}")
    return picture


def _finish(axes: Axes, title: str) -> None:
    """Title, legend and axes of a panel with microseconds over ranks."""
    axes.set_title(title, fontsize=SMALL, color=INK)
    plain_axes(axes)
    axes.set_xscale("log", base=2)
    axes.set_xticks((8, *RANKS))
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("ranks", fontsize=SMALL, color=INK)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("us", fontsize=SMALL, color=INK)
    axes.legend(fontsize=TINY, frameon=False)
