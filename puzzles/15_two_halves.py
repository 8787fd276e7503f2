"""Puzzle 15: two halves. Six calls in a row send 32 numbers each; call n uses half n % 2 of the memory.

 rank 0, call n: credit >= n - 1?  numbers --> data[half], count[half] += 1
 rank 1, call n: count[half] >= 1?  data[half] --> out[n], count[half] = 0, credit += 1

 cell         lives in  written by                         read by
 data[half]   rank 1    rank 0                             rank 1: once count[half] is 1
 count[half]  rank 1    rank 0: + 1;  rank 1: back to 0    rank 1
 credit       rank 0    rank 1: + 1 for each call done     rank 0, before it writes into a half again

The count goes back to 0 so that the half can be used again. Its owner does that, and then gives a credit. The sender
takes half n % 2 when call n - 2, which used it before, is done. So low-latency calls take turns with two halves.
"""

import numpy as np

from nbep.lab.puzzle import Puzzle, hole, order_advice, run_file, stores_to
from nbep.lang import *

CALLS, HALF_BYTES = 6, 256
CREDIT, HALVES = 0, 128
COUNT, DATA = 0, 128  # within a half


@device_function
def send_call(value, half, credit, n, lane, bounds):
    """Call n of rank 0, 32 lanes with a value each. half: where its half begins, in the memory of rank 1."""
    hole()


@device_function
def end_call(half, credit, lane):
    """Rank 1, when all lanes have read the numbers: 32 lanes. Give the half back."""
    hole()


@kernel(max_threads=32)
def calls(out: Out, x: In, peers: Peers, bounds: Bounds, num_calls: I32):
    lane = lane_id()
    credit = buffer_of(peers, 0) + CREDIT
    for n in range(num_calls):
        half = buffer_of(peers, 1) + HALVES + HALF_BYTES * (n % 2)
        if peers.rank == 0:
            send_call(ld_nc_s32(x + 4 * (32 * n + lane)), half, credit, n, lane, bounds)
        else:
            wait_at_least(half + COUNT, 1, bounds)
            st_weak_s32(out + 4 * (32 * n + lane), ld_weak_s32(half + DATA + 4 * lane))
            end_call(half, credit, lane)


def advice(clue):
    for where in ("send_call", "end_call"):
        if clue.kind != "error" and not clue.calls("syncwarp", "vote_", where=where):
            return f"In `{where}` lane 0 speaks for 32 lanes: they have to meet at a syncwarp before it does."
    if not clue.calls("st_", "atom_exch", where="end_call"):
        return (
            "No thread sets `count` back: the second call of a half finds the count of the first, and reads too early."
        )
    if not clue.calls("wait_at_least", "ld_", where="send_call"):
        return "No thread waits for a credit: call n writes into its half although call n - 2 may still be read."
    if not stores_to(clue, "credit"):
        return "Rank 1 gives no credit: `end_call` has to add 1 at the address `credit`."
    if clue.kind == "wrong result" and (clue.got == 0).any():
        return "Rank 1 read numbers that were not there. They begin at half + DATA, and lane i has its at + 4 * i."
    if clue.kind == "deadlock":
        return (
            "A count was lost, or a credit. Both ranks change `count`: rank 1 has to set it back before it gives the "
            "credit, or the next call's count is wiped out. Before call n the sender needs n - 1 credits, one for each "
            "call up to n - 2."
        )
    if order := order_advice(clue, "count", "send_call") or order_advice(clue, "credit", "end_call"):
        return order
    if clue.kind in ("race", "wrong result") and clue.about("count of half"):
        return (
            "Both ranks change `count`, and nothing orders the two: rank 1 has to set it back before it gives the "
            "credit, or the count of a later call may be wiped out."
        )
    if clue.kind in ("race", "wrong result"):
        return (
            "A half is written while it is still in use. Call n waits until call n - 2 is done, and rank 1 gives the "
            "credit, as a release, when all lanes have read and the count is 0 again."
        )
    return ""


def numbers(rank):
    return np.arange(500, 500 + 32 * CALLS, dtype=np.int32).reshape(CALLS, 32)


PUZZLE = Puzzle(
    kernel=calls,
    holes=("send_call", "end_call"),
    addresses={"half": "weak_s32", "credit": "relaxed_sys_s32"},
    outputs=lambda rank: (np.full((CALLS, 32), -1, np.int32),),
    inputs=lambda rank: (numbers(rank),),
    answer=lambda rank: (numbers(rank) if rank == 1 else np.full((CALLS, 32), -1, np.int32),),
    sizes=(CALLS,),
    cells={
        "count of half 0": HALVES,
        "data of half 0": HALVES + DATA,
        "count of half 1": HALVES + HALF_BYTES,
        "data of half 1": HALVES + HALF_BYTES + DATA,
        "credit": CREDIT,
    },
    shows="count",
    advice=advice,
    learned="two halves let a call begin while the one before it is still read; a credit says that a half is free.",
    others="the credit may be a store of the number of calls that are done, in place of an atomic.",
    runs=5,
)

if __name__ == "__main__":
    raise SystemExit(run_file(PUZZLE, __file__))
