"""Puzzle 14, solved: one lane takes the slot and tells the others, all store and meet, one counts."""

from nbep.lang import (
    FULL_MASK,
    atom_add_relaxed_gpu_s32,
    atom_add_release_sys_s32,
    device_function,
    shfl_idx_s32,
    st_weak_s32,
    syncwarp,
)

ROW_BYTES = 128


@device_function
def put_row(value, slots, next_slot, count, lane):
    slot = 0
    if lane == 0:
        slot = atom_add_relaxed_gpu_s32(next_slot, 1)
    slot = shfl_idx_s32(FULL_MASK, slot, 0)
    st_weak_s32(slots + ROW_BYTES * slot + 4 * lane, value)
    syncwarp(FULL_MASK)
    if lane == 0:
        atom_add_release_sys_s32(count, 1)


HINTS = (
    "One lane takes a slot for all, all lanes store, one lane counts.",
    "Lane 0 has the number of the slot from an atomic; shfl_idx_s32(FULL_MASK, slot, 0) gives it to all.",
    "The lanes meet at a syncwarp before lane 0 adds to `count`, with release and scope sys.",
)
