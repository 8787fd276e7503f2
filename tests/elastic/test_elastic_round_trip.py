"""Dispatch and combine of ElasticBuffer against the reference, over ranks, tokens, routings, forms and options."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from arrays import to_numpy, to_target
from cases import ROUTINGS, make_case
from elastic import ElasticOptions, dispatch_arguments, make_elastic_buffer, round_trip, run
from parts import both_parts, crossed, dear
from target import MEMORY_MODELS, spawn

from nbep.device.cards import SM80
from nbep.device.kernels.elastic.number_choices import TABLE_EXPERTS

FORMS = {
    "compact": ElasticOptions(expert_alignment=3),
    "expanded": ElasticOptions(do_expand=True, expert_alignment=3),
    "one reduction": ElasticOptions(do_expand=True, allow_multiple_reduction=False),
}
form = pytest.mark.parametrize("form", FORMS)
one_form = pytest.mark.parametrize("form", both_parts(["expanded"], thorough=["compact", "one reduction"]))


@pytest.mark.parametrize(
    ("form", "do_cpu_sync"),
    crossed([("compact", True), ("expanded", False), ("one reduction", True)], FORMS, (True, False)),
)
@pytest.mark.parametrize("num_ranks", both_parts([1, 2], thorough=[3, 4, 8]))
def test_tokens_arrive_in_order_and_return(num_ranks, form, do_cpu_sync):
    case = make_case(1, num_ranks=num_ranks, num_tokens=5, num_topk=3, experts_per_rank=3)
    run(case, replace(FORMS[form], do_cpu_sync=do_cpu_sync))


@one_form
@pytest.mark.parametrize("memory_model", MEMORY_MODELS)
@pytest.mark.parametrize("seed", both_parts([1], thorough=range(2, 6)))
def test_any_schedule(form, memory_model, seed):
    case = make_case(seed, num_ranks=2, num_tokens=(6, 3), num_topk=3)
    run(case, replace(FORMS[form], is_cached=True, do_cpu_sync=seed % 2 == 0), seed=seed, memory_model=memory_model)


@form
@pytest.mark.parametrize("num_tokens", both_parts([[0, 7]], thorough=[0, 1, 13, [9, 1]]))
def test_any_number_of_tokens_including_none(form, num_tokens):
    run(make_case(2, num_tokens=num_tokens), replace(FORMS[form], do_cpu_sync=False))


@one_form
@pytest.mark.parametrize("routing", both_parts(["one_rank"], thorough=sorted({*ROUTINGS, "one_expert"} - {"one_rank"})))
def test_any_routing(form, routing):
    run(make_case(4, num_ranks=4, num_tokens=6, num_topk=4, routing=routing), FORMS[form])


@one_form
@pytest.mark.parametrize("num_topk", both_parts([32], thorough=[1, 5]))
def test_one_to_thirty_two_choices(form, num_topk):
    run(make_case(7, num_tokens=4, num_topk=num_topk, experts_per_rank=17), replace(FORMS[form], num_biases=2))


@dear
@pytest.mark.parametrize("num_sms", both_parts([2], thorough=[1, 3]))
def test_choices_of_several_shares_and_of_more_experts_than_a_table_holds(num_sms):
    """Three warps number 288 choices each, of which they take 256 at a time, first of 256 experts, then of 44."""
    case = make_case(8, num_ranks=3, num_tokens=(90, 0, 7), num_topk=9, hidden=8, experts_per_rank=100)
    assert case.num_experts > TABLE_EXPERTS
    run(case, ElasticOptions(do_expand=True, num_sms=num_sms))


@one_form
@pytest.mark.parametrize("experts_per_rank", both_parts([70], thorough=[31, 32, 33, 128]))
def test_experts_of_several_warps(form, experts_per_rank):
    """A warp places the rows of 32 experts; alignments are no powers of two."""
    case = make_case(9, num_tokens=12, num_topk=6, experts_per_rank=experts_per_rank)
    run(case, replace(FORMS[form], expert_alignment=3))


@one_form
def test_a_token_that_names_an_expert_twice_has_two_rows_there(form):
    case = make_case(8, num_tokens=5, num_topk=4)
    for topk_idx in case.topk_idx:
        topk_idx[::2, 1] = topk_idx[::2, 0]
        topk_idx[1, :] = 3
    run(case, FORMS[form])


@one_form
@pytest.mark.parametrize("hidden", both_parts([4608], thorough=[8, 24, 520]))
def test_hidden_that_is_no_multiple_of_a_warps_row_or_takes_two_stages(form, hidden):
    run(make_case(6, num_tokens=3, hidden=hidden), FORMS[form])


@pytest.mark.emulator_only("a GPU is what it is")
@one_form
def test_cards_without_a_copy_engine(form):
    def main(comm, case, options):
        comm.runtime.world.compute_capability = SM80
        return round_trip(comm, case, options)

    case = make_case(5, num_tokens=4, num_topk=3, hidden=264)
    run(case, FORMS[form], fn=main)


@pytest.mark.parametrize(
    ("fp8", "by_column", "do_expand"),
    crossed(
        [("mixed", True, False), ("packed", False, True), ("packed", True, True)],
        ("mixed", "packed", "row", "column"),
        (False, True),
        (False, True),
    ),
)
def test_fp8_with_scales_of_any_strides(fp8, by_column, do_expand):
    case = make_case(3, num_tokens=5, hidden=256)
    options = ElasticOptions(do_expand=do_expand, fp8=fp8, by_column=by_column, is_cached=True, expert_alignment=4)
    run(case, replace(options, do_zero_padding=do_expand))


@pytest.mark.parametrize("num_biases", both_parts([2], thorough=[1]))
@one_form
def test_biases_come_first(form, num_biases):
    run(make_case(9, num_tokens=5, num_topk=3), replace(FORMS[form], num_biases=num_biases))


@pytest.mark.parametrize(("form", "with_weights"), crossed([("one reduction", True)], FORMS, (False, True)))
def test_weights_of_each_choice_come_from_its_experts_rank(form, with_weights):
    options = replace(FORMS[form], with_weights=with_weights, own_weights=True, is_cached=True)
    run(make_case(10, num_ranks=3, num_tokens=4, num_topk=3), options)


@one_form
def test_statistics_add_up_and_the_handle_may_share_topk_idx(form):
    run(make_case(11, num_tokens=5), replace(FORMS[form], with_stats=True, do_handle_copy=False))


def test_padding_becomes_zeros_if_asked_for():
    case = make_case(12, num_tokens=5, num_topk=3, experts_per_rank=3)
    run(case, ElasticOptions(do_expand=True, do_zero_padding=True, expert_alignment=8, do_cpu_sync=False))


@dear
@one_form
def test_as_many_warps_as_there_are(form):
    run(make_case(13, num_tokens=17, num_topk=3), replace(FORMS[form], num_sms=5, is_cached=True))


def test_rows_that_the_caller_has_added_up_are_taken_where_the_handle_says():
    """As LightLLM does: it rewrites the rows of each token in the handle, or says that the handle is compact now."""
    case = make_case(3, num_ranks=2, num_tokens=5, num_topk=3)

    def main(comm, way):
        buffer = make_elastic_buffer(comm, [(case, FORMS["expanded"])])
        _, _, _, handle, _ = buffer.dispatch(**dispatch_arguments(case, FORMS["expanded"], comm.rank))
        metadata = to_numpy(handle.recv_src_metadata).copy()
        num_tokens = len(metadata)
        expanded = np.zeros((handle.num_expanded_tokens, 16), ml_dtypes.bfloat16)
        sums = np.arange(num_tokens)[:, None] + np.zeros((1, 16)) + comm.rank
        for i, rows in enumerate(metadata[:, 2:]):  # the sum stands in a token's first row, the others are 0
            expanded[rows[rows >= 0][0]] = sums[i]
        if way == "compact":
            handle.do_expand = False
        if way == "rewritten":
            metadata[:, 2:] = -1
            metadata[:, 2] = np.arange(num_tokens)
            handle.recv_src_metadata = to_target(metadata)
        combined, _, _ = buffer.combine(
            to_target(expanded if way == "expanded" else sums.astype(expanded.dtype)), handle
        )
        buffer.destroy()
        return to_numpy(combined).tobytes()

    expanded, rewritten, compact = (spawn(main, 2, (way,)) for way in ("expanded", "rewritten", "compact"))
    assert expanded == rewritten == compact
