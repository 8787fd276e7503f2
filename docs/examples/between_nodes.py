"""Two programs between two nodes of two ranks each, and what their traces say: for docs/internode.md.

`one_token` sends a token from rank 0 to rank 3. `six_tokens` sends six tokens of each rank to three experts each.
"""

import re

import ml_dtypes
import numpy as np

import nbep

NUM_RANKS, NUM_NVL_RANKS = 4, 2
NUM_TOKENS, NUM_EXPERTS, HIDDEN = 6, 8, 64
# NVL rings have 4 slots and chunks of 2 tokens; RDMA rings 2 slots and chunks of 1. 6 warps a block.
ONE_CHANNEL = nbep.Config(2, 2, 4, 1, 2, num_threads=192)
TWO_CHANNELS = nbep.Config(4, 2, 4, 1, 2, num_threads=192)


def dispatched(buffer, x, topk_idx, topk_weights, num_experts, config):
    per_rank, per_node, per_expert, is_token_in_rank, _ = buffer.get_dispatch_layout(topk_idx, num_experts)
    return buffer.dispatch(
        x,
        topk_idx=topk_idx,
        topk_weights=topk_weights,
        num_tokens_per_rank=per_rank,
        num_tokens_per_rdma_rank=per_node,
        is_token_in_rank=is_token_in_rank,
        num_tokens_per_expert=per_expert,
        config=config,
    )


def new_buffer(comm):
    return nbep.Buffer(comm, num_nvl_bytes=1 << 18, num_rdma_bytes=1 << 17, num_nvl_peers=NUM_NVL_RANKS)


def one_token(comm):
    """Rank 0 has a token for rank 3, which is on the other node and has another local rank there."""
    num_tokens = 1 if comm.rank == 0 else 0
    x = np.full((num_tokens, HIDDEN), 7, ml_dtypes.bfloat16)
    topk_idx = np.full((num_tokens, 1), 3)  # four ranks have an expert each
    buffer = new_buffer(comm)
    recv_x, _, _, _, handle, _ = dispatched(
        buffer, x, topk_idx, np.ones((num_tokens, 1), np.float32), NUM_RANKS, ONE_CHANNEL
    )
    buffer.combine(recv_x, handle, config=ONE_CHANNEL)
    buffer.destroy()


def six_tokens(comm):
    """Token t of rank r is a row of 10 r + t."""
    tokens = np.arange(NUM_TOKENS)
    x = np.repeat((10 * comm.rank + tokens)[:, None], HIDDEN, axis=1).astype(ml_dtypes.bfloat16)
    topk_idx = (tokens[:, None] + comm.rank + np.array([1, 3, 5])) % NUM_EXPERTS
    topk_weights = np.tile(np.array([0.25, 0.25, 0.5], np.float32), (NUM_TOKENS, 1))
    buffer = new_buffer(comm)
    recv_x, recv_topk_idx, recv_topk_weights, _, handle, _ = dispatched(
        buffer, x, topk_idx, topk_weights, NUM_EXPERTS, TWO_CHANNELS
    )
    send_rdma_head, send_nvl_head = handle.send_rdma_head.copy(), handle.send_nvl_head.copy()
    y = recv_x * recv_topk_weights.sum(axis=1, keepdims=True).astype(recv_x.dtype)  # the experts
    combined_x, _, _ = buffer.combine(y, handle, config=TWO_CHANNELS)
    buffer.destroy()
    return locals()


def steps(trace, token):
    """Print each slot and row that is filled with a token of rank 0."""
    for line in trace.journey(rank=0, token=token).splitlines()[1:]:
        columns = re.split(r"\s{2,}", line.strip().replace("internode_", ""), maxsplit=8)
        _, rank, kernel, _, _, _, role, does, memory = columns
        print(f"{kernel:9} rank {rank}, {role:14} {does}, in the memory of rank {memory}")


def show(trace, kernel, who, owner, ring, roles=()):
    """Print what a rank did to the cells of one ring in the memory of `owner`, in order."""
    for event in trace.events(["store", "atomic", "fill"], kernel=f"internode_{kernel}", rank=who):
        is_meant = event.cell.owner == owner and ring in event.cell.text and event.cell.name != "board"
        if is_meant and (not roles or event.role in roles):
            token = "" if event.token is None else f" with token {event.token[1]} of rank {event.token[0]}"
            does = {"fill": "fills", "store": "stores", "atomic": "adds to"}[event.what]
            value = token if event.what == "fill" else f": now {event.value}"
            print(f"{event.role} of rank {who}: {does} {event.cell.text.removesuffix(' + 0')}{value}")
