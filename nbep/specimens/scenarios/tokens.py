"""Rounds of layout, dispatch and combine: inside a node and between nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

import nbep
from nbep import reference
from nbep.device.cards import SM80, SM90
from nbep.specimens.workloads import intranode
from nbep.specimens.workloads.cases import Case, Report
from nbep.specimens.workloads.intranode import (
    FACTORS,
    Expected,
    Outcome,
    combine,
    dispatch_arguments,
    kept,
    make_buffer_for,
    outcome_of,
)


@dataclass(frozen=True)
class Options(intranode.Options):
    """Inside a node. What experts multiply by differs from column to column: two ranks show more."""

    def factors(self, case: Case, rank: int) -> np.ndarray:
        return FACTORS[(rank + np.arange(case.hidden) % 3) % len(FACTORS)]


class Plan(NamedTuple):
    """What a run calls, and how.

    last: the verb that ends a round: "layout", "dispatch" or "combine"
    is_cached: dispatch is called again with its handle
    """

    last: str
    is_cached: bool
    options: intranode.Options


def counts_of(tokens: int, num_ranks: int, uneven: bool) -> list[int]:
    """The tokens of each rank; uneven: one has none, others a few."""
    return [(tokens, 0, tokens // 2 + 1, tokens // 3)[rank % 4] if uneven else tokens for rank in range(num_ranks)]


def run_rounds(comm: Any, cases: list[Case], plan: Plan, parameters: dict[str, int]) -> list[Outcome]:
    """Rounds on one buffer that is just large enough. tma: whether the emulated card has a copy engine"""
    comm.runtime.world.compute_capability = SM90 if parameters["tma"] else SM80
    buffer = make_buffer_for(comm, [(case, plan.options) for case in cases])
    results = [call_round(buffer, case, plan) for case in cases]
    buffer.destroy()
    return results


def call_round(buffer: nbep.Buffer, case: Case, plan: Plan) -> Outcome:
    """One round on one rank."""
    rank, options = buffer.rank, plan.options
    layout, arguments = dispatch_arguments(buffer, case, options, rank)
    if plan.last == "layout":
        return Outcome(layout, None, None, None, [], (), ())
    recv_x, *others = buffer.dispatch(**arguments)[:5]
    # Without rings it is a kernel that first reads what peers have written into this rank's memory.
    values = nbep.per_token_cast_back(*recv_x) if options.zero_copy and options.fp8 else None
    outcome = outcome_of(options, layout, recv_x, *others)
    if values is not None:
        Report(f"rank {rank}").same(
            "recv_x, cast back", np.asarray(values), reference.per_token_cast_back(*outcome.recv_x)
        )
    if plan.is_cached:
        again: dict[str, Any] = {name: arguments[name] for name in ("x", "config", *options.way)}
        outcome.cached_x = kept(options, buffer.dispatch(handle=outcome.handle, **again)[0])
    if plan.last == "combine":
        combine(buffer, case, options, rank, outcome)
    return outcome


def check_rounds(results: list[list[Outcome]], cases: list[Case], plan: Plan) -> None:
    """Compare what all ranks have returned with the reference, bit for bit."""
    for number, case in enumerate(cases):
        expected = Expected(case, plan.options)
        for rank, of_rank in enumerate(results):
            where = f"round {number}, rank {rank}"
            if plan.last == "layout":
                sent = [case.provenance(rank, token) for token in range(case.num_tokens[rank])]
                plan.options.check_layout(Report(where), case, rank, of_rank[number].layout, sent)
            else:
                expected.check(rank, of_rank[number], where)
