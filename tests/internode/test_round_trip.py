"""Layout, dispatch and combine between nodes against the reference, over shapes, token counts and routings."""

import pytest
from cases import NODE_ROUTINGS, ROUTINGS
from internode import SHAPES, Options, make_node_case, ragged, run
from parts import both_parts, dear

import nbep

pytestmark = pytest.mark.long

SHORT = [(2, 2)]
ALL = [*ROUTINGS, *NODE_ROUTINGS]
QUICK = ["one_node"]
LONG = [shape for shape in SHAPES if shape not in SHORT]


@pytest.mark.parametrize(
    ("num_nodes", "num_nvl_peers"), both_parts([(2, 2)], thorough=[shape for shape in SHAPES if shape != (2, 2)])
)
def test_tokens_arrive_in_order_of_rank_channel_token_and_return(num_nodes, num_nvl_peers):
    num_ranks = num_nodes * num_nvl_peers
    case = make_node_case(1, num_nodes, num_nvl_peers, num_tokens=ragged(num_ranks, 8), num_topk=4)
    run(case, Options(num_biases=1))


@dear
@pytest.mark.usefixtures("channels")
@pytest.mark.parametrize(("num_nodes", "num_nvl_peers"), both_parts(SHORT, thorough=LONG))
def test_every_rank_gets_every_token_and_gives_it_back(num_nodes, num_nvl_peers):
    num_ranks = num_nodes * num_nvl_peers
    case = make_node_case(
        2, num_nodes, num_nvl_peers, num_tokens=5, num_topk=num_ranks, routing="everywhere", hidden=48
    )
    run(case, Options(num_biases=2))


@pytest.mark.usefixtures("channels")
@pytest.mark.parametrize("num_tokens", both_parts([[1, 0, 0, 0]], thorough=[0, 1, 2, 13, [0, 0, 7, 0], [9, 1, 0, 30]]))
def test_any_number_of_tokens_including_none(num_tokens):
    run(make_node_case(3, num_tokens=num_tokens))


@pytest.mark.parametrize("routing", both_parts(QUICK, thorough=[each for each in ALL if each not in QUICK]))
def test_any_routing(routing):
    run(make_node_case(4, num_tokens=(6, 0, 9, 3), num_topk=3, routing=routing))


@pytest.mark.parametrize(("num_nodes", "num_nvl_peers"), both_parts([], thorough=[(3, 2), (4, 2), (2, 4)]))
@pytest.mark.parametrize("routing", NODE_ROUTINGS)
def test_a_node_may_get_nothing(routing, num_nodes, num_nvl_peers):
    run(make_node_case(5, num_nodes, num_nvl_peers, num_tokens=4, num_topk=3, routing=routing))


@dear
@pytest.mark.usefixtures("channels")
@pytest.mark.parametrize("hidden", both_parts([24], thorough=[8, 264, 520]))
def test_hidden_that_is_no_multiple_of_a_warps_row(hidden):
    run(make_node_case(6, num_tokens=3, hidden=hidden))


@dear
@pytest.mark.usefixtures("channels")
def test_rows_that_take_two_stages():
    """A stage of shared memory holds 8,064 bytes."""
    run(make_node_case(11, num_tokens=(3, 0, 1, 2), hidden=4608, num_topk=3), Options(num_biases=1))


@dear
@pytest.mark.usefixtures("channels")
@pytest.mark.parametrize("num_topk", both_parts([32], thorough=[1, 5]))
def test_one_to_thirty_two_choices(num_topk):
    run(make_node_case(7, num_tokens=3, num_topk=num_topk, experts_per_rank=17))


@dear
@pytest.mark.parametrize("num_sms", both_parts([2], thorough=[6, 10]))
def test_any_number_of_channels(num_sms):
    run(make_node_case(8, num_tokens=(7, 0, 3, 5)), Options(nbep.Config(num_sms, 2, 4, 2, 4)))


@dear
@pytest.mark.usefixtures("channels")
def test_one_expert_a_rank():
    run(make_node_case(9, num_tokens=5, num_topk=3, experts_per_rank=1))


@pytest.mark.parametrize(("num_nodes", "num_nvl_peers"), both_parts([], thorough=[(2, 8), (8, 2), (5, 3)]))
def test_larger_groups(num_nodes, num_nvl_peers):
    run(make_node_case(10, num_nodes, num_nvl_peers, num_tokens=3, num_topk=4), Options(nbep.Config(2, 1, 8, 2, 4)))


@pytest.mark.usefixtures("channels")
@pytest.mark.parametrize(
    "config",
    both_parts(
        [], thorough=[nbep.Config(2, 1, 2, 4, 64), nbep.Config(2, 4, 64, 1, 2)], long=[nbep.Config(2, 1, 2, 1, 2)]
    ),
)
def test_rings_smaller_than_the_traffic_at_either_level(config):
    case = make_node_case(4, num_tokens=(24, 0, 17, 3), num_topk=4, routing="everywhere")
    run(case, Options(config))
