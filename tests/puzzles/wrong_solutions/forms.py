"""Typical wrong solutions of puzzle 22: rows in groups.."""

WRONG = """
22
too few turns | wrong result | Each group begins at the sum of all rounded counts before it
    exclusive_sum: while delta < 32 => while delta < 16
no gaps | wrong result | without gaps
    find_start: exclusive_sum(padded, lane) => exclusive_sum(count, lane)
the sum is rounded | wrong result | round each count, then add up
    find_start: exclusive_sum(padded, lane) => (exclusive_sum(count, lane) + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
its own rows too | wrong result | behind its own rows
    find_start: exclusive_sum(padded, lane) => exclusive_sum(padded, lane) + padded
a gap for nobody | wrong result | without tokens takes no rows
    find_start: (count + ALIGNMENT - 1) // ALIGNMENT => (count // ALIGNMENT + 1)
its own lane | wrong result | in the lane of its expert
    find_row: shfl_idx_s32(FULL_MASK, start, max(expert, 0)) => start
all in one row | wrong result | Two tokens have the same row
    find_row: begin + below if => begin if
lanes above | wrong result | count only lanes below with the same expert
    find_row: same & ((1 << lane) - 1) => same & ~((2 << lane) - 1)
itself as well | wrong result | one row too far
    find_row: (1 << lane) - 1 => (2 << lane) - 1
a row without a token | wrong result | has no token: its row is -1
    find_row: begin + below if expert >= 0 else -1 => begin + below
some lanes return | divergence | Let all lanes call them
    find_row:
    -     begin = shfl
    +     if expert < 0:
    +         return -1
    +     begin = shfl
"""
