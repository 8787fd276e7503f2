"""Between nodes: dispatch and combine, cached dispatches, rows longer than a stage, and nodes with nothing to say."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import nbep
from nbep.lab.check.scenario import Scenario
from nbep.specimens.scenarios import intranode
from nbep.specimens.scenarios.intranode import Plan
from nbep.specimens.workloads.cases import Case, only_to
from nbep.specimens.workloads.internode import NIC, Options

# ranks: of all nodes. chunk, slots: inside a node; rdma_chunk, rdma_slots: between nodes. threads: of a block, 0 for
# what suits. 1 or 0: tma, a copy engine; ibgda, the software NIC; uneven, other numbers of tokens on each rank;
# grouped, tokens that go to half of the nodes alone; sparse, what a rank sends stays there, and in the next round goes
# to the next rank. inputs: seed of the tokens, and of the software NIC where they are sparse.
PARAMETERS = {
    "ranks": 4,
    "nodes": 2,
    "tokens": 2,
    "hidden": 16,
    "topk": 4,
    "channels": 1,
    "chunk": 2,
    "slots": 4,
    "rdma_chunk": 2,
    "rdma_slots": 4,
    "threads": 0,
    "rounds": 1,
    "fp8": 0,
    "tma": 1,
    "ibgda": 0,
    "uneven": 0,
    "grouped": 0,
    "sparse": 0,
    "inputs": 0,
}
LEAST = {
    "ranks": 2,
    "nodes": 2,
    "hidden": 16,
    **dict.fromkeys(("threads", "fp8", "ibgda", "uneven", "grouped", "sparse"), 0),
}
# What is run for faults.
USUAL = {"tokens": 16, "channels": 2, "slots": 8, "rounds": 2, "uneven": 1}
SMALL = {"channels": 1, "slots": 4}
LONG = {**SMALL, "hidden": 4608, "tokens": 3}  # a row takes two stages
# Small ones are run before: they find most.
FIRST: tuple[dict[str, int], ...] = (
    {"ranks": 2, "tokens": 3},
    {"ranks": 2, "tokens": 12},
    {"ranks": 2, "tokens": 12, "ibgda": 1},
    {},
    {"tma": 0},
    {"tokens": 12},
    {"tokens": 12, "slots": 5},
    {"tokens": 12, "threads": 320},
)
# One rank a node finds most. Four ranks, in which a node's ranks pass tokens on, take more than twice as long.
SHAPES: tuple[dict[str, int], ...] = (*({"ranks": 2, "tokens": 3},) * 9, {})
# Only one of two nodes sends, and its tokens leave slots free: its next call may come before they are read.
ONE_WAY = {"ranks": 2, "tokens": 3, "rdma_slots": 8, "uneven": 1, "rounds": 2}


def plan_of(what: str, parameters: dict[str, int]) -> Plan:
    names = ("chunk", "slots", "rdma_chunk", "rdma_slots")
    sizes = [parameters[name] for name in names]
    config = nbep.Config(2 * parameters["channels"], *sizes, num_threads=parameters["threads"] or None)
    options = Options(
        config,
        fp8="row" if parameters["fp8"] else None,
        transport="ibgda" if parameters["ibgda"] else "direct",
        nic=replace(NIC, seed=1 + parameters["inputs"], max_delay_ns=50_000) if parameters["sparse"] else NIC,
    )
    return Plan("combine" if what == "combine" else "dispatch", what == "cached", options)


def cases_of(parameters: dict[str, int]) -> list[Case]:
    cases = intranode.cases_of(parameters, ("grouped" if parameters["grouped"] else "everywhere",))
    if not parameters["sparse"]:
        return cases
    ranks = parameters["ranks"]
    owners = ([[(rank + number) % ranks] for rank in range(ranks)] for number in range(len(cases)))
    return list(map(only_to, cases, owners))


def make(
    name: str, about: str, what: str, variants: tuple, *kernels: str, shapes: Any = ({},), **changed: int
) -> Scenario:
    own = ("get_dispatch_layout", "internode.notify_dispatch", "internode.dispatch", "network.nic")
    return intranode.rounds(
        f"internode{name}",
        about,
        partial(plan_of, what),
        lambda parameters: 128 if parameters["threads"] else 0,
        cases_of,
        {**PARAMETERS, **changed},
        LEAST,
        (*own, *kernels),
        variants,
        shapes,
    )


def usual(*variants: dict[str, int]) -> tuple[dict[str, int], ...]:
    return tuple({**USUAL, **variant} for variant in variants)


COMBINE = ("internode.cached_notify", "internode.combine")
SCENARIOS = (
    make(
        "",
        "tokens go to their experts and come back",
        "combine",
        (
            *FIRST,
            *usual(
                {},
                {**SMALL, "fp8": 1, "hidden": 128},
                {"ibgda": 1},
                {"tma": 0},
                LONG,
                {**LONG, "tma": 0},
                # Several warps a team and in notify, and batches in which there is nothing for a rank.
                {"slots": 4, "chunk": 2, "threads": 320, "grouped": 1, "topk": 2},
            ),
        ),
        *COMBINE,
        shapes=SHAPES,
    ),
    make(
        ".cached",
        "tokens go to their experts, each dispatched twice",
        "cached",
        ({}, ONE_WAY, *usual({"channels": 1, "chunk": 3, "rdma_chunk": 1, "rdma_slots": 8})),
        COMBINE[0],
        shapes=(*SHAPES[1:], ONE_WAY),
    ),
    make(
        ".long",
        "rows longer than a stage, through the software NIC",
        "combine",
        ({}, {"tma": 0}),
        *COMBINE,
        ranks=2,
        tokens=3,
        hidden=4608,
        ibgda=1,
    ),
    make(
        ".sparse",
        "dispatches without combine, in which nodes have nothing for each other at times",
        "dispatch",
        ({}, {"ibgda": 1, "rounds": 4, "inputs": 2}),
        ranks=2,
        tokens=1,
        rounds=3,
        sparse=1,
    ),
)
