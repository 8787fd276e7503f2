"""A dispatch for a CUDA graph: outputs of a fixed size. The next kernel takes the largest value, to quantize by it.

nbep check examples/museum/deepep_739/program.py
"""

import ml_dtypes
import numpy as np

import nbep
from nbep.lang import (
    I32,
    In,
    Out,
    kernel,
    ld_na_s32,
    st_weak_s32,
)

NUM_RANKS = 2
NUM_TOKENS, HIDDEN = 2, 8
WORDS = HIDDEN // 2


@kernel(max_threads=1)
def largest(out: Out, x: In, topk_idx: In, num_rows: I32):
    """The largest word of x. (Two numbers of bf16 that are not negative compare as one integer does.)"""
    found = 0
    for row in range(num_rows):
        for word in range(WORDS):
            found = max(found, ld_na_s32(x + 4 * (row * WORDS + word)))
    st_weak_s32(out, found)


def main(comm):
    buffer = nbep.Buffer(comm, num_nvl_bytes=1 << 17)
    runtime, num_rows = comm.runtime, NUM_TOKENS * comm.size
    compute = runtime.create_stream("compute")
    x = np.ones((NUM_TOKENS, HIDDEN), ml_dtypes.bfloat16)
    topk_idx = np.zeros((NUM_TOKENS, 1), np.int64)
    topk_idx[comm.rank :] = 1  # rank 1 gets one token more than rank 0
    per_rank, _, per_expert, is_in_rank, _ = buffer.get_dispatch_layout(topk_idx, comm.size)
    recv_x, recv_topk_idx, _, _, _, event = buffer.dispatch(
        x,
        num_tokens_per_rank=per_rank,
        is_token_in_rank=is_in_rank,
        num_tokens_per_expert=per_expert,
        topk_idx=topk_idx,
        topk_weights=np.ones(topk_idx.shape, np.float32),
        num_worst_tokens=num_rows,  # the host does not wait
        config=nbep.Config(2, 2, 4),
        async_finish=True,
    )
    event.current_stream_wait()
    out = np.zeros(1, np.int32)
    compute.wait(event.event.event)
    runtime.launch(compute, largest, 1, 1, 0, out, recv_x, recv_topk_idx, num_rows)
    compute.synchronize()
    buffer.destroy()
    return out.tolist()


def check(results):
    assert results == [[0x3F803F80]] * len(results), results  # two ones
