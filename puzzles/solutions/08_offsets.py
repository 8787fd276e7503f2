"""Puzzle 8, solved: the inclusive sum in five turns, less the own value."""

from nbep.device.jit import device_function
from nbep.device.primitives import FULL_MASK, shfl_up_s32


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
