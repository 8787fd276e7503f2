"""Low-latency kernels broken on purpose are caught: every step that keeps order, in the run named in records/faults.md.

The steps of queue pairs and of the software NIC are broken by tests/network/test_broken_steps.py, too.
"""

import ast
from collections.abc import Sequence
from dataclasses import replace

import pytest
from parts import both_parts, dear
from table import faults_of_mode, in_parts, is_found, runs_of

from nbep.device.kernels.low_latency import coordinator
from nbep.lab.check import Run, broken, edited, perform
from nbep.specimens.scenarios.low_latency import ONCE, SMALL, USUAL

pytestmark = [pytest.mark.emulator_only("the kernels are broken in Python"), pytest.mark.long]

OVERLAPPING = [Run("low_latency.overlap", tuple({**USUAL, "topk": 3, **more}.items())) for more in ({"fp8": 1}, ONCE)]


def is_caught(memory_model: str, base: Run, seeds: Sequence[int] = range(6)) -> bool:
    """Whether one of the schedules ends in wrong results or in an error of the emulator."""
    return any(perform(replace(base, seed=seed, memory_model=memory_model)) is not None for seed in seeds)


def name_of(run: Run) -> str:
    return "-".join([run.scenario, *(f"{name}={value}" for name, value in run.parameters)])


def is_quick(run: Run) -> bool:
    """For the short part."""
    values = run.values
    is_small = values.get("hidden") == SMALL["hidden"]
    return is_small and values["tma"] == 1 and not (values["ranks"] > 2 and values["nic"])


RUNS = runs_of("low_latency")
QUICK = [run for run in RUNS if is_quick(run)][:1]


@dear
@pytest.mark.parametrize(
    ("base", "memory_model"),
    [
        pytest.param(
            base,
            memory_model,
            id=f"{name_of(base)}-{memory_model}",
            marks=() if memory_model == "checked" and base in QUICK else pytest.mark.thorough,
        )
        for base in RUNS
        for memory_model in ("checked", "sc", "delayed")
    ],
)
def test_unbroken_kernels_are_not_caught(base, memory_model):
    assert perform(replace(base, seed=1, memory_model=memory_model)) is None


@pytest.mark.parametrize("fault", in_parts(faults_of_mode("low_latency"), 2))
def test_a_step_that_is_broken_is_caught(fault):
    assert is_found(fault)


def test_a_count_that_is_not_acquired_goes_wrong_if_loads_may_be_early():
    fault = "arrivals.wait_arrival: acquire of network-amo"
    runs = [
        replace(base, seed=seed, memory_model="delayed", faults=(fault,))
        for seed in range(4)
        for base in runs_of("low_latency")[:2]
    ]
    assert any(perform(run) is not None for run in runs)


def credit_before_zeros(function: ast.FunctionDef) -> None:
    """Let the coordinator give its credits before it empties the cells."""
    give = function.body.pop()
    assert "amo_add" in ast.unparse(give)
    first_loop = next(i for i, node in enumerate(function.body) if isinstance(node, ast.For))
    function.body.insert(first_loop, give)


@pytest.mark.parametrize("memory_model", both_parts(["checked"], thorough=["sc"]))
def test_a_credit_that_is_given_before_the_cells_are_empty_is_caught(memory_model):
    with edited(coordinator.empty_half, credit_before_zeros):
        assert any(is_caught(memory_model, base, range(20)) for base in OVERLAPPING)


@dear
@pytest.mark.parametrize("memory_model", both_parts(["checked"], thorough=["sc"]))
@pytest.mark.parametrize("base", OVERLAPPING, ids=name_of)
def test_senders_that_do_not_wait_for_credits_overwrite_what_is_under_way_and_are_caught(base, memory_model):
    with broken(
        *(
            f"low_latency.coordinator.{waits}"
            for waits in ("may_send: wait for credit", "wait_send_area: wait for other")
        )
    ):
        assert is_caught(memory_model, base, range(20))


def uses_not_counted(function: ast.FunctionDef) -> None:
    """Let the coordinator write down as many uses of a half as there were."""
    (count,) = (node for node in ast.walk(function) if isinstance(node, ast.Call) and ast.unparse(node.func) == "s32")
    assert isinstance(count.args[0], ast.BinOp)
    count.args[0] = count.args[0].left


@pytest.mark.parametrize("base", OVERLAPPING, ids=name_of)
def test_credits_that_are_not_taken_are_caught(base):
    with edited(coordinator.end_earlier_calls, uses_not_counted):
        assert is_caught("sc", base, range(20))


@dear
@pytest.mark.parametrize("what", ["clear_slots", "empty_cell"])
@pytest.mark.parametrize("base", OVERLAPPING, ids=name_of)
def test_cells_that_are_not_emptied_are_caught(base, what, monkeypatch):
    monkeypatch.setattr(coordinator, what, lambda *_: None)
    assert is_caught("sc", base)
