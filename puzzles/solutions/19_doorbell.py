"""Puzzle 19, solved: the record is released behind the entry, the doorbell behind the record."""

from nbep.lang import FULL_MASK, device_function, st_release_sys_s32, st_weak_s32, syncwarp


@device_function
def post(value, entry, record, doorbell, n, lane):
    st_weak_s32(entry + 4 * lane, value)
    syncwarp(FULL_MASK)
    if lane == 0:
        st_release_sys_s32(record, n + 1)
        st_release_sys_s32(doorbell, n + 1)


HINTS = (
    "Three steps, in the order in which the NIC may look: entry, record, doorbell.",
    "Who may see the record, and what must it find then? The same question for the doorbell.",
    "All lanes store, all meet, lane 0 releases n + 1 into the record and then n + 1 into the doorbell.",
)
