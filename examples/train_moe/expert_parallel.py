"""Dispatch and combine with gradients, for experts that are spread over the ranks of a process group.

 forward    x -------> dispatch --> recv_x --> this rank's experts --> y -------> combine ---------> out
 backward   grad_x <-- combine <-- grad_recv_x <------------------- grad_y <-- dispatch again <-- grad_out

Dispatch copies a token to ranks, so the token's gradient is the sum over its copies: a combine. Combine adds up rows,
so each row's gradient is a copy of the sum's: a dispatch along the same routes, which the handle knows.
"""

import os

import torch
import torch.distributed

import nbep


class Dispatch(torch.autograd.Function):
    """Tokens, their choices and weights to the ranks that have the experts. See nbep.Buffer.dispatch."""

    @staticmethod
    def forward(ctx, x, topk_idx, topk_weights, buffer, num_experts):
        layout = buffer.get_dispatch_layout(topk_idx, num_experts)
        num_tokens_per_rank, num_tokens_per_rdma_rank, num_tokens_per_expert, is_token_in_rank, _ = layout
        recv_x, recv_topk_idx, recv_topk_weights, _, handle, _ = buffer.dispatch(
            x,
            num_tokens_per_rank=num_tokens_per_rank,
            num_tokens_per_rdma_rank=num_tokens_per_rdma_rank,
            is_token_in_rank=is_token_in_rank,
            num_tokens_per_expert=num_tokens_per_expert,
            topk_idx=topk_idx,
            topk_weights=topk_weights,
        )
        ctx.buffer, ctx.handle = buffer, handle
        ctx.save_for_backward(recv_topk_idx)
        ctx.mark_non_differentiable(recv_topk_idx)
        return recv_x, recv_topk_idx, recv_topk_weights, handle

    @staticmethod
    def backward(ctx, grad_recv_x, _grad_recv_topk_idx, grad_recv_topk_weights, _grad_handle):
        # The weight of another rank's expert arrives as 0 with index -1. Its gradient must be 0, too: the rank that has
        # the expert sends the true one.
        (recv_topk_idx,) = ctx.saved_tensors
        grad_recv_topk_weights = grad_recv_topk_weights.masked_fill(recv_topk_idx < 0, 0)
        grad_x, grad_topk_weights, _ = ctx.buffer.combine(
            grad_recv_x.contiguous(), ctx.handle, topk_weights=grad_recv_topk_weights
        )
        return grad_x, None, grad_topk_weights, None, None


class Combine(torch.autograd.Function):
    """Rows back to their tokens' ranks, where they are added up. See nbep.Buffer.combine."""

    @staticmethod
    def forward(ctx, x, handle, buffer):
        ctx.buffer, ctx.handle = buffer, handle
        combined_x, _, _ = buffer.combine(x, handle)
        return combined_x

    @staticmethod
    def backward(ctx, grad_combined_x):
        grad_x, *_ = ctx.buffer.dispatch(grad_combined_x.contiguous(), handle=ctx.handle)
        return grad_x, None, None


class ExpertParallel:
    """The ranks of a group, each with its share of the experts."""

    def __init__(self, group, num_experts, hidden):
        if group.size() < 2 or num_experts % group.size() != 0:
            raise ValueError(f"num_experts: got {num_experts} for {group.size()} ranks; must be a multiple")
        self.group, self.num_experts = group, num_experts
        share = num_experts // group.size()
        self.own_experts = slice(group.rank() * share, (group.rank() + 1) * share)
        nodes = {"num_nvl_peers": int(os.environ.get("LOCAL_WORLD_SIZE", group.size()))}  # a host is a node
        configs = nbep.Buffer.get_dispatch_config(group.size()), nbep.Buffer.get_combine_config(group.size())
        sizes = 2 * hidden, group.size()
        num_nvl_bytes = max(config.get_nvl_buffer_size_hint(*sizes, **nodes) for config in configs)
        num_rdma_bytes = max(config.get_rdma_buffer_size_hint(*sizes, **nodes) for config in configs)
        self.buffer = nbep.Buffer(group, num_nvl_bytes, num_rdma_bytes, **nodes)

    def dispatch(self, x, topk_idx, topk_weights):
        """recv_x, recv_topk_idx, recv_topk_weights, and the handle for combine."""
        return Dispatch.apply(x, topk_idx, topk_weights, self.buffer, self.num_experts)

    def combine(self, x, handle):
        return Combine.apply(x, handle, self.buffer)

    def sum(self, values):
        """The sum over ranks, in place and without a gradient."""
        torch.distributed.all_reduce(values, group=self.group)
        return values
