"""A schedule in a file: what `nbep check --schedule` needs to make a run again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nbep.check.runs import Run
from nbep.check.scenario import ScenarioError
from nbep.emulator.schedule.every import Every, Tree
from nbep.emulator.schedule.every_step import Replay, Who
from nbep.emulator.schedule.strategies import Strategy

FILE = "schedule.json"


def write_schedule(run: Run, replay: Replay, file: Path) -> None:
    """What a run depends on: the scenario, the memory model, and what was chosen."""
    of_run = {"scenario": run.scenario, "parameters": dict(run.parameters), "faults": run.faults}
    file.write_text(json.dumps({**of_run, "memory_model": run.memory_model, **replay._asdict()}) + "\n")


def read_schedule(file: Path) -> tuple[Run, Strategy]:
    """The run of a file, and its strategy.

    Raises: ScenarioError if it is none
    """
    try:
        value = json.loads(file.read_text())
        parameters = tuple((str(name), int(number)) for name, number in value["parameters"].items())
        model = value["memory_model"]
        tree = tree_in(value, model == "delayed")
        run = Run(value["scenario"], parameters, 0, "uniform", model, tuple(value["faults"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ScenarioError(f"{file}: no schedule of `nbep check --all`: {error}") from None
    return run, Every(tree)


def tree_in(value: Any, is_weak: bool = False) -> Tree:
    """A run of who went on at each choice, as a file says it, with the events that were choices, and all else."""
    events = ((str(one[0]), int(one[1]), int(one[2]), int(one[3])) for one in value["events"])
    decided = [[int(number) for number in made] for made in value["decided"]]
    tree = Tree(map(name, value["picks"]), events, decided, is_weak=is_weak, finds_races=True)
    tree.begin()
    return tree


def name(who: Any) -> Who:
    """A thread, as a file has it."""
    return int(who[0]), str(who[1]), int(who[2]), int(who[3]), int(who[4])
