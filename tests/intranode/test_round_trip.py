"""Layout, dispatch and combine against the reference, over rank counts, token counts, routings and shapes."""

import pytest
from cases import ROUTINGS, make_case
from intranode import Options, run
from parts import both_parts, dear

import nbep

pytestmark = pytest.mark.usefixtures("both_ways")


@pytest.mark.costs_time
@pytest.mark.parametrize("num_ranks", both_parts([2], thorough=[4, 8]))
def test_tokens_arrive_in_order_of_rank_channel_token_and_return(num_ranks):
    run(make_case(1, num_ranks=num_ranks, num_tokens=5, num_topk=3))


@pytest.mark.usefixtures("channels")
@pytest.mark.parametrize("num_tokens", both_parts([[0, 7]], thorough=[0, 1, 2, 13, [9, 1]]))
def test_any_number_of_tokens_including_none(num_tokens):
    run(make_case(2, num_tokens=num_tokens))


@pytest.mark.usefixtures("channels")
def test_every_rank_has_another_number_of_tokens():
    run(make_case(3, num_ranks=4, num_tokens=[3, 0, 11, 1], num_topk=3))


@pytest.mark.costs_time
@pytest.mark.parametrize("routing", both_parts(["one_rank"], thorough=sorted({*ROUTINGS} - {"one_rank"})))
def test_any_routing(routing):
    run(make_case(4, num_ranks=4, num_tokens=6, num_topk=4, routing=routing))


@dear
@pytest.mark.usefixtures("channels")
@pytest.mark.costs_time
def test_all_tokens_of_eight_ranks_to_one_rank():
    run(make_case(5, num_ranks=8, num_tokens=4, num_topk=2, routing="one_rank", unused=0))


@pytest.mark.usefixtures("channels")
@pytest.mark.parametrize("hidden", both_parts([520], thorough=[8, 24, 264]))
def test_hidden_that_is_no_multiple_of_a_warps_row(hidden):
    run(make_case(6, num_tokens=3, hidden=hidden))


@pytest.mark.usefixtures("channels")
@pytest.mark.parametrize("num_topk", both_parts([32], thorough=[1, 5]))
def test_one_to_thirty_two_choices(num_topk):
    run(make_case(7, num_tokens=4, num_topk=num_topk, experts_per_rank=17))


@dear
@pytest.mark.parametrize("warps_per_rank", both_parts([3], thorough=[1, 2]))
def test_any_block_size(warps_per_rank):
    config = nbep.Config(4, 3, 7, num_threads=2 * 32 * warps_per_rank)
    run(make_case(8, num_tokens=17), Options(config))


@pytest.mark.about_rings
@pytest.mark.parametrize(
    ("num_ranks", "warps_per_rank"), both_parts([(2, 3)], thorough=[(4, 1), (2, 1), (4, 2), (8, 1)])
)
def test_blocks_that_both_send_and_receive(num_ranks, warps_per_rank):
    config = nbep.Config(4, 3, 5, num_threads=32 * num_ranks * warps_per_rank, mix_roles=True)
    case = make_case(12, num_ranks=num_ranks, num_tokens=[3 * rank for rank in range(num_ranks)], num_topk=3)
    run(case, Options(config))


@pytest.mark.parametrize("num_sms", both_parts([4], thorough=[2, 10]))
def test_any_number_of_channels(num_sms):
    run(make_case(9, num_tokens=7), Options(nbep.Config(num_sms, 2, 4)))


@dear
@pytest.mark.about_rings
@pytest.mark.parametrize(("send", "recv"), both_parts([(1, 2)], thorough=[(1, 3), (3, 4), (5, 64)]))
def test_any_chunk_and_ring_size(send, recv):
    run(make_case(10, num_tokens=23, routing="everywhere"), Options(nbep.Config(2, send, recv)))


@dear
@pytest.mark.usefixtures("channels")
def test_one_expert_per_rank():
    run(make_case(11, num_ranks=4, num_tokens=5, num_topk=4, experts_per_rank=1))
