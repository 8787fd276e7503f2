"""Write the table of records/faults.md: break each step of nbep's kernels in turn, and note what finds it.

    python tools/fault_table.py                      all kernels; takes about ten minutes on two idle cores
    python tools/fault_table.py intranode.combine    the steps of a kernel, or of a folder; the other lines stay

The tests say when it is out of date: a step that is new or has another name, and one that its line's run does not find.
"""

from __future__ import annotations

import argparse
import ast
import shlex
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "records" / "faults.md"
sys.path.insert(0, str(ROOT))

from fault_reasons import reason_for  # noqa: E402

from nbep.lab.check.catalogue import faults_of, faults_of_function, kernels_named, own_faults, own_kernels  # noqa: E402
from nbep.lab.check.command import Row, Task, check_fault, default_jobs, positive  # noqa: E402  # noqa: E402
from nbep.lab.check.faults import Fault, edited  # noqa: E402
from nbep.lab.check.runs import (  # noqa: E402
    Run,
    option_of,
    perform,
    workers,
)
from nbep.lab.check.scenario import scenarios  # noqa: E402

HEAD = "| step that is broken | what finds it | model | seeds | in the run |\n| --- | --- | --- | --- | --- |\n"
NOTHING = "nothing"
NOTE = "_note_reached"
REASON_RUNS = 3  # of a fault that is not expected to be found, with one seed


def tasks_of(what: str, num_seeds: int, done: Collection[str] = ()) -> list[Task]:
    """What to do for a kernel, a folder of kernels, or all of nbep's (""); not for faults in `done`.

    Raises: UnknownName
    """
    kernels = kernels_named(what) if what else list(own_kernels().values())
    faults = [fault for fault in faults_of(*kernels) if fault.name not in done]
    reached = reached_by_runs(kernels, faults)
    tasks = []
    for fault in faults:
        bases = tuple(run for run, functions in reached.items() if fault.function in functions)
        has_reason = bool(reason_for(fault.name))
        few = bases[:REASON_RUNS] if has_reason else bases
        tasks.append(Task(fault.name, few, min(num_seeds, 1) if has_reason else num_seeds))
    return tasks


def reached_by_runs(kernels: Sequence[FunctionType], faults: Iterable[Fault]) -> dict[Run, set[FunctionType]]:
    """Runs of scenarios that call some of the kernels, and which functions with these faults each of them calls.

    A fault that has a reason needs none.
    """
    reached: dict[Run, set[FunctionType]] = {}
    missing = {fault.function for fault in faults if not reason_for(fault.name)}
    for scenario in scenarios().values():
        called = {kernel for name in scenario.kernels for kernel in kernels_named(name)}
        if called.isdisjoint(kernels) or not missing:
            continue
        for variant in scenario.variants:
            run = Run(scenario.name, tuple(variant.items()))
            with noting(missing) as found:
                finding = perform(run)
            assert finding is None, f"{run.command}: {finding}"
            reached[run] = set(found)
    return reached


@contextmanager
def noting(functions: Iterable[FunctionType]) -> Iterator[set[FunctionType]]:
    """Take note of which functions are called."""
    found: set[FunctionType] = set()
    by_number = dict(enumerate(functions))

    def note(number: int) -> None:
        found.add(by_number[number])

    with ExitStack() as stack:
        for number, function in by_number.items():
            if faults_of_function(function):
                function.__globals__[NOTE] = note
                stack.callback(function.__globals__.pop, NOTE, None)
                call = ast.Call(ast.Name(NOTE, ast.Load()), [ast.Constant(number)], [])
                stack.enter_context(edited(function, partial(_begin_with, ast.Expr(call))))
        yield found


def _begin_with(statement: ast.stmt, tree: ast.FunctionDef) -> None:
    tree.body.insert(0, statement)


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
        return Line(row.fault, "", "", 0, None, reason_for(row.fault))
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
            reason = reason_for(row.fault)
            if not (row.kind or reason) and row.fault in bases:
                row = check_fault(Task(row.fault, (bases[row.fault],), options.seeds))
            print(f"{row.fault}: {row.found if row.kind or not reason else f'nothing: {reason}'}", flush=True)
            if row.kind or reason:
                write(row)
            else:
                holes.append(row.fault)
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
