"""What the soak makes of its rounds. The rounds themselves need a GPU: see tests/cuda/test_benchmarks.py."""

import random

import bench_soak as soak
import pytest

import nbep
from nbep.bench.harness import command


@pytest.fixture
def soak_of(monkeypatch):
    """Run the soak on two emulated ranks, whose rounds find what find(rank, number) returns; which ones were run."""
    monkeypatch.setattr(soak, "NUM_NVL_BYTES", 256)
    monkeypatch.setattr(soak, "MAX_TOKENS", 2)
    monkeypatch.setattr(command, "can_run", lambda *_, **__: True)
    monkeypatch.setattr(command, "mpi_world", lambda: None)
    spawn = nbep.spawn
    monkeypatch.setattr(nbep, "spawn", lambda fn, num_ranks, target, args: spawn(fn, num_ranks, "emulator", args))

    def run(find, *argv):
        plans = [[], []]

        def run_round(rank, num_ranks, buffer, plan):
            plans[rank].append(plan)
            return find(rank, len(plans[rank]) - 1)

        monkeypatch.setattr(soak, "run_round", run_round)
        return soak.main(argv), plans

    return run


def test_rounds_that_are_right_go_on_to_the_end(soak_of, capsys):
    status, plans = soak_of(lambda rank, number: [], "--rounds", "5")
    assert status == 0
    assert plans[0] == plans[1]
    assert len(plans[0]) == 5
    assert capsys.readouterr().out.startswith("5 rounds on 2 ranks, all right, ")


def test_a_wrong_round_ends_the_run_with_a_report(soak_of, capsys):
    status, plans = soak_of(lambda rank, number: ["recv_x", "combined_x"] if (rank, number) == (1, 3) else [])
    assert status == 1
    assert [len(of_rank) for of_rank in plans] == [4, 4]
    first, second = capsys.readouterr().out.splitlines()
    assert first == f"round 3 of seed 0 on 2 ranks is wrong: {plans[0][3]}"
    assert second == "  rank 1: recv_x, combined_x"


def test_a_wait_that_is_over_time_ends_the_run_with_a_report(soak_of, capsys):
    def find(rank, number):
        if number == 2:
            raise RuntimeError(f"rank {rank} waited")
        return []

    status, plans = soak_of(find, "--seed", "7")
    assert status == 1
    assert [len(of_rank) for of_rank in plans] == [3, 3]
    assert capsys.readouterr().out.splitlines()[1:] == [
        "  rank 0: RuntimeError: rank 0 waited",
        "  rank 1: RuntimeError: rank 1 waited",
    ]


def test_progress_is_told(soak_of, monkeypatch, capsys):
    monkeypatch.setattr(soak, "PROGRESS_S", 0)
    soak_of(lambda rank, number: [], "--rounds", "3")
    told = [line.partition(",")[0] for line in capsys.readouterr().out.splitlines()]
    assert told == [f"{n} of 3 rounds are right" for n in (1, 2, 3)] + ["3 rounds on 2 ranks"]


def test_every_round_has_inputs_and_sizes_of_its_own():
    rng = random.Random(0)
    plans = [soak.make_plan(rng, 4) for _ in range(300)]
    assert len({plan.seed for plan in plans}) == len(plans)
    assert {plan.hidden for plan in plans} == set(soak.HIDDENS)
    assert {plan.num_topk for plan in plans} == set(range(1, 9))
    assert {plan.config.num_sms for plan in plans} == {2, 4, 6, 8}
    assert len({tuple(plan.num_tokens) for plan in plans}) == len(plans)
    assert any(0 in plan.num_tokens for plan in plans)
    assert all(plan.hidden % 128 == 0 for plan in plans if plan.fp8)
    ways = {(plan.direct_dispatch, plan.direct_combine) for plan in plans}
    assert len(ways) == 4, "rings and no rings follow each other in every order"
    assert 0.2 < sum(plan.fp8 for plan in plans) / len(plans) < 0.6


def test_a_seed_stands_for_its_rounds_however_many_are_run():
    def plans(seed: int, count: int) -> list:
        rng = random.Random(seed)
        return [soak.make_plan(rng, 2) for _ in range(count)]

    assert plans(3, 10)[:4] == plans(3, 4) != plans(4, 4)
