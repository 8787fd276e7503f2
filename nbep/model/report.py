"""The model's tables as text."""

from __future__ import annotations

from collections.abc import Sequence

from nbep.model.fit import PARAMETERS
from nbep.model.predictions import Compared, Predicted, mean_error
from nbep.model.times import Links
from nbep.model.work import MODES
from nbep.trace.table import align

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
