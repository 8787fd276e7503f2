"""The table of faults in docs/faults.md, for tests that hold parts of it."""

from pathlib import Path

import pytest

from nbep.check.catalogue import own_faults
from nbep.check.reasons import reason_for
from nbep.check.rows import Line, lines_in
from nbep.check.table import Task, check_fault

LINES = lines_in((Path(__file__).resolve().parents[2] / "docs" / "faults.md").read_text())
FOUND = [line for line in LINES if line.base is not None]
MORE_SEEDS = 4  # a change of a kernel moves its schedules


def is_found_again(line: Line) -> bool:
    """Whether a fault is found in the run of its line, within a few seeds more than it says."""
    assert line.base is not None, reason_for(line.fault)
    return check_fault(Task(line.fault, (line.base,), line.num_seeds + MORE_SEEDS)).run is not None


def found_in(*scenarios: str) -> list[Line]:
    """The lines whose runs are of these scenarios or of parts of them."""
    names = tuple(scenarios)
    return [line for line in FOUND if line.base is not None and line.base.scenario.partition(".")[0] in names]


def in_parts(lines: list[Line]) -> list:
    """Lines for `pytest.mark.parametrize`: what is left out in the short part, scopes and sizes in the other one."""
    faults = own_faults()
    thorough = ("scope", "head", "reset", "ring size")
    return [
        pytest.param(
            line,
            id=line.fault,
            marks=pytest.mark.thorough if line.fault in faults and faults[line.fault].kind in thorough else (),
        )
        for line in lines
    ]
