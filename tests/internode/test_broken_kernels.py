"""Kernels between nodes broken on purpose are caught: every step that keeps order, as records/faults.md says.

The steps of queue pairs and of the software NIC are broken by tests/network/test_broken_steps.py, too.
"""

import re
from dataclasses import replace

import pytest
from primitives_of import replace_primitives
from table import faults_of_mode, in_parts, is_found, runs_of
from target import MEMORY_MODELS

from nbep.device import primitives
from nbep.device.kernels.internode import notify_dispatch
from nbep.lab.check import Run, perform

pytestmark = [pytest.mark.emulator_only("the kernels are broken in Python"), pytest.mark.long]


def name_of(run: Run) -> str:
    return "-".join([run.scenario, *(f"{name}={value}" for name, value in run.parameters)])


@pytest.mark.thorough
@pytest.mark.parametrize("memory_model", MEMORY_MODELS)
@pytest.mark.parametrize("base", runs_of("internode"), ids=name_of)
def test_unbroken_kernels_are_not_caught(base, memory_model):
    assert perform(replace(base, seed=1, memory_model=memory_model)) is None


@pytest.mark.parametrize("fault", in_parts(faults_of_mode("internode"), 3))
def test_a_step_that_is_broken_is_caught(fault):
    assert is_found(fault)


@pytest.mark.parametrize(
    "fault",
    [
        "internode.dispatch_forwarder.load_tail: acquire of network-amo",
        "internode.coordinator.wait_total: acquire of network-amo",
    ],
)
def test_a_tail_that_is_not_acquired_goes_wrong_if_loads_may_be_early(fault):
    base = runs_of("internode")[0]
    runs = [replace(base, seed=seed, memory_model="delayed", faults=(fault,)) for seed in range(4)]
    assert any(perform(run) is not None for run in runs)


@pytest.mark.parametrize("weaker", ["st_weak_s32", "st_relaxed_gpu_s32"])
def test_counts_that_the_cpu_polls_and_that_need_not_reach_it_are_a_data_race(weaker, monkeypatch):
    replace_primitives(monkeypatch, notify_dispatch, st_relaxed_sys_s32=getattr(primitives, weaker))
    found = perform(replace(runs_of("internode")[0], seed=0, memory_model="checked"))
    assert found is not None
    assert re.search("the CPU polls (4 bytes|`fault report and counters`)", found.message)
