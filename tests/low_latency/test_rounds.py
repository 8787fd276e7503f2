"""Random rounds on one buffer: the calls of all kinds and sizes follow each other. Their fast check is checked, too."""

import random
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from low_latency import Trip, check
from low_latency_rounds import Sizes, make_plan, num_rdma_bytes, run_plan, wrong_names
from parts import both_parts, dear
from target import spawn

import nbep

SMALL = Sizes(hiddens=(128, 512), most_tokens=9, most_topk=4, experts_per_rank=(1, 3))
NUM_ROUNDS = 6


def run_rounds(comm, seed: int, num_rounds: int) -> list[str]:
    """What is wrong on one rank."""
    rng = random.Random(seed)
    buffer = nbep.Buffer(comm, num_rdma_bytes=num_rdma_bytes(comm.size, SMALL), low_latency_mode=True)
    wrong = []
    for number in range(num_rounds):
        plan = make_plan(rng, number, comm.size, SMALL)
        wrong += [f"{plan}: {name}" for name in run_plan(buffer, plan)]
    buffer.destroy()
    return wrong


@dear
@pytest.mark.parametrize(
    ("seed", "num_ranks"),
    both_parts([(0, 3)], thorough=[(0, 2), *product(range(1, 5), (2, 3))], long=[*product(range(5, 12), (2, 3))]),
)
def test_rounds_of_all_kinds_are_right(seed, num_ranks):
    assert spawn(run_rounds, num_ranks, (seed, NUM_ROUNDS), seed) == [[]] * num_ranks


@pytest.fixture(scope="module")
def trips():
    """Trips with what came out of them on each rank, which the reference has found right."""
    rng = random.Random(0)
    plans = [make_plan(rng, number, 2, SMALL) for number in range(6)]

    def main(comm):
        buffer = nbep.Buffer(comm, num_rdma_bytes=num_rdma_bytes(comm.size, SMALL), low_latency_mode=True)
        outcomes = [Trip(buffer, case, options).whole() for plan in plans for case, options in plan.trips]
        buffer.destroy()
        return outcomes

    by_rank = spawn(main, 2)
    chosen = [trip for plan in plans for trip in plan.trips]
    for i, (case, options) in enumerate(chosen):
        check(case, options, [outcomes[i] for outcomes in by_rank], f"trip {i}")
    return [(*trip, outcomes) for trip, *outcomes in zip(chosen, *by_rank, strict=True)]


def changed(array: np.ndarray, index: tuple) -> np.ndarray:
    """A copy with one bit of one element inverted."""
    array = np.array(array, order="C")
    array.view(np.uint8).reshape(*array.shape, -1)[(*index, 0)] ^= 1
    return array


@dear
def test_the_fast_check_agrees_with_the_reference(trips):
    for case, options, outcomes in trips:
        for rank, outcome in enumerate(outcomes):
            assert wrong_names(case, options, rank, outcome) == []


@pytest.mark.parametrize("name", ["recv_count", "layout_range", "src_info", "recv_x", "recv_x_scales", "combined_x"])
def test_the_fast_check_finds_one_wrong_bit(trips, name):
    num_tried = 0
    for case, options, outcomes in trips:
        for rank, outcome in enumerate(outcomes):
            dispatched = outcome.dispatched
            filled = dispatched.recv_count.nonzero()[0]
            if name == "combined_x":
                if options.use_logfmt or outcome.combined_x.size == 0:
                    continue
                wrong = replace(outcome, combined_x=changed(outcome.combined_x, (0, 5)))
            else:
                array = getattr(dispatched, name)
                if array is None or len(filled) == 0:
                    continue
                index = (int(filled[-1]), *[0] * (array.ndim - 1))
                wrong = replace(outcome, dispatched=replace(dispatched, **{name: changed(array, index)}))
            assert name in wrong_names(case, options, rank, wrong)
            num_tried += 1
    assert num_tried > 4
