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

from nbep.device.jit import device_function, kernel
from nbep.device.primitives import *
from nbep.device.protocols.peers import Bounds, Peers, buffer_of
from nbep.device.types import In, Out
from nbep.puzzle import Puzzle, hole, order_advice, run_file, wait_at_least

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
        return "syncwarp(FULL_MASK) is for all 32 lanes: a lane that does not come there, or has left, is missed."
    if clue.kind in ("race", "wrong result"):
        return (
            "Lane 0 speaks for 32 lanes. Do all lanes meet, with a syncwarp, between their stores and the flag? And on "
            "rank 1, does every lane know of the flag before it reads: by its own wait, or by a syncwarp behind lane "
            "0's?"
        )
    return "Who raises `flag` in the memory of rank 1?"


def numbers(rank):
    return np.arange(100, 132, dtype=np.int32)


PUZZLE = Puzzle(
    kernel=one_for_all,
    holes=("send", "receive"),
    outputs=lambda rank: (np.full(32, -1, np.int32),),
    inputs=lambda rank: (numbers(rank),),
    answer=lambda rank: (numbers(rank) if rank == 1 else np.full(32, -1, np.int32),),
    cells={"data": DATA, "flag": FLAG},
    shows="flag",
    advice=advice,
)

if __name__ == "__main__":
    raise SystemExit(run_file(PUZZLE, __file__))
