"""Puzzle 9, solved: n travels as -n - 1, with relaxed order."""

from nbep.lang import device_function, give_up, ld_relaxed_sys_s32, st_relaxed_sys_s32, start_wait


@device_function
def announce(cell, count):
    st_relaxed_sys_s32(cell, -count - 1)


@device_function
def await_count(cell, bounds):
    deadline = start_wait(bounds)
    while ld_relaxed_sys_s32(cell) == 0:
        if give_up(bounds, deadline):
            break
    return -ld_relaxed_sys_s32(cell) - 1


HINTS = (
    '0 means "not here yet". Which number can stand for a count of 0?',
    "Send -count - 1 or count + 1, and undo it behind the loop.",
)
