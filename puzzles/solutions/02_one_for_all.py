"""Puzzle 2, solved: a syncwarp lets lane 0's release speak for all, another passes on what lane 0 has acquired."""

from nbep.lang import FULL_MASK, device_function, ld_weak_s32, st_release_sys_s32, st_weak_s32, syncwarp, wait_at_least


@device_function
def send(value, data, flag, lane):
    st_weak_s32(data + 4 * lane, value)
    syncwarp(FULL_MASK)
    if lane == 0:
        st_release_sys_s32(flag, 1)


@device_function
def receive(data, flag, lane, bounds):
    if lane == 0:
        wait_at_least(flag, 1, bounds)
    syncwarp(FULL_MASK)
    return ld_weak_s32(data + 4 * lane)


HINTS = (
    "Which lane stores what? What must be true of all 32 lanes when lane 0 raises the flag?",
    (
        "In `send`: all lanes store, all lanes meet, lane 0 raises the flag. In `receive` the same steps come"
        " in reverse."
    ),
    "The lanes meet at syncwarp(FULL_MASK), before the release of the flag and after the wait for it.",
)
