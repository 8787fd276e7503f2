"""What the model says: of the published rows, with its error, and of any number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from statistics import fmean
from typing import Any

from nbep.lab.trace.table import align
from research.model.fit import PARAMETERS, is_fitted
from research.model.published import rows, us_of, work_of
from research.model.times import Links, Load, loads_of, time_of
from research.model.traffic import NETWORK, NVLINK
from research.model.work import INTERNODE, LOW_LATENCY, MODES, VERBS

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


# --- The model's tables as text ---------------------------------------------------------------------------------------
TITLES = dict(zip(MODES, ("inside a node", "between nodes", "low latency"), strict=True))
BAR_PERCENT = 2  # of error that a character of a bar stands for


def compared_table(compared: Sequence[Compared]) -> str:
    """A line for each published row, its error as a number and as a bar, and the mean errors below."""
    lines: list[tuple[object, ...]] = [
        ("mode", "verb", "ranks", "published us", "model us", "error", "", "slowest", "")
    ]
    lines += [
        (
            TITLES[row.mode],
            row.verb,
            row.ranks,
            f"{row.published_us:.0f}",
            f"{row.us:.0f}",
            percent(row.error),
            "fitted" if row.is_fitted else "predicted",
            row.bound,
            bar(row.error),
        )
        for row in compared
    ]
    predicted = [row for row in compared if not row.is_fitted]
    worst = max(predicted, key=lambda row: abs(row.error))
    num_fitted = len(compared) - len(predicted)
    return (
        f"{align(lines, '<<>>>><<<')}\n\n"
        f"mean error: {100 * mean_error(compared, True):.1f} % of {num_fitted} fitted rows, "
        f"{100 * mean_error(compared, False):.1f} % of {len(predicted)} predicted ones\n"
        f"worst prediction: {TITLES[worst.mode]}, {worst.verb}, {worst.ranks} ranks: {percent(worst.error)}"
    )


def percent(error: float) -> str:
    return f"{round(100 * error, 1) + 0.0:+.1f} %"  # + 0.0: never -0.0


def bar(error: float) -> str:
    """`|==` for an error of 4 %; too short times go to the left of the line."""
    length = round(abs(error) * 100 / BAR_PERCENT)
    left = "=" * length if error < 0 else ""
    return f"{left:>16}|{'=' * length if error > 0 else ''}"


def predicted_table(predicted: Sequence[Predicted]) -> str:
    """A line for each call, with what crosses the links for the average rank."""
    lines: list[tuple[object, ...]] = [
        ("mode", "verb", "ranks", "us", "slowest", "NVLink MB", "network MB", "network messages and flags")
    ]
    lines += [
        (
            TITLES[row.mode],
            row.verb,
            row.ranks,
            f"{row.us:.0f}",
            row.bound,
            f"{row.nvlink.num_bytes / 1e6:.2f}",
            f"{row.network.num_bytes / 1e6:.2f}",
            f"{row.network.num_messages:.0f}",
        )
        for row in predicted
    ]
    return align(lines, "<<>><>>>")


def parameter_lines(links: Links) -> str:
    """What a fit has found, as the file has it."""
    return "\n".join(f"{name} = {round(read(links), 1)}" for name, (read, _) in PARAMETERS.items())
