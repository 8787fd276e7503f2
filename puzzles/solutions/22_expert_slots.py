"""Puzzle 22, solved: round each count up, then add up; and count the lanes below that have the same expert."""

from nbep.lang import FULL_MASK, device_function, match_any_s32, popc_u32, shfl_idx_s32, shfl_up_s32

ALIGNMENT = 8


@device_function
def exclusive_sum(value, lane):
    total = value
    delta = 1
    while delta < 32:
        below = shfl_up_s32(FULL_MASK, total, delta)
        if lane >= delta:
            total += below
        delta *= 2
    return total - value


@device_function
def find_start(count, lane):
    padded = (count + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    return exclusive_sum(padded, lane)


@device_function
def find_row(expert, start, lane):
    begin = shfl_idx_s32(FULL_MASK, start, max(expert, 0))
    same = match_any_s32(FULL_MASK, expert)
    below = popc_u32(same & ((1 << lane) - 1))
    return begin + below if expert >= 0 else -1


HINTS = (
    "Round the count up to a multiple of ALIGNMENT, and hand that to exclusive_sum.",
    "shfl_idx_s32(FULL_MASK, start, e) gives a lane the value of lane e; for a lane without a token take e = 0.",
    "popc_u32(mask & ((1 << lane) - 1)) is how many lanes below are in the mask.",
)
