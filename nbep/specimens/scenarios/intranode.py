"""Rounds inside a node: layout, notify, dispatch and combine, with rings and without; and a rank that does not come."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

import nbep
from nbep import reference
from nbep.device.cards import SM80, SM90
from nbep.device.protocols.barriers import BARRIER
from nbep.device.protocols.waits import FaultReport
from nbep.host.block_sizes import block_sizes
from nbep.lab.check.scenario import Scenario
from nbep.specimens.workloads import intranode
from nbep.specimens.workloads.cases import Case, Report, make_case
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


def cases_of(parameters: dict[str, int], routings: Sequence[str] = ("everywhere",)) -> list[Case]:
    """The inputs of each round. All tokens go everywhere, so that rings are full; else in turn as routings say."""
    num_ranks = parameters["ranks"]
    return [
        make_case(
            parameters["inputs"] + number,
            num_ranks=num_ranks,
            num_nodes=parameters.get("nodes", 1),
            num_tokens=counts_of(parameters["tokens"], num_ranks, bool(parameters["uneven"])),
            hidden=parameters["hidden"],
            num_topk=parameters["topk"],
            experts_per_rank=parameters.get("experts", 2),
            routing=routings[number % len(routings)],
        )
        for number in range(parameters["rounds"])
    ]


def rounds(
    name: str,
    about: str,
    plan_of: Callable[[dict[str, int]], Plan],
    notify_of: Callable[[dict[str, int]], int],
    cases_of: Callable[[dict[str, int]], list[Case]],
    *of_scenario: Any,
) -> Scenario:
    """A scenario of rounds on one buffer that is just large enough. tma: whether the emulated card has a copy engine

    notify_of: the threads of a block of notify, 0 for what suits; of_scenario: from `Scenario.parameters` on
    """

    def main(comm: Any, **parameters: int) -> list[Outcome]:
        comm.runtime.world.compute_capability = SM90 if parameters["tma"] else SM80
        if num_threads := notify_of(parameters):
            block_sizes(comm.runtime).notify = num_threads
        cases, plan = cases_of(parameters), plan_of(parameters)
        buffer = make_buffer_for(comm, [(case, plan.options) for case in cases])
        results = [call_round(buffer, case, plan) for case in cases]
        buffer.destroy()
        return results

    def check(results: list[list[Outcome]], **parameters: int) -> None:
        """Compare what all ranks have returned with the reference, bit for bit."""
        plan = plan_of(parameters)
        for number, case in enumerate(cases_of(parameters)):
            expected = Expected(case, plan.options)
            for rank, of_rank in enumerate(results):
                where = f"round {number}, rank {rank}"
                if plan.last == "layout":
                    sent = [case.provenance(rank, token) for token in range(case.num_tokens[rank])]
                    plan.options.check_layout(Report(where), case, rank, of_rank[number].layout, sent)
                else:
                    expected.check(rank, of_rank[number], where)

    return Scenario(name, about, main, check, *of_scenario)


# channels: half of the blocks of a launch. chunk, slots: tokens of a chunk, slots of a ring. warps: for each peer;
# notify_warps: of a block of notify.
# fp8, tma, uneven, host: 1 or 0. tma: whether there is a copy engine. host: the rings are in the host's memory.
# inputs: seed of the tokens and where they go.
PARAMETERS = {
    "ranks": 2,
    "tokens": 8,
    "hidden": 16,
    "topk": 2,
    "channels": 1,
    "chunk": 2,
    "slots": 4,
    "warps": 1,
    "notify_warps": 1,
    "rounds": 1,
    "fp8": 0,
    "tma": 1,
    "uneven": 0,
    "host": 0,
    "inputs": 1,
}
LEAST = {"ranks": 2, "hidden": 16, "fp8": 0, "uneven": 0, "host": 0}
VARIANTS = (
    {"slots": 5},
    {"slots": 5, "tma": 0},
    {"chunk": 4, "slots": 9, "warps": 2, "tokens": 16},
    {"chunk": 4, "slots": 9, "warps": 2, "tokens": 16, "tma": 0},
    {"slots": 5, "tokens": 16},
    {"rounds": 3},
    {"hidden": 4608, "tokens": 5},  # a row takes two stages
    {"hidden": 128, "fp8": 1, "rounds": 2},
    {"tokens": 70, "warps": 2, "notify_warps": 2, "channels": 2, "chunk": 3, "slots": 6},
    {"slots": 5, "host": 1},
)


LAYOUT_VARIANTS: tuple[dict[str, int], ...] = ({}, {"tokens": 700, "ranks": 4})
DIRECT_VARIANTS: tuple[dict[str, int], ...] = (
    {"channels": 2, "tokens": 3},
    {"fp8": 1, "hidden": 512, "tokens": 6},
    {"tokens": 3, "tma": 0},
    {"hidden": 4608, "tokens": 3},  # a row takes two stages, and a sum several pieces
)


def plan_of(last: str, is_cached: bool, is_direct: bool, parameters: dict[str, int]) -> Plan:
    config = nbep.Config(
        2 * parameters["channels"],
        parameters["chunk"],
        parameters["slots"],
        num_threads=32 * parameters["ranks"] * max(parameters["warps"], -(-2 // parameters["ranks"])),
    )
    options = Options(
        config,
        fp8=("mixed" if is_direct else "row") if parameters["fp8"] else None,
        handle_type="host" if parameters["host"] else "ipc",
        zero_copy=is_direct,
    )
    return Plan(last, is_cached, options)


def main_alone(comm: Any, **parameters: int) -> FaultReport | None:
    """Rank 0 alone dispatches; what its kernel reports."""
    case = cases_of({**PARAMETERS, **parameters})[0]
    buffer = nbep.Buffer(comm, num_nvl_bytes=1 << 16)
    report = None
    if comm.rank == 0:
        try:
            call_round(buffer, case, plan_of("dispatch", False, False, {**PARAMETERS, **parameters}))
        except nbep.PeerTimeout as error:
            report = error.report
    buffer.destroy()
    return report


def check_alone(results: list[FaultReport | None], **_: int) -> None:
    """It is the first wait of rank 0, for any of the others."""
    report, *others = results
    assert report is not None, "no time-out"
    assert 0 < report.peer < len(results), report
    assert report == FaultReport(1, BARRIER, report.peer, 0, 1, 0, report.peer, -1), report
    assert others == [None] * len(others)


def make(
    name: str,
    about: str,
    last: str,
    is_cached: bool,
    kernels: tuple[str, ...],
    variants: tuple[dict[str, int], ...] = VARIANTS,
    is_direct: bool = False,
    shapes: tuple[dict[str, int], ...] = ({},),
    **changed: int,
) -> Scenario:
    return rounds(
        f"intranode.{name}",
        about,
        partial(plan_of, last, is_cached, is_direct),
        lambda parameters: 32 * parameters["notify_warps"],
        cases_of,
        {**PARAMETERS, **changed},
        LEAST,
        kernels,
        variants,
        shapes,
    )


NOTIFY = ("get_dispatch_layout", "intranode.notify_dispatch")
DISPATCH = (*NOTIFY, "intranode.dispatch")
SCENARIOS = (
    make("layout", "who gets how many tokens", "layout", False, NOTIFY[:1], LAYOUT_VARIANTS, tokens=300),
    make(
        "notify",
        "small rounds, each dispatched twice: counts, and rings that are used again",
        "dispatch",
        True,
        (*DISPATCH, "intranode.cached_notify"),
        shapes=({"rounds": 2}, {"rounds": 2}, {}),
        tokens=3,
        rounds=3,
    ),
    make("dispatch", "tokens go to their experts", "dispatch", False, DISPATCH),
    make(
        "combine",
        "tokens go to their experts and come back",
        "combine",
        False,
        (*DISPATCH, "intranode.cached_notify", "intranode.combine"),
    ),
    make(
        "direct",
        "the same without rings, each dispatched twice",
        "combine",
        True,
        (
            *(*NOTIFY, "intranode.cached_notify", "intranode.direct_dispatch", "intranode.direct_combine"),
            "intranode.offer_rows",
        ),
        DIRECT_VARIANTS,
        True,
    ),
    Scenario(
        "intranode.alone",
        "the other ranks do not come: what the kernel tells its CPU",
        main_alone,
        check_alone,
        {"ranks": 2, "tokens": 3, "inputs": 1},
        {"ranks": 2},
        NOTIFY,
        lets_time_pass=True,
    ),
)
