"""Low-latency dispatch and combine against the reference, over rank counts, token counts, routings and shapes."""

import pytest
from low_latency import LOW_LATENCY_ROUTINGS, Options, make_low_latency_case, run
from parts import both_parts, crossed
from target import MEMORY_MODELS

pytestmark = pytest.mark.usefixtures("blocks")
ROUTINGS = list(LOW_LATENCY_ROUTINGS)
both_ways = pytest.mark.parametrize("deduplicate", [False, True])
deduplicated = pytest.mark.parametrize("deduplicate", both_parts([True], thorough=[False]))
plain = pytest.mark.parametrize("deduplicate", both_parts([False], thorough=[True]))


@pytest.mark.parametrize("memory_model", MEMORY_MODELS)
@pytest.mark.parametrize("num_ranks", both_parts([2, 3], thorough=[4, 6, 8]))
def test_tokens_reach_their_experts_and_return(num_ranks, memory_model):
    case = make_low_latency_case(1, num_ranks=num_ranks, num_tokens=4, num_topk=3)
    run(case, memory_model=memory_model)


def test_more_ranks_than_a_node_has():
    run(make_low_latency_case(2, num_ranks=9, num_tokens=2, experts_per_rank=1))


@both_ways
@pytest.mark.parametrize("num_tokens", both_parts([[0, 7]], thorough=[0, 1, 13, [9, 1]]))
def test_any_number_of_tokens_including_none(num_tokens, deduplicate):
    run(make_low_latency_case(3, num_tokens=num_tokens), Options(deduplicate=deduplicate))


@both_ways
def test_every_rank_has_another_number_of_tokens(deduplicate):
    case = make_low_latency_case(4, num_ranks=4, num_tokens=[3, 0, 11, 1], num_topk=3)
    run(case, Options(deduplicate=deduplicate))


@deduplicated
def test_fewer_tokens_than_the_maximum(deduplicate):
    run(make_low_latency_case(5, num_tokens=3), Options(spare=5, deduplicate=deduplicate))


@pytest.mark.parametrize(
    ("routing", "deduplicate"),
    crossed([(each, i % 2 == 0) for i, each in enumerate(ROUTINGS)], ROUTINGS, (False, True)),
)
def test_any_routing(routing, deduplicate):
    case = make_low_latency_case(6, num_ranks=3, num_tokens=5, num_topk=4, routing=routing)
    run(case, Options(deduplicate=deduplicate))


@deduplicated
def test_all_tokens_of_six_ranks_to_one_expert(deduplicate):
    case = make_low_latency_case(7, num_ranks=6, num_tokens=4, num_topk=2, routing="one_expert", unused=0)
    run(case, Options(deduplicate=deduplicate))


@plain
@pytest.mark.parametrize("hidden", both_parts([384], thorough=[128, 1152, 2560]))
def test_any_multiple_of_128_columns(hidden, deduplicate):
    run(make_low_latency_case(8, num_tokens=2, hidden=hidden), Options(deduplicate=deduplicate))


@deduplicated
@pytest.mark.parametrize("num_topk", both_parts([32], thorough=[1, 5]))
def test_one_to_thirty_two_choices(num_topk, deduplicate):
    case = make_low_latency_case(9, num_tokens=3, num_topk=num_topk, experts_per_rank=17)
    run(case, Options(deduplicate=deduplicate))


@plain
def test_one_expert_per_rank(deduplicate):
    case = make_low_latency_case(10, num_ranks=4, num_tokens=5, num_topk=4, experts_per_rank=1)
    run(case, Options(deduplicate=deduplicate))
