"""What the model says: of the published rows, with its error, and of any number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from statistics import fmean
from typing import Any

from nbep.model.fit import is_fitted
from nbep.model.published import rows, us_of, work_of
from nbep.model.times import Links, Load, loads_of, time_of
from nbep.model.traffic import NETWORK, NVLINK
from nbep.model.work import INTERNODE, LOW_LATENCY, VERBS

RANKS = (16, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True)
class Compared:
    """A published row and what the model makes of it; error: of the time, -0.1 for a tenth too short."""

    mode: str
    verb: str
    ranks: int
    published_us: float
    us: float
    error: float
    bound: str
    is_fitted: bool


@dataclass(frozen=True)
class Predicted:
    """A call with any number of ranks, and what it puts on the links for the average rank."""

    mode: str
    verb: str
    ranks: int
    us: float
    bound: str
    nvlink: Load
    network: Load


def compare(links: Links) -> list[Compared]:
    """Every published row, in the order of the table."""
    compared = []
    for row in rows():
        time, published = time_of(loads_of(work_of(row.mode, row.ranks), row.verb), links), us_of(row)
        error = time.us / published - 1
        compared.append(Compared(row.mode, row.verb, row.ranks, published, time.us, error, time.bound, is_fitted(row)))
    return compared


def predict(links: Links, ranks: Sequence[int] = RANKS) -> list[Predicted]:
    """Both verbs of the modes that go between nodes, for each number of ranks."""
    predicted = []
    for mode, num_ranks, verb in product((INTERNODE, LOW_LATENCY), ranks, VERBS):
        loads = loads_of(work_of(mode, num_ranks), verb)
        time = time_of(loads, links)
        predicted.append(Predicted(mode, verb, num_ranks, time.us, time.bound, loads[NVLINK], loads[NETWORK]))
    return predicted


def mean_error(compared: Sequence[Compared], of_fitted: bool) -> float:
    """The mean size of the errors of the fitted rows, or of the others."""
    return fmean(abs(row.error) for row in compared if row.is_fitted == of_fitted)


def as_json(links: Links, compared: Sequence[Compared], predicted: Sequence[Predicted]) -> dict[str, Any]:
    """All of it for programs."""
    return {
        "links": asdict(links),
        "compared": [asdict(row) for row in compared],
        "predicted": [
            {**asdict(row), "nvlink": row.nvlink._asdict(), "network": row.network._asdict()} for row in predicted
        ],
    }
