"""Puzzle 18: ticket and turn. Four warps write entries into one send queue, and the NIC reads them in order.

 warp w: entry --post--> entries[ticket]      in turn: ready = ticket + 1      NIC: entries[0 .. ready - 1] --> out

 cell         written by                       read by
 reserved     every post: + 1                  the same: what it was before is the ticket
 entries[k]   the post with ticket k           the NIC: once ready is past k
 ready        whoever has its turn             the NIC, and the post with the next ticket

A ticket says which entry is yours. Tickets are taken in one order, and entries are written in any order: a quick warp
may be done before a slow one that came first. But `ready` is one number. If it is k + 1, all entries up to k must
be there. So each post waits for its turn. In this way many threads of a GPU share the send queue of one NIC; see
nbep/device/network/ibgda/queue_pair.py. All of it happens on one GPU.
"""

import numpy as np

from nbep.lab.puzzle import Puzzle, hole, order_advice, run_file
from nbep.lang import *

WARPS, ENTRIES = 4, 12
RESERVED, READY, QUEUE = 0, 64, 128


@device_function
def post(value, entries, reserved, ready, bounds):
    """One thread of each of the four warps, again and again. entries: the address of entries[0], an s32 each."""
    hole()


@kernel(max_threads=32 * (WARPS + 1))
def queue(out: Out, x: In, peers: Peers, bounds: Bounds, num_entries: I32):
    memory = buffer_of(peers, 0)
    warp = thread_idx() // 32
    if lane_id() == 0 and warp < WARPS:
        i = warp
        while i < num_entries:
            post(ld_nc_s32(x + 4 * i), memory + QUEUE, memory + RESERVED, memory + READY, bounds)
            i += WARPS
    elif lane_id() == 0:  # the NIC
        for k in range(num_entries):
            wait_at_least(memory + READY, k + 1, bounds)
            value = ld_weak_s32(memory + QUEUE + 4 * k)
            if 100 <= value < 100 + num_entries:
                st_weak_s32(out + 4 * (value - 100), value)


def advice(clue):
    if not clue.calls("atom_add"):
        return "Two posts take the same ticket. An atomic gives one to each: atom_add_relaxed_gpu_s32(reserved, 1)."
    if clue.kind == "deadlock":
        return (
            "A turn never comes. The post with ticket 0 goes first, because `ready` is 0: wait until `ready` is the "
            "ticket, and then store ticket + 1 there."
        )
    if not clue.calls("ld_", "wait_at_least", "atom_cas"):
        return (
            "No post waits for its turn. A quick one makes `ready` say that entries are there which a slow one has not "
            "written: wait until `ready` is your ticket before you change it."
        )
    if order := order_advice(clue, "ready", "post", "post"):
        return order
    if clue.kind in ("race", "wrong result"):
        return (
            "The NIC read an entry that was not there, or was overwritten. Entry number `ticket` lies at entries + 4 * "
            "ticket; store it first, then wait for the turn, and then store ticket + 1 into `ready`."
        )
    return ""


def values(rank):
    return np.arange(100, 100 + ENTRIES, dtype=np.int32)


PUZZLE = Puzzle(
    kernel=queue,
    holes=("post",),
    addresses={"entries": "weak_s32", "reserved": "relaxed_gpu_s32", "ready": "relaxed_gpu_s32"},
    outputs=lambda rank: (np.full(ENTRIES, -1, np.int32),),
    inputs=lambda rank: (values(rank),),
    answer=lambda rank: (values(rank),),
    num_ranks=1,
    block=32 * (WARPS + 1),
    sizes=(ENTRIES,),
    cells={"reserved": RESERVED, "ready": READY, "entries": QUEUE},
    shows="ready",
    advice=advice,
    learned="an atomic gives each thread its own place; waiting for the turn publishes the places in order.",
    others="a lock around all four steps is right, too; but then the entries are written one after the other.",
    runs=6,
    few=(5, "entries"),
)

if __name__ == "__main__":
    raise SystemExit(run_file(PUZZLE, __file__))
