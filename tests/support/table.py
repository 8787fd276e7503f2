"""The table of faults in records/faults.md, for tests that hold parts of it."""

from pathlib import Path

import pytest
from fault_table import Line, lines_in

from nbep.lab.check.catalogue import own_faults
from nbep.lab.check.command import Task, check_fault
from nbep.lab.check.runs import Run
from nbep.specimens.scenarios import SCENARIOS

LINES = lines_in((Path(__file__).resolve().parents[2] / "records" / "faults.md").read_text())
FOUND = {line.fault: line for line in LINES if line.base is not None}
MORE_SEEDS = 4  # a change of a kernel moves its schedules
PAIRS = ("release", "acquire", "fence")


def runs_of(mode: str) -> list[Run]:
    """What the table is made with."""
    scenarios = [scenario for name, scenario in SCENARIOS.items() if name.partition(".")[0] == mode]
    return [Run(scenario.name, tuple(variant.items())) for scenario in scenarios for variant in scenario.variants]


def is_found(fault: str) -> bool:
    """Whether a fault is found in the run of its line."""
    line = FOUND[fault]
    assert line.base is not None
    return check_fault(Task(fault, (line.base,), line.num_seeds + MORE_SEEDS)).run is not None


def faults_of_mode(mode: str) -> list[str]:
    """What runs of a mode find."""
    return [fault for fault, line in FOUND.items() if is_of(line, mode)]


def is_of(line: Line, mode: str) -> bool:
    return line.base is not None and line.base.scenario.partition(".")[0] == mode


def in_parts(faults: list[str], step: int) -> list:
    """For `pytest.mark.parametrize`: the short part has every so many ends of pairs, the thorough one the rest."""
    ends = [name for name in faults if own_faults()[name].kind in PAIRS]
    short = set(ends[::step])
    return [pytest.param(name, marks=() if name in short else pytest.mark.thorough) for name in faults]
