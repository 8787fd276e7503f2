"""Puzzle 11: copy a row, 16 bytes at a time. A warp copies 81 vectors of 16 bytes.

 turn 0: lane i: vector i          turn 1: lane i: vector 32 + i          turn 2: lane i: vector 64 + i, if there is one

ld_nc_v4(address) gives a tuple of four 32-bit words, st_na_v4(address, words) stores it. An address of 16 bytes must be
a multiple of 16. A load of 16 bytes is one instruction, as one of 4 is: rows go four times as fast.
"""

import numpy as np

from nbep.lab.puzzle import Puzzle, hole, run_file
from nbep.lang import *

VECTORS = 81


@device_function
def copy_row(dst, src, num_vectors, lane):
    """All 32 lanes come here."""
    hole()


@kernel(max_threads=32)
def copy(out: Out, x: In, peers: Peers, bounds: Bounds, num_vectors: I32):
    copy_row(out, x, num_vectors, lane_id())


def words(rank):
    return np.arange(4 * VECTORS, dtype=np.int32) + 7


def advice(clue):
    if clue.about("OutOfBounds"):
        return "81 is not a multiple of 32: in the last turn only 17 lanes have a vector. Ask before you load."
    if clue.kind == "wrong result":
        missing = int((clue.got == -1).sum())
        if missing:
            return f"{missing} of {4 * VECTORS} words were never written. How far does lane i go, and in which steps?"
    return ""


PUZZLE = Puzzle(
    kernel=copy,
    holes=("copy_row",),
    addresses={"dst": "na_v4", "src": "na_v4"},
    outputs=lambda rank: (np.full(4 * VECTORS, -1, np.int32),),
    inputs=lambda rank: (words(rank),),
    answer=lambda rank: (words(rank),),
    num_ranks=1,
    sizes=(VECTORS,),
    advice=advice,
    learned="neighbouring lanes take neighbouring vectors, and each access moves 16 bytes.",
    others="a loop over turns with an `if` inside does the same.",
    runs=3,
)

if __name__ == "__main__":
    raise SystemExit(run_file(PUZZLE, __file__))
