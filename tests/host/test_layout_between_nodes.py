"""Buffer.get_dispatch_layout where ranks are on several nodes: tokens are counted for each node, too."""

import numpy as np
import pytest
from arrays import to_numpy, to_target
from parts import both_parts
from target import spawn

import nbep
from nbep import reference


def layout_of(comm, topk_idx, num_experts, num_nvl_peers):
    buffer = nbep.Buffer(
        comm, num_rdma_bytes=128, low_latency_mode=True, transport="ibgda", num_nvl_peers=num_nvl_peers
    )
    *counts, _ = buffer.get_dispatch_layout(to_target(topk_idx[comm.rank]), num_experts)
    found = [None if array is None else to_numpy(array) for array in counts]
    buffer.destroy()
    return found


@pytest.mark.parametrize(("num_nodes", "num_nvl_peers"), both_parts([(2, 2)], thorough=[(4, 1), (3, 2), (2, 4)]))
def test_tokens_are_counted_once_for_each_node_that_they_go_to(num_nodes, num_nvl_peers):
    num_ranks = num_nodes * num_nvl_peers
    rng = np.random.default_rng(num_ranks)
    num_experts = 3 * num_ranks
    topk_idx = [rng.integers(-1, num_experts, (5 * rank, 4)) for rank in range(num_ranks)]
    for rank, found in enumerate(spawn(layout_of, num_ranks, (topk_idx, num_experts, num_nvl_peers))):
        per_rank, per_node, per_expert, is_token_in_rank = found
        want = reference.get_dispatch_layout(topk_idx[rank], num_experts, num_ranks)
        assert (per_rank == want.num_tokens_per_rank).all()
        assert (per_expert == want.num_tokens_per_expert).all()
        assert (is_token_in_rank == want.is_token_in_rank).all()
        nodes = [{int(e) // (3 * num_nvl_peers) for e in row if e >= 0} for row in topk_idx[rank]]
        assert per_node.tolist() == [sum(node in destinations for destinations in nodes) for node in range(num_nodes)]


def test_inside_a_node_there_is_no_count_for_nodes():
    topk_idx = [np.array([[0, 1]]), np.array([[-1, 3]])]

    def main(comm):
        buffer = nbep.Buffer(comm)
        found = buffer.get_dispatch_layout(to_target(topk_idx[comm.rank]), 4)[1]
        buffer.destroy()
        return found

    assert spawn(main, 2) == [None, None]
