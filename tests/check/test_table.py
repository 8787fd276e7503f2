"""The table of faults in records/faults.md is what the emulator finds."""

from dataclasses import replace
from pathlib import Path

import pytest
from fault_reasons import REASONS, reason_for
from fault_table import Line, line_of, lines_in, tasks_of, text_of
from table import FOUND, LINES, faults_of_mode, in_parts, is_found

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


IN_PARTS = {"intranode": 4, "network": 2, "elastic": 2}


@pytest.mark.parametrize(
    "fault", [fault for mode, step in IN_PARTS.items() for fault in in_parts(faults_of_mode(mode), step)]
)
def test_the_run_of_a_line_finds_its_fault(fault):
    assert is_found(fault)


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
