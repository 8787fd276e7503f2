"""The options of dispatch and combine, one by one and together."""

import pytest
from cases import make_case
from intranode import Options, run
from parts import both_parts, crossed, dear

import nbep
from nbep.device.layout.intranode import locate_ring

pytestmark = pytest.mark.usefixtures("both_ways", "channels")


@dear
def test_without_topk_only_x_travels():
    run(make_case(1, num_ranks=4, num_tokens=6), Options(with_topk=False))


@pytest.mark.parametrize(("fp8", "with_topk"), crossed([("column", True)], ("column", "packed", "row"), (False, True)))
def test_fp8_tokens_bring_their_scales_row_major_whatever_order_they_had(fp8, with_topk):
    run(make_case(2, num_tokens=7, hidden=384), Options(fp8=fp8, with_topk=with_topk))


@dear
def test_fp8_with_one_scale_per_token():
    run(make_case(3, num_tokens=5, hidden=128), Options(fp8="column"))


@pytest.mark.about_rings
def test_rings_may_lie_beyond_2_gib():
    case, options = make_case(20, num_tokens=9), Options(nbep.Config(4, 2, 3 << 20))
    shape = options.config.ring_shape(2, 2 * case.hidden, case.topk_idx[0].shape[1], 0, 1)
    assert locate_ring(0, shape, 1, 1).x > 1 << 31
    run(case, options)


@pytest.mark.parametrize("alignment", both_parts([16], thorough=[2]))
def test_expert_counts_are_rounded_up(alignment):
    run(make_case(4, num_tokens=9), Options(expert_alignment=alignment))


@dear
@pytest.mark.parametrize("extra", both_parts([40], thorough=[0, 1]))
def test_worst_tokens_gives_that_many_rows_and_no_counts(extra):
    run(make_case(5, num_tokens=6), Options(num_worst_tokens=12 + extra))


def test_worst_tokens_where_no_token_comes():
    run(make_case(6, num_tokens=3, routing="avoid_rank_0"), Options(num_worst_tokens=6))


@dear
def test_weights_of_all_ranks_are_added_in_their_order():
    run(make_case(10, num_ranks=4, num_tokens=6, num_topk=4), Options(own_weights=True))


@dear
@pytest.mark.parametrize("num_biases", both_parts([2], thorough=[1]))
def test_biases_are_added_first(num_biases):
    run(make_case(7, num_ranks=4, num_tokens=5, num_topk=4), Options(num_biases=num_biases))


@pytest.mark.costs_time
@pytest.mark.parametrize(("num_topk", "num_biases"), both_parts([], thorough=[(3, 0), (3, 1), (8, 2)]))
def test_biases_are_added_to_rows_from_every_rank(num_topk, num_biases):
    case = make_case(17, num_ranks=8, num_tokens=3, hidden=520, num_topk=num_topk, experts_per_rank=1, unused=0)
    run(case, Options(num_biases=num_biases))


def test_bias_of_a_token_that_went_nowhere_is_its_result():
    run(make_case(8, num_tokens=3, routing="nowhere"), Options(num_biases=2))


@pytest.mark.parametrize(
    ("fp8", "num_worst_tokens", "num_biases"), crossed([("packed", 10, 2)], (None, "row", "packed"), (0, 10), (0, 2))
)
def test_options_together(fp8, num_worst_tokens, num_biases):
    case = make_case(9, num_tokens=5, hidden=128)
    run(case, Options(fp8=fp8, num_worst_tokens=num_worst_tokens, num_biases=num_biases, expert_alignment=4))
