"""What a benchmark says and writes: tables, lines, one JSON value, and plots, in one form for all."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from nbep.bench.parts.normal_clock import Push
from nbep.device.terminal import console_for, write_json

PUSH_COLUMNS = {"SMs": "num_sms", "to peers": "to_peers:.1f", "at home": "at_home:.1f", "both": "both:.1f"}


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

    def table(self, rows: Sequence[Any], columns: Mapping[str, str], title: str | None = None) -> None:
        """A line for each row; columns: title -> attribute, and behind a colon how it is formatted."""
        self.console.print(table_of(rows, columns, title))

    def say_push(self, pushes: Mapping[int, Push]) -> None:
        """What SMs copy with nothing else to do, by their number."""
        rows = [argparse.Namespace(num_sms=num_sms, **rates._asdict()) for num_sms, rates in pushes.items()]
        self.table(rows, PUSH_COLUMNS, "push, GB/s")

    def add(self, **lists: Iterable[Any]) -> None:
        """What is written in the lists of these names, too."""
        for name, values in lists.items():
            self.found[name] = self.found.get(name, []) + [plain(value) for value in values]
        write_json(self.options.json, self.found, is_last=False)

    def close(self) -> None:
        """Nothing comes any more."""
        write_json(self.options.json, self.found)


def plain(value: Any) -> Any:
    """A record as JSON has it."""
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value._asdict()


def push_gbps(pushes: Mapping[int, Push]) -> dict[int, dict[str, float]]:
    return {num_sms: rates._asdict() for num_sms, rates in pushes.items()}


def table_of(rows: Sequence[Any], columns: Mapping[str, str], title: str | None = None) -> Any:
    """A rich Table. Words stand on the left, numbers on the right; None is an empty cell."""
    from rich.table import Table

    table = Table(title=title)
    for name, field in columns.items():
        is_text = all(isinstance(getattr(row, field.partition(":")[0]), str | bool) for row in rows)
        table.add_column(name, justify="left" if is_text else "right")
    for row in rows:
        table.add_row(*(cell(row, field) for field in columns.values()))
    return table


def cell(row: Any, field: str) -> str:
    name, _, form = field.partition(":")
    value = getattr(row, name)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "" if value is None else format(value, form)


def draw(path: Path, lines: Mapping[str, Mapping[Any, float]], *, dashed: str, small: str = "", **axes: Any) -> None:
    """A line for each label, over its keys; dashed: how the labels of ceilings begin; small: a title in small letters.

    axes: as `Axes.set` takes them
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    drawn = figure.subplots()
    for label, line in lines.items():
        style = {"linestyle": "--", "linewidth": 1} if dashed and label.startswith(dashed) else {"marker": "o"}
        drawn.plot(sorted(line), [line[key] for key in sorted(line)], label=label, **style)
    drawn.set(**axes)
    if small:
        drawn.set_title(small, fontsize="small")
    drawn.legend(fontsize="small")
    figure.savefig(path, dpi=150)
