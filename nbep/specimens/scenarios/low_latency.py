"""The low-latency mode: calls in turn, two at a time, of other sizes, to few ranks, with a buffer that is cleaned, and
with masks.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import nbep
from nbep.device.cards import SM80, SM90
from nbep.host.block_sizes import block_sizes
from nbep.lab.check.scenario import Scenario
from nbep.specimens.workloads.cases import Case, make_low_latency_case, only_to, without
from nbep.specimens.workloads.low_latency import BOTH, HOOK, Options, Outcome, Trip, make_buffer
from nbep.specimens.workloads.low_latency import check as check_trip

# experts: of each rank. blocks: of a launch. fp8, dedup, logfmt: as the arguments use_fp8, deduplicate and use_logfmt.
# tma: whether there is a copy engine. nic: everything between ranks goes through the software NIC. host: the buffer is
# in the host's memory. changing: every other round has longer rows, more experts and more tokens. sparse: what a rank
# sends in a round goes to one other. inputs: seed of the tokens.
PARAMETERS = {
    "ranks": 2,
    "tokens": 3,
    "hidden": 128,
    "topk": 3,
    "experts": 2,
    "rounds": 1,
    "blocks": 2,
    "fp8": 0,
    "dedup": 0,
    "logfmt": 0,
    "tma": 1,
    "nic": 0,
    "host": 0,
    "changing": 0,
    "sparse": 0,
    "inputs": 0,
}
LEAST = {"ranks": 2, "hidden": 128, **dict.fromkeys(("fp8", "dedup", "logfmt", "nic", "host", "changing", "sparse"), 0)}
ONE_EXPERT = {"experts": 1, "topk": 2}  # its rows are shared by all warps of a block
USUAL = {"rounds": 3, "tokens": 7, "hidden": 256}  # of what is run for faults
SMALL = {"rounds": 2, "tokens": 3, "hidden": 128}  # of what is run before: it finds most


def cases_of(parameters: dict[str, int]) -> list[Case]:
    """The inputs of each round; every other rank has about half of the tokens."""
    return [case_of(parameters, number) for number in range(parameters["rounds"])]


def case_of(parameters: dict[str, int], number: int) -> Case:
    num_ranks, is_larger = parameters["ranks"], parameters["changing"] and number % 2 == 0
    tokens = parameters["tokens"] + is_larger
    case = make_low_latency_case(
        parameters["inputs"] + number,
        num_ranks=num_ranks,
        num_tokens=[tokens if rank % 2 == 0 else (tokens + 1) // 2 for rank in range(num_ranks)],
        hidden=parameters["hidden"] * (1 + is_larger),
        num_topk=parameters["topk"],
        experts_per_rank=parameters["experts"] + is_larger,
        routing="everywhere" if parameters["sparse"] else "uniform",
    )
    if not parameters["sparse"]:
        return case
    step = 1 + number // 2 % (num_ranks - 1)  # so that calls in one half go to different peers
    return only_to(case, [[(rank + step) % num_ranks] for rank in range(num_ranks)])


def options_of(parameters: dict[str, int], order: Any) -> Options:
    options = Options(
        use_fp8=bool(parameters["fp8"]), deduplicate=bool(parameters["dedup"]), use_logfmt=bool(parameters["logfmt"])
    )
    dispatch_as, combine_as = CALLED_AS.get(order, (BOTH, BOTH))
    return replace(options, dispatch_as=dispatch_as, combine_as=combine_as)


def buffer_arguments(parameters: dict[str, int]) -> dict[str, Any]:
    """The network of a buffer."""
    if not parameters["nic"]:
        return {"handle_type": "host"} if parameters["host"] else {}
    # So small that queues wrap, and that a message lies in several chunks; and so slow that some wait.
    nic = nbep.NicOptions(num_entries=64, chunk_bytes=256, seed=1, max_delay_ns=5000)
    return {"transport": "ibgda", "num_nvl_peers": 1, "nic": nic}


def with_hooks(trip: Trip) -> Trip:
    """Another trip of the same, with hooks."""
    return Trip(trip.buffer, trip.case, replace(trip.options, dispatch_as=HOOK, combine_as=HOOK))


def in_turn(trips: list[Trip]) -> None:
    for trip in trips:
        trip.whole()


def two_at_a_time(trips: list[Trip]) -> None:
    """All dispatches, then all combines, two calls under way: each is received when the next one is sent."""
    trips[0].send_dispatch()
    for trip, following in pairwise(trips):
        following.send_dispatch()
        trip.receive_dispatch()
    trips[-1].receive_dispatch()
    trips[0].send_combine()
    for trip, following in pairwise(trips):
        following.send_combine()
        trip.receive_combine()
    trips[-1].receive_combine()


def crossed(trips: list[Trip]) -> None:
    """Of two dispatches under way the later one is received first; then each combine is one launch."""
    for first, second in zip(trips[::2], trips[1::2], strict=True):
        first.send_dispatch()
        second.send_dispatch()
        second.receive_dispatch()
        first.receive_dispatch()
        for trip in (first, second):
            trip.send_combine()
            trip.receive_combine()


def with_cleans(trips: list[Trip]) -> None:
    """clean_low_latency_buffer between two trips, behind a dispatch that no rank has received.

    After the last one two calls are under way at a time, for which each rank needs the right credits.
    """
    for trip in trips[:-1]:
        trip.whole()
        with_hooks(trip).send_dispatch()
        case = trip.case
        trip.buffer.clean_low_latency_buffer(max(case.num_tokens), case.hidden, case.num_experts)
    trips[-1] = with_hooks(trips[-1])
    two_at_a_time([trips[-1], with_hooks(trips[-1])])


def with_masks(trips: list[Trip]) -> None:
    """The last trip but one goes without the last rank, which sends a dispatch that no rank waits for."""
    *before, without_it, after = trips
    buffer, case = without_it.buffer, without_it.case
    for trip in before:
        trip.whole()
    if buffer.rank == case.num_ranks - 1:
        with_hooks(without_it).send_dispatch()
    else:
        buffer.low_latency_update_mask_buffer(case.num_ranks - 1, True)
        without_it.whole()
        buffer.low_latency_clean_mask_buffer()
    buffer.clean_low_latency_buffer(max(case.num_tokens), case.hidden, case.num_experts)
    after.whole()


# How the calls of each order are made; the others have both phases in one launch.
CALLED_AS: dict[Any, tuple[str, str]] = {two_at_a_time: (HOOK, HOOK), crossed: (HOOK, BOTH)}


def main(comm: Any, order: Any, **parameters: int) -> list[Outcome | None]:
    """Trips on one buffer; what each has received and summed up."""
    comm.runtime.world.compute_capability = SM90 if parameters["tma"] else SM80
    comm.runtime.resident_blocks = lambda *_: parameters["blocks"]
    if order is with_cleans:
        block_sizes(comm.runtime).notify = 128  # warps that do not know of each other by themselves
    calls = [(case, options_of(parameters, order)) for case in cases_of(parameters)]
    buffer = make_buffer(comm, calls, enable_shrink=order is with_masks, **buffer_arguments(parameters))
    trips = [Trip(buffer, *call) for call in calls]
    order(trips)
    buffer.destroy()
    return [trip.outcome for trip in trips]


def check(results: list[list[Outcome]], order: Any, **parameters: int) -> None:
    """Compare with the reference, bit for bit; rows of one expert and source come in any order."""
    options = options_of(parameters, order)
    for number, case in enumerate(cases_of(parameters)):
        is_masked = order is with_masks and number == parameters["rounds"] - 2
        masked = [case.num_ranks - 1] if is_masked else []
        outcomes = [of_rank[number] for of_rank in results]
        check_trip(without(case, masked, masked), options, outcomes, f"round {number}", leave_out=masked)


def make(name: str, about: str, order: Any, variants: tuple, *kernels: str, **own_values: int) -> Scenario:
    calls = "low_latency.dispatch", "low_latency.combine"
    own = (*calls, "network.nic", *kernels)
    several = {"rounds": 2, "tokens": 2, "topk": 2}  # less of all, so that a run stays short
    changed = {
        in_turn: {},
        with_cleans: {**several, "blocks": 1},
        with_masks: {**several, "ranks": 3, "experts": 1, "blocks": 1},
    }
    defaults = {**PARAMETERS, **changed.get(order, several), **own_values}
    mains = partial(main, order=order), partial(check, order=order)
    kept = {name: PARAMETERS[name] for name in ("topk", "experts", "blocks") if defaults[name] != PARAMETERS[name]}
    usual = [{**USUAL, **kept, **variant} for variant in variants]
    least = {**LEAST, "rounds": 2} if order is with_masks else LEAST
    # With two ranks the one that is left is alone, and finds the same for half of the time.
    shapes: tuple[dict[str, int], ...] = (*({"ranks": 2},) * 3, {}) if order is with_masks else ({},)
    return Scenario(f"low_latency{name}", about, *mains, defaults, least, own, tuple(usual), shapes)


ONCE = {"fp8": 1, "dedup": 1}
SCENARIOS = (
    make(
        "",
        "dispatch and combine in turn, on one buffer",
        in_turn,
        (
            {**SMALL, "fp8": 1},
            {**SMALL, **ONCE},
            {**SMALL, "rounds": 1, "logfmt": 1, **ONE_EXPERT},
            {**SMALL, "rounds": 1, "dedup": 1, "nic": 1, **ONE_EXPERT},
            {**SMALL, "fp8": 1, "tma": 0},
            {**SMALL, **ONCE, "tma": 0},
            {**SMALL, "rounds": 1, "logfmt": 1, "tma": 0, **ONE_EXPERT},
            {"fp8": 1},
            ONCE,
            {"logfmt": 1, **ONE_EXPERT},
            {"logfmt": 1, "tma": 0, **ONE_EXPERT},
            {**ONCE, "ranks": 3, "tokens": 2},  # a block counts for two ranks
            {**SMALL, "rounds": 4, "tokens": 2, "topk": 1, "ranks": 3},  # ranks that have nothing for each other
            {"hidden": 4096, "tokens": 2, "rounds": 1},  # stages of the send phase reach into those to receive
            {"dedup": 1, "nic": 1, "tokens": 6, **ONE_EXPERT},
            {"host": 1},
            {**ONCE, "host": 1},
        ),
    ),
    make(
        ".overlap",
        "with hooks: each call is received when the next one is sent",
        two_at_a_time,
        (
            {**SMALL, "rounds": 3, "fp8": 1},
            {"fp8": 1},
            ONE_EXPERT,
            ONCE,
            {"tma": 0},
            {**SMALL, **ONCE, "rounds": 3, "tma": 0, "ranks": 3},
            {**SMALL, "rounds": 4, "tokens": 2, "ranks": 3, "nic": 1},
        ),
    ),
    make(
        ".crossed",
        "with hooks: of two dispatches the later one is received first",
        crossed,
        ({**SMALL}, {**SMALL, **ONCE}, {"rounds": 4}),
    ),
    make(
        ".sizes",
        "the same as .overlap, with other sizes in every call",
        two_at_a_time,
        ({**SMALL, "rounds": 3}, {**SMALL, **ONCE, "rounds": 3}),
        rounds=3,
        changing=1,
    ),
    make(
        ".sparse",
        "the same as .overlap, where all that a rank sends in a call goes to one other, through the software NIC",
        two_at_a_time,
        ({**SMALL, "rounds": 3, "tokens": 4, "ranks": 3},),
        ranks=3,
        tokens=4,
        topk=3,
        experts=1,
        rounds=3,
        nic=1,
        sparse=1,
    ),
    make(
        ".clean",
        "with a buffer that is cleaned between the rounds",
        with_cleans,
        ({}, ONCE, {"host": 1}),
        "low_latency.clean_low_latency_buffer",
    ),
    make(
        ".masked",
        "with a rank that the others leave out for a while",
        with_masks,
        ({**SMALL, "rounds": 3, "ranks": 3}, {**SMALL, **ONCE, "rounds": 3, "ranks": 3}),
        "low_latency.clean_low_latency_buffer",
        "low_latency.mask_buffer",
    ),
)
