"""A layer sends tokens to experts, one row for each choice, and brings the results and then the gradients back.

nbep check examples/museum/deepspeed_8213/program.py
"""

import ml_dtypes
import numpy as np

import nbep

NUM_EXPERTS, NUM_TOKENS, HIDDEN = 4, 3, 64
CHOICES = np.array([[0, 1], [2, 3], [0, 2]])


def factors(expert):
    """What an expert multiplies a row by."""
    return 2.0 ** np.asarray(expert)


def of_shape(rows, shape):
    """As many rows as autograd wants: cut, or followed by zeros."""
    result = np.zeros(shape, rows.dtype)
    result[: len(rows)] = rows[: shape[0]]
    return result


def main(comm):
    buffer = nbep.ElasticBuffer(comm, num_max_tokens_per_rank=4, hidden=HIDDEN, num_topk=2)
    x = np.ones((NUM_TOKENS, HIDDEN), ml_dtypes.bfloat16)
    rows, _, _, handle, _ = buffer.dispatch(
        x,
        topk_idx=CHOICES,
        topk_weights=np.ones((NUM_TOKENS, 2), np.float32),
        num_experts=NUM_EXPERTS,
        do_expand=True,
    )
    experts = np.repeat([2 * comm.rank, 2 * comm.rank + 1], handle.num_recv_tokens_per_expert_list)
    scale = factors(experts)[:, None].astype(ml_dtypes.bfloat16)
    combined = buffer.combine(rows * scale, handle)[0]

    grad_combined = np.ones_like(combined)  # backward
    grad_made = buffer.dispatch(grad_combined, handle=handle)[0]
    grad_x = buffer.combine(of_shape(grad_made, rows.shape) * scale, handle)[0]
    buffer.destroy()
    return combined[:, 0].tolist(), grad_x[:, 0].tolist()


def check(results):
    wanted = [float(sum(factors(expert) for expert in choices)) for choices in CHOICES]
    for combined, grad_x in results:
        assert combined == wanted, f"combined is {combined}, and must be {wanted}"
        assert grad_x == wanted, f"the gradient of x is {grad_x}, and must be {wanted}"
