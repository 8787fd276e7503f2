"""Blocks copy what has come from other nodes. A chunk is the work of two blocks; blocks take what is left in turn.

nbep check examples/museum/mori_625/program.py
nbep check examples/museum/mori_625/program.py --blocks 4      finds nothing
"""

import numpy as np

from nbep.lang import (
    I32,
    In,
    Out,
    block_idx,
    kernel,
    ld_nc_s32,
    st_weak_s32,
)

NUM_RANKS = 1
NUM_CHUNKS, CHUNK = 4, 4  # rows of a chunk
PARTS = 2  # blocks that share a chunk


@kernel(max_threads=1)
def receive(out: Out, staged: In, num_blocks: I32):
    for number in range(block_idx(), NUM_CHUNKS * PARTS, num_blocks):
        begin = number // PARTS * CHUNK
        for row in range(begin + block_idx() % PARTS, begin + CHUNK, PARTS):
            st_weak_s32(out + 4 * row, ld_nc_s32(staged + 4 * row))


def main(comm, blocks=3):
    runtime = comm.runtime
    stream = runtime.create_stream("comm")
    staged, out = np.arange(NUM_CHUNKS * CHUNK, dtype=np.int32), np.full(NUM_CHUNKS * CHUNK, -1, np.int32)
    runtime.launch(stream, receive, blocks, 1, 0, out, staged, blocks)
    stream.synchronize()
    return out.tolist()


def check(results):
    assert results[0] == list(range(NUM_CHUNKS * CHUNK)), results
