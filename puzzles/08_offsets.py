"""Puzzle 8: offsets. Lane i knows how many rows come from source i; where do they begin?

 counts:   3 0 2 5 ...      out: 0 3 3 5 ...

 lane i: counts[i] --value--> exclusive_sum --> out[i] = counts[0] + ... + counts[i - 1]

shfl_up_s32(FULL_MASK, value, delta) gives a lane the value of the lane `delta` below it, and a lane that has none below
its own value. All 32 lanes must come to it. With delta 1, 2, 4, 8 and 16, five turns are enough.
So notify_dispatch finds the rows of every rank, and a warp the slots of its tokens.
"""

import numpy as np

from nbep.lab.puzzle import Puzzle, hole, run_file
from nbep.lang import *


@device_function
def exclusive_sum(value, lane):
    """All 32 lanes come here. The sum of the values of all lanes below this one."""
    return hole()


@kernel(max_threads=32)
def offsets(out: Out, counts: In, peers: Peers, bounds: Bounds):
    lane = lane_id()
    st_weak_s32(out + 4 * lane, exclusive_sum(ld_nc_s32(counts + 4 * lane), lane))


def counts(rank):
    return np.random.default_rng(8).integers(0, 9, 32).astype(np.int32)


def answer(rank):
    return ((np.cumsum(counts(rank)) - counts(rank)).astype(np.int32),)


def advice(clue):
    if clue.kind in ("divergence", "deadlock"):
        return "A shuffle stands where some lanes do not come. Shuffle in all lanes first, and then use it or not."
    if clue.kind == "wrong result":
        if np.array_equal(clue.got, np.cumsum(counts(0))):
            return "That is the sum with the lane's own value. The rows of a source begin where those before it end."
        if clue.got[0] != 0:
            return (
                "Lane 0 has no lane below: shfl_up gives it its own value, which it must not add. Ask `lane >= delta`."
            )
        if clue.calls("shfl_down"):
            return "shfl_down brings the value of a lane above. The sum is of the lanes below: write shfl_up_s32."
        if clue.got[1] == 0:
            return (
                "Lane 1 has one lane below it, and did not add its value. In the turn with delta 1 lane 1 adds, in the "
                "turn with delta 2 lane 2: the condition is `lane >= delta`, not `lane > delta`."
            )
        first = int(np.flatnonzero(clue.got != clue.expected)[0])
        if first & (first - 1) == 0:
            return f"The lanes below {first} are right: the turn with delta {first} is missing, or goes wrong."
        return (
            f"The lanes below {first} are right. Shuffle the sum so far, not the lane's own value, and double delta in "
            f"each turn: 1, 2, 4, 8, 16. A lane with fewer than delta lanes below it does not add."
        )
    return ""


PUZZLE = Puzzle(
    kernel=offsets,
    holes=("exclusive_sum",),
    outputs=lambda rank: (np.full(32, -1, np.int32),),
    inputs=lambda rank: (counts(rank),),
    answer=answer,
    num_ranks=1,
    advice=advice,
    learned=(
        "a warp adds up in five shuffles, and every lane takes part in each of them, whether it uses the value or not."
    ),
    others="you can shuffle the inclusive sum up by one at the end, if lane 0 takes 0.",
    runs=4,
)

if __name__ == "__main__":
    raise SystemExit(run_file(PUZZLE, __file__))
