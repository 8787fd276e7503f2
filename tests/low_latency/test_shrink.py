"""enable_shrink: ranks that stop are masked, the others go on with what has arrived.

A rank stops when its function returns. The emulator then lets time pass to the deadlines of those that wait for it.
"""

import warnings
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from cases import Case
from low_latency import ASYNC, HOOK, Options, Trip, make_buffer, make_low_latency_case
from masked import check_survivor
from parts import both_parts
from target import spawn

import nbep

pytestmark = pytest.mark.emulator_only("it lets time pass")

NUM_RANKS = 4
OPTIONS = [
    Options(),
    Options(use_fp8=True, dispatch_as=HOOK, combine_as=HOOK),
    Options(dispatch_as=ASYNC, combine_as=ASYNC, use_logfmt=True),
    Options(deduplicate=True),
    Options(deduplicate=True, use_fp8=True, dispatch_as=HOOK, combine_as=HOOK),
]
MODELS = ["sc", "delayed"]  # once a wait has timed out `checked` checks no more


def in_turn(*others: Sequence[Any]) -> list:
    """All combinations of OPTIONS and the others. One option, with one of the others, is short; CI has more."""
    short = [
        (options, *(other[(i >> k) % len(other)] for k, other in enumerate(others)))
        for i, options in enumerate(OPTIONS)
        if i == 4
    ]
    rest = [some for some in product(OPTIONS, *others) if some not in short]
    sample = rest[::4]
    return both_parts(short, thorough=sample, long=[some for some in rest if some not in sample])


def make_case(seed: int) -> Case:
    return make_low_latency_case(seed, num_ranks=NUM_RANKS, num_tokens=(3, 5, 4, 2), num_topk=4)


def masks(buffer: nbep.Buffer) -> list[int]:
    status = np.full(NUM_RANKS, -1, np.int32)
    buffer.low_latency_query_mask_buffer(status)
    return status.tolist()


def spawn_and_destroy(main, destroyed_without: Sequence[int], **options: Any) -> list[Any]:
    """What the ranks return. Those that destroy the buffer warn that they do not wait for the others."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = spawn(main, NUM_RANKS, **options)
    names = f"rank{'s' * (len(destroyed_without) > 1)} {', '.join(map(str, destroyed_without))}"
    warned = sorted(str(warning.message).partition(". ")[0] for warning in caught)
    survivors = [rank for rank in range(NUM_RANKS) if rank not in destroyed_without]
    expected = [f"rank {rank}: destroy does not wait for {names}, masked" for rank in survivors]
    assert warned == (expected if destroyed_without else [])
    return results


@pytest.mark.parametrize(("options", "memory_model", "gone"), in_turn(MODELS, [[2], [0, 3]]))
def test_ranks_that_stop_before_a_dispatch_are_masked_and_the_others_finish(options, memory_model, gone):
    cases = [make_case(seed) for seed in range(4)]

    def main(comm):
        buffer = make_buffer(comm, [(case, options) for case in cases], enable_shrink=True)
        outcomes = [Trip(buffer, cases[0], options).whole()]
        if comm.rank in gone:
            return outcomes
        assert masks(buffer) == [0] * NUM_RANKS
        outcomes += [Trip(buffer, case, options).whole() for case in cases[1:]]
        assert masks(buffer) == [int(rank in gone) for rank in range(NUM_RANKS)]
        buffer.destroy()
        return outcomes

    for rank, outcomes in enumerate(spawn_and_destroy(main, gone, memory_model=memory_model)):
        check_survivor(cases[0], options, rank, outcomes[0], [], [])
        for case, outcome in zip(cases[1:], outcomes[1:], strict=False):
            check_survivor(case, options, rank, outcome, gone, gone)


@pytest.mark.parametrize(
    ("options", "memory_model", "last_step"), in_turn(MODELS, ["send_dispatch", "receive_dispatch"])
)
def test_experts_of_a_rank_that_stops_before_combine_are_left_out(options, memory_model, last_step):
    """Its own tokens have arrived, and count in dispatch."""
    cases = [make_case(seed) for seed in range(2)]
    options = replace(options, dispatch_as=HOOK)

    def main(comm):
        buffer = make_buffer(comm, [(case, options) for case in cases], enable_shrink=True)
        trip = Trip(buffer, cases[0], options)
        trip.send_dispatch()
        if comm.rank == 1 and last_step == "send_dispatch":
            return None
        trip.receive_dispatch()
        if comm.rank == 1:
            return None
        trip.send_combine()
        trip.receive_combine()
        second = Trip(buffer, cases[1], options).whole()
        buffer.destroy()
        return trip.outcome, second

    for rank, outcomes in enumerate(spawn_and_destroy(main, [1], memory_model=memory_model)):
        if outcomes is not None:
            check_survivor(cases[0], options, rank, outcomes[0], [], [1])
            check_survivor(cases[1], options, rank, outcomes[1], [1], [1])


def masked_by_rank_1(comm):
    case = make_low_latency_case(1, num_tokens=4, num_topk=3, routing="everywhere")
    buffer = make_buffer(comm, [(case, Options())], enable_shrink=True)
    if comm.rank == 1:
        buffer.low_latency_update_mask_buffer(0, True)
    Trip(buffer, case, Options()).whole()
    buffer.destroy()


def test_a_rank_that_a_peer_has_masked_hears_of_that_peer_when_it_destroys():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        spawn(masked_by_rank_1, 2)
    assert sorted(str(warning.message).partition(". ")[0] for warning in caught) == [
        f"rank {rank}: destroy does not wait for rank {1 - rank}, masked" for rank in range(2)
    ]


@pytest.mark.thorough
@pytest.mark.parametrize(("options", "memory_model"), in_turn([*MODELS, "checked"]))
def test_a_rank_that_the_user_masks_is_left_out_until_it_is_taken_back(options, memory_model):
    """No wait times out: the emulator would say so. Rank 3 makes no call while it is masked."""
    cases = [make_case(seed) for seed in range(4)]

    def main(comm):
        buffer = make_buffer(comm, [(case, options) for case in cases], enable_shrink=True)
        outcomes: list[Any] = [Trip(buffer, cases[0], options).whole()]
        comm.barrier()
        if comm.rank != 3:
            buffer.low_latency_update_mask_buffer(3, True)
            assert masks(buffer) == [0, 0, 0, 1]
            outcomes += [Trip(buffer, case, options).whole() for case in cases[1:3]]
            buffer.low_latency_clean_mask_buffer()
            assert masks(buffer) == [0] * NUM_RANKS
        buffer.clean_low_latency_buffer(max(cases[3].num_tokens), cases[3].hidden, cases[3].num_experts)
        outcomes.append(Trip(buffer, cases[3], options).whole())
        buffer.destroy()
        return outcomes

    for rank, outcomes in enumerate(spawn_and_destroy(main, [], memory_model=memory_model)):
        check_survivor(cases[0], options, rank, outcomes[0], [], [])
        for case, outcome in zip(cases[1:3], outcomes[1:-1], strict=rank != 3):
            check_survivor(case, options, rank, outcome, [3], [3])
        check_survivor(cases[3], options, rank, outcomes[-1], [], [])


@pytest.mark.parametrize(
    ("options", "last_step", "role", "cell"),
    [
        (Options(), None, "low-latency dispatch receiver", "count"),
        (Options(deduplicate=True), None, "low-latency dispatch receiver", "count"),
        (Options(), "receive_dispatch", "low-latency combine receiver", "count"),
        (Options(deduplicate=True), "receive_dispatch", "low-latency combine receiver", "count"),
    ],
)
def test_without_enable_shrink_a_rank_that_stops_is_a_time_out_that_names_it(options, last_step, role, cell):
    case = make_low_latency_case(1, num_tokens=4, num_topk=3, routing="everywhere")

    def main(comm):
        buffer = make_buffer(comm, [(case, options)])
        trip = Trip(buffer, case, options)
        if comm.rank == 1 and last_step is None:
            return
        if comm.rank == 1:
            trip.send_dispatch()
        else:
            with pytest.raises(nbep.PeerTimeout) as error:  # noqa: PT012
                trip.send_dispatch()
                trip.receive_dispatch()
                buffer.low_latency_combine(
                    np.zeros((2, 8, case.hidden), case.x[0].dtype), trip.topk_idx, trip.topk_weights, trip.handle
                )
                buffer.low_latency_dispatch(case.x[0], trip.topk_idx, 4, case.num_experts)
            assert (error.value.rank, error.value.peer, error.value.role, error.value.cell) == (0, 1, role, cell)
            with pytest.raises(nbep.PeerTimeout):
                buffer.low_latency_dispatch(case.x[0], trip.topk_idx, 4, case.num_experts)

    spawn(main, 2, on_deadlock="expire")
