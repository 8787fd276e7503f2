"""The reference's MoE layer: dispatching to experts gives what one rank with all experts gives."""

import numpy as np
from cases import make_case

from nbep import reference


def test_gate_takes_the_best_experts_and_its_weights_sum_to_one():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((6, 8), np.float32).astype(reference.BF16)
    gate_weight = rng.standard_normal((8, 5), np.float32)
    topk_idx, topk_weights = reference.gate(x, gate_weight, 3)
    scores = x.astype(np.float32) @ gate_weight
    for token in range(6):
        assert topk_idx[token].tolist() == sorted(range(5), key=lambda expert: -scores[token, expert])[:3]
    assert np.allclose(topk_weights.sum(axis=1), 1)
    assert np.all(np.diff(topk_weights, axis=1) <= 0)


def test_dispatch_experts_combine_is_the_layer():
    case = make_case(4, num_ranks=4, num_tokens=[0, 1, 5, 8], num_topk=3, hidden=16)
    rng = np.random.default_rng(4)
    # Small integers, so that sums in any order are the same.
    x = [rng.integers(-2, 3, array.shape).astype(reference.BF16) for array in case.x]
    weights = [rng.integers(1, 3, array.shape).astype(np.float32) for array in case.topk_weights]
    expert_weight = rng.integers(-1, 2, (case.num_experts, 16, 16)).astype(np.float32)
    dispatched = reference.dispatch(x, case.layouts, 2, topk_idx=case.topk_idx, topk_weights=weights)
    computed = [
        reference.expert_layer(d.recv_x, d.recv_topk_idx, d.recv_topk_weights, expert_weight[2 * rank : 2 * rank + 2])
        for rank, d in enumerate(dispatched)
    ]
    for rank, (combined, _) in enumerate(reference.combine(computed, dispatched)):
        layer = reference.moe_layer(x[rank], case.topk_idx[rank], weights[rank], expert_weight, case.num_ranks)
        assert combined.tobytes() == layer.tobytes()
