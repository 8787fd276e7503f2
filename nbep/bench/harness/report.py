"""What a benchmark says and writes: tables, lines, one JSON value, and plots, in one form for all."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nbep.bench.harness.clocks import nothing
from nbep.device.terminal import console_for, write_json

Row = dict[str, Any]  # columns by name, as JSON has them; None where one has no meaning


@dataclass(frozen=True)
class Case:
    """What is measured, on one rank. Bytes and times are means over the ranks, so that all ranks make the same row.

    settings  the columns that a row begins with
    call      what is measured; left out where a clock times several calls at once
    moved     the bytes of a call, by the column for their rate in GB/s
    compared  microseconds of something else that does the same, by the column for the ratio
    """

    settings: Row
    call: Callable[[], Any] = nothing
    moved: Mapping[str, float] = field(default_factory=dict)
    compared: Mapping[str, float] = field(default_factory=dict)

    def row(self, us: float, **more: Any) -> Row:
        """The row of a case that took so long. more: other columns"""
        rates = {name: num_bytes / us / 1e3 for name, num_bytes in self.moved.items()}
        ratios = {name: other_us / us for name, other_us in self.compared.items()}
        return {**self.settings, "us": us, **more, **rates, **ratios}


class Report:
    """What rank 0 says and writes, after every part, so that a run that is cut off has said what it knows.

    Args: options of the command; `json` is where to write
          head: what the JSON value begins with
    """

    def __init__(self, options: argparse.Namespace, **head: Any):
        self.options = options
        self.found: dict[str, Any] = head
        self.console = console_for(options.json, width=120)

    def say(self, *lines: str) -> None:
        for line in lines:
            self.console.print(line, highlight=False)

    def table(self, rows: Sequence[Row], columns: Mapping[str, str], title: str | None = None) -> None:
        """A line for each row. Words stand on the left, numbers on the right.

        Args: columns: title -> key of a row, and behind a colon how it is formatted
        """
        from rich.table import Table

        table = Table(title=title)
        for name, shown in columns.items():
            is_text = all(isinstance(row[shown.partition(":")[0]], str | bool) for row in rows)
            table.add_column(name, justify="left" if is_text else "right")
        for row in rows:
            table.add_row(*(cell(row, field) for field in columns.values()))
        self.console.print(table)

    def add(self, **lists: Iterable[Row]) -> None:
        """What is written in the lists of these names, too."""
        for name, rows in lists.items():
            self.found[name] = self.found.get(name, []) + list(rows)
        write_json(self.options.json, self.found, is_last=False)

    def close(self) -> None:
        """Nothing comes any more."""
        write_json(self.options.json, self.found)


def cell(row: Row, field: str) -> str:
    """None is an empty cell."""
    name, _, form = field.partition(":")
    value = row[name]
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "" if value is None else format(value, form)


def draw(path: Path, points: Iterable[tuple[str, float, float]], *, dashed: str, small: str = "", **axes: Any) -> None:
    """A line for each label.

    Args: points: label, x, y; of those of a label at one x the first counts
          dashed: how the labels of ceilings begin
          small: a title in small letters
          axes: as `Axes.set` takes them
    """
    from matplotlib.figure import Figure

    lines: dict[str, dict[float, float]] = {}
    for label, x, y in points:
        lines.setdefault(label, {}).setdefault(x, y)
    figure = Figure(figsize=(7, 4), layout="constrained")
    drawn = figure.subplots()
    for label, line in lines.items():
        style = {"linestyle": "--", "linewidth": 1} if dashed and label.startswith(dashed) else {"marker": "o"}
        drawn.plot(sorted(line), [line[x] for x in sorted(line)], label=label, **style)
    drawn.set(**axes)
    if small:
        drawn.set_title(small, fontsize="small")
    drawn.legend(fontsize="small")
    figure.savefig(path, dpi=150)
