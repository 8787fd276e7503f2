"""`nbep.specimens.workloads.internode` on the target of the tests."""

# ruff: noqa: F401  # tests import from here what is the same on all targets

import random
from typing import Any

import intranode
from cases import Case, make_case

import nbep
from nbep.specimens.workloads.internode import CONFIG, HANDLE, NIC, Options, num_bytes
from nbep.specimens.workloads.intranode import Outcome

SHAPES = [(2, 2), (2, 4), (4, 2), (3, 2), (2, 3)]  # nodes, ranks of a node
TRANSPORTS = ["direct", "ibgda"]


def make_node_case(seed: int, num_nodes: int = 2, num_nvl_peers: int = 2, **shape: Any) -> Case:
    """As make_case, with so many nodes of so many ranks; "grouped" routing."""
    shape = {"routing": "grouped", **shape}
    return make_case(seed, num_ranks=num_nodes * num_nvl_peers, num_nodes=num_nodes, **shape)


def ragged(num_ranks: int, most: int = 12) -> list[int]:
    """Another number of tokens on each rank, zero on one of them."""
    return [5 * rank % most for rank in range(num_ranks)]


def random_config(rng: random.Random, num_nodes: int) -> nbep.Config:
    """Chunks and rings of a few tokens at both levels, one to three channels."""
    nvl, rdma = rng.randint(1, 3), rng.randint(1, 3)
    slots = num_nodes * nvl + rng.randint(0, 3)  # nodes share them in combine
    return nbep.Config(2 * rng.randint(1, 3), nvl, slots, rdma, rdma * rng.randint(2, 3))


def run(case: Case, options: Options | None = None, **arguments: Any) -> list[Outcome]:
    """As intranode.run."""
    return intranode.run(case, options or Options(), **arguments)
