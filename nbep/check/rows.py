"""The table of faults as text: lines of a page, which are read again by the tests that hold it."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from typing import NamedTuple

from nbep.check.runs import Run, option_of
from nbep.check.table import Row

HEAD = "| step that is broken | what finds it | model | seeds | in the run |\n| --- | --- | --- | --- | --- |\n"
NOTHING = "nothing"


class Line(NamedTuple):
    """A line of the table; base is the run without its seed, its strategy and its fault, None if nothing finds it."""

    fault: str
    kind: str
    memory_model: str
    num_seeds: int
    base: Run | None
    reason: str


def line_of(row: Row) -> Line:
    if row.run is None:
        return Line(row.fault, "", "", 0, None, row.reason)
    base = Run(row.run.scenario, row.run.parameters)
    return Line(row.fault, row.kind, row.run.memory_model, row.num_seeds, base, "")


def text_of(lines: Iterable[Line]) -> str:
    """The table in Markdown."""
    return HEAD + "".join(map(_text, lines))


def _text(line: Line) -> str:
    if line.base is None:
        return f"| `{line.fault}` | {NOTHING} | | | {line.reason} |\n"
    words = [line.base.scenario]
    for name, value in line.base.parameters:
        words += [option_of(name), str(value)]
    return f"| `{line.fault}` | {line.kind} | {line.memory_model} | {line.num_seeds} | `{shlex.join(words)}` |\n"


def lines_in(page: str) -> list[Line]:
    """The lines of the tables on a page."""
    lines = []
    for text in page.splitlines():
        if text.startswith("| `"):
            fault, kind, model, seeds, run = (part.strip().strip("`") for part in text.strip("|").split(" |"))
            if kind == NOTHING:
                lines.append(Line(fault, "", "", 0, None, run))
            else:
                scenario, *words = shlex.split(run)
                names = [word.removeprefix("--").replace("-", "_") for word in words[::2]]
                parameters = tuple(zip(names, map(int, words[1::2]), strict=True))
                lines.append(Line(fault, kind, model, int(seeds), Run(scenario, parameters), ""))
    return lines
