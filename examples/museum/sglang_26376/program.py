"""A dispatch runs on the comm stream; the compute stream prepares batches.

nbep check examples/museum/sglang_26376/program.py
"""

import ml_dtypes
import numpy as np

import nbep
from nbep.lang import (
    I32,
    Out,
    kernel,
    st_weak_s32,
    thread_idx,
)

NUM_TOKENS, HIDDEN = 4, 8
ONES, TWOS = 0x3F803F80, 0x40004000  # two numbers of bf16


@kernel(max_threads=32)
def prepare(x: Out, value: I32):
    """The tokens of a batch: all of one value."""
    for word in range(thread_idx(), NUM_TOKENS * HIDDEN // 2, 32):
        st_weak_s32(x + 4 * word, value)


def main(comm):
    buffer = nbep.Buffer(comm, num_nvl_bytes=1 << 17)
    runtime = comm.runtime
    compute = runtime.create_stream("compute")
    x = np.zeros((NUM_TOKENS, HIDDEN), ml_dtypes.bfloat16)
    topk_idx = np.arange(NUM_TOKENS)[:, None] % comm.size
    per_rank, _, per_expert, is_token_in_rank, _ = buffer.get_dispatch_layout(topk_idx, comm.size)

    runtime.launch(compute, prepare, 1, 32, 0, x, ONES)
    prepared = nbep.EventOverlap(nbep.EventHandle(compute.record()))
    recv_x, *_, sent = buffer.dispatch(
        x,
        num_tokens_per_rank=per_rank,
        is_token_in_rank=is_token_in_rank,
        num_tokens_per_expert=per_expert,
        topk_idx=topk_idx,
        topk_weights=np.ones(topk_idx.shape, np.float32),
        num_worst_tokens=NUM_TOKENS * comm.size,  # the host does not wait
        config=nbep.Config(2, 2, 4),
        previous_event=prepared,
        async_finish=True,
    )
    runtime.launch(compute, prepare, 1, 32, 0, x, TWOS)  # the next batch

    sent.current_stream_wait()
    compute.synchronize()
    received = recv_x[: NUM_TOKENS * comm.size // 2].astype(np.float32)
    buffer.destroy()
    return received


def check(results):
    for received in results:
        assert (received == 1).all(), received
