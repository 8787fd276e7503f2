"""Ranks serve their own requests, step by step, with a layer of experts.

nbep check examples/museum/vllm_43547/program.py
"""

import ml_dtypes
import numpy as np

import nbep

NUM_RANKS = 4
NUM_EXPERTS, HIDDEN = 8, 128
CONFIG = nbep.Config(2, 6, 256)
NUM_TOKENS = [[2, 2, 2, 2], [3, 1, 0, 1], [2, 2, 1, 2]]  # of each step, of each rank


def array(comm, values):
    """As the target takes it."""
    if comm.runtime.target != "cuda":
        return values
    import torch

    if values.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(values.view(np.int16)).cuda().view(torch.bfloat16)
    return torch.from_numpy(values).cuda()


def forward(comm, buffer, num_tokens):
    """One layer: tokens go to their experts and come back."""
    x = array(comm, np.ones((num_tokens, HIDDEN), ml_dtypes.bfloat16))
    topk_idx = array(comm, np.arange(2 * num_tokens, dtype=np.int64).reshape(-1, 2) % NUM_EXPERTS)
    topk_weights = array(comm, np.ones((num_tokens, 2), np.float32))
    per_rank, _, per_expert, is_in_rank, _ = buffer.get_dispatch_layout(topk_idx, NUM_EXPERTS)
    recv_x, _, _, _, handle, _ = buffer.dispatch(
        x,
        topk_idx=topk_idx,
        topk_weights=topk_weights,
        num_tokens_per_rank=per_rank,
        is_token_in_rank=is_in_rank,
        num_tokens_per_expert=per_expert,
        config=CONFIG,
    )
    buffer.combine(recv_x, handle, config=CONFIG)


def main(comm):
    buffer = nbep.Buffer(comm, CONFIG.get_nvl_buffer_size_hint(2 * HIDDEN, comm.size))
    for num_tokens in NUM_TOKENS:
        if num_tokens[comm.rank] == 0:
            continue
        forward(comm, buffer, num_tokens[comm.rank])
    buffer.destroy()
