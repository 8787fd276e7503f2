"""Puzzle 1, solved: the store of the flag is a release, the load that polls it an acquire, and data lies between."""

from nbep.lang import (
    device_function,
    give_up,
    ld_acquire_sys_s32,
    ld_weak_s32,
    st_release_sys_s32,
    st_weak_s32,
    start_wait,
)


@device_function
def send(value, data, flag):
    st_weak_s32(data, value)
    st_release_sys_s32(flag, 1)


@device_function
def receive(data, flag, bounds):
    deadline = start_wait(bounds)
    while ld_acquire_sys_s32(flag) != 1:
        if give_up(bounds, deadline):
            break
    return ld_weak_s32(data)


HINTS = (
    "`send` needs two stores, and `receive` two loads: one in the loop, one behind it.",
    "The number goes first. Which of the four needs a release, and which an acquire?",
    (
        "The flag is stored with st_release_sys_s32 and polled with ld_acquire_sys_s32; weak accesses are "
        "enough for the number."
    ),
)
