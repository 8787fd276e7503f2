"""Puzzle 20: the minimum on the board. Three warps write a third of each row; it is there when the slowest one is done.

 rank 0: warps 0, 1 and 2: a third of row n --> slots[n % 2] of rank 1         --note--> board[w] = n + 1
         the coordinator, warp 3: least_progress(board) --> tail                         rank 1: slots --> out

 cell      lives in        written by                    read by
 slots[k]  rank 1          warps 0 to 2 of rank 0        rank 1: once tail is past the row
 board[w]  rank 0, shared  warp w: rows it has written   the coordinator
 tail      rank 1          the coordinator               rank 1: so many rows are there
 head      rank 0          rank 1                        warps 0 to 2 of rank 0: so many rows have been read

Between nodes a tail is a message on the network, so one thread sends it for all warps. It must not say more than the
slowest warp has done. The board lies in shared memory, where one block has to agree: the scope is `cta`. Its functions
are ld_acquire_cta_shared_s32(address), atom_exch_release_cta_shared_s32(address, value), and others of the kind. nbep's
board is in nbep/device/protocols/board.py.
"""

import numpy as np

from nbep.lab.puzzle import RELEASES, Puzzle, hole, run_file, stores_to
from nbep.lang import *

WARPS, ROWS, NUM_SLOTS, ROW_BYTES = 3, 7, 2, 3 * 128
TAIL, HEAD, SLOTS = 0, 64, 128


@device_function
def note(cell, num_rows, lane):
    """All 32 lanes of a warp, each of which has stored its number. cell: the place of this warp on the board."""
    hole()


@device_function
def least_progress(board, num_warps):
    """How many rows all warps have written. board: the address of board[0], an s32 each. One thread comes here."""
    return hole()


@kernel(max_threads=32 * (WARPS + 1))
def shared_slots(out: Out, x: In, peers: Peers, bounds: Bounds, num_rows: I32):
    warp, lane = thread_idx() // 32, lane_id()
    tail, head, slots = buffer_of(peers, 1) + TAIL, buffer_of(peers, 0) + HEAD, buffer_of(peers, 1) + SLOTS
    board = smem_base()
    if thread_idx() < WARPS:
        st_shared_s32(board + 4 * thread_idx(), 0)
    syncthreads()
    if peers.rank == 1:
        if warp == 0:
            for n in range(num_rows):
                wait_at_least(tail, n + 1, bounds)
                for part in range(WARPS):
                    at = 128 * part + 4 * lane
                    st_weak_s32(out + ROW_BYTES * n + at, ld_weak_s32(slots + ROW_BYTES * (n % NUM_SLOTS) + at))
                syncwarp(FULL_MASK)
                if lane == 0:
                    st_release_sys_s32(head, n + 1)
    elif warp < WARPS:
        at = 128 * warp + 4 * lane
        for n in range(num_rows):
            wait_at_least(head, n + 1 - NUM_SLOTS, bounds)
            st_weak_s32(slots + ROW_BYTES * (n % NUM_SLOTS) + at, ld_nc_s32(x + ROW_BYTES * n + at))
            note(board + 4 * warp, n + 1, lane)
    elif lane == 0:
        published = 0
        deadline = start_wait(bounds)
        while published < num_rows:
            least = least_progress(board, WARPS)
            if least > published:
                st_release_sys_s32(tail, least)
                published = least
                deadline = start_wait(bounds)
            elif give_up(bounds, deadline):
                return


def advice(clue):
    if clue.kind in ("deadlock", "divergence") and not stores_to(clue, "cell"):
        return "No warp writes its progress on the board: `note` has to store num_rows at the address `cell`."
    if clue.kind == "divergence":
        return "syncwarp(FULL_MASK) waits for all 32 lanes: move it out of the `if`."
    if clue.kind in ("deadlock", "race") and not clue.calls("ld_acq", "ld_rel", "atom_", where="least_progress"):
        return (
            "`ld_shared_s32` is for bytes that no other thread changes meanwhile. The coordinator polls the board: "
            "write `ld_acquire_cta_shared_s32`."
        )
    if clue.kind == "deadlock":
        return (
            "Rank 1 waits for a tail that does not move. The tail becomes what `least_progress` returns: the least of "
            "the numbers at board + 4 * w for all num_warps warps, each of which `note` sets to num_rows."
        )
    if clue.about("waits without polling"):
        return "The coordinator has to load the board anew each time: ld_acquire_cta_shared_s32(board + 4 * warp)."
    if clue.kind in ("race", "wrong result") and not clue.calls("syncwarp", "vote_", where="note"):
        return "One lane notes for 32: they have to meet at syncwarp(FULL_MASK) first, when all have stored."
    is_released = clue.calls(*RELEASES, where="note")
    if clue.kind == "race" and (not is_released or clue.about("nothing, and no fence")):
        return (
            "The board is too weak: it must publish what the warp has stored in its slot. `note` releases, with "
            "atom_exch_release_cta_shared_s32, and `least_progress` acquires, with ld_acquire_cta_shared_s32."
        )
    if clue.kind in ("race", "wrong result"):
        return (
            "The tail was ahead of the slowest warp. `least_progress` has to return the least of all num_warps places "
            "on the board, not the largest one and not the first one."
        )
    return ""


def rows(rank):
    return np.arange(300, 300 + 96 * ROWS, dtype=np.int32).reshape(ROWS, 96)


def unread(rank):
    return np.full((ROWS, 96), -1, np.int32)


PUZZLE = Puzzle(
    kernel=shared_slots,
    holes=("note", "least_progress"),
    addresses={"cell": "shared_s32", "board": "shared_s32"},
    outputs=lambda rank: (unread(rank),),
    inputs=lambda rank: (rows(rank),),
    answer=lambda rank: (rows(rank) if rank == 1 else unread(rank),),
    block=32 * (WARPS + 1),
    smem_bytes=4 * WARPS,
    sizes=(ROWS,),
    cells={"tail": TAIL, "head": HEAD, "slots": SLOTS},
    ring=("tail", "head"),
    num_slots=NUM_SLOTS,
    advice=advice,
    learned="one thread can speak for many warps: it publishes the least of what they have released to it.",
    others="relaxed accesses of the board do, with fence_acq_rel_cta() before the write and behind the loads.",
    runs=3,
    few=(1, "row"),
)

if __name__ == "__main__":
    raise SystemExit(run_file(PUZZLE, __file__))
