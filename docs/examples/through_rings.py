"""Four ranks dispatch six tokens each through rings, and combine them: for docs/journey.md."""

import ml_dtypes
import numpy as np

import nbep
from nbep.lab.trace import Trace

NUM_RANKS, NUM_TOKENS, NUM_EXPERTS, HIDDEN = 4, 6, 8, 64
CONFIG = nbep.Config(4, 2, 4)  # 4 SMs are 2 channels; chunks of 2 tokens; rings of 4 slots


def six_tokens(comm):
    """Token t of rank r is a row of 10 r + t. Returns all that the calls have returned."""
    tokens = np.arange(NUM_TOKENS)
    x = np.repeat((10 * comm.rank + tokens)[:, None], HIDDEN, axis=1).astype(ml_dtypes.bfloat16)
    topk_idx = np.stack([tokens + comm.rank + 1, tokens + comm.rank + 5], axis=1) % NUM_EXPERTS
    topk_weights = np.full(topk_idx.shape, 0.5, np.float32)

    buffer = nbep.Buffer(comm, num_nvl_bytes=1 << 16)
    layout = buffer.get_dispatch_layout(topk_idx, NUM_EXPERTS)
    num_tokens_per_rank, _, num_tokens_per_expert, is_token_in_rank, _ = layout
    recv_x, recv_topk_idx, recv_topk_weights, per_expert, handle, _ = buffer.dispatch(
        x,
        topk_idx=topk_idx,
        topk_weights=topk_weights,
        num_tokens_per_rank=num_tokens_per_rank,
        is_token_in_rank=is_token_in_rank,
        num_tokens_per_expert=num_tokens_per_expert,
        config=CONFIG,
    )
    send_head = handle.send_head.copy()
    y = recv_x * recv_topk_weights.sum(axis=1, keepdims=True).astype(recv_x.dtype)  # the experts
    combined_x, _, _ = buffer.combine(y, handle, config=CONFIG)
    buffer.destroy()
    return locals()


trace = Trace()
rank_0, _, rank_2, _ = nbep.spawn(six_tokens, NUM_RANKS, target="emulator", seed=7, tracer=trace)


def show(kernel, rank, ring):
    """Print what a rank did to the cells of one ring, in order. ring: how its name goes on, in whose memory it lies"""
    name, owner = ring
    for event in trace.events(["store", "fill"], kernel=kernel, rank=rank):
        if name in event.cell.text and event.cell.owner == owner:
            value = "" if event.what == "fill" else f" = {event.value}"
            print(f"{event.role} of rank {rank}: {event.what} {event.cell.text.removesuffix(' + 0')}{value}")
