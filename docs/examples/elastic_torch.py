"""A layer of experts with torch and DeepEP's ElasticBuffer: forward, FP8, expanded, overlap, backward, CUDA graph.

python docs/examples/elastic_torch.py                            two ranks on the emulator, in this process
torchrun --nproc-per-node 2 docs/examples/elastic_torch.py       a process for each rank; with GPUs a GPU each
"""

import os

import torch
import torch.distributed

import nbep
import nbep.deep_ep as deep_ep
from nbep.deep_ep.utils import per_token_cast_back, per_token_cast_to_fp8

MAX_TOKENS, HIDDEN, NUM_TOPK, NUM_EXPERTS = 4, 128, 2, 4  # MAX_TOKENS: of a rank in a call


def own_experts(rows, idx, weights, matrices):
    """For each row: this rank's experts that it chose, times their weights, added up. idx counts them from 0."""
    y = torch.zeros_like(rows, dtype=torch.float32)
    for expert, matrix in enumerate(matrices):
        weight = (weights * (idx == expert)).sum(1, keepdim=True)  # 0 if the row did not choose it
        y += weight * (rows.float() @ matrix)
    return y.bfloat16()


def forward(buffer, x, topk_idx, weights, matrices):
    recv_x, idx, recv_weights, handle, _ = buffer.dispatch(x, topk_idx, weights, num_experts=NUM_EXPERTS)
    y = own_experts(recv_x, idx, recv_weights, matrices)
    return buffer.combine(y, handle)[0], handle


def forward_fp8(buffer, x, topk_idx, weights, matrices):
    x_fp8 = per_token_cast_to_fp8(x)  # values, and a scale for each 128 of them
    recv_fp8, idx, recv_weights, handle, _ = buffer.dispatch(x_fp8, topk_idx, weights, num_experts=NUM_EXPERTS)
    y = own_experts(per_token_cast_back(*recv_fp8), idx, recv_weights, matrices)
    return buffer.combine(y, handle)[0]


def forward_expanded(buffer, x, topk_idx, weights, matrices):
    rows, _, row_weights, handle, _ = buffer.dispatch(
        x, topk_idx, weights, num_experts=NUM_EXPERTS, do_expand=True, expert_alignment=4
    )
    y = torch.zeros_like(rows)
    ends, counts = handle.psum_num_recv_tokens_per_expert, handle.num_unaligned_recv_tokens_per_expert
    for matrix, end, count in zip(matrices, ends.tolist(), counts.tolist(), strict=True):
        block = slice(end - count, end)  # the rows of one expert
        y[block] = (row_weights[block, None] * (rows[block].float() @ matrix)).bfloat16()
    return buffer.combine(y, handle)[0]


def backward(buffer, grad_combined_x, handle, backward_of_experts):
    grad_y, *_ = buffer.dispatch(grad_combined_x, handle=handle)  # the backward of combine
    grad_recv_x, grad_recv_weights = backward_of_experts(grad_y)
    grad_x, grad_weights, _ = buffer.combine(grad_recv_x, handle, topk_weights=grad_recv_weights)  # of dispatch
    return grad_x, grad_weights


def forward_overlapped(buffer, x, topk_idx, weights, matrices, shared_expert):
    recv_x, idx, recv_weights, handle, event = buffer.dispatch(
        x, topk_idx, weights, num_experts=NUM_EXPERTS, async_with_compute_stream=True
    )
    shared = shared_expert(x)  # your own kernels, while tokens travel
    event.current_stream_wait()
    y = own_experts(recv_x, idx, recv_weights, matrices)
    return buffer.combine(y, handle)[0] + shared


def step(buffer, x, topk_idx, weights, matrices):
    recv_x, idx, recv_weights, handle, _ = buffer.dispatch(
        x, topk_idx, weights, num_experts=NUM_EXPERTS, do_cpu_sync=False
    )
    y = own_experts(recv_x, idx, recv_weights, matrices)
    return buffer.combine(y, handle)[0]


def capture(*arguments):
    """The graph of a step. Copy new tokens into the same x, topk_idx and weights, then call graph.replay()."""
    step(*arguments)  # compiles the kernels
    torch.cuda.synchronize()
    torch.distributed.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        combined_x = step(*arguments)
    return graph, combined_x


def main(group, device="cpu"):
    rank, num_ranks = group.rank(), group.size()
    share = NUM_EXPERTS // num_ranks
    experts = range(rank * share, (rank + 1) * share)
    matrices = [2.0**expert * torch.eye(HIDDEN, device=device) for expert in experts]
    tokens = torch.arange(MAX_TOKENS, device=device)
    x = (1 + tokens)[:, None].expand(MAX_TOKENS, HIDDEN).bfloat16().contiguous()
    topk_idx = torch.stack([tokens % NUM_EXPERTS, (tokens + rank + 1) % NUM_EXPERTS], dim=1)
    weights = torch.full((MAX_TOKENS, NUM_TOPK), 0.5, device=device)
    expected = x * (0.5 * 2.0**topk_idx).sum(1, keepdim=True).bfloat16()

    buffer = deep_ep.ElasticBuffer(group, num_max_tokens_per_rank=MAX_TOKENS, hidden=HIDDEN, num_topk=NUM_TOPK)
    arguments = buffer, x, topk_idx, weights, matrices
    combined_x, handle = forward(*arguments)
    assert torch.equal(combined_x, expected)
    assert torch.equal(forward_fp8(*arguments), expected)
    assert torch.equal(forward_expanded(*arguments), expected)
    assert torch.equal(forward_overlapped(*arguments, lambda x: 4 * x), expected + 4 * x)
    assert torch.equal(step(*arguments), expected)

    def backward_of_experts(grad_y):
        return grad_y, torch.zeros(len(grad_y), NUM_TOPK, device=device)

    grad_x, _ = backward(buffer, x, handle, backward_of_experts)
    copies = sum((topk_idx // share == other).any(1, keepdim=True) for other in range(num_ranks))
    assert torch.equal(grad_x, x * copies)
    if torch.device(device).type == "cuda":
        graph, replayed_x = capture(*arguments)
        x *= 2
        graph.replay()
        assert torch.equal(replayed_x, 2 * expected)
    buffer.destroy()
    return combined_x[:, 0].tolist()


if __name__ == "__main__":
    if "LOCAL_RANK" not in os.environ:
        print(*nbep.spawn(main, 2, "emulator"), sep="\n")
    else:
        on_gpu = torch.cuda.is_available() and os.environ.get("NBEP_TARGET") != "emulator"
        if on_gpu:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.distributed.init_process_group("nccl" if on_gpu else "gloo")
        print(main(torch.distributed.group.WORLD, "cuda" if on_gpu else "cpu"))
