"""Schedules between nodes: all seeds and memory models give one result."""

import pytest
from internode import SHAPES, Options, make_node_case, ragged, run
from intranode import round_trip
from parts import both_parts, dear
from target import MEMORY_MODELS

from nbep.device.cards import SM80

pytestmark = [pytest.mark.emulator_only("a seed gives a schedule"), pytest.mark.long]


@dear
@pytest.mark.parametrize("memory_model", MEMORY_MODELS)
@pytest.mark.parametrize(
    ("seeds", "num_tokens"),
    both_parts([(range(1), (2, 0, 3, 1))], thorough=[(range(3), (9, 0, 6, 3))], long=[(range(3, 9), (9, 0, 6, 3))]),
)
@pytest.mark.parametrize("transport", both_parts(["direct"], thorough=["ibgda"]))
def test_all_seeds_give_one_result(transport, seeds, num_tokens, memory_model):
    case = make_node_case(2, num_tokens=num_tokens, hidden=128, num_topk=3)
    for seed in seeds:
        run(case, Options(num_biases=1, transport=transport), seed=seed, memory_model=memory_model)


@pytest.mark.parametrize("memory_model", both_parts([], thorough=["sc", "delayed", "checked"]))
@pytest.mark.parametrize(("num_nodes", "num_nvl_peers"), SHAPES)
def test_every_shape_gives_one_result_if_stores_may_be_late_or_must_be_ordered(num_nodes, num_nvl_peers, memory_model):
    num_ranks = num_nodes * num_nvl_peers
    case = make_node_case(3, num_nodes, num_nvl_peers, num_tokens=ragged(num_ranks, 7), num_topk=3)
    for seed in range(2):
        run(case, seed=seed, memory_model=memory_model)


@dear
def test_kernels_without_bulk_copies_give_the_same():
    def main(comm, case, options):
        comm.runtime.world.compute_capability = SM80
        return round_trip(comm, case, options)

    run(make_node_case(5, num_tokens=(9, 0, 3, 4), hidden=264), fn=main)
