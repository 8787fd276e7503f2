"""Puzzle 17, solved."""

from nbep.lang import (
    FULL_MASK,
    buffer_of,
    device_function,
    give_up,
    ld_nc_s32,
    ld_relaxed_sys_s32,
    ld_weak_s32,
    st_relaxed_sys_s32,
    st_release_sys_s32,
    st_weak_s32,
    start_wait,
    syncwarp,
    wait_at_least,
)

NUM_RANKS, NUM_SLOTS, ROW_BYTES = 3, 4, 128
COUNT, TAIL, HEAD, SLOTS = 0, 128, 256, 384


@device_function
def slot_of(peers, src, dst, n):
    return buffer_of(peers, dst) + SLOTS + ROW_BYTES * (NUM_SLOTS * src + n % NUM_SLOTS)


@device_function
def count_tokens(is_token_in_rank, dst, num_tokens):
    count = 0
    for token in range(num_tokens):
        count += ld_nc_s32(is_token_in_rank + 4 * (NUM_RANKS * token + dst))
    return count


@device_function
def await_count(cell, bounds):
    deadline = start_wait(bounds)
    seen = ld_relaxed_sys_s32(cell)
    while seen == 0:
        if give_up(bounds, deadline):
            return 0
        seen = ld_relaxed_sys_s32(cell)
    return -seen - 1


@device_function
def send_tokens(x, is_token_in_rank, peers, bounds, dst, num_tokens, lane):
    me = peers.rank
    count, tail = buffer_of(peers, dst) + COUNT + 4 * me, buffer_of(peers, dst) + TAIL + 4 * me
    head = buffer_of(peers, me) + HEAD + 4 * dst
    if lane == 0:
        st_relaxed_sys_s32(count, -count_tokens(is_token_in_rank, dst, num_tokens) - 1)
    n = 0
    for token in range(num_tokens):
        if ld_nc_s32(is_token_in_rank + 4 * (NUM_RANKS * token + dst)) != 0:
            wait_at_least(head, n + 1 - NUM_SLOTS, bounds)
            st_weak_s32(slot_of(peers, me, dst, n) + 4 * lane, ld_nc_s32(x + ROW_BYTES * token + 4 * lane))
            syncwarp(FULL_MASK)
            if lane == 0:
                st_release_sys_s32(tail, n + 1)
            n += 1


@device_function
def receive_tokens(out, peers, bounds, src, lane):
    me = peers.rank
    counts, tail = buffer_of(peers, me) + COUNT, buffer_of(peers, me) + TAIL + 4 * src
    head = buffer_of(peers, src) + HEAD + 4 * me
    first = 0
    for rank in range(src):
        first += await_count(counts + 4 * rank, bounds)
    num_rows = await_count(counts + 4 * src, bounds)
    for n in range(num_rows):
        wait_at_least(tail, n + 1, bounds)
        value = ld_weak_s32(slot_of(peers, src, me, n) + 4 * lane)
        st_weak_s32(out + ROW_BYTES * (first + n) + 4 * lane, value)
        syncwarp(FULL_MASK)
        if lane == 0:
            st_release_sys_s32(head, n + 1)


HINTS = (
    "Puzzle 9 announces, puzzle 8 finds where rows begin, puzzle 10 is the ring.",
    ("first is the sum of the counts of the ranks before src. Every lane may wait for the counts on its own."),
    "In the ring, n takes the place of i, and slot_of gives the slot.",
)
