"""Puzzle 5: a barrier between ranks. Each rank writes to all; no thread reads before all have written.

 rank r: thread i: 100 r + i --> data[r][i] of every rank      barrier      sum over r of data[r][i] --> out[i]

 cell        lives in    written by                      read by
 data[r][i]  every rank  thread i of rank r              thread i of its owner, behind the barrier
 arrived     every rank  every rank: + 1, atomically     its owner: until it is num_ranks

thread_idx() is 0 to 63. buffer_of(peers, rank) is where this rank sees the memory of another one, or its own.
wait_at_least(cell, wanted, bounds) waits, with acquire order.
"""

import numpy as np

from nbep.lab.puzzle import Puzzle, hole, order_advice, run_file
from nbep.lang import *

ARRIVED, DATA = 0, 128
THREADS = 64


@device_function
def barrier(peers, bounds):
    """All threads of the block come here. The cell is at buffer_of(peers, rank) + ARRIVED."""
    hole()


@kernel(max_threads=THREADS)
def exchange(out: Out, peers: Peers, bounds: Bounds):
    i = thread_idx()
    for rank in range(peers.num_ranks):
        st_weak_s32(buffer_of(peers, rank) + DATA + 4 * (THREADS * peers.rank + i), 100 * peers.rank + i)
    barrier(peers, bounds)
    total = 0
    for rank in range(peers.num_ranks):
        total += ld_weak_s32(buffer_of(peers, peers.rank) + DATA + 4 * (THREADS * rank + i))
    st_weak_s32(out + 4 * i, total)


def advice(clue):
    if clue.kind == "divergence":
        return "A syncthreads is for all 64 threads of the block: it may not stand where only some of them come."
    if clue.kind in ("deadlock", "race") and not clue.calls("atom_"):
        return "Three ranks that load, add and store at once lose arrivals. An atomic adds in one step."
    if clue.kind == "deadlock":
        return (
            "A rank waits for arrivals that do not come. Does every rank add 1 to the cell `arrived` of every rank, "
            "its own among them, or does it wait for one less? And does it add only once, not once for each thread?"
        )
    if order := order_advice(clue, "arrived"):
        return order
    if clue.kind in ("race", "wrong result") and not clue.calls("syncthreads", "bar_sync"):
        return "One thread speaks for 64. They have to meet before it tells the others, and again behind its wait."
    if clue.kind in ("race", "wrong result"):
        return (
            "Some thread reads before all threads of all ranks have written. The block has to meet before a thread "
            "adds 1 to the cell of every rank, once for the whole block; a thread has to wait for as many arrivals as "
            "there are ranks, and the block meets again behind it."
        )
    return ""


PUZZLE = Puzzle(
    kernel=exchange,
    holes=("barrier",),
    outputs=lambda rank: (np.full(THREADS, -1, np.int32),),
    answer=lambda rank: (np.array([100 * (0 + 1 + 2) + 3 * i for i in range(THREADS)], np.int32),),
    num_ranks=3,
    block=THREADS,
    cells={"arrived": ARRIVED, "data": DATA},
    shows="arrived",
    advice=advice,
    learned="a barrier between GPUs is an atomic to each peer, a wait, and a syncthreads on both sides of them.",
    others="one thread may tell all ranks, or thread r tells rank r; the second is faster where there are many.",
    runs=4,
)

if __name__ == "__main__":
    raise SystemExit(run_file(PUZZLE, __file__))
