"""Programs in low-latency mode, and what their traces say: for docs/low_latency.md."""

import ml_dtypes
import numpy as np

import nbep

HIDDEN = 128
NUM_RANKS, NUM_TOKENS, NUM_EXPERTS = 4, 6, 8


def three_dispatches(comm):
    """Each rank sends a token to the expert of the other one, three times."""
    x = np.full((1, HIDDEN), 10 + comm.rank, ml_dtypes.bfloat16)
    topk_idx = np.array([[1 - comm.rank]])
    num_bytes = nbep.Buffer.get_low_latency_rdma_size_hint(1, HIDDEN, comm.size, comm.size)
    buffer = nbep.Buffer(comm, num_rdma_bytes=num_bytes, low_latency_mode=True)
    for _ in range(3):
        buffer.low_latency_dispatch(x, topk_idx, 1, comm.size, use_fp8=False)
    buffer.destroy()


def six_tokens(comm):
    """Token t of rank r is a row of 10 r + t. Returns all that the calls have returned."""
    tokens = np.arange(NUM_TOKENS)
    x = np.repeat((10 * comm.rank + tokens)[:, None], HIDDEN, axis=1).astype(ml_dtypes.bfloat16)
    topk_idx = np.stack([tokens + comm.rank + 1, tokens + comm.rank + 5], axis=1) % NUM_EXPERTS
    topk_weights = np.full(topk_idx.shape, 0.5, np.float32)

    num_bytes = nbep.Buffer.get_low_latency_rdma_size_hint(NUM_TOKENS, HIDDEN, NUM_RANKS, NUM_EXPERTS)
    buffer = nbep.Buffer(comm, num_rdma_bytes=num_bytes, low_latency_mode=True)
    recv_x, recv_count, handle, _, _ = buffer.low_latency_dispatch(x, topk_idx, NUM_TOKENS, NUM_EXPERTS)
    values, scales = recv_x
    y = (values.astype(np.float32) * np.repeat(scales, HIDDEN // scales.shape[2], axis=2)).astype(x.dtype)
    combined_x, _, _ = buffer.low_latency_combine(y, topk_idx, topk_weights, handle)
    buffer.destroy()
    return locals()


def show(trace, kernel, *cells, of=None):
    """Print what was done to some cells, in order. cells: how a name begins, and in whose memory; of: this rank only"""
    for event in trace.events(["atomic", "fill"], kernel=f"low_latency_{kernel}", rank=of):
        if any(event.cell.text.startswith(name) and event.cell.owner == owner for name, owner in cells):
            value = event.value if event.cell.words is None else event.cell.words(event.value)
            what = f"fills {event.cell.text}" if event.what == "fill" else f"makes {event.cell.text} {value}"
            print(f"{event.role} of rank {event.rank}: {what}")
