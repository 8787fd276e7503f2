"""enable_shrink: a rank that is only late, and was masked. The others must agree, and it must damage nothing of theirs.

Rank 0 is late: its calls begin when another rank has masked it, or later. What it sends may count or not, expert by
expert, in the call that it was sent for; in no other.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from cases import Case
from intranode import Report
from low_latency import (
    HOOK,
    Options,
    Outcome,
    Trip,
    check,
    check_dispatched,
    expected_combine,
    expected_dispatch,
    make_buffer,
    make_low_latency_case,
)
from masked import check_survivor
from parts import both_parts, dear
from target import spawn

from nbep.device.kernels.low_latency import deduplicated_dispatch
from nbep.device.kernels.parts import arrivals
from nbep.host.low_latency.memory import workspace_at
from nbep.host.target.emulator import EmulatorRuntime

pytestmark = pytest.mark.emulator_only("it lets time pass")

LATE = 0
OTHERS = (1, 2)
OPTIONS = [Options(), Options(use_fp8=True), Options(deduplicate=True)]


@pytest.fixture(autouse=True)
def many_blocks(monkeypatch):
    """More waits that end at different times."""
    monkeypatch.setattr(EmulatorRuntime, "resident_blocks", lambda *_: 4)


def make_case(seed: int) -> Case:
    return make_low_latency_case(seed, num_ranks=3, num_tokens=(1, 5, 4), num_topk=4, hidden=256)


def run_late(options: Options, seed: int, late: Callable, other: Callable, is_time: Callable) -> list:
    """What other(trips) returns on ranks 1 and 2. late(trips) runs on rank 0 once is_time(buffers)."""
    options = replace(options, dispatch_as=HOOK, combine_as=HOOK)
    cases = [make_case(i) for i in range(2)]
    buffers: dict = {}

    def main(comm):
        buffer = make_buffer(comm, [(case, options) for case in cases], enable_shrink=True)
        buffers[comm.rank] = buffer
        trips = [Trip(buffer, case, options) for case in cases]
        comm.barrier()
        if comm.rank == LATE:
            comm.runtime.wait_until(lambda: is_time(buffers), lambda: "the others, to mask this rank")
            late(trips)
            return None
        return other(trips)

    return spawn(main, 3, seed=seed)


def dispatch(trip: Trip) -> None:
    trip.send_dispatch()
    trip.receive_dispatch()


def combine(trip: Trip) -> Outcome:
    trip.send_combine()
    trip.receive_combine()
    return trip.outcome


@pytest.mark.parametrize("seeds", both_parts([range(1)], thorough=[range(1, 6)], long=[range(6, 14)]))
@pytest.mark.parametrize("options", both_parts(OPTIONS[2:], thorough=OPTIONS[:2]))
def test_what_comes_late_meets_nothing_of_later_calls(options, seeds):
    """Two dispatches, then two combines: the late dispatch goes to the half in which the others combine."""

    def late(trips):
        for trip in trips:
            dispatch(trip)
        combine(trips[0])

    for seed in seeds:
        num_ready = []

        def other(trips, num_ready=num_ready):
            for trip in trips:
                dispatch(trip)
            num_ready.append(1)
            return [combine(trip) for trip in trips]

        results = run_late(options, seed, late, other, lambda _, ready=num_ready: len(ready) == len(OTHERS))
        for rank in OTHERS:
            for i, outcome in enumerate(results[rank]):
                check_survivor(make_case(i), options, rank, outcome, [LATE], [LATE])


@dear
@pytest.mark.parametrize("cleans", [False, True])
@pytest.mark.parametrize("options", both_parts(OPTIONS[2:], thorough=OPTIONS[:2]))
def test_what_a_rank_sends_after_it_was_masked_by_hand_counts_in_no_call(options, cleans):
    """Also if the others have cleaned their buffers in between: its cells stay given up."""
    options, case = replace(options, dispatch_as=HOOK), make_case(0)
    done = []

    def main(comm):
        buffer = make_buffer(comm, [(case, options)], enable_shrink=True)
        trip = Trip(buffer, case, options)
        comm.barrier()
        if comm.rank == LATE:
            comm.runtime.wait_until(lambda: len(done) == len(OTHERS), lambda: "the others, to mask this rank")
            trip.send_dispatch()
            buffer._memory.low_latency.synchronize()
            done.append(LATE)
            return None
        buffer.low_latency_update_mask_buffer(LATE, True)
        if cleans:
            buffer.clean_low_latency_buffer(max(case.num_tokens), case.hidden, case.num_experts)
        buffer._memory.low_latency.synchronize()
        done.append(comm.rank)
        comm.runtime.wait_until(lambda: LATE in done, lambda: "the late rank, to send")
        return trip.whole()

    results = spawn(main, 3)
    for rank in OTHERS:
        check_survivor(case, options, rank, results[rank], [LATE], [LATE])


@pytest.mark.parametrize("seeds", both_parts([range(1)], thorough=[range(1, 6)], long=[range(6, 12)]))
@pytest.mark.parametrize("options", both_parts(OPTIONS[2:], thorough=OPTIONS[:2]))
def test_a_rank_that_comes_late_to_a_clean_is_waited_for_in_the_next_one(options, seeds):
    """What it sends before the next one, and no rank receives, must not meet cells that are clean already."""
    case = make_case(0)
    half_a_call = replace(options, dispatch_as=HOOK)

    def main(comm, done):
        buffer = make_buffer(comm, [(case, options)], enable_shrink=True)

        def clean():
            buffer.clean_low_latency_buffer(max(case.num_tokens), case.hidden, case.num_experts)
            buffer._memory.low_latency.synchronize()

        comm.barrier()
        if comm.rank == LATE:
            comm.runtime.wait_until(lambda: len(done) == len(OTHERS), lambda: "the others, to clean")
        else:
            buffer.low_latency_update_mask_buffer(LATE, True)
        clean()
        done.append(comm.rank)
        comm.barrier()
        buffer.low_latency_clean_mask_buffer()
        comm.barrier()
        if comm.rank == LATE:
            Trip(buffer, case, half_a_call).send_dispatch()  # begins with a clean
        else:
            clean()
        clean()
        return Trip(buffer, case, options).whole()

    for seed in seeds:
        check(case, options, spawn(main, 3, args=([],), seed=seed), f"schedule {seed}")


@pytest.mark.parametrize(
    ("options", "last_rank_is_asked_first"),
    both_parts(
        [(OPTIONS[-1], True)],
        thorough=[(each, first) for each in OPTIONS for first in (False, True) if (each, first) != (OPTIONS[-1], True)],
    ),
)
def test_after_masks_are_taken_off_all_ranks_are_in_step_again(options, last_rank_is_asked_first):
    """As vLLM does it: the buffer is zeroed and the masks are taken off, and that is all."""
    case, again = make_case(0), make_case(1)

    def main(comm, done):
        buffer = make_buffer(comm, [(case, options), (again, options)], enable_shrink=True)
        comm.barrier()
        if comm.rank == LATE:
            comm.runtime.wait_until(lambda: len(done) == len(OTHERS), lambda: "the others, to mask this rank")
        # The others make an odd number of calls, the late rank an even one.
        Trip(buffer, case, options).whole()
        if comm.rank != LATE:
            dispatch(Trip(buffer, case, replace(options, dispatch_as=HOOK)))
            done.append(comm.rank)
        comm.barrier()
        status = np.zeros(3, np.int32)
        buffer.low_latency_query_mask_buffer(status)
        assert status[LATE] == 1 or comm.rank == LATE
        buffer.get_local_buffer_tensor(np.int8, use_rdma_buffer=True)[:] = 0
        buffer.low_latency_clean_mask_buffer()
        if last_rank_is_asked_first:
            comm.runtime.wait_until(lambda: comm.rank == 2 or len(done) > 2, lambda: "the last rank")
            done.append(comm.rank)
        return [Trip(buffer, again, options).whole() for _ in range(2)]

    results = spawn(main, 3, args=([],))
    for trip in range(2):
        check(again, options, [outcomes[trip] for outcomes in results], f"trip {trip}")


def test_a_replayed_graph_after_masks_were_taken_off_is_refused():
    """It asks no host whether the ranks are in step: its kernels do."""
    case = make_case(0)

    def main(comm):
        buffer = make_buffer(comm, [(case, Options())], enable_shrink=True)
        buffer.low_latency_clean_mask_buffer()
        buffer._memory.low_latency.is_unclean = False  # as a replay, which passes no verb
        with pytest.raises(ValueError, match=r"got a replay of a CUDA graph on rank \d after masks were taken off"):
            Trip(buffer, case, Options()).whole()

    spawn(main, 3)


def test_tokens_of_an_expert_whose_count_was_given_up_have_no_rows(monkeypatch):
    """With deduplicate the messages may be there all the same: an arrival of its own tells of them."""
    case, options = make_case(0), Options(deduplicate=True)
    wait_number = deduplicated_dispatch.wait_number

    def give_up_expert_0(cell, bounds, mask, waiter):
        if waiter.peer == LATE and waiter.channel < case.num_ranks:
            return arrivals.ABSENT
        return wait_number(cell, bounds, mask, waiter)

    monkeypatch.setattr(deduplicated_dispatch, "wait_number", give_up_expert_0)

    def main(comm):
        return Trip(make_buffer(comm, [(case, options)], enable_shrink=True), case, options).whole()

    results = spawn(main, 3)
    for rank in OTHERS:
        check_consistent(case, options, rank, results[rank])
        counts = results[rank].dispatched.layout_range[:, LATE] & 0xFFFFFFFF
        assert counts[0] == 0
    assert any((case.topk_idx[LATE] == rank * case.num_experts // case.num_ranks).any() for rank in OTHERS)


def has_masked(buffers: dict) -> bool:
    """Whether a rank has masked the late one just now. The kernels of the others still run."""
    at, _ = workspace_at(0, 3)
    masks = [buffers[rank]._memory.low_latency.workspace.read(at.mask, 3, np.int32) for rank in OTHERS]
    return any(mask[LATE] for mask in masks)


def num_present_in_a_race(options: Options, seed: int) -> list[int]:
    """How many tokens of the late rank the others get if it comes while they mask it. They have to agree."""

    def late(trips):
        dispatch(trips[0])
        combine(trips[0])

    def other(trips):
        dispatch(trips[0])
        return combine(trips[0])

    results = run_late(options, seed, late, other, has_masked)
    return [check_consistent(make_case(0), options, rank, results[rank]) for rank in OTHERS]


@pytest.mark.parametrize("seeds", both_parts([], thorough=[[0, 34], range(32, 36)], long=[range(60, 77)]))
def test_a_rank_that_comes_while_it_is_given_up_counts_for_all_blocks_or_for_none(seeds):
    present = [num for options in OPTIONS for seed in seeds for num in num_present_in_a_race(options, seed)]
    assert 0 in present  # it was masked before anything came
    assert any(present)  # and it came in time, although it was masked


@pytest.mark.thorough  # few schedules show it
def test_a_wait_that_gives_up_alone_is_caught(monkeypatch):
    """The others may see what comes then, and put its tokens where it has put those of the next rank."""
    monkeypatch.setattr(arrivals, "give_up", lambda *_: arrivals.ABSENT)

    def run_all():
        for seed in range(100):
            num_present_in_a_race(OPTIONS[seed % 2], seed)

    with pytest.raises((AssertionError, ValueError), match=r"recv_count|layout_range|src_info|recv_x|combined_x"):
        run_all()


def check_consistent(case: Case, options: Options, rank: int, outcome: Outcome) -> int:
    """Compare what a rank got with the tokens of the late one that layout_range tells of. Returns how many they are."""
    report = Report(f"rank {rank}")
    num_local_experts = case.num_experts // case.num_ranks
    counts = outcome.dispatched.layout_range[:, LATE] & 0xFFFFFFFF
    topk_idx = case.topk_idx[LATE].copy()
    for local_expert in range(num_local_experts):
        expert = rank * num_local_experts + local_expert
        assert counts[local_expert] in (0, (topk_idx == expert).sum()), "a part of an expert's tokens"
        if counts[local_expert] == 0:
            topk_idx[topk_idx == expert] = -1
    present = replace(case, topk_idx=[topk_idx if r == LATE else idx for r, idx in enumerate(case.topk_idx)])
    dispatched = expected_dispatch(present, options)
    check_dispatched(report, present, options, rank, dispatched[rank], outcome)
    everything = expected_dispatch(case, options)
    candidates = [
        expected_combine(with_experts(case, is_there), options, everything)[rank]
        for is_there in product((False, True), repeat=num_local_experts)
    ]
    for token, row in enumerate(outcome.combined_x):
        wanted = {candidate[token].tobytes() for candidate in candidates}
        assert row.tobytes() in wanted, f"combined_x of {case.provenance(rank, token)} on rank {rank}"
    return int(counts.sum())


def with_experts(case: Case, is_there: tuple[bool, ...]) -> Case:
    """The case without the choices of those experts of the late rank that are not there."""
    gone = [LATE * len(is_there) + i for i, there in enumerate(is_there) if not there]
    return replace(case, topk_idx=[np.where(np.isin(idx, gone), -1, idx) for idx in case.topk_idx])
