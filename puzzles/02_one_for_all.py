"""Puzzle 2: one for all. A warp sends 32 numbers, and one lane of it raises the flag.

 rank 0: lane i: x[i] --> data[i]      lane 0: flag = 1
 rank 1: all lanes know that flag is 1      lane i: data[i] --> out[i]

 cell     lives in  written by            read by
 data[i]  rank 1    lane i of rank 0      lane i of rank 1
 flag     rank 1    lane 0 of rank 0      rank 1

Lanes of a warp do not run in lockstep: lane 0 may be far ahead of lane 31, or far behind. syncwarp(FULL_MASK) lets the
lanes meet, and what a lane has written before is visible to the others behind it.
"""

import numpy as np

from nbep.lab.puzzle import Puzzle, hole, order_advice, run_file
from nbep.lang import *

DATA, FLAG = 0, 128


@device_function
def send(value, data, flag, lane):
    """All 32 lanes come here, each with its value. data is the address of data[0]."""
    hole()


@device_function
def receive(data, flag, lane, bounds):
    """All 32 lanes come here. wait_at_least(flag, 1, bounds) polls until the flag is 1, with acquire order."""
    return hole()


@kernel(max_threads=32)
def one_for_all(out: Out, x: In, peers: Peers, bounds: Bounds):
    buffer = buffer_of(peers, 1)
    lane = lane_id()
    if peers.rank == 0:
        send(ld_nc_s32(x + 4 * lane), buffer + DATA, buffer + FLAG, lane)
    else:
        st_weak_s32(out + 4 * lane, receive(buffer + DATA, buffer + FLAG, lane, bounds))


def advice(clue):
    if order := order_advice(clue, "flag", "send", "receive"):
        return order
    if clue.kind == "divergence":
        return (
            "syncwarp(FULL_MASK) and syncthreads() wait for all 32 lanes. Move the call out of the `if`, so that each "
            "lane comes to it."
        )
    if clue.kind == "wrong result" and clue.got[0] != -1:
        others = [i for i in range(32) if clue.got[i] != clue.expected[i] and clue.got[i] in clue.expected]
        if others:
            return (
                f"Lane {others[0]} got the number of another lane. The number of a lane is at data + 4 * lane: use "
                f"that in both functions."
            )
    if clue.kind in ("race", "wrong result"):
        in_send = (
            "Lane 0 of rank 0 raises the flag for 32 lanes. In `send`, all lanes have to meet at syncwarp(FULL_MASK) "
            "between their stores and the flag."
        )
        in_receive = (
            "In `receive`, each lane has to wait for the flag itself, or meet the lane that waits at a "
            "syncwarp(FULL_MASK) behind its wait."
        )
        meets = {hole: clue.calls("syncwarp", "syncthreads", where=hole) for hole in ("send", "receive")}
        if meets["send"] != meets["receive"]:
            return in_receive if meets["send"] else in_send
        return f"{in_send} {in_receive}"
    if clue.kind == "deadlock" and clue.seen:
        return f"The flag is {clue.seen}, and rank 1 waits for another value: one lane stores 1, so wait for 1."
    if clue.kind == "deadlock":
        return "Rank 1 waits for `flag`, and no thread raises it: one lane of rank 0 has to store 1 there."
    return ""


def numbers(rank):
    return np.arange(100, 132, dtype=np.int32)


PUZZLE = Puzzle(
    kernel=one_for_all,
    holes=("send", "receive"),
    addresses={"data": "weak_s32", "flag": "relaxed_sys_s32"},
    outputs=lambda rank: (np.full(32, -1, np.int32),),
    inputs=lambda rank: (numbers(rank),),
    answer=lambda rank: (numbers(rank) if rank == 1 else np.full(32, -1, np.int32),),
    cells={"data": DATA, "flag": FLAG},
    shows="flag",
    advice=advice,
    learned="one lane can speak for its warp if all lanes meet, at a syncwarp, between their stores and its release.",
    others=(
        "in `receive` every lane may wait for the flag itself. Then no syncwarp is needed there, and 32 lanes poll."
    ),
)

if __name__ == "__main__":
    raise SystemExit(run_file(PUZZLE, __file__))
