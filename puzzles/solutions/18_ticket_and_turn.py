"""Puzzle 18, solved: each post acquires what those before it have released, and releases it with its own entry."""

from nbep.lang import (
    atom_add_relaxed_gpu_s32,
    device_function,
    give_up,
    ld_acquire_gpu_s32,
    st_release_gpu_s32,
    st_weak_s32,
    start_wait,
)


@device_function
def post(value, entries, reserved, ready, bounds):
    ticket = atom_add_relaxed_gpu_s32(reserved, 1)
    st_weak_s32(entries + 4 * ticket, value)
    deadline = start_wait(bounds)
    while ld_acquire_gpu_s32(ready) != ticket:
        if give_up(bounds, deadline):
            return
    st_release_gpu_s32(ready, ticket + 1)


HINTS = (
    "Four steps: take a ticket, write the entry, wait for your turn, give the turn to the next one.",
    "The ticket is what an atomic on `reserved` returns. Your turn has come when `ready` is your ticket.",
    "Poll `ready` with an acquire and store ticket + 1 with a release, both of scope gpu. Puzzle 1 has the loop.",
)
