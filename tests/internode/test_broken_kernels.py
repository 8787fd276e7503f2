"""Kernels between nodes broken on purpose are caught: every step that keeps order, as docs/faults.md says.

The steps of queue pairs and of the software NIC are broken by tests/network/test_broken_steps.py, too.
"""

from dataclasses import replace

import pytest
from table import found_in, is_found_again

from nbep.check import Run, perform
from nbep.check.scenarios.internode import SCENARIOS

pytestmark = pytest.mark.emulator_only("the kernels are broken in Python")

RUNS = [Run(scenario.name, tuple(variant.items())) for scenario in SCENARIOS for variant in scenario.variants]


def name_of(run: Run) -> str:
    return "-".join([run.scenario, *(f"{name}={value}" for name, value in run.parameters)])


@pytest.mark.thorough
@pytest.mark.parametrize("memory_model", ["sc", "delayed", "checked"])
@pytest.mark.parametrize("base", RUNS, ids=name_of)
def test_unbroken_kernels_are_not_caught(base, memory_model):
    assert perform(replace(base, seed=1, memory_model=memory_model)) is None


@pytest.mark.thorough
@pytest.mark.parametrize("line", found_in("internode"), ids=lambda line: line.fault)
def test_a_step_that_is_broken_is_caught(line):
    assert is_found_again(line)
