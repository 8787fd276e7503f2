"""Dispatch and combine between nodes over the software NIC, with delay and reordering: the reference's bits."""

import random

import pytest
from cases import NODE_ROUTINGS, ROUTINGS
from internode import SHAPES, Options, make_node_case, ragged, random_config, run
from intranode import cached_round_trip, round_trip
from parts import both_parts

import nbep

pytestmark = pytest.mark.emulator_only("the software NIC is told how to misbehave")

MODELS = ["sc", "delayed", "checked"]
SMALL_SHAPES = [(2, 2), (3, 2), (2, 3), (2, 2)]


@pytest.mark.parametrize("seed", both_parts(range(2), thorough=range(2, 52)))
def test_rounds_of_all_kinds_over_a_nic_that_delays_and_reorders_are_right(seed):
    rng = random.Random(seed)
    num_nodes, num_nvl_peers = SMALL_SHAPES[seed % 4]
    num_ranks = num_nodes * num_nvl_peers
    fp8 = rng.choice([None, None, "row", "column"])
    case = make_node_case(
        seed,
        num_nodes,
        num_nvl_peers,
        num_tokens=rng.sample(ragged(num_ranks), num_ranks),
        hidden=rng.choice((128, 256)) if fp8 else rng.choice((8, 136)),
        num_topk=rng.randint(1, 4),
        routing=rng.choice(ROUTINGS + NODE_ROUTINGS),
    )
    with_topk = rng.random() < 0.7
    options = Options(
        random_config(rng),
        with_topk=with_topk,
        fp8=fp8,
        num_biases=rng.randint(0, 2),
        num_worst_tokens=sum(case.num_tokens) + 1 if with_topk and rng.random() < 0.3 else 0,
        transport="ibgda",
        nic=nbep.NicOptions(
            num_entries=64,
            chunk_bytes=rng.choice((256, 2048, 1 << 26)),
            seed=seed + 1,
            max_delay_ns=rng.choice((0, 300, 2000)),
        ),
    )
    fn = rng.choice([round_trip, cached_round_trip])
    run(case, options, fn=fn, seed=seed, memory_model=MODELS[seed % 3])


@pytest.mark.parametrize(("num_nodes", "num_nvl_peers"), both_parts([], thorough=SHAPES))
def test_every_shape_over_nics(num_nodes, num_nvl_peers):
    case = make_node_case(
        1, num_nodes, num_nvl_peers, num_tokens=ragged(num_nodes * num_nvl_peers, 8), num_topk=4, hidden=128
    )
    run(case, Options(transport="ibgda", fp8="column", num_biases=1))
