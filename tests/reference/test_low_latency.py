"""The reference of the low-latency mode: a tiny case by hand, and what must hold of every case."""

import numpy as np
import pytest
from cases import Case, make_case
from hypothesis import given, settings
from hypothesis import strategies as st

from nbep import reference

BF16 = reference.BF16
BEGIN = 1 << 32


def hand_case() -> Case:
    """Rank 0 has tokens 1, 2, 3 and rank 1 has token 10; ranks own experts 0, 1 and 2, 3."""
    topk_idx = [np.array([[0, 1], [3, 0], [2, -1]]), np.array([[1, 2]])]
    x = [np.array([[1], [2], [3]], BF16), np.array([[10]], BF16)]
    weights = [np.array([[0.25, 0.5], [1, 2], [3, 4]], np.float32), np.array([[5, 6]], np.float32)]
    return Case(0, 2, 4, x, topk_idx, weights, [])


def dispatch(case: Case, num_max_tokens: int, **options) -> list[reference.LowLatencyDispatched]:
    return reference.low_latency_dispatch(case.x, case.topk_idx, num_max_tokens, case.num_experts, **options)


def test_dispatch_of_four_tokens_by_hand():
    rank_0, rank_1 = dispatch(hand_case(), 3, use_fp8=False)
    assert rank_0.recv_x[:, :, 0].tolist() == [[1, 2, 0, 0, 0, 0], [1, 10, 0, 0, 0, 0]]
    assert rank_0.src_info.tolist() == [[0, 1, -1, -1, -1, -1], [0, 0, -1, -1, -1, -1]]
    assert rank_0.recv_count.tolist() == [2, 2]
    assert rank_0.layout_range.tolist() == [[2, 2 * BEGIN], [1, BEGIN + 1]]
    assert rank_1.recv_x[:, :, 0].tolist() == [[3, 10, 0, 0, 0, 0], [2, 0, 0, 0, 0, 0]]
    assert rank_1.recv_count.tolist() == [2, 1]
    assert rank_1.layout_range.tolist() == [[1, BEGIN + 1], [1, BEGIN]]
    assert rank_1.recv_x_scales is None


@pytest.mark.parametrize("deduplicate", [False, True])
def test_combine_of_four_tokens_by_hand(deduplicate):
    case = hand_case()
    dispatched = dispatch(case, 3, use_fp8=False)
    x = [(of_rank.recv_x * (rank + 1)).astype(BF16) for rank, of_rank in enumerate(dispatched)]
    combined = reference.low_latency_combine(x, case.topk_idx, case.topk_weights, dispatched, deduplicate=deduplicate)
    # Experts of rank 1 double their tokens.
    assert combined[0][:, 0].tolist() == [0.75, 1 * 4 + 2 * 2, 3 * 6]
    assert combined[1][:, 0].tolist() == [5 * 10 + 6 * 20]


def test_additions_are_in_the_order_of_the_choices_and_each_is_rounded():
    case = make_case(0, num_tokens=(1, 0), hidden=128, num_topk=3, unused=0)
    case.topk_idx[0][:] = [[2, 0, 3]]
    case.topk_weights[0][:] = 1
    dispatched = dispatch(case, 1, use_fp8=False)
    values = {0: 2.0**-24, 2: 1.0, 3: -1.0}
    x = [
        np.array([np.full((2, 128), values.get(2 * rank + e, 0.0)) for e in range(2)]).astype(BF16) for rank in range(2)
    ]
    ((sums,), _) = reference.low_latency_combine(x, case.topk_idx, case.topk_weights, dispatched)
    assert (sums == 0).all()  # 1 + 2**-24 rounds to 1
    case.topk_idx[0][:] = [[2, 3, 0]]
    ((sums,), _) = reference.low_latency_combine(x, case.topk_idx, case.topk_weights, dispatched)
    assert (sums == 2.0**-24).all()


def test_deduplicate_rounds_the_sum_of_each_rank():
    case = make_case(0, num_tokens=(1, 0), hidden=128, num_topk=3, unused=0)
    case.topk_idx[0][:] = [[2, 0, 3]]
    case.topk_weights[0][:] = 1
    dispatched = dispatch(case, 1, use_fp8=False)
    values = {0: -1.0, 2: 1.0, 3: 2.0**-9}
    x = [
        np.array([np.full((2, 128), values.get(2 * rank + e, 0.0)) for e in range(2)]).astype(BF16) for rank in range(2)
    ]
    arguments = x, case.topk_idx, case.topk_weights, dispatched
    assert (reference.low_latency_combine(*arguments)[0] == 2.0**-9).all()
    # Rank 1 sends 1 + 2**-9, which is 1 in bf16.
    assert (reference.low_latency_combine(*arguments, deduplicate=True)[0] == 0).all()


@settings(max_examples=30)
@given(
    seed=st.integers(0, 1 << 20),
    num_ranks=st.sampled_from([2, 3, 4]),
    num_topk=st.integers(1, 5),
    experts_per_rank=st.integers(2, 4),
    deduplicate=st.booleans(),
)
def test_tokens_that_experts_leave_alone_return_times_their_weights(
    seed, num_ranks, num_topk, experts_per_rank, deduplicate
):
    case = make_case(
        seed, num_ranks=num_ranks, num_tokens=4, hidden=128, num_topk=num_topk, experts_per_rank=experts_per_rank
    )
    dispatched = dispatch(case, 4, use_fp8=False)
    x = [of_rank.recv_x for of_rank in dispatched]
    combined = reference.low_latency_combine(x, case.topk_idx, case.topk_weights, dispatched, deduplicate=deduplicate)
    for rank in range(num_ranks):
        weights = np.where(case.topk_idx[rank] < 0, 0, case.topk_weights[rank]).sum(axis=1, keepdims=True)
        want = case.x[rank].astype(np.float32) * weights
        assert np.allclose(combined[rank].astype(np.float32), want, rtol=2**-7, atol=1e-30)


@settings(max_examples=30)
@given(seed=st.integers(0, 1 << 20), num_ranks=st.sampled_from([2, 3]))
def test_rows_of_a_source_in_any_order_are_put_in_order(seed, num_ranks):
    case = make_case(seed, num_ranks=num_ranks, num_tokens=[5, 0, 7][:num_ranks], hidden=512)
    rng = np.random.default_rng(seed)
    for want in dispatch(case, 7, round_scale=True, use_ue8m0=True):
        mixed = want.in_order()
        for local_expert in range(len(want.recv_count)):
            for src in range(num_ranks):
                rows = np.array(want.rows_of(local_expert, src), int)
                other_order = rng.permutation(rows)
                for array in (mixed.recv_x, mixed.recv_x_scales, mixed.src_info):
                    array[local_expert, rows] = array[local_expert, other_order]
        assert mixed.in_order().src_info.tolist() == want.src_info.tolist()
        assert mixed.in_order().recv_x.tobytes() == want.recv_x.tobytes()
        assert mixed.in_order().recv_x_scales.tobytes() == want.recv_x_scales.tobytes()


def test_fp8_rows_are_those_of_the_cast():
    case = make_case(1, num_tokens=3, hidden=512)
    for round_scale in (False, True):
        dispatched = dispatch(case, 3, round_scale=round_scale)
        casts = [reference.per_token_cast_to_fp8(x, round_scale) for x in case.x]
        for of_rank in dispatched:
            for local_expert in range(2):
                for src in range(2):
                    for row in of_rank.rows_of(local_expert, src):
                        token = of_rank.src_info[local_expert, row]
                        assert of_rank.recv_x[local_expert, row].tobytes() == casts[src][0][token].tobytes()
                        assert of_rank.recv_x_scales[local_expert, row].tolist() == casts[src][1][token].tolist()


def test_four_exponents_are_a_word_with_the_first_in_its_low_byte():
    scales = np.array([[1, 2, 4, 0.5, 2.0**-126, 2.0**127, 1, 1]], np.float32)
    words = reference.pack_ue8m0(scales)
    assert words.dtype == np.int32
    assert words.view(np.uint32).tolist() == [[0x7E81807F, 0x7F7FFE01]]
    assert reference.unpack_ue8m0(words).tolist() == scales.tolist()


def test_calc_diff_is_deepeps():
    x = np.array([1.0, 2.0, 3.0])
    assert reference.calc_diff(x, x) == 0
    assert reference.calc_diff(x[:0], x[:0]) == 0
    # (2 * (2*3 + 3*4 + 4*5)) / (4 + 9 + 16 + 9 + 16 + 25)
    assert reference.calc_diff(x, x + 1) == pytest.approx(1 - 76 / 79)
    assert reference.calc_diff(x.astype(BF16), x.astype(np.float32)) == 0
