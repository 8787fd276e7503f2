"""Puzzle 20, solved: each warp releases how far it is, and the coordinator acquires the least of it."""

from nbep.lang import FULL_MASK, atom_exch_release_cta_shared_s32, device_function, ld_acquire_cta_shared_s32, syncwarp


@device_function
def note(cell, num_rows, lane):
    syncwarp(FULL_MASK)
    if lane == 0:
        atom_exch_release_cta_shared_s32(cell, num_rows)


@device_function
def least_progress(board, num_warps):
    least = ld_acquire_cta_shared_s32(board)
    for warp in range(1, num_warps):
        least = min(least, ld_acquire_cta_shared_s32(board + 4 * warp))
    return least


HINTS = (
    "The tail may not be ahead of any warp. Which number of the three is that?",
    "`note`: the lanes meet, then one of them writes num_rows. `least_progress`: a loop and min().",
    "Write with atom_exch_release_cta_shared_s32(cell, num_rows), read with ld_acquire_cta_shared_s32.",
)
