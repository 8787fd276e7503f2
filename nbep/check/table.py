"""Breaks each step of some kernels in turn, and says what finds it."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

from rich.console import Console

from nbep.check.catalogue import faults_of, faults_of_function, kernels_named, own_kernels
from nbep.check.faults import Fault, edited
from nbep.check.runs import ERROR, SEARCHED, STRATEGIES, Run, World, perform, planned
from nbep.check.scenario import load_module, scenarios
from nbep.check.search import workers
from nbep.device.terminal import progress, write_json
from nbep.registry import registered

REASON_RUNS = 3  # of a fault that is not expected to be found, with one seed
FEW_TASKS = 16  # are for one process
MOST_CALLS = 12_000_000  # primitive calls after which no further seed is begun
LENGTH = 10_000  # primitive calls of a usual run, for preemptions
NOTE = "_note_reached"


class Task(NamedTuple):
    """A fault, and the runs that lead to it: for each seed all of them."""

    fault: str
    bases: tuple[Run, ...]
    num_seeds: int


class Row(NamedTuple):
    """What has found a fault; kind is "" if nothing has.

    num_seeds: how many it took, or were tried
    run: that has found it
    """

    fault: str
    kind: str
    num_seeds: int
    run: Run | None
    reason: str

    @property
    def is_hole(self) -> bool:
        return not self.kind and not self.reason

    @property
    def found(self) -> str:
        if self.run is not None:
            seeds = "1 seed" if self.num_seeds == 1 else f"{self.num_seeds} seeds"
            return f"{self.kind} ({self.run.memory_model}), {seeds}"
        return f"nothing: {self.reason}" if self.reason else f"NOTHING in {self.num_seeds} seeds: a hole"


def reason_for(fault: str) -> str:
    """Why nothing finds a fault; "" if something should."""
    return next((reason for reason_of in registered("reasons") if (reason := reason_of(fault))), "")


def check_fault(task: Task) -> Row:
    """Break one step and run until something is found."""
    reason = reason_for(task.fault)
    calls, seen = 0, World()
    for seed in range(task.num_seeds):
        if calls > MOST_CALLS:
            return Row(task.fault, "", seed, None, reason)
        for base in task.bases:
            for run in planned(replace(base, faults=(task.fault,)), [seed], STRATEGIES, SEARCHED, LENGTH):
                finding = perform(run, None, seen)
                calls += seen.calls
                if finding is not None and finding.kind != ERROR:
                    return Row(task.fault, finding.kind, seed + 1, run, reason)
    return Row(task.fault, "", task.num_seeds, None, reason)


def tasks_of(what: str, num_seeds: int, done: Collection[str] = ()) -> list[Task]:
    """What to do for a kernel, a folder of kernels, a user's file, or all of nbep's (""); not for faults in `done`.

    Raises: UnknownName
    """
    if what.endswith(".py"):
        return [Task(fault.name, (Run(what),), num_seeds) for fault in faults_of(load_module(Path(what)))]
    kernels = kernels_named(what) if what else list(own_kernels().values())
    faults = [fault for fault in faults_of(*kernels) if fault.name not in done]
    reached = reached_by_runs(kernels, faults)
    tasks = []
    for fault in faults:
        bases = [run for run, functions in reached.items() if fault.function in functions]
        if reason_for(fault.name):
            tasks.append(Task(fault.name, tuple(bases[:REASON_RUNS]), min(num_seeds, 1)))
        else:
            tasks.append(Task(fault.name, tuple(bases), num_seeds))
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


def as_json(row: Row) -> dict[str, Any]:
    command = None if row.run is None else row.run.command
    return {"fault": row.fault, "kind": row.kind, "num_seeds": row.num_seeds, "command": command, "reason": row.reason}


def check_faults(console: Console, what: str, num_seeds: int, jobs: int, json: Path | None = None) -> int:
    """Print what finds each fault. Exit status: 1 if there is a hole."""
    tasks = tasks_of(what, num_seeds)
    width = max(len(task.fault) for task in tasks)
    rows = []
    with progress("faults", len(tasks)) as advance, workers(min(jobs, -(-len(tasks) // FEW_TASKS))) as each:
        for row in each(check_fault, tasks):
            rows.append(row)
            console.print(f"{row.fault:{width}}  {row.found}")
            advance()
    write_json(json, [as_json(row) for row in rows])
    print_summary(console, rows)
    return 1 if any(row.is_hole for row in rows) else 0


def print_summary(console: Console, rows: Sequence[Row]) -> None:
    found = sum(bool(row.kind) for row in rows)
    holes = sum(row.is_hole for row in rows)
    console.print(f"{len(rows)} faults: {found} found, {len(rows) - found - holes} harmless, {holes} not found.")
