"""Puzzle 14: a slot for each row. Four warps of rank 0 put nine rows into slots of rank 1, whichever is free next.

 rank 0: warp w: row w, w + 4, ... --put_row--> slots[next++]           rank 1: waits for count = 9, reads the slots

 cell      lives in  written by                        read by
 next      rank 0    one lane of each row: + 1         the same: what it was before is the number of the slot
 slots[k]  rank 1    all lanes of the warp that has k  rank 1: once count is complete
 count     rank 1    one lane of each row: + 1         rank 1

There are slots enough for all rows, as in the low-latency mode, so no thread waits for a free one. Each row carries its
own number in its first word, because slots are taken in any order.
"""

import numpy as np

from nbep.lab.puzzle import Puzzle, hole, order_advice, run_file, stores_to
from nbep.lang import *

ROWS, ROW_BYTES = 9, 128
NEXT, COUNT, SLOTS = 0, 64, 128


@device_function
def put_row(value, slots, next_slot, count, lane):
    """All 32 lanes of a warp, each with its value of the row. slots: address of slots[0]; a slot has 128 bytes."""
    hole()


@kernel(max_threads=128)
def slots_of_rows(out: Out, x: In, peers: Peers, bounds: Bounds, num_rows: I32):
    warp, lane = thread_idx() // 32, lane_id()
    slots, count = buffer_of(peers, 1) + SLOTS, buffer_of(peers, 1) + COUNT
    if peers.rank == 0:
        row = warp
        while row < num_rows:
            put_row(ld_nc_s32(x + ROW_BYTES * row + 4 * lane), slots, buffer_of(peers, 0) + NEXT, count, lane)
            row += 4
    elif warp == 0:
        wait_at_least(count, num_rows, bounds)
        for k in range(num_rows):
            row = ld_weak_s32(slots + ROW_BYTES * k)
            if 0 <= row < num_rows:
                st_weak_s32(out + ROW_BYTES * row + 4 * lane, ld_weak_s32(slots + ROW_BYTES * k + 4 * lane))


def advice(clue):
    if clue.kind == "deadlock":
        return "Rank 1 waits until `count` is 9: one lane adds 1 to it, atomically, for each row."
    if clue.about("Misaligned"):
        return "Slot k begins ROW_BYTES * k bytes behind slots, and lane i has its number 4 * i bytes behind that."
    if clue.kind == "memory":
        return "More slots were taken than there are rows: one lane takes a slot for its whole warp."
    if not clue.calls("shfl_idx"):
        return (
            "One lane takes the slot, with an atomic, and the 31 others have to learn its number: "
            "shfl_idx_s32(FULL_MASK, value, 0) gives all lanes that of lane 0."
        )
    if stores_to(clue, "next_slot", ("st_",)):
        return "Four warps take slots at once: a load and a store give two warps the same one. Take an atomic."
    if not clue.calls("st_release", "atom_add_release", "atom_add_acq_rel", "fence_acq_rel"):
        return order_advice(clue, "count")
    if clue.kind in ("race", "wrong result") and not clue.calls("syncwarp"):
        return "Lane 0 adds to `count` for 32 lanes: they have to meet at a syncwarp between their stores and that."
    if clue.kind == "race" and clue.about("between ranks it takes sys"):
        return "The count tells another rank: `cta` reaches the block, `gpu` this GPU. It takes the scope `sys`."
    if clue.kind in ("race", "wrong result"):
        return (
            "A row was counted before it was there. First the stores, then a syncwarp, then one lane adds 1 to `count`."
        )
    return ""


def rows(rank):
    x = np.random.default_rng(14).integers(100, 1000, (ROWS, 32)).astype(np.int32)
    x[:, 0] = np.arange(ROWS)
    return x


PUZZLE = Puzzle(
    kernel=slots_of_rows,
    holes=("put_row",),
    addresses={"slots": "weak_s32", "next_slot": "relaxed_gpu_s32", "count": "relaxed_sys_s32"},
    outputs=lambda rank: (np.full((ROWS, 32), -1, np.int32),),
    inputs=lambda rank: (rows(rank),),
    answer=lambda rank: (rows(rank) if rank == 1 else np.full((ROWS, 32), -1, np.int32),),
    block=128,
    sizes=(ROWS,),
    num_bytes=SLOTS + ROW_BYTES * ROWS,
    cells={"next": NEXT, "count": COUNT, "slots": SLOTS},
    shows="count",
    advice=advice,
    learned=(
        "slots that are taken in any order need no ring: an atomic gives numbers, a count says when all are there."
    ),
    others="any lane may take the slot and any lane may count, as long as the lanes meet in between.",
    runs=4,
    few=(4, "rows"),
)

if __name__ == "__main__":
    raise SystemExit(run_file(PUZZLE, __file__))
