"""Puzzle 17: dispatch in 40 lines. Every rank sends its tokens to the ranks that want them, through rings.

 block 0, warp d: the tokens for rank d --send_tokens--> ring of rank d        block 1, warp s: --receive_tokens--> out

 cell           lives in  written by          read by
 count[s]       rank d    rank s: -n - 1      all receiving warps of rank d: how many tokens come from rank s
 tail[s]        rank d    rank s              warp s of rank d: so many of them are there
 head[d]        rank s    warp s of rank d    warp d of rank s: so many have been taken out
 slots[s][k]    rank d    rank s              warp s of rank d: once the tail is past it

Token number n for a rank goes through slot n % 4. In `out` come first the tokens of rank 0, in their order there, then
those of rank 1, and so on: the rows of source s begin behind those of the sources before it. Puzzles 2, 8, 9 and 10
have all the pieces. Below are the addresses, and a loop over the tokens.
"""

import numpy as np

from nbep.lab.puzzle import Puzzle, arguments_of, hole, order_advice, run_file
from nbep.lang import *

NUM_RANKS, NUM_SLOTS, TOKENS, ROW_BYTES = 3, 4, 9, 128
COUNT, TAIL, HEAD, SLOTS = 0, 128, 256, 384
NUM_BYTES = SLOTS + NUM_RANKS * NUM_SLOTS * ROW_BYTES


@device_function
def slot_of(peers, src, dst, n):
    """Where token number n from src to dst passes, as this rank sees it."""
    return buffer_of(peers, dst) + SLOTS + ROW_BYTES * (NUM_SLOTS * src + n % NUM_SLOTS)


@device_function
def count_tokens(is_token_in_rank, dst, num_tokens):
    """How many tokens go to rank dst."""
    count = 0
    for token in range(num_tokens):
        count += ld_nc_s32(is_token_in_rank + 4 * (NUM_RANKS * token + dst))
    return count


@device_function
def send_tokens(x, is_token_in_rank, peers, bounds, dst, num_tokens, lane):
    """A warp. Tell rank dst how many tokens come, then send them. Lane i has word i of a token."""
    me = peers.rank
    count, tail = buffer_of(peers, dst) + COUNT + 4 * me, buffer_of(peers, dst) + TAIL + 4 * me
    head = buffer_of(peers, me) + HEAD + 4 * dst
    hole()  # announce count_tokens(is_token_in_rank, dst, num_tokens)
    n = 0
    for token in range(num_tokens):
        if ld_nc_s32(is_token_in_rank + 4 * (NUM_RANKS * token + dst)) != 0:
            hole()  # token number n: x + ROW_BYTES * token --> slot_of(peers, me, dst, n)
            n += 1


@device_function
def receive_tokens(out, peers, bounds, src, lane):
    """A warp. The counts of all ranks say where the rows of rank src begin, and how many there are."""
    me = peers.rank
    counts, tail = buffer_of(peers, me) + COUNT, buffer_of(peers, me) + TAIL + 4 * src
    head = buffer_of(peers, src) + HEAD + 4 * me
    first, num_rows = hole()
    for n in range(num_rows):
        hole()  # slot_of(peers, src, me, n) --> out + ROW_BYTES * (first + n)


@kernel(max_threads=32 * NUM_RANKS)
def dispatch(out: Out, x: In, is_token_in_rank: In, peers: Peers, bounds: Bounds, num_tokens: I32):
    warp, lane = thread_idx() // 32, lane_id()
    if block_idx() == 0:
        send_tokens(x, is_token_in_rank, peers, bounds, warp, num_tokens, lane)
    else:
        receive_tokens(out, peers, bounds, warp, lane)


def tokens(rank):
    x = np.arange(32 * TOKENS, dtype=np.int32).reshape(TOKENS, 32)
    return x + 10000 * (rank + 1)


def routing(rank):
    chosen = np.random.default_rng(rank).random((TOKENS, NUM_RANKS)) < 0.6
    chosen[:, (rank + 1) % NUM_RANKS] &= rank != 1  # rank 1 has nothing for rank 2
    return chosen.astype(np.int32)


def answer(rank):
    rows = np.concatenate([tokens(src)[routing(src)[:, rank] != 0] for src in range(NUM_RANKS)])
    out = np.full((NUM_RANKS * TOKENS, 32), -1, np.int32)
    out[: len(rows)] = rows
    return (out,)


def wrong_slot(clue):
    """What is wrong with a call of slot_of, if that can be seen; "" if not."""
    own = ("me", "peers.rank")
    for where, sources, destinations in (("send_tokens", own, ("dst",)), ("receive_tokens", ("src",), own)):
        for _, src, dst, n in arguments_of(clue, "slot_of", where):
            if src not in sources or dst not in destinations:
                return (
                    f"In `{where}` a row goes from rank `{sources[0]}` to rank `{destinations[0]}`, so its slot is "
                    f"slot_of(peers, {sources[0]}, {destinations[0]}, n), and not slot_of(peers, {src}, {dst}, {n})."
                )
            if n == "token" or not n.isidentifier():
                return (
                    f"In `{where}` the slot follows from the number of the row among those for this rank: 0, 1, 2. "
                    f"slot_of takes that number, which is not `{n}`."
                )
    return ""


def advice(clue):
    if clue.kind == "deadlock":
        if clue.about("polls `nvl_buffer` of rank 2: count"):
            return "Rank 1 has no token for rank 2, and must tell that too: a count of 0 may not travel as 0."
        return (
            "A ring stands still, or a count never came. Row n is there when the tail is n + 1; a slot is free again "
            "when the head is n - 3; both count for each pair of ranks on their own."
        )
    if clue.kind == "memory":
        return (
            "An address lies outside of its memory. A count that is still 0 is not there yet, and stands for -1 rows: "
            "wait until it is not 0, and take -count - 1."
        )
    if clue.kind == "divergence":
        return "Some lanes of a warp go another way. Do all find the same counts? One that is still 0 is not there yet."
    if clue.kind in ("race", "wrong result"):
        for where, cell in (("send_tokens", "tail"), ("receive_tokens", "head")):
            if not clue.calls("syncwarp", "vote_", where=where):
                return (
                    f"In `{where}` lane 0 moves the {cell} for its warp: the lanes have to meet at a syncwarp before."
                )
    if clue.kind in ("race", "wrong result") and (found := wrong_slot(clue)):
        return found
    if clue.kind == "wrong result":
        rows = [int(r) for r in np.argwhere((clue.got != clue.expected).any(axis=1))[:, 0]]
        row = clue.got[rows[0]]
        sources = {int(v) // 10000 for v in row}
        if len(sources) == 1 and len({int(v) % 10000 // 32 for v in row}) > 1:
            return (
                f"Row {rows[0]} of rank {clue.rank} is a mix of two tokens of one rank: a slot was written again "
                f"before it was read, or read before it was written. Who waits for the head, and who for the tail?"
            )
        src = int(row[0]) // 10000 - 1
        what = "nothing" if src < 0 else f"token {int(row[0]) % 10000 // 32} of rank {src}"
        what = what if len(sources) == 1 else "tokens of several ranks"
        return (
            f"Row {rows[0]} of rank {clue.rank} holds {what}. Rows of rank 0 come first, then those of rank 1: does "
            f"every source begin behind those before it? And are all slots read before the sender uses them again?"
        )
    if order := order_advice(clue, "tail", "send_tokens", "receive_tokens"):
        return order
    if clue.kind == "race":
        return (
            "Is the tail behind the stores of all lanes, and the head behind their loads? And does the sender wait for "
            "the head before it writes into a slot for the second time?"
        )
    return ""


PUZZLE = Puzzle(
    kernel=dispatch,
    holes=("send_tokens", "receive_tokens"),
    outputs=lambda rank: (np.full((NUM_RANKS * TOKENS, 32), -1, np.int32),),
    inputs=lambda rank: (tokens(rank), routing(rank)),
    answer=answer,
    num_ranks=NUM_RANKS,
    grid=2,
    block=32 * NUM_RANKS,
    sizes=(TOKENS,),
    num_bytes=NUM_BYTES,
    cells={"count": COUNT, "tail": TAIL, "head": HEAD, "slots": SLOTS},
    shows="tail",
    advice=advice,
    learned="dispatch is a count, an offset and a ring for each pair of ranks.",
    others=(
        "one lane may read the counts and share them with a shuffle. The real kernel moves its tail once for a "
        "chunk of tokens."
    ),
    runs=2,
    has_too_many_schedules=True,
)

if __name__ == "__main__":
    raise SystemExit(run_file(PUZZLE, __file__))
