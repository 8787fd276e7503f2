"""Dispatch and combine between nodes over the software NIC, with delay and reordering: the reference's bits."""

import random

import pytest
from internode import SHAPES, Options, make_node_case, ragged, run
from internode_rounds import SMALL, num_bytes, wrong_rounds
from parts import both_parts

import nbep

pytestmark = [pytest.mark.emulator_only("the software NIC misbehaves on request"), pytest.mark.long]

MODELS = ["sc", "delayed", "checked"]
SHAPES_OF_SEEDS = [(2, 2), (3, 2), (2, 3), (2, 2)]


def run_rounds(comm, seed: int, num_nodes: int, num_rounds: int) -> list[str]:
    """What is wrong on one rank."""
    rng = random.Random(seed)
    nic = nbep.NicOptions(
        num_entries=64,
        chunk_bytes=rng.choice((256, 2048, 1 << 26)),
        seed=seed + 1,
        max_delay_ns=rng.choice((0, 300, 2000)),
    )
    num_nvl_peers = comm.size // num_nodes
    buffer = nbep.Buffer(
        comm,
        **num_bytes(num_nodes, num_nvl_peers, SMALL),
        transport="ibgda",
        num_nvl_peers=num_nvl_peers,
        num_qps_per_rank=rng.choice((1, 3, 4)),
        nic=nic,
    )
    wrong = wrong_rounds(buffer, num_nodes, seed, num_rounds, SMALL)
    buffer.destroy()
    return wrong


@pytest.mark.parametrize("seed", both_parts([], thorough=range(16), long=range(16, 52)))
def test_rounds_over_a_nic_that_delays_and_reorders_are_right(seed):
    num_nodes, num_nvl_peers = SHAPES_OF_SEEDS[seed % 4]
    num_ranks, model = num_nodes * num_nvl_peers, MODELS[seed % 3]
    args = seed, num_nodes, 2
    assert nbep.spawn(run_rounds, num_ranks, "emulator", args, seed, memory_model=model) == [[]] * num_ranks


@pytest.mark.parametrize(("num_nodes", "num_nvl_peers"), both_parts([], thorough=SHAPES))
def test_every_shape_over_nics(num_nodes, num_nvl_peers):
    case = make_node_case(
        1, num_nodes, num_nvl_peers, num_tokens=ragged(num_nodes * num_nvl_peers, 8), num_topk=4, hidden=128
    )
    run(case, Options(transport="ibgda", fp8="column", num_biases=1))
