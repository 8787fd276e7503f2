"""Puzzle 1: one flag. Rank 0 sends a number to rank 1.

 rank 0: x --send--> data, flag = 1        rank 1: flag is 1? --receive--> out

 cell    lives in  written by       read by
 data    rank 1    rank 0, send     rank 1, receive: once flag is 1
 flag    rank 1    rank 0, send     rank 1, receive: again and again

A weak store promises nothing. A release makes what its thread has written before visible to whoever acquires the value
that it writes. docs/primitives.md lists all loads and stores; docs/memory_orders.md says what an order promises.
"""

import numpy as np

from nbep.device.jit import device_function, kernel
from nbep.device.primitives import *
from nbep.device.protocols.peers import Bounds, Peers, buffer_of
from nbep.device.protocols.waits import start_wait
from nbep.device.types import In, Out
from nbep.puzzle import Puzzle, give_up, hole, order_advice, run_file

DATA, FLAG = 0, 128  # byte offsets in the memory of a rank


@device_function
def send(value, data, flag):
    """data and flag are addresses in the memory of rank 1, as rank 0 sees them."""
    hole()  # two stores


@device_function
def receive(data, flag, bounds):
    """Return the number. The same addresses, as rank 1 sees them."""
    deadline = start_wait(bounds)
    while hole():  # the flag is not 1 yet
        if give_up(bounds, deadline):
            break
    return hole()  # a load


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
        return "Rank 1 waits for a flag that nobody raises. Is it stored at the address `flag`, and is it 1?"
    if clue.kind == "wrong result" and clue.got[0] == 0:
        return (
            "Rank 1 took the 0 that was there before: it read `data` before the number was there. Is the number stored "
            "before the flag, and loaded after the loop?"
        )
    if clue.kind == "race" and not order_advice(clue, "flag", "send", "receive"):
        return "Is the number stored before the flag, and loaded after the loop?"
    return order_advice(clue, "flag", "send", "receive")


PUZZLE = Puzzle(
    kernel=one_flag,
    holes=("send", "receive"),
    outputs=lambda rank: (np.full(1, -1, np.int32),),
    inputs=lambda rank: (np.array([42], np.int32),),
    answer=lambda rank: (np.array([42 if rank == 1 else -1], np.int32),),
    cells={"data": DATA, "flag": FLAG},
    shows="flag",
    advice=advice,
)

if __name__ == "__main__":
    raise SystemExit(run_file(PUZZLE, __file__))
