"""Puzzle 21, solved: a receiver's wait, a sender's wait, a copy, and both counters."""

from nbep.lang import FULL_MASK, device_function, ld_weak_s32, st_release_sys_s32, st_weak_s32, syncwarp, wait_at_least

OUT_SLOTS = 2


@device_function
def forward(slot_in, slot_out, tail_in, head_in, tail_out, head_out, n, lane, bounds):
    wait_at_least(tail_in, n + 1, bounds)
    wait_at_least(head_out, n + 1 - OUT_SLOTS, bounds)
    st_weak_s32(slot_out + 4 * lane, ld_weak_s32(slot_in + 4 * lane))
    syncwarp(FULL_MASK)
    if lane == 0:
        st_release_sys_s32(tail_out, n + 1)
        st_release_sys_s32(head_in, n + 1)


HINTS = (
    "Two waits, a copy, a meeting, two stores. Which cell does each of them use?",
    "Wait for tail_in as a receiver does, and for head_out as a sender does.",
    "Copy at + 4 * lane, meet at syncwarp(FULL_MASK), and lane 0 releases n + 1 into tail_out and into head_in.",
)
