"""Which parameters of the links come from the published rows, and from which of them.

Fitted on: dispatch, up to 64 ranks. All rows of combine, and dispatch with more ranks, are prediction. So the same rule
holds for every mode, less than half of the rows are used, and what is predicted is another verb, with rows of twice the
size and counts of its own, or more ranks than were fitted.

The fit makes the sum of the squared logarithms of predicted by published time as small as it gets, with no link faster
than the hardware.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from research.model.published import Row, rows, us_of, work_of
from research.model.times import Link, Links, Loads, loads_of, time_of
from research.model.work import DISPATCH

MAX_FITTED_RANKS = 64
MAX_ROUNDS = 300
STEP = 1e-4  # of the logarithm of a parameter
SMALLEST = 1e-3  # that a parameter may become


def is_fitted(row: Row) -> bool:
    return row.verb == DISPATCH and row.ranks <= MAX_FITTED_RANKS


def _with_rate(link: Link, gb_per_s: float) -> Link:
    return replace(link, gb_per_s=min(gb_per_s, link.limit_gb_per_s))


# name -> how to read it and how to set it
PARAMETERS: dict[str, tuple[Callable[[Links], float], Callable[[Links, float], Links]]] = {
    "[call] start_us": (lambda x: x.start_us, lambda x, value: replace(x, start_us=value)),
    "[nvlink] gb_per_s": (
        lambda x: x.nvlink.gb_per_s,
        lambda x, value: replace(x, nvlink=_with_rate(x.nvlink, value)),
    ),
    "[network] gb_per_s": (
        lambda x: x.network.gb_per_s,
        lambda x, value: replace(x, network=_with_rate(x.network, value)),
    ),
    "[network] latency_us": (
        lambda x: x.network.latency_us,
        lambda x, value: replace(x, network=replace(x.network, latency_us=value)),
    ),
}


def fit(links: Links) -> Links:
    """The links with the parameters that suit the fitted rows best. Where the search begins does not matter."""
    chosen = [row for row in rows() if is_fitted(row)]
    loads = [loads_of(work_of(row.mode, row.ranks), row.verb) for row in chosen]
    published = [us_of(row) for row in chosen]
    return _search(links, lambda candidate: misfits(candidate, loads, published))


def misfits(links: Links, loads: Sequence[Loads], published: Sequence[float]) -> np.ndarray:
    """The logarithm of what is predicted by what was published, for each row."""
    return np.log([time_of(load, links).us for load in loads]) - np.log(published)


def _search(links: Links, misfits_of: Callable[[Links], np.ndarray]) -> Links:
    """Damped least squares on the logarithms of the parameters (Levenberg and Marquardt)."""
    names = list(PARAMETERS)

    def links_at(logarithms: np.ndarray) -> Links:
        moved = links
        for name, value in zip(names, np.exp(logarithms), strict=True):
            moved = PARAMETERS[name][1](moved, float(value))
        return moved

    def where(moved: Links) -> np.ndarray:
        return np.log([max(PARAMETERS[name][0](moved), SMALLEST) for name in names])

    at, damping = where(links), 1.0
    best = misfits_of(links_at(at))
    for _ in range(MAX_ROUNDS):
        # Downwards: a link at its limit goes no faster, but slower.
        slopes = [(best - misfits_of(links_at(at - STEP * unit))) / STEP for unit in np.eye(len(names))]
        jacobian = np.array(slopes).T
        is_stuck = (jacobian.T @ best < 0) & (where(links_at(at + STEP)) == at)  # at a limit that it would pass
        jacobian[:, is_stuck] = 0
        normal = jacobian.T @ jacobian + damping * np.eye(len(names))
        tried = where(links_at(at - np.linalg.solve(normal, jacobian.T @ best)))
        misfit = misfits_of(links_at(tried))
        if misfit @ misfit < best @ best:
            at, best, damping = tried, misfit, damping / 3
        else:
            damping *= 3
    return links_at(at)
