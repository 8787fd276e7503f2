"""The reference between nodes: a tiny case by hand, and what must hold of every case."""

import numpy as np
import pytest
from cases import NODE_ROUTINGS, ROUTINGS, Case, make_case
from hypothesis import given, settings
from hypothesis import strategies as st

from nbep import reference

BF16 = reference.BF16
MORE = -reference.NO_MORE_TOKENS - 1


def dispatch(case: Case, num_channels: int, num_nvl_peers: int, **options) -> list[reference.InternodeDispatched]:
    topk = {"topk_idx": case.topk_idx, "topk_weights": case.topk_weights}
    return reference.internode_dispatch(case.x, case.layouts, num_channels, num_nvl_peers, **topk, **options)


def hand_case() -> Case:
    """Two nodes of two ranks, an expert on each. Rank 0 has tokens 1, 2, 3, 4 and rank 2 has token 10."""
    topk_idx = [
        np.array([[0, 2], [3, 2], [-1, -1], [3, 1]]),
        np.zeros((0, 2), np.int64),
        np.array([[0, 1]]),
        np.zeros((0, 2), np.int64),
    ]
    x = [np.array([[1], [2], [3], [4]], BF16), *(np.zeros((n, 1), BF16) + np.array(10, BF16) for n in (0, 1, 0))]
    weights = [np.ones(idx.shape, np.float32) for idx in topk_idx]
    layouts = [reference.get_dispatch_layout(idx, 4, 4) for idx in topk_idx]
    return Case(0, 4, 4, x, topk_idx, weights, layouts)


def test_dispatch_of_five_tokens_by_hand():
    received = [there.recv_x.ravel().tolist() for there in dispatch(hand_case(), 2, 2)]
    assert received == [[1, 10], [4, 10], [1, 2], [2, 4]]


def test_handle_of_five_tokens_by_hand():
    rank_0, rank_1, rank_2, rank_3 = dispatch(hand_case(), 2, 2)
    # Rank 0 sends tokens 0 and 1 on the first channel and 2 and 3 on the second: 0 and 3 to node 0, 0, 1 and 3 to
    # node 1. Each goes to the rank with local index 0 there.
    assert rank_0.rdma_channel_prefix_matrix.tolist() == [[1, 2], [2, 3]]
    assert rank_0.gbl_channel_prefix_matrix.tolist() == [[1, 1], [0, 1], [2, 2], [1, 2]]
    assert rank_0.send_rdma_head.tolist() == [[0, 0], [-1, 1], [-1, -1], [0, 0]]
    assert rank_2.rdma_channel_prefix_matrix.tolist() == [[1, 1], [0, 0]]
    assert rank_2.send_rdma_head.tolist() == [[0, -1]]
    # Rank 0 forwards its own tokens 0 and 3, and token 0 of rank 2.
    assert rank_0.recv_rdma_channel_prefix_matrix.tolist() == [[1, 2], [1, 1]]
    assert rank_0.recv_rdma_rank_prefix_sum.tolist() == [2, 3]
    assert rank_0.send_nvl_head.tolist() == [[0, -1], [-1, 0], [0, 0]]
    # Rank 2 forwards tokens 0, 1 and 3 of rank 0.
    assert rank_2.recv_rdma_channel_prefix_matrix.tolist() == [[2, 3], [0, 0]]
    assert rank_2.recv_rdma_rank_prefix_sum.tolist() == [3, 3]
    assert rank_2.send_nvl_head.tolist() == [[0, -1], [1, 0], [-1, 0]]
    for forwards_nothing in (rank_1, rank_3):
        assert forwards_nothing.send_nvl_head.shape == (0, 2)
        assert forwards_nothing.recv_rdma_rank_prefix_sum.tolist() == [0, 0]
    assert rank_0.recv_gbl_rank_prefix_sum.tolist() == [1, 1, 2, 2]
    assert rank_0.recv_gbl_channel_prefix_matrix.tolist() == [[0, 1], [1, 1], [1, 2], [2, 2]]
    assert rank_3.recv_gbl_channel_prefix_matrix.tolist() == [[0, 1], [2, 2], [2, 2], [2, 2]]


def test_heads_of_absent_tokens_are_encoded_for_each_channel_of_each_source_node():
    head = np.array([[0, -1], [-1, 0], [-1, -1], [0, 1], [-1, 0]], np.int32)
    one_channel = reference.encode_send_nvl_head(head, np.array([[2], [3]], np.int32), np.array([2, 5], np.int32))
    assert one_channel.tolist() == [[0, -1], [MORE, 0], [-1, -2], [0, 1], [MORE, 0]]
    two_channels = np.array([[0, 2], [2, 3]], np.int32)
    encoded = reference.encode_send_nvl_head(head, two_channels, np.array([2, 5], np.int32))
    assert encoded.tolist() == [[0, -1], [MORE, 0], [-1, -2], [0, 1], [MORE, 0]]
    split = reference.encode_send_nvl_head(head, np.array([[1, 2], [1, 3]], np.int32), np.array([2, 5], np.int32))
    assert split.tolist() == [[0, MORE], [MORE, 0], [MORE, MORE], [0, 1], [MORE, 0]]


def results_by_hand() -> list[np.ndarray]:
    """Of token 0 of rank 2, which goes to both ranks of node 0, and of tokens of rank 0."""
    return [np.array(values, BF16)[:, None] for values in ([1, 256], [2, 1], [256, 3], [1, 5])]


def test_sums_of_nodes_are_rounded_before_they_are_added():
    dispatched = dispatch(hand_case(), 1, 2)
    bias = [None, None, np.ones((1, 1), BF16), None]
    combined = reference.internode_combine(results_by_hand(), dispatched, 2, bias=bias)
    # Rank 0: 1 + 256; 3 + 1 of one node; nothing; 2 + 5. 257 is rounded to 256.
    assert combined[0][0].ravel().tolist() == [256, 4, 0, 7]
    # Rank 2: 256 + 1 is rounded to 256 on node 0. The bias would make it 258.
    assert combined[2][0].ravel().tolist() == [256]
    assert reference.combine(results_by_hand(), dispatched, bias=bias)[2][0].ravel().tolist() == [258]
    assert all(weights is None for _, weights in combined)


def test_weights_are_added_on_each_node_first_and_are_not_rounded():
    dispatched = dispatch(hand_case(), 1, 2)
    tiny = np.float32(2**-24)
    weights = [np.zeros((2, 1), np.float32) for _ in range(4)]
    weights[0][:, 0] = 1, tiny  # of token 0 of rank 0, and of the token of rank 2
    weights[2][0] = 3
    weights[1][1] = tiny
    combined = reference.internode_combine(results_by_hand(), dispatched, 2, topk_weights=weights)
    assert combined[0][1].ravel().tolist() == [4, 0, 0, 0]
    assert combined[2][1].ravel().tolist() == [2 * tiny]


def test_biases_are_added_before_nodes():
    dispatched = dispatch(hand_case(), 1, 2)
    bias = [(np.full((4, 1), 256, BF16), np.full((4, 1), 1, BF16)), None, None, None]
    results = [np.full(there.recv_x.shape, 1, BF16) for there in dispatched]
    (combined, _), *_ = reference.internode_combine(results, dispatched, 2, bias=bias)
    # 256 + 1 + 1 + 1 for token 0, which has a rank on each node; 256 + 1 + 2; 257; 256 + 1 + 1 + 1
    assert combined.ravel().tolist() == [260, 260, 256, 260]


@st.composite
def cases(draw):
    num_nodes, num_nvl_peers = draw(st.sampled_from([(2, 2), (2, 4), (4, 2), (3, 2), (2, 3), (3, 1)]))
    num_ranks = num_nodes * num_nvl_peers
    case = make_case(
        draw(st.integers(0, 1 << 20)),
        num_ranks=num_ranks,
        num_tokens=draw(st.lists(st.integers(0, 9), min_size=num_ranks, max_size=num_ranks)),
        hidden=8,
        num_topk=draw(st.integers(1, 4)),
        routing=draw(st.sampled_from((*ROUTINGS, *NODE_ROUTINGS))),
        num_nodes=num_nodes,
    )
    return case, num_nvl_peers


@settings(max_examples=50)
@given(shape=cases(), num_channels=st.integers(1, 4))
def test_every_node_gets_a_token_once_and_its_forwarder_gives_it_to_each_rank_once(shape, num_channels):
    case, num_nvl_peers = shape
    dispatched = dispatch(case, num_channels, num_nvl_peers)
    for rank, forwarder in enumerate(dispatched):
        node, local = divmod(rank, num_nvl_peers)
        forwarded = []
        for src in range(local, case.num_ranks, num_nvl_peers):
            dsts = [{int(e) * case.num_ranks // case.num_experts for e in row if e >= 0} for row in case.topk_idx[src]]
            on_node = [{dst for dst in of_token if dst // num_nvl_peers == node} for of_token in dsts]
            forwarded += [of_token for of_token in on_node if of_token]
            assert dispatched[src].rdma_channel_prefix_matrix[node, -1] == sum(map(bool, on_node))
            counts = reference.count_tokens_per_rdma_rank(case.layouts[src], num_nvl_peers)
            assert counts[node] == sum(map(bool, on_node))
        assert len(forwarder.send_nvl_head) == forwarder.recv_rdma_rank_prefix_sum[-1] == len(forwarded)
        for row, dsts in zip(forwarder.send_nvl_head, forwarded, strict=True):
            assert {node * num_nvl_peers + peer for peer in np.flatnonzero(row >= 0)} == dsts


@settings(max_examples=50)
@given(shape=cases(), num_channels=st.integers(1, 4))
def test_heads_count_a_channels_tokens_at_both_levels(shape, num_channels):
    case, num_nvl_peers = shape
    dispatched = dispatch(case, num_channels, num_nvl_peers)
    for rank, there in enumerate(dispatched):
        begin = 0
        for src_node, of_node in enumerate(there.recv_rdma_channel_prefix_matrix):
            src = src_node * num_nvl_peers + rank % num_nvl_peers
            base = begin
            for channel in range(num_channels):
                end = base + of_node[channel]
                first, last = reference.channel_task_range(len(case.x[src]), num_channels, channel)
                sent = dispatched[src].send_rdma_head[first:last, rank // num_nvl_peers]
                assert [head for head in sent if head >= 0] == list(range(end - begin))
                for peer in range(num_nvl_peers):
                    heads = [head for head in there.send_nvl_head[begin:end, peer] if head >= 0]
                    dst = dispatched[rank - rank % num_nvl_peers + peer]
                    assert len(heads) == len(rows_of(dst, src, channel))
                    assert heads == list(range(len(heads)))
                begin = end
            assert begin == there.recv_rdma_rank_prefix_sum[src_node]


def rows_of(there: reference.InternodeDispatched, src: int, channel: int) -> range:
    """Where the rows of a source rank's channel lie, as the handle says it."""
    starts = there.recv_gbl_channel_prefix_matrix[src]
    ends = [*starts[1:], there.recv_gbl_rank_prefix_sum[src]]
    return range(starts[channel], ends[channel])


@settings(max_examples=50)
@given(shape=cases(), num_channels=st.integers(1, 4))
def test_every_row_lies_where_the_handle_says(shape, num_channels):
    case, num_nvl_peers = shape
    for rank, there in enumerate(dispatch(case, num_channels, num_nvl_peers)):
        next_row = 0
        for src in range(case.num_ranks):
            for channel in range(num_channels):
                first, last = reference.channel_task_range(len(case.x[src]), num_channels, channel)
                tokens = [t for t in range(first, last) if case.layouts[src].is_token_in_rank[t, rank]]
                rows = rows_of(there, src, channel)
                assert len(rows) == len(tokens)
                assert rows.start == next_row
                assert there.recv_x[rows.start : rows.stop].tobytes() == case.x[src][tokens].tobytes()
                next_row = rows.stop
        assert next_row == len(there.recv_x)


@settings(max_examples=50)
@given(shape=cases(), seed=st.integers(0, 1 << 20))
def test_sums_in_two_steps_differ_from_sums_in_one_by_the_rounding_of_nodes(shape, seed):
    case, num_nvl_peers = shape
    rng = np.random.default_rng(seed)
    dispatched = dispatch(case, 2, num_nvl_peers)
    results = [rng.standard_normal(there.recv_x.shape, np.float32).astype(BF16) for there in dispatched]
    weights = [rng.random(there.recv_topk_weights.shape, np.float32) for there in dispatched]
    bias = [rng.standard_normal(x.shape, np.float32).astype(BF16) for x in case.x]
    sizes = [np.abs(result.astype(np.float32)).astype(BF16) for result in results]
    in_two = reference.internode_combine(results, dispatched, num_nvl_peers, topk_weights=weights, bias=bias)
    in_one = reference.combine(results, dispatched, topk_weights=weights, bias=bias)
    largest = reference.combine(sizes, dispatched, bias=[np.abs(b.astype(np.float32)).astype(BF16) for b in bias])
    for (got, got_weights), (want, want_weights), (size, _) in zip(in_two, in_one, largest, strict=True):
        error = np.abs(got.astype(np.float32) - want.astype(np.float32))
        assert (error <= 2**-7 * size.astype(np.float32)).all()  # three roundings, 2**-9 each
        np.testing.assert_allclose(got_weights, want_weights, rtol=1e-6)


@pytest.mark.parametrize("num_nvl_peers", [1, 4])
def test_one_rank_a_node_or_one_node_alone_is_the_sum_in_one_step(num_nvl_peers):
    case = make_case(3, num_ranks=4, num_tokens=(6, 0, 3, 9), num_topk=4)
    dispatched = dispatch(case, 2, num_nvl_peers)
    results = [there.recv_x for there in dispatched]
    weights = [there.recv_topk_weights for there in dispatched]
    in_two = reference.internode_combine(results, dispatched, num_nvl_peers, topk_weights=weights)
    for (got, got_weights), (want, want_weights) in zip(
        in_two, reference.combine(results, dispatched, topk_weights=weights), strict=True
    ):
        assert got.tobytes() == want.tobytes()
        assert got_weights.tobytes() == want_weights.tobytes()


@pytest.mark.parametrize("routing", NODE_ROUTINGS)
def test_routings_of_nodes_leave_out_what_they_say(routing):
    case = make_case(1, num_ranks=6, num_tokens=20, num_topk=5, routing=routing, num_nodes=3, unused=0)
    for layout in case.layouts:
        nodes = layout.is_token_in_rank.reshape(20, 3, 2).any(axis=2)
        if routing == "grouped":
            assert (nodes.sum(axis=1) == 2).all()
            assert nodes.any(axis=0).all()
        else:
            is_empty = [True, True, False] if routing == "one_node" else [True, False, False]
            assert (~nodes.any(axis=0)).tolist() == is_empty
