"""The options of dispatch and combine between nodes, one by one and together."""

from dataclasses import replace

import pytest
from internode import Options, make_node_case, ragged, run
from parts import both_parts, dear

import nbep
from nbep import reference

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("channels")]


@dear
def test_without_topk_only_x_travels():
    run(make_node_case(1, num_tokens=(6, 0, 3, 8)), Options(with_topk=False))


@dear
@pytest.mark.parametrize(
    ("fp8", "with_topk"),
    both_parts([("row", True), ("column", False)], thorough=[("row", False), ("column", True), ("packed", True)]),
)
def test_fp8_tokens_bring_their_scales_row_major_whatever_order_they_had(fp8, with_topk):
    run(make_node_case(2, num_tokens=(7, 0, 2, 4), hidden=384), Options(fp8=fp8, with_topk=with_topk))


@dear
def test_fp8_with_one_scale_per_token():
    run(make_node_case(3, num_tokens=5, hidden=128), Options(fp8="column"))


@dear
@pytest.mark.parametrize("alignment", both_parts([16], thorough=[2]))
def test_expert_counts_are_rounded_up(alignment):
    run(make_node_case(4, num_tokens=9), Options(expert_alignment=alignment))


@dear
@pytest.mark.parametrize("extra", both_parts([40], thorough=[0, 1]))
def test_worst_tokens_gives_that_many_rows_and_no_counts(extra):
    case = make_node_case(5, num_tokens=ragged(4))
    run(case, Options(num_worst_tokens=sum(case.num_tokens) + extra))


@dear
def test_worst_tokens_where_no_token_comes():
    run(make_node_case(6, num_tokens=3, routing="avoid_node_0"), Options(num_worst_tokens=12))


def test_a_rank_may_forward_more_tokens_than_any_rank_receives():
    """Rank 0 has 8 tokens for itself, and 8 of rank 2 come over it to rank 1."""
    case = make_node_case(11, num_tokens=(8, 0, 8, 0), num_topk=1, experts_per_rank=1)
    case.topk_idx[0][:] = 0
    case.topk_idx[2][:] = 1
    layouts = [reference.get_dispatch_layout(idx, case.num_experts, case.num_ranks) for idx in case.topk_idx]
    run(replace(case, layouts=layouts), Options(num_worst_tokens=8))


@dear
@pytest.mark.parametrize("num_biases", both_parts([2], thorough=[1]))
def test_biases_are_added_first(num_biases):
    run(make_node_case(7, num_tokens=5, num_topk=4), Options(num_biases=num_biases))


@dear
def test_bias_of_a_token_that_went_nowhere_is_its_result():
    run(make_node_case(8, num_tokens=3, routing="nowhere"), Options(num_biases=2))


@pytest.mark.parametrize(
    ("fp8", "num_worst_tokens", "num_biases"),
    both_parts(
        [("row", 40, 2)], thorough=[(None, 0, 0), (None, 40, 2), ("packed", 0, 2), ("column", 40, 1), ("column", 0, 0)]
    ),
)
def test_options_together(fp8, num_worst_tokens, num_biases):
    case = make_node_case(9, num_tokens=(5, 11, 0, 8), num_topk=3, hidden=128)
    run(case, Options(fp8=fp8, num_worst_tokens=num_worst_tokens, num_biases=num_biases, expert_alignment=4))


@pytest.mark.parametrize(("num_nodes", "num_nvl_peers"), both_parts([], thorough=[(2, 1), (3, 1)]))
def test_blocks_with_more_warps_than_a_ring_has_slots_get_on(num_nodes, num_nvl_peers):
    """A warp that waits at one level has published to the other one what it is done with."""
    case = make_node_case(
        12, num_nodes, num_nvl_peers, num_tokens=(40,) * (num_nodes * num_nvl_peers), routing="everywhere", num_topk=4
    )
    run(case, Options(nbep.Config(2, 2, 4 * num_nodes, 2, 4, num_threads=640)))
