"""Puzzle 12: the copy engine. One row goes through shared memory, where each number gets 1 more.

 x --tma_load_1d--> stage --lanes: + 1--> stage --tma_store_1d--> out
        full: an mbarrier that counts the bytes

 1  lane 0 starts the load, and tells `full` how many bytes will come (done below)
 2  whoever reads the stage waits until `full` says that they are there: mbarrier_try_wait_parity(full, 0)
 3  each lane adds 1 to its number: ld_shared_s32, st_shared_s32
 4  the engine takes another road to shared memory than stores do: each lane that has stored passes a
    fence_proxy_async_shared, and then they meet
 5  lane 0 starts the store, commits it, and the kernel may not end before tma_store_wait_all

So dispatch moves rows on cards from sm_90 on.
"""

import ast

import numpy as np

from nbep.lab.puzzle import Puzzle, hole, run_file
from nbep.lab.puzzle.advice import tree_of
from nbep.lang import *

STAGE_BYTES = 128


@device_function
def add_one(stage, full, lane):
    """Steps 2, 3 and 4. All 32 lanes come here; the number of a lane is at stage + 4 * lane."""
    hole()


@device_function
def store(out, stage, num_bytes):
    """Step 5. Lane 0 comes here."""
    hole()


@kernel(max_threads=32)
def through_a_stage(out: Out, x: In, peers: Peers, bounds: Bounds):
    lane = lane_id()
    stage = smem_base()
    full = stage + STAGE_BYTES
    if lane == 0:
        mbarrier_init(full, 1)
        fence_mbarrier_init()
        fence_proxy_async_shared()
    syncwarp(FULL_MASK)
    if lane == 0:
        tma_load_1d(stage, x, STAGE_BYTES, full)
        mbarrier_arrive_expect_tx(full, STAGE_BYTES)
    add_one(stage, full, lane)
    if lane == 0:
        store(out, stage, STAGE_BYTES)


def waits_in_a_loop(puzzle):
    loops = [node for node in ast.walk(tree_of(puzzle.scope["add_one"])) if isinstance(node, ast.While)]
    return any("mbarrier_try_wait_parity" in ast.unparse(loop.test) for loop in loops)


def numbers(rank):
    return np.arange(32, dtype=np.int32) * 3


def advice(clue):
    if not clue.calls("mbarrier_try_wait_parity"):
        return "No thread waits for the load: the bytes may come later than the lanes. Poll `full` in a while loop."
    if not waits_in_a_loop(clue.puzzle):
        return (
            "mbarrier_try_wait_parity waits for a short time, and then returns False. "
            "Write `while not mbarrier_try_wait_parity(full, 0): pass`."
        )
    if not clue.calls("fence_proxy_async_shared"):
        return (
            "The lanes' stores go to shared memory by one road, the engine reads by another. A proxy fence is missing."
        )
    if not clue.calls("tma_store_wait_all"):
        return "The kernel ends while the engine still writes. Lane 0 has to wait for its store: tma_store_wait_all."
    if clue.about("bulk stores may still read"):
        return "A wait counts the stores that were committed before it: tma_store_commit comes between store and wait."
    if clue.about("never written"):
        return (
            "The lanes read before the row is there. The first load completes the phase with parity 0: wait for that."
        )
    if clue.kind in ("race", "memory") or not clue.calls("syncwarp"):
        return (
            "Each lane passes the proxy fence behind its own store, and only then do all lanes meet: lane 0's store "
            "may start when the last of them is through."
        )
    if clue.kind == "wrong result" and np.array_equal(clue.got, clue.expected - 1):
        return "The row has come through as it was: what was added did not reach the stage before the engine read it."
    if clue.kind == "wrong result":
        return "What comes out is not the row plus 1: each lane adds 1, once, to its own word, at stage + 4 * lane."
    return ""


PUZZLE = Puzzle(
    kernel=through_a_stage,
    holes=("add_one", "store"),
    addresses={"stage": "shared_s32"},
    outputs=lambda rank: (np.full(32, -1, np.int32),),
    inputs=lambda rank: (numbers(rank),),
    answer=lambda rank: (numbers(rank) + 1,),
    num_ranks=1,
    smem_bytes=STAGE_BYTES + 8,
    advice=advice,
    learned=(
        "the copy engine is another agent: an mbarrier says that its bytes are there, a proxy fence shows it yours."
    ),
    others="one lane alone may poll `full`, if a syncwarp passes that on to the others.",
)

if __name__ == "__main__":
    raise SystemExit(run_file(PUZZLE, __file__))
