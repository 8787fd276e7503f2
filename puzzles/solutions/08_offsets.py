"""Puzzle 8, solved: the inclusive sum in five turns, less the own value."""

from nbep.lang import FULL_MASK, device_function, shfl_up_s32


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


HINTS = (
    "After the turn with delta 1 each lane has the sum of 2 values, after delta 2 of 4.",
    "Lanes with lane < delta take part in the shuffle and do not add.",
    "At the end each lane has the sum with its own value. Take that away.",
)
