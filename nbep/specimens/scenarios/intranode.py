"""Inside a node: layout, notify, dispatch and combine, with rings and without; and a rank that does not come."""

from __future__ import annotations

from functools import partial
from typing import Any

import nbep
from nbep.device.protocols.barriers import BARRIER
from nbep.device.protocols.waits import FaultReport
from nbep.host.block_sizes import block_sizes
from nbep.lab.check.scenario import Scenario
from nbep.specimens.scenarios.tokens import Options, Plan, call_round, check_rounds, counts_of, run_rounds
from nbep.specimens.workloads.cases import Case, make_case
from nbep.specimens.workloads.intranode import Outcome

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


def plan_of(last: str, is_cached: bool, parameters: dict[str, int], is_direct: bool = False) -> Plan:
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


def cases_of(parameters: dict[str, int]) -> list[Case]:
    """The inputs of each round. All tokens go everywhere, so that rings are full."""
    num_ranks = parameters["ranks"]
    return [
        make_case(
            parameters["inputs"] + number,
            num_ranks=num_ranks,
            num_tokens=counts_of(parameters["tokens"], num_ranks, bool(parameters["uneven"])),
            hidden=parameters["hidden"],
            num_topk=parameters["topk"],
            routing="everywhere",
        )
        for number in range(parameters["rounds"])
    ]


def main(comm: Any, last: str, is_cached: bool, is_direct: bool = False, **parameters: int) -> list[Outcome]:
    """Rounds on a machine as the parameters say."""
    block_sizes(comm.runtime).notify = 32 * parameters["notify_warps"]
    return run_rounds(comm, cases_of(parameters), plan_of(last, is_cached, parameters, is_direct), parameters)


def check(results: list[list[Outcome]], last: str, is_cached: bool, is_direct: bool = False, **parameters: int) -> None:
    check_rounds(results, cases_of(parameters), plan_of(last, is_cached, parameters, is_direct))


def main_alone(comm: Any, **parameters: int) -> FaultReport | None:
    """Rank 0 alone dispatches; what its kernel reports."""
    case = cases_of({**PARAMETERS, **parameters})[0]
    buffer = nbep.Buffer(comm, num_nvl_bytes=1 << 16)
    report = None
    if comm.rank == 0:
        try:
            call_round(buffer, case, plan_of("dispatch", False, {**PARAMETERS, **parameters}))
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
    return Scenario(
        f"intranode.{name}",
        about,
        partial(main, last=last, is_cached=is_cached, is_direct=is_direct),
        partial(check, last=last, is_cached=is_cached, is_direct=is_direct),
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
