"""Calls of all shapes and options follow each other on one buffer, as many under way as its two halves allow."""

import random

import pytest
from low_latency import (
    ASYNC,
    BOTH,
    HOOK,
    LOW_LATENCY_ROUTINGS,
    Options,
    Trip,
    check,
    make_buffer,
    make_low_latency_case,
    skip_what_the_target_lacks,
)
from parts import both_parts
from target import MEMORY_MODELS, spawn

NUM_TRIPS = 4


def make_trips(seed, num_ranks):
    """(case, options) of some trips, each of other sizes."""
    rng = random.Random(seed)
    trips = []
    for _ in range(NUM_TRIPS):
        deduplicate, use_fp8 = rng.random() < 0.4, rng.random() < 0.5
        use_logfmt = not deduplicate and rng.random() < 0.3
        case = make_low_latency_case(
            rng.getrandbits(20),
            num_ranks=num_ranks,
            num_tokens=[rng.choice([0, 1, 3, 5]) for _ in range(num_ranks)],
            hidden=rng.choice([128, 128, 512]),
            num_topk=rng.randint(1, 4),
            experts_per_rank=rng.randint(1, 4),
            routing=rng.choice(LOW_LATENCY_ROUTINGS),
        )
        options = Options(
            use_fp8=use_fp8,
            round_scale=use_fp8 and rng.random() < 0.5,
            deduplicate=deduplicate,
            dispatch_as=rng.choice([BOTH, HOOK, HOOK, ASYNC]),
            use_logfmt=use_logfmt,
            combine_as=rng.choice([BOTH, HOOK, HOOK, ASYNC]),
            zero_copy=not use_logfmt and rng.random() < 0.5,
            spare=rng.choice([0, 2]),
        )
        trips.append((case, options))
    return trips


def make_sends(seed):
    """The calls that all ranks make in this order: (trip, "dispatch" or "combine")."""
    rng = random.Random(seed)
    order = [trip for trip in range(NUM_TRIPS) for _ in range(2)]
    rng.shuffle(order)
    seen = set()
    return [(trip, "combine" if trip in seen or seen.add(trip) else "dispatch") for trip in order]


def make_steps(sends, rng):
    """One rank's steps: the sends, and receives wherever they are allowed, in any order.

    A call waits until the one before the last is received, a combine until its dispatch is.
    """
    steps, under_way = [], []

    def receive(call):
        under_way.remove(call)
        steps.append((f"receive_{call[1]}", call[0]))

    for number, (trip, what) in enumerate(sends):
        needed = [] if number < 2 else [sends[number - 2]]
        if what == "combine":
            needed.append((trip, "dispatch"))
        for call in rng.sample(under_way, len(under_way)):
            if call in needed or rng.random() < 0.3:
                receive(call)
        steps.append((f"send_{what}", trip))
        under_way.append((trip, what))
    for call in rng.sample(under_way, len(under_way)):
        receive(call)
    return steps


def take_steps(comm, trips, sends, seed):
    """All steps of one rank; the outcomes of its trips."""
    buffer = make_buffer(comm, trips)
    running = [Trip(buffer, case, options) for case, options in trips]
    for step, number in make_steps(sends, random.Random(f"{seed} {comm.rank}")):
        getattr(running[number], step)()
    buffer.destroy()
    return [trip.outcome for trip in running]


def check_steps(seed, num_ranks, **spawn_options):
    trips, sends = make_trips(seed, num_ranks), make_sends(seed)
    skip_what_the_target_lacks(*(options for _, options in trips))
    ranks = spawn(take_steps, num_ranks, (trips, sends, seed), seed, **spawn_options)
    for number, (case, options) in enumerate(trips):
        outcomes = [outcomes[number] for outcomes in ranks]
        check(case, options, outcomes, f"inputs and schedule {seed}, trip {number}")


@pytest.mark.parametrize("memory_model", MEMORY_MODELS)
@pytest.mark.parametrize(
    ("num_ranks", "seeds"),
    both_parts(
        [(2, range(1))],
        thorough=[(2, range(1, 4)), (3, range(2)), (4, range(1))],
        long=[(2, range(4, 24)), (3, range(2, 8)), (4, range(1, 3))],
    ),
)
def test_calls_of_all_shapes_overlap_and_give_the_references_bits(num_ranks, seeds, memory_model):
    for seed in seeds:
        check_steps(seed, num_ranks, memory_model=memory_model)


def two_trips(comm, called_as):
    options = Options(dispatch_as=called_as, combine_as=called_as)
    trips = [(make_low_latency_case(seed, num_tokens=[4, 2], num_topk=3), options) for seed in (1, 2)]
    buffer = make_buffer(comm, trips)
    return buffer, trips, [Trip(buffer, case, options) for case, options in trips]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_calls_may_be_received_in_either_order(order):
    def main(comm):
        buffer, trips, running = two_trips(comm, HOOK)
        for verb in ("dispatch", "combine"):
            for trip in running:
                getattr(trip, f"send_{verb}")()
            for number in order:
                getattr(running[number], f"receive_{verb}")()
        buffer.destroy()
        return trips, [trip.outcome for trip in running]

    ranks = spawn(main, 2)
    for number, (case, options) in enumerate(ranks[0][0]):
        check(case, options, [outcomes[number] for _, outcomes in ranks], f"order {order}, trip {number}")


@pytest.mark.parametrize("first_received", [0, 1])
def test_a_half_that_a_hook_has_received_is_free_before_its_rank_calls_again(first_received):
    """Rank 0 sends the next call and all of it leaves, while rank 1 waits for that before it calls anything."""

    def main(comm):
        buffer, trips, running = two_trips(comm, HOOK)
        for trip in running:
            trip.send_dispatch()
        running[first_received].receive_dispatch()
        if first_received == 1:
            running[0].receive_dispatch()
        if comm.rank == 1:
            comm.barrier()
        running[0].send_combine()  # the half of the first dispatch
        if comm.rank == 0:
            buffer._memory.low_latency.synchronize()
            comm.barrier()
        if first_received == 0:
            running[1].receive_dispatch()
        running[1].send_combine()
        for trip in running:
            trip.receive_combine()
        buffer.destroy()
        return trips, [trip.outcome for trip in running]

    ranks = spawn(main, 2)
    for number, (case, options) in enumerate(ranks[0][0]):
        check(case, options, [outcomes[number] for _, outcomes in ranks], f"trip {number}")


@pytest.mark.parametrize("third", ["dispatch", "combine"])
def test_a_third_call_under_way_is_refused_and_succeeds_after_the_hook_of_the_first(third):
    def main(comm):
        case = make_low_latency_case(3, num_tokens=3)
        buffer = make_buffer(comm, [(case, Options())])
        whole = Trip(buffer, case, Options(combine_as=HOOK))
        whole.send_dispatch()
        whole.receive_dispatch()  # call 0
        first, second, last = (Trip(buffer, case, Options(dispatch_as=HOOK)) for _ in range(3))
        first.send_dispatch()  # call 1
        second.send_dispatch()  # call 2
        send = whole.send_combine if third == "combine" else last.send_dispatch
        message = (
            rf"low_latency_{third}: got a third call under way: the hook of low_latency_dispatch "
            r"\(low-latency call 1\) has not been called; must be made after that hook"
        )
        with pytest.raises(ValueError, match=message):
            send()
        first.receive_dispatch()
        send()
        trips = [first, second]
        if third == "dispatch":
            trips.append(last)
        second.receive_dispatch()
        if third == "dispatch":
            last.receive_dispatch()
        else:
            whole.receive_combine()
            trips.append(whole)
        buffer.destroy()
        return case, [trip.outcome for trip in trips]

    ranks = spawn(main, 2)
    for number in range(3):
        check(ranks[0][0], Options(), [outcomes[number] for _, outcomes in ranks], f"trip {number}")


def test_a_hook_is_called_once():
    def main(comm):
        buffer, _, (trip, _) = two_trips(comm, HOOK)
        trip.send_dispatch()
        hook = trip._receive
        hook()
        with pytest.raises(ValueError, match=r"hook: got a second call of the hook of low_latency_dispatch \(low-lat"):
            hook()
        buffer.destroy()
        with pytest.raises(ValueError, match="buffer: got one that is destroyed; must be used before destroy"):
            hook()

    spawn(main, 2)


def test_a_buffer_may_be_destroyed_before_its_hooks_are_called():
    def main(comm):
        buffer, _, running = two_trips(comm, HOOK)
        for trip in running:
            trip.send_dispatch()
        buffer.destroy()
        with pytest.raises(ValueError, match="buffer: got one that is destroyed; must be used before destroy"):
            running[0]._receive()

    spawn(main, 2)


@pytest.mark.thorough
def test_results_of_a_call_stay_as_they_are_through_later_calls():
    def main(comm):
        case = make_low_latency_case(4, num_tokens=5, num_topk=3)
        buffer = make_buffer(comm, [(case, Options())])
        first = Trip(buffer, case, Options())
        first.send_dispatch()
        for seed in range(5, 8):
            other = make_low_latency_case(seed, num_tokens=5, num_topk=3)
            Trip(buffer, other, Options()).whole()
        first.receive_dispatch()
        first.send_combine()
        for seed in range(5, 8):
            other = make_low_latency_case(seed, num_tokens=5, num_topk=3)
            Trip(buffer, other, Options()).whole()
        first.receive_combine()
        buffer.destroy()
        return case, first.outcome

    ranks = spawn(main, 2)
    check(ranks[0][0], Options(), [outcome for _, outcome in ranks], "results that are held")


def test_one_dispatch_serves_several_combines():
    def main(comm):
        case, options = make_low_latency_case(5, num_tokens=5, num_topk=3), Options(deduplicate=True)
        buffer = make_buffer(comm, [(case, options)])
        trip = Trip(buffer, case, options)
        first = trip.whole().combined_x.tobytes()
        trip.send_combine()
        trip.receive_combine()
        buffer.destroy()
        return case, trip.outcome, first

    ranks = spawn(main, 2)
    check(ranks[0][0], Options(deduplicate=True), [outcome for _, outcome, _ in ranks], "combined twice")
    assert all(outcome.combined_x.tobytes() == first for _, outcome, first in ranks)


def test_ranks_that_make_different_calls_raise():
    def main(comm):
        case = make_low_latency_case(6, num_tokens=3)
        options = Options(use_fp8=comm.rank == 0)
        buffer = make_buffer(comm, [(case, options)])
        Trip(buffer, case, options).whole()

    with pytest.raises(ValueError, match="use_fp8"):
        spawn(main, 2)


def test_the_steps_above_have_two_calls_under_way():
    steps = [make_steps(make_sends(seed), random.Random(f"{seed} {rank}")) for seed in range(4) for rank in range(2)]
    assert any("ss" in "".join(step[0] for step, _ in of_rank) for of_rank in steps)
