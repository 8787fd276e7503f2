"""Write the table of records/planted.md: in which of all schedules of a small run each broken step shows.

python tools/planted_table.py              takes some five minutes of CPU
python tools/planted_table.py --missing    only the steps that have no line yet; the others stay
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "records" / "planted.md"
sys.path.insert(0, str(ROOT))

from fault_table import Line, lines_in, noting  # noqa: E402

from nbep.emulator.schedule.every import Tree  # noqa: E402
from nbep.lab.check.catalogue import fault_of  # noqa: E402
from nbep.lab.check.command import default_jobs  # noqa: E402
from nbep.lab.check.every import one  # noqa: E402
from nbep.lab.check.runs import (  # noqa: E402
    ERROR,
    Run,
    option_of,
    perform,
    workers,
)

BOTH_WAYS = {"tokens": 2, "topk": 2, "experts": 1, "blocks": 1}
# Whole calls between two ranks whose schedules all end: docs/every_schedule.md has their numbers.
SMALL = tuple(
    Run(scenario, tuple(parameters.items()))
    for scenario, parameters in (
        ("intranode.notify", {"tokens": 1, "rounds": 1}),
        ("intranode.dispatch", {"tokens": 2, "chunk": 1, "slots": 2}),
        ("low_latency", {**BOTH_WAYS, "fp8": 1, "rounds": 3}),
        ("low_latency.overlap", {**BOTH_WAYS, "fp8": 1, "rounds": 3}),
        ("network.push", {"blocks": 1, "warps": 1, "messages": 1, "queues": 1, "rounds": 1}),
    )
)
MOST = 40  # runs of one step in one program: more than all schedules of any
HEAD = "| step that is broken | what finds it | schedule | in the run | seeds |\n| --- | --- | --- | --- | --- |\n"


class Planted(NamedTuple):
    """A step that is broken: what the schedules of a small run find, and in which of them; 0 if none finds it."""

    fault: str
    kind: str
    schedule: int
    run: Run | None
    num_seeds: int


def reached_by(lines: Iterable[Line]) -> dict[str, list[Run]]:
    """For each step that seeds find, the small runs that call its function."""
    found = [line.fault for line in lines if line.base is not None]
    functions = {fault: fault_of(fault).function for fault in found}
    reached: dict[str, list[Run]] = {fault: [] for fault in found}
    for run in SMALL:
        with noting(dict.fromkeys(functions.values())) as called:
            finding = perform(run)
        assert finding is None, finding
        for fault, function in functions.items():
            if function in called:
                reached[fault].append(run)
    return {fault: runs for fault, runs in reached.items() if runs}


def look(task: tuple[Line, tuple[Run, ...]]) -> Planted:
    """Go through all schedules of some runs with a step broken, until one fails."""
    line, runs = task
    for run in runs:
        tree, broken = Tree(), replace(run, faults=(line.fault,))
        for _ in range(MOST):
            if not tree.begin():
                break
            finding = one(tree, broken)
            if finding is not None and finding.kind != ERROR:
                return Planted(line.fault, finding.kind, tree.schedules + 1, run, line.num_seeds)
            if finding is not None:
                break
    return Planted(line.fault, "", 0, None, line.num_seeds)


def words_of(run: Run) -> str:
    return shlex.join(
        [run.scenario, *(word for name, value in run.parameters for word in (option_of(name), str(value)))]
    )


def text_of(planted: Iterable[Planted]) -> str:
    """The table in Markdown: what is found."""
    return HEAD + "".join(
        f"| `{one.fault}` | {one.kind} | {one.schedule} | `{words_of(one.run)}` | {one.num_seeds} |\n"
        for one in planted
        if one.run is not None
    )


def rows_in(page: str) -> list[Planted]:
    """The lines of the table on a page."""
    runs: Mapping[str, Run] = {words_of(run): run for run in SMALL}
    found = []
    for text in page.splitlines():
        if text.startswith("| `"):
            fault, kind, schedule, run, seeds = (part.strip().strip("`") for part in text.strip("|").split(" |"))
            found.append(Planted(fault, kind, int(schedule), runs[run], int(seeds)))
    return found


def main() -> None:
    lines = lines_in(PAGE.with_name("faults.md").read_text())
    reached = reached_by(lines)
    page = PAGE.read_text()
    begin = page[: page.index(HEAD)]
    rows = {row.fault: row for row in rows_in(page)} if "--missing" in sys.argv[1:] else {}
    tasks = [(line, tuple(reached[line.fault])) for line in lines if line.fault in reached and line.fault not in rows]
    with workers(default_jobs()) as each:
        for row in each(look, tasks):
            print(f"{row.fault}: {row.kind or 'nothing'} {row.schedule}", flush=True)
            rows[row.fault] = row
            PAGE.write_text(begin + text_of(rows[line.fault] for line in lines if line.fault in rows))
    print(f"{sum(row.run is not None for row in rows.values())} of {len(rows)} show")


if __name__ == "__main__":
    main()
