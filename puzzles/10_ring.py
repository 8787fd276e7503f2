"""Puzzle 10: a ring with flow control. Ten rows go through four slots.

 rank 0: x[i] --send--> slots[i % 4]          rank 1: slots[i % 4] --receive--> out[i]

 cell      lives in  written by           read by
 slots[k]  rank 1    all lanes of rank 0  all lanes of rank 1: once tail is past the row
 tail      rank 1    lane 0 of rank 0     rank 1: so many rows are there
 head      rank 0    lane 0 of rank 1     rank 0: so many rows have been read, and their slots are free

Before row i goes into a slot, row i - 4 must have been read there. The tail announces data. The head does not, but it
may not move before the row has been read. This is what dispatch's sender and receiver do with tokens.
"""

import numpy as np

from nbep.lab.puzzle import Puzzle, hole, order_advice, run_file
from nbep.lab.trace import Trace
from nbep.lang import *

NUM_SLOTS, ROWS, ROW_BYTES = 4, 10, 128
TAIL, HEAD, SLOTS = 0, 64, 128


@device_function
def send(value, slot, tail, head, i, lane, bounds):
    """Row i, one value for each of 32 lanes. slot: where its slot begins. tail, head: addresses of the cells."""
    hole()


@device_function
def receive(slot, tail, head, i, lane, bounds):
    """The value of row i for this lane."""
    return hole()


@kernel(max_threads=32)
def ring(out: Out, x: In, peers: Peers, bounds: Bounds, num_rows: I32):
    lane = lane_id()
    tail, head = buffer_of(peers, 1) + TAIL, buffer_of(peers, 0) + HEAD
    for i in range(num_rows):
        slot = buffer_of(peers, 1) + SLOTS + ROW_BYTES * (i % NUM_SLOTS)
        if peers.rank == 0:
            send(ld_nc_s32(x + ROW_BYTES * i + 4 * lane), slot, tail, head, i, lane, bounds)
        else:
            st_weak_s32(out + ROW_BYTES * i + 4 * lane, receive(slot, tail, head, i, lane, bounds))


def advice(clue):
    if clue.kind == "deadlock":
        return (
            "Both ends wait, or one does for ever. Row i is there when the tail is i + 1. Row i - 4 has been read when "
            "the head is i - 3, and the first four rows do not wait. Is the head moved after each row?"
        )
    if order := order_advice(clue, "tail", "send", "receive"):
        return order
    if clue.kind in ("race", "wrong result"):
        for where, cell in (("send", "tail"), ("receive", "head")):
            if not clue.calls("syncwarp", "vote_", where=where):
                return f"In `{where}` lane 0 moves the {cell} for 32 lanes: they have to meet at a syncwarp first."
    if clue.kind == "wrong result":
        row = int(np.argwhere((clue.got != clue.expected).any(axis=1))[0, 0])
        if (np.isin(clue.got[row], clue.expected[row]) & (clue.got[row] != clue.expected[row])).any():
            return f"Row {row} has numbers of its own, but not in their places: lane i uses slot + 4 * i."
        if (clue.got[row] < clue.expected[row]).any():
            return (
                "A lane has read before its row was there. Each lane has to wait until the tail is i + 1, or meet at a "
                "syncwarp the lane that does. The tail moves behind the stores of all lanes, by 1 for each row. `slot` "
                "is the slot of row i already."
            )
    if clue.kind == "wrong result" and (clue.got > clue.expected).any():
        return (
            "A row was overwritten by a later one before it was read. Before row i goes into a slot, the head has to "
            "be i - 3: row i - 4, which was there, has been read. Does `send` wait for that, and does `receive` move "
            "the head only behind its load?"
        )
    if clue.kind in ("race", "wrong result"):
        return (
            "Either the tail moves before all lanes have stored, or a slot is written again before all lanes have read "
            "it: the sender waits for the head, and the head moves behind the loads and a syncwarp. Or `receive` does "
            "not wait until the tail is i + 1."
        )
    return ""


def most_rows_on_their_way(puzzle):
    """How many rows were sent and not yet read, at most, in a few runs."""
    most = 0
    for seed in range(8):
        trace, cells = Trace(), {"tail": 0, "head": 0}
        puzzle.run(seed=seed, tracer=trace)
        for event in trace.events(["store", "atomic"]):
            if event.cell.name in cells:
                cells[event.cell.name] = event.value
                most = max(most, cells["tail"] - cells["head"])
    return most


def remark(puzzle):
    said = []
    most = most_rows_on_their_way(puzzle)
    if most < NUM_SLOTS:
        said.append(
            f"A remark: at most {most} of {NUM_SLOTS} slots were in use at once, so the sender waits although there is "
            f"room. Row i needs only that row i - {NUM_SLOTS} has been read: wait until the head is i + 1 - NUM_SLOTS."
        )
    if not puzzle.calls("st_release", "atom_add_release", "atom_add_acq_rel", "fence_acq_rel", where="receive"):
        said.append(
            "A remark: your head is not released. Dispatch does the same: the bytes were read before, and the head "
            "publishes nothing. docs/memory_orders.md says what such a head relies on."
        )
    return " ".join(said)


def rows(rank):
    return np.arange(1000, 1000 + 32 * ROWS, dtype=np.int32).reshape(ROWS, 32)


PUZZLE = Puzzle(
    kernel=ring,
    holes=("send", "receive"),
    addresses={"slot": "weak_s32", "tail": "relaxed_sys_s32", "head": "relaxed_sys_s32"},
    outputs=lambda rank: (np.full((ROWS, 32), -1, np.int32),),
    inputs=lambda rank: (rows(rank),),
    answer=lambda rank: (rows(rank) if rank == 1 else np.full((ROWS, 32), -1, np.int32),),
    sizes=(ROWS,),
    cells={"tail": TAIL, "head": HEAD, "slots": SLOTS},
    ring=("tail", "head"),
    num_slots=NUM_SLOTS,
    remark=remark,
    advice=advice,
    learned=(
        "a ring is two counters, one for each side. Neither is ever set back, and the slot is the number modulo "
        "the slots."
    ),
    others=(
        "the counters may grow by atomics. A head may be relaxed if the loads before it are done; a tail must release."
    ),
    runs=4,
    few=(5, "rows"),
)

if __name__ == "__main__":
    raise SystemExit(run_file(PUZZLE, __file__))
