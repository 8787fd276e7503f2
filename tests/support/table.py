"""The table of faults in records/faults.md, for tests that hold parts of it."""

from pathlib import Path

from fault_table import lines_in

from nbep.lab.check.runs import Run
from nbep.specimens.scenarios import SCENARIOS

LINES = lines_in((Path(__file__).resolve().parents[2] / "records" / "faults.md").read_text())
FOUND = {line.fault: line for line in LINES if line.base is not None}


def runs_of(mode: str) -> list[Run]:
    """What the table is made with."""
    scenarios = [scenario for name, scenario in SCENARIOS.items() if name.partition(".")[0] == mode]
    return [Run(scenario.name, tuple(variant.items())) for scenario in scenarios for variant in scenario.variants]
