"""Puzzle 9: an announcement. A count is its own message, and it may be 0.

 rank 0: lane i: counts[i] --announce--> cell[i]        rank 1: lane i: cell[i] --await_count--> out[i]

 cell     lives in  written by         read by
 cell[i]  rank 1    lane i of rank 0   lane i of rank 1: until it is not 0 any more

The cells are 0 before the launch, and 0 has to mean "not here yet". So a count of n cannot travel as n. Nothing else is
read because of it, so no release is needed; but a weak store or load is for bytes that no other thread touches.
"""

import re

import numpy as np

from nbep.lab.puzzle import Puzzle, hole, run_file
from nbep.lang import *

CELLS = 0


@device_function
def announce(cell, count):
    """Tell a count of 0 or more through one s32."""
    hole()


@device_function
def await_count(cell, bounds):
    """Wait for it, and return it."""
    deadline = start_wait(bounds)
    while hole():
        if give_up(bounds, deadline):
            break
    return hole()


@kernel(max_threads=32)
def announcements(out: Out, counts: In, peers: Peers, bounds: Bounds):
    lane = lane_id()
    cell = buffer_of(peers, 1) + CELLS + 4 * lane
    if peers.rank == 0:
        announce(cell, ld_nc_s32(counts + 4 * lane))
    else:
        st_weak_s32(out + 4 * lane, await_count(cell, bounds))


def counts(rank):
    return (np.arange(32, dtype=np.int32) * 5) % 7


def advice(clue):
    if clue.kind == "deadlock":
        place = re.search(r"cell(?: \+ (\d+))? \(byte", clue.report)
        lane = int(place[1] or 0) // 4 if place else 0
        if counts(0)[lane % 32] != 0:
            return (
                f"Lane {lane} of rank 1 waits for its cell, and its count is not 0. `cell` is the address of the "
                f"lane's own cell: store and load there, and add nothing to it."
            )
        return (
            "Some lanes of rank 1 wait for a cell that stays 0: their count is 0, and it was sent as 0. Send it so "
            "that no count becomes 0, as -count - 1 or count + 1."
        )
    if clue.kind == "wrong result":
        return (
            f"Lane 1 returned {clue.got[1]}, and its count is {clue.expected[1]}. Undo in `await_count` what "
            f"`announce` has done: -count - 1 becomes count again by -seen - 1, count + 1 by seen - 1."
        )
    if clue.kind == "race":
        return "A cell that another thread polls is no place for weak accesses: take relaxed ones, with scope sys."
    return ""


PUZZLE = Puzzle(
    kernel=announcements,
    holes=("announce", "await_count"),
    addresses={"cell": "relaxed_sys_s32"},
    outputs=lambda rank: (np.full(32, -1, np.int32),),
    inputs=lambda rank: (counts(rank),),
    answer=lambda rank: (counts(rank) if rank == 1 else np.full(32, -1, np.int32),),
    cells={"cell": CELLS},
    shows="cell + 4",
    advice=advice,
    learned=(
        "one word can be its own flag if no value that is sent looks like the value before. No release is needed then."
    ),
    others=(
        "count + 1 works as well. DeepEP sends -count - 1, so that a sign tells a count that has arrived from a "
        "cell at rest."
    ),
    runs=6,
)

if __name__ == "__main__":
    raise SystemExit(run_file(PUZZLE, __file__))
