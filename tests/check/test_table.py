"""The table of faults in records/faults.md is what the emulator finds."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from fault_reasons import REASONS, reason_for
from fault_table import Line, line_of, lines_in, tasks_of, text_of
from parts import both_parts
from primitives_of import replace_primitives
from table import FOUND, LINES, runs_of

from nbep.device.kernels.internode import notify_dispatch as internode
from nbep.device.kernels.intranode import notify_dispatch as intranode
from nbep.device.primitives import st_weak_s32
from nbep.lab.check import perform
from nbep.lab.check.catalogue import own_faults
from nbep.lab.check.command import Row, Task, check_fault
from nbep.lab.check.runs import Run

PAGE = Path(__file__).resolve().parents[2] / "records" / "faults.md"


def test_every_step_that_can_be_broken_has_a_line():
    missing = own_faults().keys() - {line.fault for line in LINES}
    assert missing == set(), "out of date: run `python tools/fault_table.py --missing KERNEL`"
    assert [line.fault for line in LINES] == list(own_faults())


def test_what_nothing_finds_has_a_reason():
    for line in LINES:
        assert (line.base is None) == bool(line.reason)
        if line.base is None:
            assert line.reason == reason_for(line.fault)


def test_no_reason_is_given_for_what_is_not_there():
    names = own_faults()
    places = {
        ".".join(place.split(".")[: end + 1])
        for name in names
        for place in [name.partition(":")[0]]
        for end in range(9)
    }
    assert REASONS.keys() <= names.keys() | places


def test_what_has_a_reason_is_not_found():
    """Then the reason is not true."""
    assert [fault for fault in FOUND if reason_for(fault)] == []


IN_PARTS = {"intranode": 4, "network": 2, "elastic": 2, "internode": 3, "low_latency": 3}
LONG = "internode", "low_latency"
MORE_SEEDS = 4  # a change of a kernel moves its schedules


def in_parts(mode, step):
    """The short part has every so many ends of pairs, the thorough one the rest."""
    faults = [fault for fault, line in FOUND.items() if line.base.scenario.partition(".")[0] == mode]
    short = [fault for fault in faults if own_faults()[fault].kind in ("release", "acquire", "fence")][::step]
    marks = [pytest.mark.thorough, pytest.mark.long][: 1 + (mode in LONG)]
    return [pytest.param(fault, marks=() if fault in short else marks) for fault in faults]


@pytest.mark.parametrize("fault", [fault for mode, step in IN_PARTS.items() for fault in in_parts(mode, step)])
def test_the_run_of_a_line_finds_its_fault(fault):
    line = FOUND[fault]
    assert check_fault(Task(fault, (line.base,), line.num_seeds + MORE_SEEDS)).run is not None


@pytest.mark.thorough
@pytest.mark.parametrize(
    "base",
    [
        pytest.param(base, id=f"{base.scenario} {base.values}", marks=[pytest.mark.long] * (mode in LONG))
        for mode in IN_PARTS
        for base in runs_of(mode)
    ],
)
def test_unbroken_kernels_are_not_caught(base):
    """The engine's tests run them under the other memory models."""
    assert perform(replace(base, seed=1, memory_model="delayed")) is None


# Without `checked`: what is wrong in results, or in what kernels do.
SHOWN = {
    "sc": [
        "teams.publish_tail: tma_store_wait_all",
        "teams.publish_tail: bar_red_and",
        "intranode.dispatch.send_tokens: wait for head",
        "intranode.combine.send_tokens: wait for head",
        "intranode.combine.send_tokens: bar_red_and",
    ],
    "delayed": [
        "teams.publish_tail: release of dispatch-tail",
        "teams.wait_tail_past: acquire of dispatch-tail",
        "intranode.combine.send_tokens: release of combine-tail",
        "intranode.combine.coordinate: acquire of combine-tail",
        "intranode.combine.coordinate: release of combine-shared-tail",
        "intranode.combine.wait_shared_tail_past: acquire of combine-shared-tail",
        "barrier.meet_by_adding: release of barrier-signal",
        "barrier.wait_call: acquire of barrier-signal",
        "internode.dispatch_forwarder.load_tail: acquire of network-amo",
        "internode.coordinator.wait_total: acquire of network-amo",
        "arrivals.wait_arrival: acquire of network-amo",
    ],
}


@pytest.mark.parametrize(
    ("memory_model", "fault"),
    both_parts(
        [(model, SHOWN[model][1]) for model in SHOWN],
        thorough=[(model, fault) for model in SHOWN for fault in SHOWN[model] if fault != SHOWN[model][1]],
    ),
)
def test_a_step_that_is_left_out_goes_wrong(fault, memory_model):
    base = replace(FOUND[fault].base, memory_model=memory_model, faults=(fault,))
    assert any(perform(replace(base, seed=seed)) is not None for seed in range(40))


@pytest.mark.parametrize(
    ("module", "scenario"), [(intranode, "intranode.notify"), (internode, "internode")], ids=["intranode", "internode"]
)
def test_a_count_that_the_cpu_polls_and_that_need_not_reach_it_is_a_data_race(module, scenario, monkeypatch):
    replace_primitives(monkeypatch, module, st_relaxed_sys_s32=st_weak_s32)
    found = perform(Run(scenario, memory_model="checked"))
    assert found is not None
    assert re.search("the CPU polls (4 bytes|`fault report and counters`)", found.message)


def test_a_step_that_breaks_nothing_is_a_hole_unless_there_is_a_reason():
    run = Run("intranode.layout")  # its kernel has no tail
    hole = check_fault(Task("teams.publish_tail: release of dispatch-tail", (run,), 1))
    assert hole == Row(hole.fault, "", 1, None)
    assert hole.found == "NOTHING in 1 seeds: a hole"
    assert not line_of(hole).reason
    row = check_fault(Task("low_latency.deduplicated_dispatch.notify_counts: syncwarp", (run,), 1))
    assert "brings the lanes together" in line_of(row).reason


@pytest.mark.long
@pytest.mark.thorough
def test_faults_are_looked_for_where_their_function_is_called():
    by_fault = {task.fault: task.bases for task in tasks_of("get_dispatch_layout", 3)}
    assert {run.scenario for run in by_fault["get_dispatch_layout: syncthreads"]} >= {"intranode.layout"}


def test_lines_are_read_as_they_are_written():
    lines = [
        Line("a.b: release of c", "race", "checked", 2, Run("intranode.layout", (("tokens", 3), ("topk", 1))), ""),
        Line("a.b: syncwarp 2", "", "", 0, None, "not needed, here"),
    ]
    assert lines_in(f"text\n{text_of(lines)}more\n") == lines
    assert lines_in(PAGE.read_text()) == LINES
    assert replace(Run("x"), seed=1) != Run("x")
