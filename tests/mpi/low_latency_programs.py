"""Low-latency calls under mpiexec, once per rank: `python low_latency_programs.py NAMES`. A failure ends all ranks."""

import os
import signal
import sys
import time
import traceback
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from mpi4py import MPI

sys.path.append(str(Path(__file__).parents[1] / "support"))

import numpy as np
import pytest
from low_latency import ASYNC, BOTH, HOOK, Options, Trip, check, make_buffer, make_low_latency_case
from masked import check_survivor

import nbep

KILLED = 1


def make_case(seed: int, num_ranks: int):
    num_tokens = [(5 * rank + 3) % 8 for rank in range(num_ranks)]
    return make_low_latency_case(seed, num_ranks=num_ranks, num_tokens=num_tokens, num_topk=3, hidden=256)


def check_all_ranks(comm, case, options, outcome):
    """Compare what all ranks got with the reference, on rank 0."""
    outcomes = comm.gather(outcome)
    if comm.rank == 0:
        check(case, options, outcomes, f"inputs {case.seed}")


def round_trips(comm):
    """Trips of several kinds on one buffer, one after the other."""
    kinds = [
        Options(),
        Options(use_fp8=True, dispatch_as=HOOK, combine_as=HOOK, with_stats=True),
        Options(deduplicate=True, use_fp8=True, round_scale=True),
        Options(dispatch_as=ASYNC, combine_as=ASYNC, use_logfmt=True),
        Options(deduplicate=True, zero_copy=True, with_out=True),
    ]
    trips = [(make_case(seed, comm.size), options) for seed, options in enumerate(kinds)]
    buffer = make_buffer(comm, trips)
    outcomes = [Trip(buffer, case, options).whole() for case, options in trips]
    buffer.destroy()
    for (case, options), outcome in zip(trips, outcomes, strict=True):
        check_all_ranks(comm, case, options, outcome)


def two_calls_in_flight(comm):
    """Each dispatch is received when the next one is sent; then the same with combines. No rank waits for a barrier."""
    for options in (Options(use_fp8=True), Options(deduplicate=True)):
        options = replace(options, dispatch_as=HOOK, combine_as=HOOK)
        cases = [make_case(seed, comm.size) for seed in range(6)]
        buffer = make_buffer(comm, [(case, options) for case in cases])
        trips = [Trip(buffer, case, options) for case in cases]
        for send, receive in (("send_dispatch", "receive_dispatch"), ("send_combine", "receive_combine")):
            getattr(trips[0], send)()
            for trip, following in pairwise(trips):
                getattr(following, send)()
                getattr(trip, receive)()
            getattr(trips[-1], receive)()
        buffer.destroy()
        for case, trip in zip(cases, trips, strict=True):
            check_all_ranks(comm, case, options, trip.outcome)


def two_threads_in_another_order(comm):
    """Each thread has a buffer of its own group. Where one thread waits, the other one goes on."""
    cases, options = [make_case(seed, comm.size) for seed in range(2)], Options()
    groups = [comm.Dup() for _ in cases]
    buffers = [make_buffer(group, [(case, options)]) for group, case in zip(groups, cases, strict=True)]
    order = [0, 1] if comm.rank == 0 else [1, 0]
    with ThreadPoolExecutor(2) as threads:
        trips = {}
        for number in order:
            trips[number] = threads.submit(Trip(buffers[number], cases[number], options).whole)
            while not buffers[number]._turn.locked() and not trips[number].done():
                time.sleep(1e-3)
    for number, (buffer, group) in enumerate(zip(buffers, groups, strict=True)):
        buffer.destroy()
        check_all_ranks(comm, cases[number], options, trips[number].result())
        group.Free()


def calls_that_differ(comm):
    """What the last rank passes alone each of them reports, with both values."""
    last = comm.size - 1
    case = make_low_latency_case(3, num_ranks=comm.size, num_tokens=[8] * comm.size, num_topk=3, hidden=256)
    wide = make_low_latency_case(3, num_ranks=comm.size, num_tokens=[8] * comm.size, num_topk=3, hidden=512)
    fp8 = Options(use_fp8=True)
    for of_all, of_last, name, values in (
        ((case, Options()), (wide, Options()), "hidden size of x", (256, 512)),
        ((case, Options()), (case, fp8), "use_fp8", (False, True)),
        ((case, fp8), (case, Options(use_fp8=True, round_scale=True)), "round_scale", (False, True)),
        ((case, Options()), (case, Options(use_logfmt=True)), "use_logfmt", (False, True)),
    ):
        buffer = make_buffer(comm, [of_all, of_last], check_calls=True)
        own, theirs = values[::-1] if comm.rank == last else values
        others = rf"[0-{last - 1}]" if comm.rank == last else str(last)
        text = rf"^{name}: got {own} on rank {comm.rank}, {theirs} on rank {others} in the same low_latency_"
        trip = Trip(buffer, *(of_last if comm.rank == last else of_all))
        with pytest.raises(ValueError, match=text):  # noqa: PT012
            trip.whole()
            trip.send_dispatch()  # a rank with a GPU of its own raises for its last call at the next one
        buffer.destroy()


def last_combine_that_a_rank_comes_late_to(comm):
    """Run with a short time-out. The others raise; the late rank gets what they had sent before, or raises, too."""
    late = comm.size - 1
    for kind in (BOTH, HOOK, ASYNC):
        case, options = make_case(3, comm.size), Options(combine_as=kind)
        buffer = make_buffer(comm, [(case, options)])
        trip = Trip(buffer, case, options)
        trip.send_dispatch()
        trip.receive_dispatch()
        if comm.rank == late:
            for peer in range(late):
                comm.recv(source=peer)
            with suppress(nbep.PeerTimeout):
                trip.send_combine()
                trip.receive_combine()
                check_survivor(case, options, comm.rank, trip.outcome, [], [])
        else:
            with pytest.raises(nbep.PeerTimeout, match=f"for rank {late}"):  # noqa: PT012
                trip.send_combine()
                trip.receive_combine()
            comm.send(None, late)
        buffer.destroy()


def event_that_nobody_waits_for(comm):
    """Run with a short time-out. Only destroy can tell of a call whose event was dropped."""
    late = comm.size - 1
    case, options = make_case(3, comm.size), Options(combine_as=ASYNC)
    buffer = make_buffer(comm, [(case, options)])
    trip = Trip(buffer, case, options)
    trip.send_dispatch()
    trip.receive_dispatch()
    if comm.rank == late:
        buffer.destroy()
    else:
        trip.send_combine()
        with pytest.raises(nbep.PeerTimeout, match=f"for rank {late}"):
            buffer.destroy()


def rank_that_is_killed(comm):
    """Run where ranks survive: rank 1 kills itself between two trips, or within one. The others go on without it."""
    for_all, within, later = (make_case(seed, comm.size) for seed in range(3))
    options = Options(deduplicate="deduplicate" in sys.argv, dispatch_as=HOOK, combine_as=HOOK)
    buffer = make_buffer(comm, [(case, options) for case in (for_all, within, later)], enable_shrink=True)
    outcomes = [Trip(buffer, for_all, options).whole()]
    trip = Trip(buffer, within, options)
    trip.send_dispatch()
    trip.receive_dispatch()
    if comm.rank == KILLED:
        os.kill(os.getpid(), signal.SIGKILL)
    trip.send_combine()
    trip.receive_combine()
    outcomes += [trip.outcome, Trip(buffer, later, options).whole()]
    status = np.zeros(comm.size, np.int32)
    buffer.low_latency_query_mask_buffer(status)
    assert status.tolist() == [int(rank == KILLED) for rank in range(comm.size)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        buffer.destroy()
    (shown,) = caught
    assert str(shown.message).startswith(f"rank {comm.rank}: destroy does not wait for rank {KILLED}, masked. Nothing")
    check_survivor(for_all, options, comm.rank, outcomes[0], [], [])
    check_survivor(within, options, comm.rank, outcomes[1], [], [KILLED])
    check_survivor(later, options, comm.rank, outcomes[2], [KILLED], [KILLED])


def main():
    comm, names = MPI.COMM_WORLD, sys.argv[1].split(",")
    try:
        for name in names:
            globals()[name](comm)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        comm.Abort(1)
    print(f"rank {comm.rank} is done", flush=True)


if __name__ == "__main__":
    main()
