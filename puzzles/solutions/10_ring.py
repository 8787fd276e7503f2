"""Puzzle 10, solved. The head is a release here because wait_at_least acquires; dispatch's heads are relaxed."""

from nbep.lang import FULL_MASK, device_function, ld_weak_s32, st_release_sys_s32, st_weak_s32, syncwarp, wait_at_least

NUM_SLOTS = 4


@device_function
def send(value, slot, tail, head, i, lane, bounds):
    wait_at_least(head, i + 1 - NUM_SLOTS, bounds)
    st_weak_s32(slot + 4 * lane, value)
    syncwarp(FULL_MASK)
    if lane == 0:
        st_release_sys_s32(tail, i + 1)


@device_function
def receive(slot, tail, head, i, lane, bounds):
    wait_at_least(tail, i + 1, bounds)
    value = ld_weak_s32(slot + 4 * lane)
    syncwarp(FULL_MASK)
    if lane == 0:
        st_release_sys_s32(head, i + 1)
    return value


HINTS = (
    "Two counters: the tail says how many rows are there, the head how many have been read.",
    (
        "`send` waits for the head, stores, meets, moves the tail. `receive` waits for the tail, loads, "
        "meets, moves the head."
    ),
    "Row i - 4 has been read when the head is i - 3, and row i is there when the tail is i + 1.",
)
