"""Inside a node: layout, notify, dispatch and combine."""

from __future__ import annotations

from functools import partial
from typing import Any

import nbep
from nbep.check.cases import Case, make_case
from nbep.check.compare import Report
from nbep.check.scenario import Scenario
from nbep.check.scenarios.tokens import Plan, call_round, counts_of, expected_round
from nbep.device.layout.intranode import num_nvl_bytes_needed
from nbep.host.runtime.base import HandleType

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


def plan_of(last: str, is_cached: bool, parameters: dict[str, int]) -> Plan:
    config = nbep.Config(
        2 * parameters["channels"],
        parameters["chunk"],
        parameters["slots"],
        num_threads=32 * parameters["ranks"] * max(parameters["warps"], -(-2 // parameters["ranks"])),
    )
    return Plan(last, is_cached, bool(parameters["fp8"]), config)


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


def main(comm: Any, last: str, is_cached: bool, **parameters: int) -> list[dict[str, Any]]:
    """Rounds on one buffer, which is just large enough."""
    comm.runtime.world.has_tma = bool(parameters["tma"])
    comm.runtime.notify_threads = 32 * parameters["notify_warps"]
    plan = plan_of(last, is_cached, parameters)
    hidden, topk = parameters["hidden"], parameters["topk"]
    shape = plan.config.ring_shape(comm.size, 2 * hidden, topk, hidden // 128, 1)
    handle_type: HandleType = "host" if parameters["host"] else "ipc"
    buffer = nbep.Buffer(comm, num_nvl_bytes=num_nvl_bytes_needed(shape), handle_type=handle_type)
    results = [call_round(buffer, case, plan) for case in cases_of(parameters)]
    buffer.destroy()
    return results


def check(results: list[list[dict[str, Any]]], last: str, is_cached: bool, **parameters: int) -> None:
    """Compare with the reference, bit for bit."""
    plan = plan_of(last, is_cached, parameters)
    for number, case in enumerate(cases_of(parameters)):
        for rank, want in enumerate(expected_round(case, plan)):
            Report(f"round {number}, rank {rank}").all_same(results[rank][number], want)


def make(name: str, about: str, last: str, is_cached: bool, kernels: tuple[str, ...], **changed: int) -> Scenario:
    return Scenario(
        f"intranode.{name}",
        about,
        partial(main, last=last, is_cached=is_cached),
        partial(check, last=last, is_cached=is_cached),
        {**PARAMETERS, **changed},
        LEAST,
        kernels,
        VARIANTS if name != "layout" else ({}, {"tokens": 700, "ranks": 4}),
    )


NOTIFY = ("get_dispatch_layout", "intranode.notify_dispatch")
DISPATCH = (*NOTIFY, "intranode.dispatch")
SCENARIOS = (
    make("layout", "who gets how many tokens", "layout", False, NOTIFY[:1], tokens=300),
    make(
        "notify",
        "small rounds, each dispatched twice: counts, and rings that are used again",
        "dispatch",
        True,
        (*DISPATCH, "intranode.cached_notify_dispatch"),
        tokens=3,
        rounds=3,
    ),
    make("dispatch", "tokens go to their experts", "dispatch", False, DISPATCH),
    make(
        "combine",
        "tokens go to their experts and come back",
        "combine",
        False,
        (*DISPATCH, "intranode.cached_notify_combine", "intranode.combine"),
    ),
)
