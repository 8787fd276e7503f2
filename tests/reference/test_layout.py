"""The reference's layout and channel split."""

import numpy as np
import pytest
from cases import ROUTINGS, make_case
from hypothesis import given
from hypothesis import strategies as st

from nbep import reference


def test_token_with_two_experts_on_one_rank_is_counted_once_for_the_rank_and_twice_for_experts():
    layout = reference.get_dispatch_layout(np.array([[0, 1], [1, 2], [-1, 3]]), num_experts=4, num_ranks=2)
    assert layout.num_tokens_per_rank.tolist() == [2, 2]
    assert layout.num_tokens_per_expert.tolist() == [1, 2, 1, 1]
    assert layout.is_token_in_rank.tolist() == [[True, False], [True, True], [False, True]]


def test_layout_of_no_tokens_is_all_zeros():
    layout = reference.get_dispatch_layout(np.empty((0, 3), np.int64), num_experts=4, num_ranks=2)
    assert layout.num_tokens_per_rank.tolist() == [0, 0]
    assert layout.num_tokens_per_expert.tolist() == [0] * 4
    assert layout.is_token_in_rank.shape == (0, 2)


@given(num_tokens=st.integers(0, 60), num_channels=st.integers(1, 12))
def test_channels_cover_every_token_once_in_order(num_tokens, num_channels):
    ranges = [reference.channel_task_range(num_tokens, num_channels, channel) for channel in range(num_channels)]
    assert [token for begin, end in ranges for token in range(begin, end)] == list(range(num_tokens))


@pytest.mark.parametrize("routing", ROUTINGS)
def test_layout_counts_agree_with_membership(routing):
    case = make_case(3, num_ranks=4, num_tokens=9, num_topk=3, routing=routing)
    for idx, layout in zip(case.topk_idx, case.layouts, strict=True):
        assert layout.num_tokens_per_rank.tolist() == layout.is_token_in_rank.sum(axis=0).tolist()
        assert layout.num_tokens_per_expert.sum() == (idx >= 0).sum()
        for expert, count in enumerate(layout.num_tokens_per_expert):
            assert count == (idx == expert).sum()


def test_provenance_names_source_and_destination():
    case = make_case(0, num_ranks=2, num_tokens=1, num_topk=3, routing="everywhere")
    assert case.provenance(1, 0) == "r1t0 -> r0e0 r1e0 r0e1"
    assert make_case(0, num_tokens=1, routing="nowhere").provenance(0, 0) == "r0t0 -> nowhere"
