"""Low-latency kernels broken on purpose where that is no step by its name are caught; see tests/check/test_table.py."""

import ast
from collections.abc import Sequence
from dataclasses import replace

import pytest
from parts import both_parts, dear

from nbep.device.kernels.low_latency import coordinator
from nbep.lab.check import Run, broken, edited, perform
from nbep.specimens.scenarios.low_latency import ONCE, USUAL

pytestmark = [pytest.mark.emulator_only("the kernels are broken in Python"), pytest.mark.long]

OVERLAPPING = [Run("low_latency.overlap", tuple({**USUAL, "topk": 3, **more}.items())) for more in ({"fp8": 1}, ONCE)]


def is_caught(memory_model: str, base: Run, seeds: Sequence[int] = range(6)) -> bool:
    """Whether one of the schedules ends in wrong results or in an error of the emulator."""
    return any(perform(replace(base, seed=seed, memory_model=memory_model)) is not None for seed in seeds)


def name_of(run: Run) -> str:
    return "-".join([run.scenario, *(f"{name}={value}" for name, value in run.parameters)])


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
