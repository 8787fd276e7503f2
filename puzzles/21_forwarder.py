"""Puzzle 21: a forwarder. Rank 0 is on another node; rank 1 passes its rows on to rank 2, from one ring into another.

 rank 0 --> ring in rank 1, 4 slots --forward--> ring in rank 2, 2 slots --> out of rank 2

 cell       lives in  written by                read by
 slots_in   rank 1    rank 0                    rank 1, forward: once tail_in is past the row
 tail_in    rank 1    rank 0: a release         rank 1, forward
 head_in    rank 0    rank 1, forward           rank 0: so many rows were forwarded, their slots are free
 slots_out  rank 2    rank 1, forward           rank 2: once tail_out is past the row
 tail_out   rank 2    rank 1, forward           rank 2: an acquire
 head_out   rank 1    rank 2: a release         rank 1, forward: so many rows were read, their slots are free

A forwarder is the receiver of one ring and the sender of another one: puzzle 10, both ends in one thread. Between nodes
each token goes this way: over the network once, and then over NVLink to each rank of the node that wants it.
"""

import numpy as np

from nbep.lab.puzzle import Puzzle, hole, order_advice, run_file, stores_to
from nbep.lang import *

IN_SLOTS, OUT_SLOTS, ROWS, ROW_BYTES = 4, 2, 9, 128
TAIL, HEAD, SLOTS = 0, 64, 128


@device_function
def forward(slot_in, slot_out, tail_in, head_in, tail_out, head_out, n, lane, bounds):
    """Row n, 32 lanes with a number each. slot_in, slot_out: where its slots begin; slot_out is one of OUT_SLOTS."""
    hole()


@kernel(max_threads=32)
def two_rings(out: Out, x: In, peers: Peers, bounds: Bounds, num_rows: I32):
    lane = lane_id()
    tail_in, head_in = buffer_of(peers, 1) + TAIL, buffer_of(peers, 0) + HEAD
    tail_out, head_out = buffer_of(peers, 2) + TAIL, buffer_of(peers, 1) + HEAD
    for n in range(num_rows):
        slot_in = buffer_of(peers, 1) + SLOTS + ROW_BYTES * (n % IN_SLOTS)
        slot_out = buffer_of(peers, 2) + SLOTS + ROW_BYTES * (n % OUT_SLOTS)
        if peers.rank == 0:
            wait_at_least(head_in, n + 1 - IN_SLOTS, bounds)
            st_weak_s32(slot_in + 4 * lane, ld_nc_s32(x + ROW_BYTES * n + 4 * lane))
            syncwarp(FULL_MASK)
            if lane == 0:
                st_release_sys_s32(tail_in, n + 1)
        elif peers.rank == 1:
            forward(slot_in, slot_out, tail_in, head_in, tail_out, head_out, n, lane, bounds)
        else:
            wait_at_least(tail_out, n + 1, bounds)
            st_weak_s32(out + ROW_BYTES * n + 4 * lane, ld_weak_s32(slot_out + 4 * lane))
            syncwarp(FULL_MASK)
            if lane == 0:
                st_release_sys_s32(head_out, n + 1)


def advice(clue):
    if clue.kind == "divergence":
        return "syncwarp(FULL_MASK) waits for all 32 lanes: move it out of the `if`."
    if clue.kind == "deadlock":
        if not stores_to(clue, "tail_out"):
            return "Rank 2 waits for a row: `forward` has to store n + 1 at tail_out when the row is in slot_out."
        if not stores_to(clue, "head_in"):
            return "Rank 0 waits for a free slot: `forward` has to store n + 1 at head_in when it has read the row."
        return (
            "`forward` waits for what does not come. Row n is there when tail_in is n + 1; slot_out is free when "
            "head_out is n + 1 - OUT_SLOTS."
        )
    if clue.kind in ("race", "wrong result") and not clue.calls("syncwarp", "vote_"):
        return "Lane 0 moves tail_out and head_in for 32 lanes: they have to meet at syncwarp(FULL_MASK) first."
    if order := order_advice(clue, "tail", "forward", "forward"):
        is_out = "rank 2: tail" in clue.report.partition("\n")[0]
        return order.replace("`tail`", "`tail_out`" if is_out else "`tail_in`")
    if clue.kind == "wrong result":
        row = int(np.argwhere((clue.got != clue.expected).any(axis=1))[0, 0])
        if (clue.got[row] > clue.expected[row]).any():
            return (
                f"Row {row} was overwritten by a later one. Before you store into slot_out, wait until head_out is n + "
                f"1 - OUT_SLOTS; and store head_in only when all lanes have read slot_in."
            )
        return (
            f"Row {row} was read before it was there. Wait until tail_in is n + 1, and move tail_out after the stores."
        )
    if clue.kind == "race":
        return (
            "Four cells: wait until tail_in is n + 1 and head_out is n + 1 - OUT_SLOTS, copy, meet, and only then "
            "store n + 1 into tail_out and head_in, both with release."
        )
    return ""


def rows(rank):
    return np.arange(2000, 2000 + 32 * ROWS, dtype=np.int32).reshape(ROWS, 32)


PUZZLE = Puzzle(
    kernel=two_rings,
    holes=("forward",),
    addresses={
        "slot_in": "weak_s32",
        "slot_out": "weak_s32",
        "tail_in": "relaxed_sys_s32",
        "head_in": "relaxed_sys_s32",
        "tail_out": "relaxed_sys_s32",
        "head_out": "relaxed_sys_s32",
    },
    outputs=lambda rank: (np.full((ROWS, 32), -1, np.int32),),
    inputs=lambda rank: (rows(rank),),
    answer=lambda rank: (rows(rank) if rank == 2 else np.full((ROWS, 32), -1, np.int32),),
    num_ranks=3,
    sizes=(ROWS,),
    cells={"tail": TAIL, "head": HEAD, "slots": SLOTS},
    shows="tail",
    advice=advice,
    learned="a forwarder is receiver and sender at once, and frees a slot when it has filled the next one.",
    others="the two waits may change places. The real forwarder reads each slot once and writes it to several rings.",
    runs=3,
    few=(3, "rows"),
)

if __name__ == "__main__":
    raise SystemExit(run_file(PUZZLE, __file__))
