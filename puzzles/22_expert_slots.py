"""Puzzle 22: expert slots. Lane t has a token for expert experts[t]; in which row of the output does it go?

 experts:   5 0 5 2 ...       expert:  0        1       2 ...
                              rows:    0 1 2 . . . . .  8 9 ...      a gap up to the next multiple of ALIGNMENT

 lane e: how many tokens expert e has --> find_start --> the row where its group begins; ends[e] = start + how many
 lane t: its expert, start of lane e  --> find_row ----> start of that expert + the tokens for it in lanes below t

Groups come in the order of experts, each begins at a multiple of ALIGNMENT, and an expert without tokens takes no rows.
A lane whose expert is -1 has no token: its row is -1. All 32 lanes must come to shuffles and to match_any_s32, which
gives each lane the mask of the lanes that have its value. `exclusive_sum` is that of puzzle 8.
So ElasticBuffer lays out the rows of its expanded form: a matrix product of 128 rows has one expert.
"""

import numpy as np

from nbep.lab.puzzle import Puzzle, hole, run_file
from nbep.lang import *

ALIGNMENT, NUM_EXPERTS = 8, 6


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
def count_tokens(expert, lane):
    """In lane e how many lanes have a token for expert e."""
    count = 0
    for token in range(32):
        if shfl_idx_s32(FULL_MASK, expert, token) == lane:
            count += 1
    return count


@device_function
def find_start(count, lane):
    """All 32 lanes come here. In lane e the first row of expert e, which has count tokens."""
    return hole()


@device_function
def find_row(expert, start, lane):
    """All 32 lanes come here. The row of this lane's token; -1 if expert is -1. start: in lane e that of expert e"""
    return hole()


@kernel(max_threads=32)
def expert_slots(ends: Out, rows: Out, experts: In, peers: Peers, bounds: Bounds):
    lane = lane_id()
    expert = ld_nc_s32(experts + 4 * lane)
    count = count_tokens(expert, lane)
    start = find_start(count, lane)
    st_weak_s32(ends + 4 * lane, start + count)
    st_weak_s32(rows + 4 * lane, find_row(expert, start, lane))


def experts(rank):
    """12 tokens for expert 0, none for expert 3, and three lanes without a token."""
    drawn = np.random.default_rng(22).choice([1, 2, 4, 5], 32)
    drawn[::3] = 0
    drawn[4], drawn[13], drawn[31] = -1, -1, -1
    return drawn.astype(np.int32)


def answer(rank):
    chosen = experts(rank)
    rows, ends, start = np.full(32, -1, np.int32), np.zeros(32, np.int32), 0
    for expert in range(32):
        tokens = np.flatnonzero(chosen == expert)
        rows[tokens] = start + np.arange(len(tokens))
        ends[expert] = start + len(tokens)
        start += -(-len(tokens) // ALIGNMENT) * ALIGNMENT
    return ends, rows


def advice(clue):
    if clue.kind in ("divergence", "deadlock"):
        return (
            "Some lanes do not come to a shuffle or to match_any_s32. Let all lanes call them, those without a token "
            "too, and choose the result afterwards."
        )
    if clue.kind != "wrong result":
        return ""
    chosen = experts(0)
    if clue.name == "ends":
        counts = np.array([(chosen == expert).sum() for expert in range(32)])
        got = clue.got - counts
        packed = np.cumsum(counts) - counts
        if np.array_equal(got, packed):
            return (
                "The groups follow each other without gaps. Round each count up to a multiple of ALIGNMENT before "
                "you add up: a gap belongs to the expert before it."
            )
        if np.array_equal(got, -(-packed // ALIGNMENT) * ALIGNMENT):
            return (
                "The sum is rounded up, but it leaves out the gaps of the experts before: groups overlap. First round "
                "each count, then add up."
            )
        if got[0] != 0:
            return "Expert 0 begins behind its own rows. A group begins where those before it end: exclusive_sum."
        if got[4] - got[3] == ALIGNMENT:
            return (
                "An expert without tokens takes no rows: (count + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT is 0 for it, "
                "and count // ALIGNMENT + 1 is not."
            )
        first = int(np.flatnonzero(clue.got != clue.expected)[0])
        return f"The experts before {first} are right. Each group begins at the sum of all rounded counts before it."
    if (clue.got[chosen < 0] != -1).any():
        return "A lane whose expert is -1 has no token: its row is -1."
    taken = clue.got[chosen >= 0]
    if not clue.calls("shfl", where="find_row"):
        return (
            "The start of a token's group is in the lane of its expert, not in its own. A shuffle brings it: "
            "shfl_idx_s32(FULL_MASK, start, expert), in all lanes."
        )
    if len(set(taken.tolist())) < len(taken):
        return (
            "Two tokens have the same row. Count the tokens for the same expert in the lanes below: the bits of "
            "match_any_s32's mask below this lane's, `& ((1 << lane) - 1)`."
        )
    if (clue.got[chosen >= 0] == clue.expected[chosen >= 0] + 1).all():
        return "Each token is one row too far: the mask has the lane itself, which is no lane below. Leave it out."
    return (
        "The groups begin where they should, but the tokens in them are in other rows. Take the start of the lane that "
        "has the number of the expert, and count only lanes below with the same expert."
    )


PUZZLE = Puzzle(
    kernel=expert_slots,
    holes=("find_start", "find_row"),
    outputs=lambda rank: (np.full(32, -2, np.int32), np.full(32, -2, np.int32)),
    inputs=lambda rank: (experts(rank),),
    answer=answer,
    num_ranks=1,
    advice=advice,
    learned=(
        "the place of every row follows from counts alone: no token waits for another one, and the padding costs no "
        "pass over the rows."
    ),
    others="count the lanes below with 32 shuffles, or keep a running count of each expert in its lane.",
    runs=4,
)

if __name__ == "__main__":
    raise SystemExit(run_file(PUZZLE, __file__))
