"""Puzzle 13: the cast to FP8. 128 numbers share a scale; a warp casts them, four in each lane.

 lane i: x[4 i .. 4 i + 3] --|x|--> amax of the warp --> scale = 448 / amax --> four e4m3 in one word --> out[i]
 lane 0: amax / 448 --> scales: what the receiver multiplies by

448 is the largest e4m3. shfl_xor_f32(FULL_MASK, value, 16) gives a lane the value of the lane whose number differs in
that bit; with 16, 8, 4, 2 and 1 all lanes get the maximum of all. A group of zeros must not divide by zero: amax is at
least 1e-4. Divide and multiply with f32_div_rn and f32_mul_rn: then every machine gets the same bits. Pack four
numbers with f32x4_to_e4m3x4(a, b, c, d), and write constants as f32(448).
"""

import ml_dtypes
import numpy as np

from nbep.lab.puzzle import Puzzle, hole, run_file
from nbep.lang import *

COLUMNS, GROUPS = 128, 3


@device_function
def largest_of_warp(value):
    """The largest of the values of all 32 lanes, in every lane."""
    return hole()


@device_function
def scales_of(amax):
    """A tuple: what the numbers are multiplied by, and what undoes it."""
    return hole()


@kernel(max_threads=32)
def cast(out: Out, scales: Out, x: In, peers: Peers, bounds: Bounds, num_groups: I32):
    lane = lane_id()
    for group in range(num_groups):
        at = x + 4 * (COLUMNS * group + 4 * lane)
        a, b, c, d = ld_nc_f32(at), ld_nc_f32(at + 4), ld_nc_f32(at + 8), ld_nc_f32(at + 12)
        own = f32_max(f32_max(f32_abs(a), f32_abs(b)), f32_max(f32_abs(c), f32_abs(d)))
        scale, inverse = scales_of(largest_of_warp(own))
        word = f32x4_to_e4m3x4(f32_mul_rn(a, scale), f32_mul_rn(b, scale), f32_mul_rn(c, scale), f32_mul_rn(d, scale))
        st_weak_u32(out + 4 * (32 * group + lane), word)
        if lane == 0:
            st_weak_f32(scales + 4 * group, inverse)


def numbers(rank):
    x = np.random.default_rng(13).standard_normal((GROUPS, COLUMNS)).astype(np.float32)
    x[1] = 0
    return x


def answer(rank):
    amax = np.maximum(np.abs(numbers(rank)).max(axis=1, keepdims=True), np.float32(1e-4))
    fp8 = (numbers(rank) * (np.float32(448) / amax)).astype(ml_dtypes.float8_e4m3fn)
    return fp8.view(np.int32), (amax / np.float32(448))[:, 0]


def advice(clue):
    if clue.kind in ("divergence", "deadlock"):
        return "All 32 lanes have to come to the same shuffles."
    if clue.about("ZeroDivision"):
        return "Group 1 holds zeros alone, so its amax is 0, and something divides by it: amax is at least 1e-4."
    if clue.kind == "wrong result" and clue.name == "scales":
        if clue.got[1] == 0 or not np.isfinite(clue.got[1]):
            return "Group 1 holds zeros alone, and its scale is no number to divide by: amax is at least 1e-4."
        return "`scales` is what the receiver multiplies by: amax / 448, with the largest number of all 32 lanes."
    if clue.kind == "wrong result":
        row = int(np.argwhere((clue.got != clue.expected).any(axis=1))[0, 0])
        if row == 1:
            return "Group 1 is all zeros. 448 / 0 is infinite, and 0 times that is no number; amax is at least 1e-4."
        fp8 = clue.got.view(ml_dtypes.float8_e4m3fn).astype(np.float32)[row]
        if np.abs(fp8).max() < 448:
            return f"The largest number of group {row} became {np.abs(fp8).max():g}, not 448: the range is not used."
        if (np.abs(fp8) == 448).sum() > 1:
            return (
                "More than one number became 448: each lane has a scale of its own, or the maximum is not that of all "
                "32 lanes. One shuffle brings the value of one other lane."
            )
        return "The largest number became 448, but others have wrong bits: multiply by 448 / amax, by f32_div_rn."
    return ""


PUZZLE = Puzzle(
    kernel=cast,
    holes=("largest_of_warp", "scales_of"),
    outputs=lambda rank: (np.full((GROUPS, 32), -1, np.int32), np.full(GROUPS, -1, np.float32)),
    inputs=lambda rank: (numbers(rank),),
    answer=answer,
    num_ranks=1,
    sizes=(GROUPS,),
    advice=advice,
    learned="a warp finds a common maximum in five exchanges; one scale serves 128 numbers.",
    others="the bits may come in any order: a maximum has no rounding. A sum would.",
    runs=3,
)

if __name__ == "__main__":
    raise SystemExit(run_file(PUZZLE, __file__))
