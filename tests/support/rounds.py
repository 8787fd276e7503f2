"""Round trips for ranks that are processes, or that run under a tool: few, and of many kinds."""

import traceback
from dataclasses import replace
from typing import Any

from cases import Case, make_case
from intranode import Expected, Options, cached_round_trip, round_trip

import nbep


def rounds(num_ranks: int, handle_type: str = "ipc") -> list[tuple]:
    """(fn, case, options) of each; fn(comm, case, options) is for one rank."""
    made = _rounds(num_ranks)
    if handle_type != "host":  # which has no calls without rings
        made += rounds_without_rings(num_ranks)
    return [(fn, case, replace(options, handle_type=handle_type)) for fn, case, options in made]


def _rounds(num_ranks: int) -> list[tuple]:
    ragged = [(7 * rank + 3) % 12 for rank in range(num_ranks)]
    wide = nbep.Config(8, 4, 16)
    return [
        (round_trip, case(1, num_ranks, 5, num_topk=3), Options()),
        (round_trip, case(2, num_ranks, ragged, hidden=264), Options(num_biases=2)),
        (round_trip, case(3, num_ranks, 9, routing="one_rank", unused=0), Options(with_topk=False)),
        (round_trip, case(4, num_ranks, 6, routing="avoid_rank_0"), Options(expert_alignment=16)),
        (round_trip, case(5, num_ranks, 4, routing="nowhere"), Options(num_biases=1)),
        (round_trip, case(6, num_ranks, 0), Options()),
        (round_trip, case(7, num_ranks, ragged, hidden=384), Options(fp8="row")),
        (round_trip, case(8, num_ranks, 7, hidden=256), Options(fp8="packed", with_topk=False)),
        (round_trip, case(9, num_ranks, 5), Options(num_worst_tokens=5 * num_ranks + 2)),
        (cached_round_trip, case(10, num_ranks, 17, num_topk=4), Options(nbep.Config(2, 3, 5))),
        (cached_round_trip, case(11, num_ranks, ragged, hidden=256), Options(fp8="column", config=wide)),
        (round_trip, case(12, num_ranks, 64, hidden=7168, num_topk=8, experts_per_rank=8), Options(wide)),
        (round_trip, case(13, num_ranks, 64, hidden=7168, num_topk=8, experts_per_rank=8), Options(wide, fp8="column")),
    ]


def rounds_without_rings(num_ranks: int) -> list[tuple]:
    ragged = [(7 * rank + 3) % 12 for rank in range(num_ranks)]
    wide = nbep.Config(8, 4, 16)
    large = {"hidden": 7168, "num_topk": 8, "experts_per_rank": 8}
    return [
        (fn, case, replace(options, zero_copy=True))
        for fn, case, options in (
            (round_trip, case(21, num_ranks, ragged, hidden=264), Options(num_biases=2)),
            (round_trip, case(22, num_ranks, 5), Options(num_worst_tokens=5 * num_ranks + 2, expert_alignment=16)),
            (round_trip, case(23, num_ranks, 4, routing="nowhere"), Options(num_biases=1)),
            (cached_round_trip, case(24, num_ranks, ragged, hidden=256), Options(fp8="column", config=wide)),
            (round_trip, case(25, num_ranks, 9, hidden=384), Options(fp8="packed", with_topk=False)),
            (cached_round_trip, case(26, num_ranks, 200, **large), Options(wide)),
            (round_trip, case(27, num_ranks, 200, **large), Options(wide, fp8="column")),
            (round_trip, case(28, num_ranks, 90, **large), Options(wide, fp8="row")),
        )
    ]


def wrong_rounds(group: Any, rank: int, num_ranks: int, handle_type: str = "ipc") -> int:
    """How many rounds go wrong on this rank; what is wrong is printed. group is what `nbep.Buffer` takes."""
    wrong = 0
    for number, (fn, case, options) in enumerate(rounds(num_ranks, handle_type)):
        outcome = fn(group, case, options)
        try:
            Expected(case, options).check(rank, outcome, f"round {number}, inputs {case.seed}, rank {rank}")
        except AssertionError:
            traceback.print_exc()
            wrong += 1
    return wrong


def case(seed: int, num_ranks: int, num_tokens: int | list[int], **shape) -> Case:
    return make_case(seed, num_ranks=num_ranks, num_tokens=num_tokens, **shape)
