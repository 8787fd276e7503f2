"""What a scenario is for: a fault that it finds, and that the scenarios of its mode without its name do not.

Each has a fault of its own here. Where that is no single step, it is an edit of a function.
"""

import ast
from contextlib import contextmanager

import pytest
from parts import both_parts

from nbep.device.kernels.internode import meet_nodes
from nbep.device.kernels.low_latency import coordinator
from nbep.device.kernels.parts import calls
from nbep.device.network.ibgda import transport
from nbep.lab.check import Run, broken, edited, perform
from nbep.lab.check.runs import STRATEGIES, planned
from nbep.specimens.scenarios import SCENARIOS

pytestmark = pytest.mark.emulator_only("the kernels are broken in Python")
SEEDS = range(6)
LENGTH = 10_000


def sizes_of_this_call(function: ast.FunctionDef) -> None:
    """The coordinator clears as many slot counters as this call has experts; the call before may have had more."""
    (clear,) = (call for call in calls_in(function, "clear_slots") if ast.unparse(call.args[2]) == "num_slots")
    clear.args[2] = ast.parse("ctx.shape.num_experts", mode="eval").body


def room_for_the_first(function: ast.FunctionDef) -> None:
    """A warp waits until the slot of its first entry is free, and writes all of them."""
    (wait,) = calls_in(function, "wait_room")
    wait.args[-1] = ast.Name("first", ast.Load())


def calls_of_others(function: ast.FunctionDef) -> None:
    """A rank takes each call of the others that it waits for as the same as its own."""
    function.body[-1] = ast.Return(ast.Constant(False))


def calls_in(function: ast.FunctionDef, name: str) -> list[ast.Call]:
    return [node for node in ast.walk(function) if isinstance(node, ast.Call) and ast.unparse(node.func) == name]


# Scenario, and what it is for: the name of a fault, or a function and its edit.
FAULTS = {
    "low_latency.sizes": (coordinator.end_earlier_calls, sizes_of_this_call),
    "low_latency.sparse": "low_latency.coordinator.wait_send_area: wait for other",
    "low_latency.differ": "low_latency.calls.compare_calls: wait_number",
    "intranode.differ": (calls.wait_peer, calls_of_others),
    "internode.differ": (meet_nodes.wait_node, calls_of_others),
    "internode.long": "internode.dispatch_sender.send_token: syncwarp 2",
    "internode.sparse": "internode.notify_dispatch.received_message: place of a round",
    "network.wrap": (transport.post_few, room_for_the_first),
}


@contextmanager
def fault_for(scenario):
    fault = FAULTS[scenario]
    with broken(fault) if isinstance(fault, str) else edited(*fault):
        yield


def is_found(run, seeds, strategies=STRATEGIES):
    return any(perform(each) is not None for each in planned(run, seeds, strategies, ["checked"], LENGTH))


def older_runs(scenario):
    """Runs of the scenarios of the same mode that have no fault of their own here, as the table of faults has them."""
    mode = scenario.partition(".")[0]
    others = [other for name, other in SCENARIOS.items() if name.partition(".")[0] == mode and name not in FAULTS]
    return [Run(other.name, tuple(variant.items())) for other in others for variant in other.variants]


QUICK = ["intranode.differ"]


@pytest.mark.parametrize("scenario", both_parts(QUICK, thorough=[name for name in FAULTS if name not in QUICK]))
def test_a_scenario_finds_what_it_is_for(scenario):
    run = Run(scenario)
    assert not is_found(run, [0])
    with fault_for(scenario):
        assert is_found(run, SEEDS)


@pytest.mark.long
@pytest.mark.thorough
def test_credits_of_other_peers_are_found_missing_by_a_schedule_that_is_not_made_for_it():
    with fault_for("low_latency.sparse"):
        assert is_found(Run("low_latency.sparse"), SEEDS, ["uniform"])


# How many of these runs are tried: one of so many, from the first or from another one, or all.
@pytest.mark.parametrize("one_of", both_parts([], thorough=[5], long=[1]))
@pytest.mark.parametrize(("number", "scenario"), list(enumerate(FAULTS)), ids=list(FAULTS))
def test_scenarios_without_its_name_do_not_find_it(number, scenario, one_of):
    runs = older_runs(scenario)
    assert runs
    with fault_for(scenario):
        assert [run.command for run in runs[number % one_of :: one_of] if is_found(run, [0])] == []
