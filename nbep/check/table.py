"""Breaks each step of the kernels of a file in turn, and says what finds it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from nbep.check.catalogue import faults_of
from nbep.check.runs import ERROR, SEARCHED, STRATEGIES, Run, World, perform, planned
from nbep.check.scenario import load_module
from nbep.check.search import workers
from nbep.device.terminal import progress, write_json

FEW_TASKS = 16  # are for one process
MOST_CALLS = 12_000_000  # primitive calls after which no further seed is begun
LENGTH = 10_000  # primitive calls of a usual run, for preemptions


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

    @property
    def found(self) -> str:
        if self.run is not None:
            seeds = "1 seed" if self.num_seeds == 1 else f"{self.num_seeds} seeds"
            return f"{self.kind} ({self.run.memory_model}), {seeds}"
        return f"NOTHING in {self.num_seeds} seeds: a hole"


def check_fault(task: Task) -> Row:
    """Break one step and run until something is found."""
    calls, seen = 0, World()
    for seed in range(task.num_seeds):
        if calls > MOST_CALLS:
            return Row(task.fault, "", seed, None)
        for base in task.bases:
            for run in planned(replace(base, faults=(task.fault,)), [seed], STRATEGIES, SEARCHED, LENGTH):
                finding = perform(run, None, seen)
                calls += seen.calls
                if finding is not None and finding.kind != ERROR:
                    return Row(task.fault, finding.kind, seed + 1, run)
    return Row(task.fault, "", task.num_seeds, None)


def as_json(row: Row) -> dict[str, Any]:
    command = None if row.run is None else row.run.command
    return {"fault": row.fault, "kind": row.kind, "num_seeds": row.num_seeds, "command": command}


def check_faults(console: Console, file: Path, num_seeds: int, jobs: int, json: Path | None = None) -> int:
    """Print what finds each fault. Exit status: 1 if there is a hole."""
    tasks = [Task(fault.name, (Run(str(file)),), num_seeds) for fault in faults_of(load_module(file))]
    width = max((len(task.fault) for task in tasks), default=0)
    rows = []
    with progress("faults", len(tasks)) as advance, workers(min(jobs, -(-len(tasks) // FEW_TASKS))) as each:
        for row in each(check_fault, tasks):
            rows.append(row)
            console.print(f"{row.fault:{width}}  {row.found}")
            advance()
    write_json(json, [as_json(row) for row in rows])
    found = sum(bool(row.kind) for row in rows)
    console.print(f"{len(rows)} faults: {found} found, {len(rows) - found} not found.")
    return 1 if found < len(rows) else 0
