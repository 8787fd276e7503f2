"""What `nbep check --all` says of nbep's kernels: whole calls between two ranks, small enough for all schedules."""

from pathlib import Path

import pytest
from parts import both_parts

from nbep.check.every import one
from nbep.check.runs import RACE, Run
from nbep.emulator.schedule.every import Tree

pytestmark = pytest.mark.emulator_only("every schedule is one of the emulator")

SMALL_RINGS = {"tokens": 2, "chunk": 1, "slots": 2}  # as small as a ring can be
BOTH_WAYS = {"tokens": 2, "topk": 2, "experts": 1, "blocks": 1}
# Scenario, parameters, schedules, runs given up as repetitions.
NOTIFY = ("intranode.notify", {"tokens": 1, "rounds": 1}, 1, 16)
DISPATCH = ("intranode.dispatch", SMALL_RINGS, 4, 18)
LOW_LATENCY = ("low_latency", BOTH_WAYS, 1, 8)
OVERLAP = ("low_latency.overlap", {**BOTH_WAYS, "rounds": 3}, 1, 24)  # the third round uses the first one's half again


def run_of(scenario, parameters, *faults):
    return Run(scenario, tuple(parameters.items()), faults=faults)


@pytest.mark.parametrize(
    ("scenario", "parameters", "schedules", "redundant"), both_parts([LOW_LATENCY], [NOTIFY, DISPATCH, OVERLAP])
)
def test_all_schedules_are_right(scenario, parameters, schedules, redundant):
    tree, run = Tree(), run_of(scenario, parameters)
    while tree.begin():
        assert one(tree, run) is None
    assert (tree.schedules, tree.redundant) == (schedules, redundant)


FAULTS = [
    "network.direct.amo_add: release of network-amo",
    "arrivals.wait_arrival: acquire of network-amo",
    "low_latency.dispatch_receiver.wait_counts: syncwarp",
    "network.direct.quiet: syncwarp",  # of another lane than the one that adds
]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_step_is_found_in_the_first_schedule(fault):
    tree = Tree()
    tree.begin()
    finding = one(tree, run_of(*LOW_LATENCY[:2], fault))
    assert finding is not None
    assert finding.kind == RACE


FAULTS_PAGE = Path(__file__).resolve().parents[2] / "docs/faults.md"
LARGER = {  # runs of that page: the same calls as here, with more tokens, experts and blocks
    "`low_latency --rounds 2 --tokens 3 --hidden 128 --fp8 1`": "low_latency",
    "`low_latency.overlap --rounds 3 --tokens 3 --hidden 128 --topk 3 --fp8 1`": "low_latency.overlap",
}
NEEDS_MORE_BLOCKS = {
    "low_latency.coordinator.empty_half: syncwarp",
    "low_latency.dispatch_sender.take_slot: scope of slot_counter",
}


def planted():
    """Scenario and fault of each line of the table of faults that a larger low-latency run finds."""
    for line in FAULTS_PAGE.read_text().splitlines():
        parts = [part.strip() for part in line.strip("|").split("|")]
        fault = parts[0].strip("`")
        if parts[-1] in LARGER and fault not in NEEDS_MORE_BLOCKS:
            yield LARGER[parts[-1]], fault


@pytest.mark.thorough
def test_planted_orders_are_found_in_the_first_two_schedules():
    found = {}
    for scenario, fault in planted():
        tree, run = Tree(), run_of(scenario, {**BOTH_WAYS, "fp8": 1, "rounds": 3}, fault)
        finding = None
        while finding is None and tree.begin() and tree.schedules < 2:
            finding = one(tree, run)
        found[fault] = None if finding is None else tree.schedules + 1
    late = {fault: number for fault, number in found.items() if number != 1}
    assert len(found) == 47
    assert late == {
        "low_latency.combine_sender.send_expert_rows: syncthreads 2": 2,
        "low_latency.combine_sender.put_row: syncwarp 2": 2,
    }
