"""ElasticBuffer in a node and between nodes: compact and expanded, the CPU waiting or not, calls in a row."""

from __future__ import annotations

from typing import Any

from nbep.device.cards import SM80, SM90
from nbep.lab.check.scenario import Scenario
from nbep.specimens.scenarios import intranode
from nbep.specimens.workloads.cases import Case
from nbep.specimens.workloads.elastic import (
    ElasticExpected,
    ElasticOptions,
    ElasticOutcome,
    make_elastic_buffer,
    received_trips,
)

# experts: of each rank. blocks: of a launch, at most. rounds: dispatches one behind the other, before their combines.
# expand, once, sync, cached, column, tma, uneven, hybrid, ibgda, shared: 1 or 0. once: one reduction. tma: there is a
# copy engine. hybrid: ranks of a node share what comes from another one. ibgda: the software NIC between nodes. shared:
# x lies in shared rows. fp8: 0; 1, and ranks differ in the order of scales; 2, by row, and in shared rows if x is.
# inputs: seed of the tokens and where they go.
PARAMETERS = {
    "ranks": 2,
    "nodes": 1,
    "tokens": 4,
    "hidden": 16,
    "topk": 2,
    "experts": 2,
    "blocks": 1,
    "rounds": 1,
    "align": 5,
    "expand": 0,
    "once": 0,
    "sync": 0,
    "cached": 0,
    "column": 0,
    "fp8": 0,
    "tma": 1,
    "uneven": 0,
    "hybrid": 0,
    "ibgda": 0,
    "shared": 0,
    "inputs": 1,
}
NOT_LESS = ("expand", "once", "sync", "cached", "column", "fp8", "uneven", "hybrid", "ibgda", "shared")
LEAST = {"ranks": 2, "hidden": 16, **dict.fromkeys(NOT_LESS, 0)}
OF_NODE = tuple(f"elastic.{name}" for name in ("publish", "notify", "dispatch", "combine"))
OF_SHARED = (
    "elastic.fetch_combine",
    "elastic.dispatch",
    "elastic.publish",
    "intranode.offer_rows",
)
OF_NODES = tuple(f"elastic.{name}" for name in ("send_dispatch", "meet", "send_combine", "combine"))
VARIANTS = (
    {"rounds": 3},
    {"tma": 0, "rounds": 2, "hidden": 520},
    {"cached": 1, "sync": 1, "fp8": 1, "hidden": 128},
    {"hidden": 4608, "tokens": 3},  # a row takes two stages, and a sum several pieces
    {"tokens": 40, "blocks": 2},
    {"fp8": 2, "hidden": 512, "rounds": 2},  # scales come by the copy engine
)
# One rank a node, through the network alone; two, which fetch from each other as well.
BETWEEN_VARIANTS: tuple[dict[str, int], ...] = (
    {"rounds": 3},
    {"rounds": 2, "ibgda": 1},
    {"tma": 0, "rounds": 2, "hidden": 520},
    {"cached": 1, "sync": 1, "fp8": 1, "hidden": 128},
    {"hidden": 4608, "tokens": 3},
    {"tokens": 40, "blocks": 2},
    {"ranks": 4, "rounds": 2},
)
HYBRID_VARIANTS: tuple[dict[str, int], ...] = (
    {"rounds": 3},
    {"rounds": 2, "ibgda": 1},
    {"rounds": 2, "expand": 1, "tma": 0, "hidden": 520},
    {"cached": 1, "sync": 1, "fp8": 1, "hidden": 128},
)


def options_of(parameters: dict[str, int]) -> ElasticOptions:
    return ElasticOptions(
        do_expand=bool(parameters["expand"]),
        do_cpu_sync=bool(parameters["sync"]),
        expert_alignment=parameters["align"],
        fp8=(None, "mixed", "row")[parameters["fp8"]],
        num_biases=1,
        do_zero_padding=bool(parameters["expand"]),
        by_column=bool(parameters["column"]),
        with_stats=True,
        is_cached=bool(parameters["cached"]),
        allow_multiple_reduction=not parameters["once"],
        num_sms=parameters["blocks"],
        allow_hybrid_mode=bool(parameters["hybrid"]),
        num_nodes=parameters["nodes"],
        is_shared=bool(parameters["shared"]),
        transport="ibgda" if parameters["ibgda"] else "direct",
    )


def cases_of(parameters: dict[str, int]) -> list[Case]:
    """The inputs of each round. Most tokens go to all ranks."""
    return intranode.cases_of(parameters, ("everywhere", "uniform"))


def main(comm: Any, **parameters: int) -> list[ElasticOutcome]:
    """Dispatches of all rounds, then their combines, the last one first."""
    comm.runtime.world.compute_capability = SM90 if parameters["tma"] else SM80
    options = options_of(parameters)
    cases = cases_of(parameters)
    buffer = make_elastic_buffer(comm, [(case, options) for case in cases])
    trips = received_trips(buffer, cases, options)
    for trip in reversed(trips):
        trip.combine()
    outcomes = [trip.end() for trip in trips]
    buffer.destroy()
    return outcomes


def check(results: list[list[ElasticOutcome]], **parameters: int) -> None:
    """Compare what all ranks have returned with the reference, bit for bit."""
    options = options_of(parameters)
    for number, case in enumerate(cases_of(parameters)):
        expected = ElasticExpected(case, options)
        for rank, of_rank in enumerate(results):
            expected.check(rank, of_rank[number], f"round {number}, rank {rank}")


def make(
    name: str, about: str, kernels: tuple = OF_NODE, variants: tuple = VARIANTS, least: dict = LEAST, **changed: int
) -> Scenario:
    numbers = {**PARAMETERS, **changed}
    return Scenario(name, about, main, check, numbers, least, kernels, variants, ({}, {"rounds": 2}))


def make_between(name: str, about: str, **changed: int) -> Scenario:
    kernels = ("elastic.dispatch", "elastic.publish", *OF_NODES, "network.nic")
    return make(name, about, kernels, BETWEEN_VARIANTS, {**LEAST, "nodes": 2}, nodes=2, **changed)


def make_hybrid(name: str, about: str) -> Scenario:
    kernels = ("elastic.gather_combine", *OF_NODES)
    least = {**LEAST, "nodes": 2, "ranks": 4}
    return make(name, about, kernels, HYBRID_VARIANTS, least, nodes=2, ranks=4, tokens=2, hybrid=1)


SCENARIOS = (
    make("elastic", "ElasticBuffer: tokens go to the ranks of their experts, a row each, and come back"),
    make("elastic.expanded", "the same with a row for each expert; a rank adds up before it sends", expand=1),
    make("elastic.once", "the same, and all rows are added up at once", expand=1, once=1),
    make("elastic.shared", "the ranks fetch what lies in shared rows", OF_SHARED, shared=1),
    make_between("elastic.nodes", "ElasticBuffer between nodes"),
    make_between("elastic.nodes.once", "the same with a row for each expert, all added up at once", expand=1, once=1),
    make_hybrid("elastic.hybrid", "between nodes, where a row and a sum cross the network once for each node"),
)
