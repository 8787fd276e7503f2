"""Puzzle 1: one flag. Rank 0 sends a number to rank 1.

 rank 0: x --send--> data, flag = 1        rank 1: flag is 1? --receive--> out

 cell    lives in  written by       read by
 data    rank 1    rank 0, send     rank 1, receive: once flag is 1
 flag    rank 1    rank 0, send     rank 1, receive: again and again

A weak store promises nothing. A release makes what its thread has written before visible to whoever acquires the value
that it writes. docs/primitives.md lists all loads and stores; docs/memory_orders.md says what an order promises.

A wait is a loop that looks at a cell again and again. bounds says how long a wait may take: start_wait(bounds) is when
it ends, and give_up(bounds, deadline), the last call of each iteration, says whether that is now. Then the check says
who has waited for what. wait_at_least(cell, wanted, bounds) of later puzzles is such a loop, with an acquire.
"""

import numpy as np

from nbep.lab.puzzle import Puzzle, hole, order_advice, run_file
from nbep.lang import *

DATA, FLAG = 0, 128  # byte offsets in the memory of a rank


@device_function
def send(value, data, flag):
    """data and flag are addresses in the memory of rank 1, as rank 0 sees them."""
    hole()


@device_function
def receive(data, flag, bounds):
    """Return the number. The same addresses, as rank 1 sees them."""
    deadline = start_wait(bounds)
    while hole():
        if give_up(bounds, deadline):
            break
    return hole()


@kernel(max_threads=32)
def one_flag(out: Out, x: In, peers: Peers, bounds: Bounds):
    buffer = buffer_of(peers, 1)
    if thread_idx() == 0:
        if peers.rank == 0:
            send(ld_nc_s32(x), buffer + DATA, buffer + FLAG)
        else:
            st_weak_s32(out, receive(buffer + DATA, buffer + FLAG, bounds))


def advice(clue):
    if clue.kind == "deadlock":
        if clue.seen:
            return f"Rank 1 waits until the flag is 1, and it is {clue.seen}. Store 1 there; the number goes to `data`."
        return "Rank 1 waits for a flag that no thread raises: `send` has to store 1 at the address `flag`."
    if clue.kind == "wrong result" and clue.got[0] == 1:
        return "Rank 1 returned 1, which is the flag. The number is at the address `data`: load that one."
    if clue.kind == "wrong result" and clue.got[0] == 0:
        return (
            "Rank 1 took the 0 that was there before: it read `data` before the number was there. `send` stores the "
            "number first, at `data`, and then the flag; `receive` loads the number after the loop."
        )
    if clue.kind == "race" and not order_advice(clue, "flag", "send", "receive"):
        return "Store the number before the flag, and load it after the loop."
    return order_advice(clue, "flag", "send", "receive")


PUZZLE = Puzzle(
    kernel=one_flag,
    holes=("send", "receive"),
    addresses={"data": "weak_s32", "flag": "relaxed_sys_s32"},
    outputs=lambda rank: (np.full(1, -1, np.int32),),
    inputs=lambda rank: (np.array([42], np.int32),),
    answer=lambda rank: (np.array([42 if rank == 1 else -1], np.int32),),
    cells={"data": DATA, "flag": FLAG},
    shows="flag",
    advice=advice,
    learned=(
        "a release makes what its thread stored before visible to the thread whose acquire reads the released value."
    ),
    others=(
        "a relaxed store behind fence_acq_rel_sys(), and a relaxed poll with such a fence behind the loop, do the same."
    ),
)

if __name__ == "__main__":
    raise SystemExit(run_file(PUZZLE, __file__))
