"""Write the table of docs/faults.md: break each step of nbep's kernels in turn, and note what finds it.

    python tools/fault_table.py                      all kernels; takes about ten minutes on two idle cores
    python tools/fault_table.py intranode.combine    the steps of a kernel, or of a folder; the other lines stay

The tests say when it is out of date: a step that is new or has another name, and one that its line's run does not find.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "faults.md"
sys.path.insert(0, str(ROOT))

from nbep.check.catalogue import own_faults  # noqa: E402
from nbep.check.command import default_jobs, positive  # noqa: E402
from nbep.check.runs import Run, option_of  # noqa: E402
from nbep.check.search import workers  # noqa: E402
from nbep.check.table import Row, Task, check_fault, tasks_of  # noqa: E402

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


NUM_SEEDS = 12


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("kernels", nargs="*", default=[""], metavar="KERNEL")
    parser.add_argument("--jobs", type=positive, default=default_jobs())
    parser.add_argument("--seeds", type=positive, default=NUM_SEEDS)
    parser.add_argument("--missing", action="store_true", help="only the steps that have no line yet")
    options = parser.parse_args()
    lines = lines_in(PAGE.read_text())
    bases = {line.fault: line.base for line in lines if line.base is not None}  # maybe runs of another kernel
    done = {line.fault for line in lines} if options.missing else set()
    tasks = {task.fault: task for kernel in options.kernels or [""] for task in tasks_of(kernel, options.seeds, done)}
    holes = []
    with workers(options.jobs) as each:
        for row in each(check_fault, tasks.values()):
            if row.is_hole and row.fault in bases:
                row = check_fault(Task(row.fault, (bases[row.fault],), options.seeds))
            print(f"{row.fault}: {row.found}", flush=True)
            if row.is_hole:
                holes.append(row.fault)
            else:
                write(row)
    return 1 if holes else 0


def write(row: Row) -> None:
    """Put a line in its place in the table, or a new one in place of it."""
    page = PAGE.read_text()
    lines = {line.fault: line for line in lines_in(page)} | {row.fault: line_of(row)}
    begin = page.index(HEAD)
    end = begin + len(text_of(lines_in(page)))
    in_order = [lines[name] for name in own_faults() if name in lines]
    PAGE.write_text(page[:begin] + text_of(in_order) + page[end:])


if __name__ == "__main__":
    sys.exit(main())
