"""Puzzle 3: a chain. Rank 0 writes to rank 2, but tells only rank 1; rank 1 passes the word on.

 rank 0: x --> data                     rank 2: data --> out
           first = 1 --> rank 1: pass_on --> second = 1

 cell     lives in  written by          read by
 data     rank 2    rank 0              rank 2: once second is 1
 first    rank 1    rank 0: a release   rank 1, pass_on
 second   rank 2    rank 1, pass_on     rank 2: an acquire

Rank 1 never touches data. Still the order goes through it: a chain of releases and acquires holds if each link does.
So tokens go from rank to rank between nodes, and so combine's coordinator tells its receivers of a tail.
"""

import numpy as np

from nbep.lab.puzzle import Puzzle, hole, order_advice, run_file
from nbep.lang import *

DATA, FIRST, SECOND = 0, 128, 256


@device_function
def pass_on(first, second, bounds):
    """Rank 1: wait until the cell at `first` is 1, then make the cell at `second` 1. See puzzle 1 for the loop."""
    deadline = start_wait(bounds)
    while hole():
        if give_up(bounds, deadline):
            return
    hole()


@kernel(max_threads=32)
def chain(out: Out, x: In, peers: Peers, bounds: Bounds):
    if thread_idx() == 0:
        second = buffer_of(peers, 2) + SECOND
        if peers.rank == 0:
            st_weak_s32(buffer_of(peers, 2) + DATA, ld_nc_s32(x))
            st_release_sys_s32(buffer_of(peers, 1) + FIRST, 1)
        elif peers.rank == 1:
            pass_on(buffer_of(peers, 1) + FIRST, second, bounds)
        else:
            wait_at_least(second, 1, bounds)
            st_weak_s32(out, ld_weak_s32(buffer_of(peers, 2) + DATA))


def advice(clue):
    if clue.kind == "deadlock":
        if clue.report.startswith("DeadlockError: rank 1") and clue.about("flag_second"):
            return "pass_on waits for `second`, which it has to store itself. It has to wait for `first`."
        return (
            "Rank 2 waits until `second` is 1. pass_on has to store a 1 there: at `second`, and not at `first`. The "
            "store stands behind the loop, not in it: `first` may be 1 at the first look."
        )
    if order := order_advice(clue, "second", polled="first"):
        return "The chain breaks at rank 1, although both other links are right. " + order
    if clue.kind in ("race", "wrong result"):
        return "Rank 1 must have seen `first` before it stores `second`: the store stands behind the loop, not in it."
    return ""


PUZZLE = Puzzle(
    kernel=chain,
    holes=("pass_on",),
    addresses={"first": "relaxed_sys_s32", "second": "relaxed_sys_s32"},
    outputs=lambda rank: (np.full(1, -1, np.int32),),
    inputs=lambda rank: (np.array([7], np.int32),),
    answer=lambda rank: (np.array([7 if rank == 2 else -1], np.int32),),
    num_ranks=3,
    cells={"data": DATA, "flag_first": FIRST, "flag_second": SECOND},
    shows="flag_",
    advice=advice,
    learned="order is transitive: who acquires from a rank that has acquired, sees what the first rank released.",
    others="relaxed accesses do with one fence_acq_rel_sys() between the loop and the store.",
)

if __name__ == "__main__":
    raise SystemExit(run_file(PUZZLE, __file__))
