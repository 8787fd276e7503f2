"""Puzzle 4, solved: add, meet, and arrive with an atomic that releases and acquires."""

from nbep.lang import (
    atom_add_acq_rel_gpu_s32,
    atom_add_relaxed_gpu_s32,
    device_function,
    grid_dim,
    syncthreads,
    thread_idx,
)


@device_function
def add_and_arrive(value, total, arrivals):
    atom_add_relaxed_gpu_s32(total, value)
    syncthreads()
    if thread_idx() != 0:
        return False
    return atom_add_acq_rel_gpu_s32(arrivals, 1) == grid_dim() - 1


HINTS = (
    "Which atomic adds to the total, and who adds to `arrivals`? An atomic returns the value before it.",
    "All threads of a block must have added before its thread 0 arrives.",
    (
        "The atomic on `arrivals` is one with acq_rel order: it publishes what this block added, and sees the"
        " others' sums."
    ),
)
