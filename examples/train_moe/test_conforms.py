"""Does expert_parallel.py conform, forward and backward? pytest examples/train_moe/test_conforms.py"""

from pathlib import Path

import nbep
from nbep.conformance import conforms

nbep.Buffer.set_num_sms(2)  # few blocks, fast runs


def expert_parallel(rank):
    module = rank.load(Path(__file__).parent, {"expert_parallel"})["expert_parallel"]
    layer = rank.once("layer", lambda: module.ExpertParallel(rank.group, num_experts=4, hidden=128))
    case, x, weights = rank.case, rank.leaf(rank.case.x), rank.leaf(rank.case.topk_weights)
    rows, idx, recv_weights, handle = layer.dispatch(x, case.topk_idx, weights)
    y = layer.combine(case.experts(rows, case.of_local(idx), recv_weights), handle)

    def backward():
        rank.same("y", y, case.combined)
        y.backward(case.grad)
        rank.same("gradient of x", x.grad, case.grad_x)
        rank.same("gradient of weights", weights.grad, case.grad_weights)

    return backward


def test_expert_parallel_conforms():
    conforms(expert_parallel, ranks=2, seeds=4)
