"""Puzzle 15, solved: the credit is the last thing that the receiver does with a half, and a release."""

from nbep.lang import FULL_MASK, atom_add_release_sys_s32, device_function, st_weak_s32, syncwarp, wait_at_least

COUNT, DATA = 0, 128


@device_function
def send_call(value, half, credit, n, lane, bounds):
    wait_at_least(credit, n - 1, bounds)
    st_weak_s32(half + DATA + 4 * lane, value)
    syncwarp(FULL_MASK)
    if lane == 0:
        atom_add_release_sys_s32(half + COUNT, 1)


@device_function
def end_call(half, credit, lane):
    syncwarp(FULL_MASK)
    if lane == 0:
        st_weak_s32(half + COUNT, 0)
        atom_add_release_sys_s32(credit, 1)


HINTS = (
    "Before a call writes into a half, the call that used it before must be done: call n - 2.",
    "The receiver sets `count` back before it gives the credit, and gives the credit as a release.",
    ("`send_call` waits for n - 1 credits and stores at half + DATA; all lanes meet before one speaks for them."),
)
