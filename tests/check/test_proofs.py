"""What `nbep check --all` says of nbep's kernels: whole calls between two ranks, small enough for all schedules."""

import pytest
from parts import both_parts

from nbep.emulator.schedule.every import Tree
from nbep.lab.check.every import one
from nbep.lab.check.runs import RACE, Run

pytestmark = pytest.mark.emulator_only("every schedule is one of the emulator")

SMALL_RINGS = {"tokens": 2, "chunk": 1, "slots": 2}  # as small as a ring can be
BOTH_WAYS = {"tokens": 2, "topk": 2, "experts": 1, "blocks": 1}
# Scenario, parameters, schedules, runs given up as repetitions.
NOTIFY = ("intranode.notify", {"tokens": 1, "rounds": 1}, 1, 12)
DISPATCH = ("intranode.dispatch", SMALL_RINGS, 3, 9)
FOUR_TOKENS = ("intranode.dispatch", {**SMALL_RINGS, "tokens": 4}, 9, 11)
COMBINE = ("intranode.combine", {**SMALL_RINGS, "tokens": 1}, 1, 14)
COMBINE_OF_TWO = ("intranode.combine", SMALL_RINGS, 13, 30)
LOW_LATENCY = ("low_latency", BOTH_WAYS, 1, 4)
ONE_ROW_FOR_A_RANK = ("low_latency", {**BOTH_WAYS, "experts": 2, "dedup": 1}, 1, 10)
DIRECT = ("intranode.direct", {**SMALL_RINGS, "tokens": 1}, 48, 21)  # four warps of each rank take tickets
DIRECT_OF_TWO = ("intranode.direct", SMALL_RINGS, 768, 33)  # minutes of CPU
OVERLAP = ("low_latency.overlap", {**BOTH_WAYS, "rounds": 3}, 1, 12)  # the third round uses the first one's half again


def run_of(scenario, parameters, *faults):
    return Run(scenario, tuple(parameters.items()), faults=faults)


@pytest.mark.parametrize(
    ("scenario", "parameters", "schedules", "redundant"),
    both_parts(
        [LOW_LATENCY],
        [NOTIFY, DISPATCH, FOUR_TOKENS, COMBINE, COMBINE_OF_TWO, DIRECT, ONE_ROW_FOR_A_RANK, OVERLAP],
        long=[DIRECT_OF_TWO],
    ),
)
def test_all_schedules_are_right(scenario, parameters, schedules, redundant):
    tree, run = Tree(has_parts=True), run_of(scenario, parameters)
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
