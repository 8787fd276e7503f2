"""Puzzle 19: the doorbell. A GPU writes entries, says how many there are, and rings.

 rank 0: entry --> record: how many --> doorbell: look       NIC (rank 1): reads the record, and then the entries

 cell        lives in  written by      read by
 entries[n]  rank 1    all 32 lanes    the NIC: once record or doorbell is past n
 record      rank 1    one lane        the NIC: when it was rung, and also on its own
 doorbell    rank 1    one lane        the NIC: until it is rung

A NIC looks at the record when the doorbell rings. It may also look before: after an earlier ring, or because it was
awake. So the record alone must promise that the entries are there, and the doorbell must promise the record. Here
rank 1 plays the NIC: its warp 0 looks when it is rung, its warp 1 looks at the record all the time.
"""

import numpy as np

from nbep.lab.puzzle import Puzzle, hole, order_advice, run_file, stores_to
from nbep.lang import *

ENTRIES, ENTRY_BYTES = 4, 128
RECORD, DOORBELL, QUEUE = 0, 64, 128


@device_function
def post(value, entry, record, doorbell, n, lane):
    """Entry number n: 32 lanes with a word each. Record and doorbell become n + 1. entry: where its slot begins."""
    hole()


@kernel(max_threads=64)
def entries(rung: Out, looked: Out, x: In, peers: Peers, bounds: Bounds, num_entries: I32):
    warp, lane = thread_idx() // 32, lane_id()
    memory = buffer_of(peers, 1)
    record, doorbell = memory + RECORD, memory + DOORBELL
    for n in range(num_entries):
        entry = memory + QUEUE + ENTRY_BYTES * n
        at = ENTRY_BYTES * n + 4 * lane
        if peers.rank == 0:
            if warp == 0:
                post(ld_nc_s32(x + at), entry, record, doorbell, n, lane)
        elif warp == 0:
            wait_at_least(doorbell, n + 1, bounds)
            if ld_relaxed_sys_s32(record) > n:  # otherwise it was rung for nothing
                st_weak_s32(rung + at, ld_weak_s32(entry + 4 * lane))
        else:
            wait_at_least(record, n + 1, bounds)
            st_weak_s32(looked + at, ld_weak_s32(entry + 4 * lane))


def advice(clue):
    if clue.kind == "deadlock":
        if not stores_to(clue, "doorbell"):
            return "The NIC waits for a ring: one lane has to store n + 1 at the address `doorbell`."
        if stores_to(clue, "record"):
            return (
                f"The NIC waits for a number that never comes, and sees {clue.seen}. Record and doorbell become n + 1."
            )
        return "The NIC waits for the record: one lane has to store n + 1 at the address `record`."
    if clue.kind == "divergence":
        return "syncwarp(FULL_MASK) waits for all 32 lanes: move it out of the `if`."
    if clue.kind in ("race", "wrong result") and not clue.calls("syncwarp"):
        return "One lane speaks for 32: they have to meet at syncwarp(FULL_MASK) between their stores and the record."
    if clue.kind == "wrong result" and clue.name == "rung" and (clue.got == -1).any():
        row = int(np.argwhere((clue.got == -1).any(axis=1))[0, 0])
        return (
            f"The NIC was rung for entry {row}, and the record did not count it yet: it went to sleep again. Store the "
            f"record first, and then ring."
        )
    for cell, other in (("record", "the entries"), ("doorbell", "the record and the entries")):
        if clue.kind == "race" and f"{cell} (byte" in clue.report.partition("\n")[0]:
            return (
                f"The store to `{cell}` is too weak: whoever sees it must also see {other}. Write "
                f"`st_release_sys_s32({cell}, n + 1)`."
            )
    if order := order_advice(clue, "record", "post"):
        return order
    if clue.kind in ("race", "wrong result"):
        return "First the words of all lanes, at entry + 4 * lane, then the record, then the doorbell."
    return ""


def words(rank):
    return np.arange(700, 700 + 32 * ENTRIES, dtype=np.int32).reshape(ENTRIES, 32)


def unread(rank):
    return np.full((ENTRIES, 32), -1, np.int32)


PUZZLE = Puzzle(
    kernel=entries,
    holes=("post",),
    addresses={"entry": "weak_s32", "record": "relaxed_sys_s32", "doorbell": "relaxed_sys_s32"},
    outputs=lambda rank: (unread(rank), unread(rank)),
    inputs=lambda rank: (words(rank),),
    answer=lambda rank: (words(rank), words(rank)) if rank == 1 else (unread(rank), unread(rank)),
    block=64,
    sizes=(ENTRIES,),
    cells={"record": RECORD, "doorbell": DOORBELL, "entries": QUEUE},
    shows="doorbell",
    advice=advice,
    learned="each cell that another agent may look at on its own needs its own release.",
    others="two relaxed stores do, each behind a fence_acq_rel_sys(). A real NIC has its doorbell in a register.",
    runs=5,
)

if __name__ == "__main__":
    raise SystemExit(run_file(PUZZLE, __file__))
