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


# How reading a file may fail that is no schedule.
BROKEN = (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)


def read_schedule(file: Path) -> tuple[Run, Strategy]:
    """The run of a file, and its strategy. Nothing of the run is loaded by then.

    Raises: ScenarioError if it is none
    """
    try:
        value = json.loads(file.read_text())
        parameters = tuple((name, number(given)) for name, given in value["parameters"].items())
        model, scenario = text(value["memory_model"]), text(value["scenario"])
        tree = tree_in(value, model == "delayed")
        run = Run(scenario, parameters, 0, "uniform", model, tuple(map(text, value["faults"])))
    except BROKEN as error:
        raise ScenarioError(f"{file}: no schedule of `nbep check --all`: {error}") from None
    return run, Every(tree)


def tree_in(value: Any, is_weak: bool = False) -> Tree:
    """A run of who went on at each choice, as a file says it, with the events that were choices, and all else."""
    events = ((text(one[0]), number(one[1]), number(one[2]), number(one[3])) for one in value["events"])
    decided = [list(map(number, made)) for made in value["decided"]]
    tree = Tree(map(thread, value["picks"]), events, decided, is_weak=is_weak, finds_races=True)
    tree.begin()
    return tree


def thread(who: Any) -> Who:
    """A thread, as a file has it."""
    return number(who[0]), text(who[1]), number(who[2]), number(who[3]), number(who[4])


def number(value: Any) -> int:
    if type(value) is not int or abs(value) >> 31:
        raise ValueError(f"{str(value)[:20]} stands where a number of 32 bits must be")
    return value


def text(value: Any) -> str:
    if not isinstance(value, str) or "\0" in value:
        raise TypeError(f"{str(value)[:20]} stands where text must be")
    return value
