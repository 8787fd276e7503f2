"""Puzzle 16: combine. The results of a token come from up to three experts; add them up, each with its weight.

 out[t] = w[t][0] * rows[index[t][0]] + w[t][1] * rows[index[t][1]] + w[t][2] * rows[index[t][2]]

A row has 64 BF16, two in each 32-bit word; lane i has word i. An index of -1 is an expert that the token did not have.
Sum up in float32, in this order, and round to BF16 once, at the end: rounding each step loses bits, and another order
gives other bits. bf16x2_to_f32x2(word) gives a tuple of two float32, f32x2_to_bf16x2(low, high) makes a word of two.
Multiply with f32_mul_rn and add with f32_add_rn, so that no compiler makes one operation of the two. Start at f32(0):
to Numba 0.0 is float64.
"""

import ml_dtypes
import numpy as np

from nbep.lab.puzzle import Puzzle, hole, run_file
from nbep.lang import *

TOKENS, NUM_TOPK, ROWS, ROW_BYTES = 6, 3, 12, 128
BF16 = ml_dtypes.bfloat16


@device_function
def combine_word(rows, indices, weights, lane):
    """The word of this lane. indices: three s32 of the token, weights: three f32."""
    return hole()


@kernel(max_threads=32)
def combine(out: Out, rows: In, indices: In, weights: In, peers: Peers, bounds: Bounds, num_tokens: I32):
    lane = lane_id()
    for t in range(num_tokens):
        word = combine_word(rows, indices + 4 * NUM_TOPK * t, weights + 4 * NUM_TOPK * t, lane)
        st_weak_u32(out + ROW_BYTES * t + 4 * lane, word)


def inputs(rank):
    rng = np.random.default_rng(16)
    rows = rng.standard_normal((ROWS, 64)).astype(BF16)
    indices = np.stack([rng.permutation(ROWS)[:NUM_TOPK] for _ in range(TOKENS)]).astype(np.int32)
    indices[1, 1] = indices[4] = -1
    weights = rng.random((TOKENS, NUM_TOPK), dtype=np.float32)
    rows[0] *= 2**20
    rows[1] = -rows[0]
    indices[0], weights[0] = (0, 1, 2), 1  # the first two cancel out, and leave all bits of the third: in this order
    return rows.view(np.int32), indices, weights


def answer(rank):
    words, indices, weights = inputs(rank)
    rows = words.view(BF16).astype(np.float32)
    total = np.zeros((TOKENS, 64), np.float32)
    for t in range(TOKENS):
        for k in range(NUM_TOPK):
            if indices[t, k] >= 0:
                total[t] += weights[t, k] * rows[indices[t, k]]
    return (total.astype(BF16).view(np.int32),)


def advice(clue):
    if clue.kind == "memory":
        return "Row -1 lies in front of the first one: an expert that the token did not have adds nothing."
    if clue.kind == "wrong result":
        got, expected = (np.ascontiguousarray(a).view(BF16).astype(np.float32) for a in (clue.got, clue.expected))
        close = np.isclose(got, expected, rtol=0.04, atol=0.04, equal_nan=True)
        if close.all():
            return "All numbers are about right, but not all bits. Is every step in float32, in order, rounded once?"
        if np.isclose(got, expected.reshape(-1, 2)[:, ::-1].reshape(got.shape), rtol=0.04, atol=0.04).all():
            return "The two numbers of each word have changed places: low is the first of the tuple, high the second."
        wrong = [int(t) for t in np.argwhere(~close.all(axis=1))[:, 0]]
        t = next((t for t in wrong if t not in (1, 4)), wrong[0])
        if wrong == [0]:
            return "Only token 0 is wrong: its first two rows cancel out, if added first. Add in order, in float32."
        if t in (1, 4):
            return f"Token {t} lacks an expert: its indices are {inputs(0)[1][t].tolist()}. A -1 adds nothing."
        return f"The sum of token {t} is wrong, its indices are {inputs(0)[1][t].tolist()}. Has each row its weight?"
    return ""


PUZZLE = Puzzle(
    kernel=combine,
    holes=("combine_word",),
    addresses={"rows": "weak_s32", "indices": "weak_s32", "weights": "weak_f32"},
    outputs=lambda rank: (np.full((TOKENS, 32), -1, np.int32),),
    inputs=inputs,
    answer=answer,
    num_ranks=1,
    sizes=(TOKENS,),
    advice=advice,
    learned="a sum is rounded once and in a fixed order, so each run gives the same bits.",
    others="the loop may be written out three times: the compiler unrolls it anyway.",
    runs=2,
)

if __name__ == "__main__":
    raise SystemExit(run_file(PUZZLE, __file__))
