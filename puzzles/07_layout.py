"""Puzzle 7: the layout. Which token goes to which rank, and how many go there?

 thread t: topk_idx[t] = experts of token t --> is_token_in_rank[t][r] = 0 or 1, num_tokens_per_rank[r] += 1

Expert e belongs to rank e // EXPERTS_PER_RANK. A token whose experts are on one rank goes there once, not twice. A -1
in topk_idx is no expert at all. Both outputs are 0 before the launch, and all threads count into the same four cells.
"""

import numpy as np

from nbep.lab.puzzle import Puzzle, hole, run_file
from nbep.lang import *

NUM_RANKS, EXPERTS_PER_RANK, NUM_TOPK, NUM_TOKENS = 4, 2, 3, 20


@device_function
def count_token(experts, per_rank, in_rank):
    """experts: where the three s64 of the token lie. per_rank: four s32 of all tokens. in_rank: four s32 of its own."""
    hole()


@kernel(max_threads=32)
def layout(per_rank: Out, in_rank: Out, topk_idx: In, peers: Peers, bounds: Bounds, num_tokens: I32):
    token = thread_idx()
    if token < num_tokens:
        count_token(topk_idx + 8 * NUM_TOPK * token, per_rank, in_rank + 4 * NUM_RANKS * token)


def routing(rank):
    rng = np.random.default_rng(5)
    topk_idx = np.stack([rng.permutation(NUM_RANKS * EXPERTS_PER_RANK)[:NUM_TOPK] for _ in range(NUM_TOKENS)])
    topk_idx[::4, 1] = -1
    return topk_idx.astype(np.int64)


def answer(rank):
    in_rank = np.zeros((NUM_TOKENS, NUM_RANKS), np.int32)
    for token, experts in enumerate(routing(rank)):
        for expert in experts:
            if expert >= 0:
                in_rank[token, expert // EXPERTS_PER_RANK] = 1
    return in_rank.sum(axis=0, dtype=np.int32), in_rank


def advice(clue):
    if not clue.calls("ld_nc_s64", "ld_weak_s64", "ld_na_s64", "ld_volatile_s64", "ld_relaxed", "ld_acquire"):
        return "The experts are s64: each takes 8 bytes, and a load of its own kind."
    if clue.kind == "memory" or clue.about("negative shift"):
        return "An expert of -1 belongs to no rank: -1 // 2 is -1. Skip it: ask `if expert >= 0` first."
    if clue.kind == "race":
        return "All threads count into the same cells. A load and a store lose what others add between: use an atomic."
    if clue.kind == "wrong result" and clue.name == "per_rank":
        if (clue.got > clue.expected).any() and (clue.got < clue.expected).any():
            return "Tokens are counted at the wrong ranks. Expert e belongs to rank e // EXPERTS_PER_RANK."
        if (clue.got > clue.expected).any():
            twice = next(t for t, e in enumerate(routing(0)) if len({x // 2 for x in e if x >= 0}) < sum(e >= 0))
            return (
                f"Some rank is counted too often. Token {twice} has the experts {routing(0)[twice].tolist()}: two of "
                f"them are on one rank, and the token goes there once. Count ranks, not experts."
            )
        return "Some rank is counted too seldom. Do all threads add to its cell, with an atomic?"
    if clue.kind == "wrong result":
        return "is_token_in_rank has a row for each token: a 1 for each rank that has one of its experts."
    return ""


PUZZLE = Puzzle(
    kernel=layout,
    holes=("count_token",),
    addresses={"experts": "weak_s64", "per_rank": "weak_s32", "in_rank": "weak_s32"},
    outputs=lambda rank: (np.zeros(NUM_RANKS, np.int32), np.zeros((NUM_TOKENS, NUM_RANKS), np.int32)),
    inputs=lambda rank: (routing(rank),),
    answer=answer,
    num_ranks=1,
    sizes=(NUM_TOKENS,),
    advice=advice,
    learned="counts are of ranks, not of experts: a token with two experts on one rank is sent once.",
    others="a loop over ranks outside and experts inside needs no bits; it loads each expert NUM_RANKS times.",
    runs=4,
)

if __name__ == "__main__":
    raise SystemExit(run_file(PUZZLE, __file__))
