"""The reference's dispatch and combine: tiny cases by hand, and what must hold of every case."""

import numpy as np
import pytest
from cases import ROUTINGS, Case, make_case
from hypothesis import given, settings
from hypothesis import strategies as st

from nbep import reference

BF16 = reference.BF16


def dispatch(case: Case, num_channels: int = 2, **options) -> list[reference.Dispatched]:
    return reference.dispatch(
        case.x, case.layouts, num_channels, topk_idx=case.topk_idx, topk_weights=case.topk_weights, **options
    )


def hand_case() -> Case:
    """Rank 0 has tokens 1, 2, 3 and rank 1 has token 10; ranks own experts 0, 1 and 2, 3."""
    topk_idx = [np.array([[0, 1], [3, 0], [2, -1]]), np.array([[1, 2]])]
    x = [np.array([[1], [2], [3]], BF16), np.array([[10]], BF16)]
    weights = [np.array([[0.25, 0.5], [1, 2], [3, 4]], np.float32), np.array([[5, 6]], np.float32)]
    return Case(0, 2, 4, x, topk_idx, weights, [reference.get_dispatch_layout(idx, 4, 2) for idx in topk_idx])


def test_dispatch_of_four_tokens_by_hand():
    rank_0, rank_1 = dispatch(hand_case())
    assert rank_0.recv_x.ravel().tolist() == [1, 2, 10]
    assert rank_0.recv_src_rank.tolist() == [0, 0, 1]
    assert rank_0.recv_src_idx.tolist() == [0, 1, 0]
    assert rank_0.recv_topk_idx.tolist() == [[0, 1], [-1, 0], [1, -1]]
    assert rank_0.recv_topk_weights.tolist() == [[0.25, 0.5], [0, 2], [5, 0]]
    assert rank_0.num_recv_tokens_per_expert_list == [2, 2]
    assert rank_1.recv_x.ravel().tolist() == [2, 3, 10]
    assert rank_1.recv_topk_idx.tolist() == [[1, -1], [0, -1], [-1, 0]]
    assert rank_1.num_recv_tokens_per_expert_list == [2, 1]


def test_handle_of_four_tokens_by_hand():
    rank_0, rank_1 = dispatch(hand_case())
    # Of two channels, rank 0 sends tokens 0 and 1 on the first and token 2 on the second; rank 1 uses the first.
    assert rank_0.rank_prefix_matrix.tolist() == rank_1.rank_prefix_matrix.tolist() == [[2, 2], [3, 3]]
    assert rank_0.channel_prefix_matrix.tolist() == [[2, 2], [1, 2]]
    assert rank_1.channel_prefix_matrix.tolist() == [[1, 1], [1, 1]]
    assert rank_0.recv_channel_prefix_matrix.tolist() == [[0, 2], [0, 1]]
    assert rank_1.recv_channel_prefix_matrix.tolist() == [[0, 1], [0, 1]]
    assert rank_0.send_head.tolist() == [[0, -1], [1, 0], [-1, 0]]


def test_absent_tokens_are_encoded_with_the_next_ring_index_of_their_channel():
    head = np.array([[-1, 0], [0, -1], [-1, -1], [1, -1]], np.int32)
    more = -reference.NO_MORE_TOKENS - 1
    assert reference.encode_send_head(head, 1).tolist() == [[-1, 0], [0, more], [-2, more], [1, more]]
    assert reference.encode_send_head(head, 2).tolist() == [[-1, 0], [0, more], [-2, more], [1, more]]
    assert reference.encode_send_head(np.array([[-1], [-1], [0], [1]], np.int32), 2).tolist() == [
        [more],
        [more],
        [0],
        [1],
    ]


def test_combine_adds_in_float32_and_rounds_once():
    case = hand_case()
    dispatched = dispatch(case)
    # 256 + 1 + 1 is 258 in float32; rounding to bf16 after each addition would stay at 256.
    results = [np.full_like(d.recv_x, 1) for d in dispatched]
    bias = [np.full((3, 1), 256, BF16), None]
    (combined, weights), _ = reference.combine(results, dispatched, bias=bias)
    assert combined.ravel().tolist() == [256, 258, 256]
    assert weights is None


def test_combine_adds_both_biases_first():
    dispatched = dispatch(hand_case())
    bias = [(np.full((3, 1), 2, BF16), np.full((3, 1), 4, BF16)), (None, np.full((1, 1), 8, BF16))]
    results = reference.combine([d.recv_x for d in dispatched], dispatched, bias=bias)
    assert results[0][0].ravel().tolist() == [7, 10, 9]
    assert results[1][0].ravel().tolist() == [28]


cases = st.builds(
    make_case,
    seed=st.integers(0, 1 << 20),
    num_ranks=st.sampled_from([2, 4]),
    num_tokens=st.integers(0, 9),
    hidden=st.just(8),
    num_topk=st.integers(1, 4),
    routing=st.sampled_from(ROUTINGS),
)


@settings(max_examples=50)
@given(case=cases, num_channels=st.integers(1, 4))
def test_every_received_row_is_the_token_that_its_handle_names(case, num_channels):
    dispatched = dispatch(case, num_channels)
    for rank, there in enumerate(dispatched):
        assert len(there.recv_x) == sum(layout.num_tokens_per_rank[rank] for layout in case.layouts)
        assert len(there.recv_x) == there.rank_prefix_matrix[-1, rank]
        for row, (src, token) in enumerate(zip(there.recv_src_rank, there.recv_src_idx, strict=True)):
            assert there.recv_x[row].tobytes() == case.x[src][token].tobytes(), case.provenance(src, token)
        for src in range(case.num_ranks):
            begin = there.rank_prefix_matrix[src - 1, rank] if src else 0
            rows = slice(begin, there.rank_prefix_matrix[src, rank])
            assert set(there.recv_src_rank[rows].tolist()) <= {src}
            assert np.all(np.diff(there.recv_src_idx[rows]) > 0)


@settings(max_examples=50)
@given(case=cases, num_channels=st.integers(1, 4))
def test_weights_return_to_their_tokens_and_x_comes_back_once_per_rank(case, num_channels):
    dispatched = dispatch(case, num_channels)
    results = reference.combine(
        [d.recv_x for d in dispatched], dispatched, topk_weights=[d.recv_topk_weights for d in dispatched]
    )
    for rank, (combined_x, weights) in enumerate(results):
        copies = case.layouts[rank].is_token_in_rank.sum(axis=1, keepdims=True)
        exact = case.x[rank].astype(np.float32) * copies
        assert np.array_equal(combined_x.astype(np.float32), exact.astype(BF16).astype(np.float32))
        assert np.array_equal(weights, np.where(case.topk_idx[rank] >= 0, case.topk_weights[rank], 0))


@settings(max_examples=30)
@given(case=cases, num_channels=st.integers(1, 4))
def test_prefix_matrices_locate_every_channel(case, num_channels):
    dispatched = dispatch(case, num_channels)
    for rank, there in enumerate(dispatched):
        for src in range(case.num_ranks):
            base = there.rank_prefix_matrix[src - 1, rank] if src else 0
            for channel in range(num_channels):
                begin = base + there.recv_channel_prefix_matrix[src, channel]
                end = base + dispatched[src].channel_prefix_matrix[rank, channel]
                tokens = there.recv_src_idx[begin:end]
                first, last = reference.channel_task_range(len(case.x[src]), num_channels, channel)
                assert all(first <= token < last for token in tokens)
                assert dispatched[src].send_head[tokens, rank].tolist() == list(range(end - begin))


@settings(max_examples=30)
@given(case=cases, num_channels=st.integers(1, 4))
def test_encoding_send_head_twice_is_encoding_it_once(case, num_channels):
    for there in dispatch(case, num_channels):
        once = reference.encode_send_head(there.send_head, num_channels)
        assert np.array_equal(reference.encode_send_head(once, num_channels), once)
        assert np.array_equal(np.where(once >= 0, once, -1), there.send_head)


@pytest.mark.parametrize("alignment", [1, 4, 5])
def test_alignment_rounds_expert_counts_up(alignment):
    case = make_case(5, num_tokens=7, routing="uniform")
    for exact, aligned in zip(dispatch(case), dispatch(case, expert_alignment=alignment), strict=True):
        for n, m in zip(exact.num_recv_tokens_per_expert_list, aligned.num_recv_tokens_per_expert_list, strict=True):
            assert m % alignment == 0
            assert n <= m < n + alignment


def test_worst_tokens_pads_rows_and_marks_them_unused():
    case = make_case(1, num_tokens=4)
    for exact, padded in zip(dispatch(case), dispatch(case, num_worst_tokens=8), strict=True):
        n = len(exact.recv_x)
        assert padded.recv_x.shape == (8, case.hidden)
        assert padded.recv_x[:n].tobytes() == exact.recv_x.tobytes()
        assert np.all(padded.recv_topk_idx[n:] == -1)
        assert padded.num_recv_tokens_per_expert_list == []


def test_scales_travel_with_their_tokens():
    case = make_case(2, num_ranks=4, num_tokens=5, hidden=256)
    cast = [reference.per_token_cast_to_fp8(x) for x in case.x]
    for there in reference.dispatch(cast, case.layouts, 2):
        for row, (src, token) in enumerate(zip(there.recv_src_rank, there.recv_src_idx, strict=True)):
            assert there.recv_x[row].tobytes() == cast[src][0][token].tobytes()
            assert there.recv_x_scales[row].tolist() == cast[src][1][token].tolist()
        assert there.recv_topk_idx is None
