"""Puzzle 4: the last block. Four blocks add up 256 numbers; whichever comes last writes the sum.

 block b, thread i: x[64 b + i] --> total      the block that arrives last: total --> out

 cell      written by                     read by
 total     all threads: they add          thread 0 of the last block
 arrivals  thread 0 of each block: + 1    the same: what it was before tells how many have come

No thread waits. An atomic gives back what was there before, so the last one to arrive knows that it is the last. But it
must also see what the others have added: the atomic on `arrivals` has to publish and to observe.
So get_dispatch_layout counts tokens.
"""

import numpy as np

from nbep.lab.puzzle import Puzzle, hole, order_advice, run_file
from nbep.lang import *

TOTAL, ARRIVALS = 0, 128


@device_function
def add_and_arrive(value, total, arrivals):
    """All threads of all blocks come here. True for thread 0 of the block that arrives last, False for all others."""
    return hole()


@kernel(max_threads=64)
def sum_up(out: Out, x: In, peers: Peers, bounds: Bounds):
    buffer = buffer_of(peers, 0)
    i = block_idx() * block_dim() + thread_idx()
    if add_and_arrive(ld_nc_s32(x + 4 * i), buffer + TOTAL, buffer + ARRIVALS):
        st_weak_s32(out, ld_weak_s32(buffer + TOTAL))


def advice(clue):
    if not clue.calls("atom_add"):
        return "Two threads that load, add and store lose one of the two numbers. An atomic does it in one step."
    if clue.kind == "wrong result" and clue.got[0] == -1:
        return "No thread wrote the sum. The last of grid_dim() blocks finds grid_dim() - 1 arrivals before its own."
    if clue.kind in ("race", "wrong result") and clue.calls("atom_add_release") and not clue.calls("fence_acq_rel"):
        return (
            "The atomic on `arrivals` releases: it says what its own block has added. It does not acquire, so the last "
            "block may not see what the others have added. One atomic has to do both: `acq_rel` in its name."
        )
    if clue.kind in ("race", "wrong result") and not clue.calls("atom_add_acq_rel", "fence_acq_rel"):
        return (
            "The atomic on `arrivals` is relaxed: that a block has arrived then says nothing of what it has added. It "
            "has to release for those who come later, and to acquire from those who came before."
        )
    if clue.kind in ("race", "wrong result") and not clue.calls("syncthreads", "bar_sync"):
        return "Thread 0 speaks for 64 threads in two warps. They have to meet before it arrives: syncthreads()."
    if clue.kind == "divergence":
        return "syncthreads() waits for all 64 threads: put it before the line that lets some of them return."
    if clue.kind == "wrong result" and not clue.calls("st_"):
        return (
            "The sum was taken before all had added. Each block arrives once: its thread 0 adds 1 to `arrivals`, "
            "behind syncthreads(), and the other threads return False."
        )
    if clue.kind == "wrong result" and clue.got[0] < clue.expected[0]:
        return "Some numbers are missing: two threads that load, add and store lose one of the two. Add with an atomic."
    return order_advice(clue, "arrivals")


def numbers(rank):
    return np.arange(256, dtype=np.int32) ** 2


PUZZLE = Puzzle(
    kernel=sum_up,
    holes=("add_and_arrive",),
    addresses={"total": "weak_s32", "arrivals": "relaxed_gpu_s32"},
    outputs=lambda rank: (np.full(1, -1, np.int32),),
    inputs=lambda rank: (numbers(rank),),
    answer=lambda rank: (numbers(rank).sum(keepdims=True, dtype=np.int32),),
    num_ranks=1,
    grid=4,
    block=64,
    cells={"total": TOTAL, "arrivals": ARRIVALS},
    advice=advice,
    learned=(
        "an atomic with acq_rel order both publishes and observes, and so the last block to arrive sees all sums."
    ),
    others="a relaxed atomic between two fence_acq_rel_gpu() does the same.",
    runs=5,
)

if __name__ == "__main__":
    raise SystemExit(run_file(PUZZLE, __file__))
