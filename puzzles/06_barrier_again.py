"""Puzzle 6: the barrier again. The same cell serves six barriers, and no thread resets it.

 turn 0, 2, 4: each rank writes turn + rank to all --> barrier(turn) --> each adds up what it got --> barrier(turn + 1)

 cell     lives in    written by                  read by
 data[r]  every rank  rank r                      its owner, between two barriers
 arrived  every rank  every rank: + 1 a barrier   its owner

What does `arrived` hold when barrier number `turn` is over? A quick rank may be one barrier ahead of a slow one, so
setting the cell back to 0 is no way out: an arrival for the next barrier may be in it.
"""

import numpy as np

from nbep.lab.puzzle import Puzzle, hole, order_advice, run_file
from nbep.lang import *

ARRIVED, DATA = 0, 128
ROUNDS = 3


@device_function
def barrier(peers, turn, bounds):
    """One thread of each rank comes here, with turn 0, 1, 2, ..."""
    hole()


@kernel(max_threads=32)
def rounds(out: Out, peers: Peers, bounds: Bounds, num_rounds: I32):
    if thread_idx() == 0:
        for i in range(num_rounds):
            for rank in range(peers.num_ranks):
                st_weak_s32(buffer_of(peers, rank) + DATA + 4 * peers.rank, 10 * i + peers.rank)
            barrier(peers, 2 * i, bounds)
            total = 0
            for rank in range(peers.num_ranks):
                total += ld_weak_s32(buffer_of(peers, peers.rank) + DATA + 4 * rank)
            st_weak_s32(out + 4 * i, total)
            barrier(peers, 2 * i + 1, bounds)


def advice(clue):
    if clue.kind in ("deadlock", "race") and not clue.calls("atom_"):
        return "Three ranks that load, add and store at once lose arrivals. An atomic adds in one step."
    if clue.kind == "deadlock":
        return (
            "An arrival got lost, or a rank waits for too many. Each rank adds 1 to the cell of every rank, its own "
            "among them. If the cell is set back, what a quick peer has added for the next barrier is gone."
        )
    if clue.kind == "divergence":
        return (
            "One thread of each rank comes here, so no other thread comes to a syncthreads or a syncwarp: leave it out."
        )
    if order := order_advice(clue, "arrived"):
        return order
    if clue.kind in ("race", "wrong result"):
        return (
            "A later barrier lets a rank through too early: what it waits for was there from the barriers before. How "
            "many arrivals have there been when barrier number `turn` is complete?"
        )
    return ""


PUZZLE = Puzzle(
    kernel=rounds,
    holes=("barrier",),
    outputs=lambda rank: (np.full(ROUNDS, -1, np.int32),),
    answer=lambda rank: (np.array([3 * 10 * i + 0 + 1 + 2 for i in range(ROUNDS)], np.int32),),
    num_ranks=3,
    sizes=(ROUNDS,),
    cells={"arrived": ARRIVED, "data": DATA},
    shows="arrived",
    advice=advice,
    learned="a counter that only grows needs no reset: the number to wait for grows with it.",
    others=(
        "notebook 01 has a barrier whose cells return to 0: each rank adds to its own cell and takes away from "
        "its peer's."
    ),
    few=(1, "round"),
)

if __name__ == "__main__":
    raise SystemExit(run_file(PUZZLE, __file__))
