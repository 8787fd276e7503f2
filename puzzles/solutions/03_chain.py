"""Puzzle 3, solved: acquire what rank 0 has released, release it to rank 2."""

from nbep.lang import device_function, give_up, ld_acquire_sys_s32, st_release_sys_s32, start_wait


@device_function
def pass_on(first, second, bounds):
    deadline = start_wait(bounds)
    while ld_acquire_sys_s32(first) == 0:
        if give_up(bounds, deadline):
            return
    st_release_sys_s32(second, 1)


HINTS = (
    "pass_on reads one cell and writes another one. Rank 1 does not touch `data`.",
    "What it reads must be acquired, so that what it writes can release more than its own number.",
)
