"""Tokens without a score choose no expert. Then the layout of a dispatch is counted, on the comm stream.

nbep check examples/museum/torchtitan_3413/program.py
"""

import numpy as np

import nbep
from nbep.lang import (
    Out,
    kernel,
    st_weak_s32,
    thread_idx,
)

NUM_RANKS = 2
NUM_TOKENS = 4


@kernel(max_threads=32)
def masked_fill(topk_idx: Out):
    """The last two tokens choose nothing: -1, in two words each."""
    if thread_idx() < 4:
        st_weak_s32(topk_idx + 8 * (NUM_TOKENS - 2) + 4 * thread_idx(), -1)


def main(comm):
    buffer = nbep.Buffer(comm, num_nvl_bytes=1 << 17)
    compute = comm.runtime.create_stream("compute")
    topk_idx = np.zeros((NUM_TOKENS, 1), np.int64)

    comm.runtime.launch(compute, masked_fill, 1, 32, 0, topk_idx)
    per_rank, _, _, _, event = buffer.get_dispatch_layout(
        topk_idx,
        comm.size,
        async_finish=True,
    )
    event.current_stream_wait()
    compute.synchronize()
    num_tokens = per_rank.tolist()
    buffer.destroy()
    return num_tokens


def check(results):
    assert results == [[NUM_TOKENS - 2, 0]] * len(results), results
