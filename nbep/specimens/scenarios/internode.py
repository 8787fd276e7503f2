"""Between nodes: dispatch and combine, cached dispatches, rows longer than a stage, and nodes with nothing to say."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import nbep
from nbep.host.block_sizes import block_sizes
from nbep.lab.check.scenario import Scenario
from nbep.specimens.scenarios.intranode import Plan, check_rounds, counts_of, run_rounds
from nbep.specimens.workloads.cases import Case, make_case, only_to
from nbep.specimens.workloads.internode import NIC, Options
from nbep.specimens.workloads.intranode import Outcome

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
    """The inputs of each round."""
    return [case_of(parameters, number) for number in range(parameters["rounds"])]


def case_of(parameters: dict[str, int], number: int) -> Case:
    num_ranks, num_nodes = parameters["ranks"], parameters["nodes"]
    case = make_case(
        parameters["inputs"] + number,
        num_ranks=num_ranks,
        num_nodes=num_nodes,
        num_tokens=counts_of(parameters["tokens"], num_ranks, bool(parameters["uneven"])),
        hidden=parameters["hidden"],
        num_topk=parameters["topk"],
        routing="grouped" if parameters["grouped"] else "everywhere",
    )
    if not parameters["sparse"]:
        return case
    return only_to(case, [[(rank + number) % num_ranks] for rank in range(num_ranks)])


def main(comm: Any, what: str, **parameters: int) -> list[Outcome]:
    """Rounds on a machine as the parameters say."""
    if parameters["threads"]:
        block_sizes(comm.runtime).notify = 128
    return run_rounds(comm, cases_of(parameters), plan_of(what, parameters), parameters)


def check(results: list[list[Outcome]], what: str, **parameters: int) -> None:
    check_rounds(results, cases_of(parameters), plan_of(what, parameters))


def make(
    name: str, about: str, what: str, variants: tuple, *kernels: str, shapes: Any = ({},), **changed: int
) -> Scenario:
    own = ("get_dispatch_layout", "internode.notify_dispatch", "internode.dispatch", "network.nic")
    mains = partial(main, what=what), partial(check, what=what)
    return Scenario(
        f"internode{name}", about, *mains, {**PARAMETERS, **changed}, LEAST, (*own, *kernels), variants, shapes
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
