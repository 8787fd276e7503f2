"""`nbep check --all`: every schedule of a small program; and `--schedule`, one of them again from a file.

docs/every_schedule.md says what "all" means, and what it rests on.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from nbep.check.debug import debug
from nbep.check.runs import Finding, Run, perform
from nbep.check.scenario import ScenarioError, load_scenario
from nbep.device.terminal import progress, write_json
from nbep.emulator.schedule.every import Every, Redundant, Tree
from nbep.emulator.schedule.every_step import Who
from nbep.emulator.schedule.strategies import Strategy
from nbep.emulator.schedule.weak import Weak
from nbep.emulator.schedule.weak_tree import WeakTree

NOTHING_FOUND, FOUND, NOT_ALL = 0, 1, 3
LIMIT, MINUTES = 100_000, 10.0  # runs and time, if nobody says how many
FILE = "schedule.json"
COVERS = 'They are all orders of the accesses that are not weak. What "all" means: docs/every_schedule.md'
COVERS_WEAK = """\
They are all orders of accesses to memory, with late stores and early loads. Races are what --all without --weak looks
for. What this covers: docs/every_schedule.md"""


def check_all(
    console: Console,
    base: Run,
    limit: int | None,
    minutes: float | None,
    to: Path | None,
    note: str | None,
    is_weak: bool = False,
) -> int:
    """Run every schedule, or as many as there is time for. Exit status: 0 none fails, 1 one does, 3 not all were run.

    Args: to: where --json writes; note: what to say if nothing is found; is_weak: with late stores and early loads
    """
    if load_scenario(base.scenario).lets_time_pass:
        raise ScenarioError(f"{base.scenario}: lets time pass, so its waits end by the clock; --all knows no clock")
    limit, end = limit or LIMIT, time.monotonic() + 60 * (minutes or MINUTES)
    tree: Tree | WeakTree = WeakTree() if is_weak else Tree()
    finding: Finding | None = None
    with progress(base.scenario, 1000) as show:
        while finding is None and tree.schedules + tree.redundant < limit and time.monotonic() < end and tree.begin():
            finding = one(tree, base)
            show(completed=int(1000 * tree.share))
    told: dict[str, Any] = {"schedules": tree.schedules, "redundant": tree.redundant, "all": tree.is_whole}
    if finding is not None:
        write_schedule(base, tree, Path(FILE))
        write_json(to, {**told, "found": {"kind": finding.kind, "message": finding.message, "schedule": FILE}})
        console.print(f"Found in schedule {tree.schedules + 1}: {finding.kind}\n\n{finding.message}\n")
        console.print(f"See it again, with --pdb in the debugger at the step that fails:\n  {command_of(FILE)}")
        return FOUND
    write_json(to, {**told, "found": None, "share": tree.share})
    redundant = f"{tree.redundant} more runs were given up as repetitions"
    if not tree.is_whole:
        left = f"about {round(tree.schedules / tree.share) - tree.schedules:,}" if tree.share > 1e-9 else "many"
        console.print(f"Not all: {tree.schedules:,} schedules seen, {left} to go ({redundant}). Nothing found so far.")
        return NOT_ALL
    whole = "The only schedule" if tree.schedules == 1 else f"All {tree.schedules:,} schedules"
    console.print(f"{whole}: nothing found ({redundant}).")
    console.print(COVERS_WEAK if is_weak else COVERS)
    if note is not None:
        console.print(note)
    return NOTHING_FOUND


def one(tree: Tree | WeakTree, run: Run) -> Finding | None:
    """The next run of the tree."""
    try:
        finding = perform(replace(run, memory_model=model_of(tree)), strategy=strategy_for(tree))
    except Redundant:
        tree.end(is_redundant=True)
        return None
    if finding is None:
        tree.end()
    return finding


def model_of(tree: Tree | WeakTree) -> str:
    return "delayed" if isinstance(tree, WeakTree) else "checked"


def strategy_for(tree: Tree | WeakTree) -> Strategy:
    return Weak(tree) if isinstance(tree, WeakTree) else Every(tree)


def command_of(file: str) -> str:
    return f"nbep check --schedule {file}"


def write_schedule(run: Run, tree: Tree | WeakTree, file: Path) -> None:
    """What a run depends on: the scenario, and who went on at each choice; with weak memory, what its step picked."""
    value = {
        "scenario": run.scenario,
        "parameters": dict(run.parameters),
        "faults": run.faults,
        "memory_model": model_of(tree),
        "picks": [list(who) for who in tree.picks],
    }
    file.write_text(json.dumps(value) + "\n")


def read_schedule(file: Path) -> tuple[Run, Strategy]:
    """The run of a file, and its strategy.

    Raises: ScenarioError if it is none
    """
    try:
        value = json.loads(file.read_text())
        parameters = tuple((str(key), int(number)) for key, number in value["parameters"].items())
        model = value["memory_model"]
        tree: Tree | WeakTree
        if model == "delayed":
            tree = WeakTree(((*name(who), int(who[5])), list(map(int, picks))) for who, picks in value["picks"])
        else:
            tree = Tree([name(who) for who in value["picks"]])
        run = Run(value["scenario"], parameters, 0, "uniform", model, tuple(value["faults"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ScenarioError(f"{file}: no schedule of `nbep check --all`: {error}") from None
    tree.begin()
    return run, strategy_for(tree)


def name(who: Any) -> Who:
    """A thread, as a file has it."""
    return int(who[0]), str(who[1]), int(who[2]), int(who[3]), int(who[4])


def run_schedule(console: Console, file: Path, with_pdb: bool, to: Path | None) -> int:
    """Run a schedule of a file again. Exit status: 0 nothing was found, 1 something was."""
    run, strategy = read_schedule(file)
    if with_pdb:
        return FOUND if debug(run, strategy) else NOTHING_FOUND
    finding = perform(run, strategy=strategy)
    write_json(to, {"found": None if finding is None else {"kind": finding.kind, "message": finding.message}})
    console.print("1 run: nothing found." if finding is None else finding.message)
    return NOTHING_FOUND if finding is None else FOUND
