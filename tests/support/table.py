"""The table of faults in docs/faults.md, for tests that hold parts of it."""

from functools import cache
from pathlib import Path

import pytest

from nbep.check.catalogue import faults_of, kernels_named, own_faults
from nbep.check.reasons import reason_for
from nbep.check.rows import Line, lines_in
from nbep.check.runs import Run
from nbep.check.scenarios import SCENARIOS
from nbep.check.table import Task, check_fault, tasks_of

LINES = lines_in((Path(__file__).resolve().parents[2] / "docs" / "faults.md").read_text())
FOUND = {line.fault: line for line in LINES if line.base is not None}
MORE_SEEDS = 4  # a change of a kernel moves its schedules
SEEDS_WITHOUT_LINE = 6
PAIRS = ("release", "acquire", "fence")
# What is left out in the short part; other scopes, heads, resets and sizes are for the thorough one.
LEFT_OUT = ("release", "acquire", "fence", "barrier", "copies", "network")


def runs_of(mode: str) -> list[Run]:
    """What the table is made with."""
    scenarios = [scenario for name, scenario in SCENARIOS.items() if name.partition(".")[0] == mode]
    return [Run(scenario.name, tuple(variant.items())) for scenario in scenarios for variant in scenario.variants]


def is_found(fault: str, mode: str) -> bool:
    """Whether a fault is found in the run of its line, or in any run of the mode if it has no line."""
    line = FOUND.get(fault)
    if line is None or line.base is None:
        return check_fault(tasks_without_lines(mode)[fault]).run is not None
    return check_fault(Task(fault, (line.base,), line.num_seeds + MORE_SEEDS)).run is not None


@cache
def tasks_without_lines(mode: str) -> dict[str, Task]:
    """As `nbep check --faults` does it: first it finds out which runs lead where."""
    return {task.fault: task for task in tasks_of(mode, SEEDS_WITHOUT_LINE)}


def faults_of_mode(mode: str) -> list[str]:
    """What is to be found in runs of a mode: the faults of its kernels, but for those that another mode's runs find."""
    names = [fault.name for fault in faults_of(*kernels_named(mode)) if not reason_for(fault.name)]
    lines = {name: FOUND.get(name) for name in names}
    return [n for n, line in lines.items() if line is None or (line.base is not None and is_of(line, mode))]


def is_of(line: Line, mode: str) -> bool:
    return line.base is not None and line.base.scenario.partition(".")[0] == mode


def in_parts(faults: list[str]) -> list:
    """For `pytest.mark.parametrize`: the short part has ends of pairs whose line says where to look."""
    kinds = {name: own_faults()[name].kind for name in faults}
    short = {name for name in faults if name in FOUND and kinds[name] in PAIRS}
    return [pytest.param(name, marks=() if name in short else pytest.mark.thorough) for name in faults]
