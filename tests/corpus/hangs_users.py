"""Kernels that users write, broken so that they hang, and what the first paragraph of the report must say.

The patterns: flag, ring, barrier between ranks and in a block, all-to-all, reduction, counter. Each kernel is written
out with what is wrong in it, as it is met in the wild. Together they come to each line of the reports' code.
"""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

from entries import Broken

import nbep
from nbep.device.jit import device_function, kernel
from nbep.device.primitives import (
    FULL_MASK,
    atom_add_release_sys_s32,
    bar_sync,
    ld_acquire_sys_s32,
    st_release_sys_s32,
    syncwarp,
    thread_idx,
    wait_expired,
)
from nbep.device.protocols.peers import Peers, buffer_of
from nbep.emulator import DeadlockError, World

NEVER = 1 << 62
NUM_BYTES = 1024
TAIL, HEAD = 0, 64
COUNT, LOOKED = 0, 64


@device_function
def wait_for(cell, wanted):
    """Wait until a cell has come to `wanted`."""
    while ld_acquire_sys_s32(cell) < wanted:
        wait_expired(NEVER)


def run_kernel(
    function: Callable,
    cells: dict[str, int],
    num_ranks: int,
    absent: tuple[int, ...],
    grid: int,
    block: int,
    seed: int,
    memory_model: str = "sc",
) -> None:
    """Launch a kernel with `peers` on all ranks but those that are absent, and wait for it."""

    def main(comm: Any) -> None:
        memory = nbep.SharedMemory.create(comm, NUM_BYTES, cells=cells)
        if comm.rank not in absent:
            memory.runtime.launch(memory.comm_stream, function, grid, block, 0, memory.peers)
            memory.wait()

    with patch.object(World, "max_idle_calls", 5000):  # a loop without wait_expired would take seconds
        nbep.spawn(main, num_ranks, "emulator", seed=seed, memory_model=memory_model)


def hang(
    name: str,
    function: Callable,
    names: tuple,
    not_names: tuple[str, ...] = (),
    *,
    cells: dict[str, int] | None = None,
    num_ranks: int = 2,
    absent: tuple[int, ...] = (),
    grid: int = 1,
    block: int = 32,
) -> Broken:
    run = partial(run_kernel, function, cells or {}, num_ranks, absent, grid, block)
    return Broken(name, run, DeadlockError, names, not_names, range(4), 4)


@kernel(max_threads=32)
def flag_in_own_memory(peers: Peers):
    """Rank 0 raises the flag in its own memory instead of its neighbour's."""
    if thread_idx() == 0:
        if peers.rank == 0:
            st_release_sys_s32(buffer_of(peers, peers.rank), 1)
        else:
            wait_for(buffer_of(peers, peers.rank), 1)


@kernel(max_threads=32)
def flag_polled_without_wait_expired(peers: Peers):
    """The loop does not tell the emulator that it waits."""
    if thread_idx() == 0 and peers.rank == 1:
        while ld_acquire_sys_s32(buffer_of(peers, 1)) != 7:
            pass


@device_function
def send_rows(peers, num_rows, num_slots, tail):
    """Rank 0: count num_rows rows into the ring of rank 1, at most num_slots ahead of the head."""
    for i in range(num_rows):
        wait_for(buffer_of(peers, 0) + HEAD, i + 1 - num_slots)
        st_release_sys_s32(buffer_of(peers, 1) + tail, i + 1)


@device_function
def receive_rows(peers, num_rows, head):
    """Rank 1: take num_rows rows out."""
    for i in range(num_rows):
        wait_for(buffer_of(peers, 1) + TAIL, i + 1)
        st_release_sys_s32(buffer_of(peers, 0) + head, i + 1)


@kernel(max_threads=32)
def ring_with_the_heads_next_word(peers: Peers):
    """The receiver stores its head one word too far."""
    if thread_idx() == 0:
        if peers.rank == 0:
            send_rows(peers, 10, 4, TAIL)
        else:
            receive_rows(peers, 10, HEAD + 4)


@kernel(max_threads=32)
def ring_with_one_more_row(peers: Peers):
    """The receiver counts on one row more than the sender sends."""
    if thread_idx() == 0:
        if peers.rank == 0:
            send_rows(peers, 10, 4, TAIL)
        else:
            receive_rows(peers, 11, HEAD)


@kernel(max_threads=32)
def ring_with_a_head_that_wraps(peers: Peers):
    """The receiver stores which slot it has read last, in place of how many rows."""
    if thread_idx() == 0:
        for i in range(10):
            if peers.rank == 0:
                wait_for(buffer_of(peers, 0) + HEAD, i - 3)
                st_release_sys_s32(buffer_of(peers, 1) + TAIL, i + 1)
            else:
                wait_for(buffer_of(peers, 1) + TAIL, i + 1)
                st_release_sys_s32(buffer_of(peers, 0) + HEAD, (i + 1) % 4)


@kernel(max_threads=32)
def barrier_at_rank_0(peers: Peers):
    """All ranks count themselves in at rank 0."""
    if thread_idx() == 0:
        arrivals = buffer_of(peers, 0)
        atom_add_release_sys_s32(arrivals, 1)
        wait_for(arrivals, peers.num_ranks)


@kernel(max_threads=32)
def barrier_of_signals(peers: Peers):
    """Each rank tells each other one, in the cell of its own rank; this one tells in the cell of the other's."""
    peer = thread_idx()
    if peer < peers.num_ranks:
        st_release_sys_s32(buffer_of(peers, peer) + 4 * peer, 1)
        wait_for(buffer_of(peers, peers.rank) + 4 * peer, 1)


@kernel(max_threads=32)
def barrier_that_all_set_back(peers: Peers):
    """Each rank empties the cell for the next time, when another one may have come there again."""
    if thread_idx() == 0:
        for _ in range(6):
            atom_add_release_sys_s32(buffer_of(peers, 0) + COUNT, 1)
            wait_for(buffer_of(peers, 0) + COUNT, peers.num_ranks)
            st_release_sys_s32(buffer_of(peers, 0) + COUNT, 0)


@kernel(max_threads=128)
def team_barrier_for_too_many(peers: Peers):
    """Two teams of two warps, each with a barrier; that of the first team is for three. The second waits for it."""
    flag = buffer_of(peers, peers.rank)
    if thread_idx() < 64:
        bar_sync(1, 96)
        if thread_idx() == 0:
            st_release_sys_s32(flag, 1)
    else:
        if thread_idx() == 64:
            wait_for(flag, 1)
        bar_sync(2, 64)


@kernel(max_threads=64)
def barriers_in_another_order(peers: Peers):
    """Both warps come to two barriers, one of them in the other order."""
    if thread_idx() < 32:
        bar_sync(1, 64)
        bar_sync(2, 64)
    else:
        bar_sync(2, 64)
        bar_sync(1, 64)


@kernel(max_threads=64)
def barrier_that_a_warp_leaves_out(peers: Peers):
    """Warp 1 has nothing to do and returns."""
    if thread_idx() >= 32:
        return
    bar_sync(0, 64)


@kernel(max_threads=32)
def lanes_that_wait_for_their_warp(peers: Peers):
    """Lane 0 raises the flag behind a syncwarp, to which lane 1 comes when it has seen the flag."""
    flag = buffer_of(peers, peers.rank)
    if thread_idx() == 1:
        wait_for(flag, 1)
    syncwarp(FULL_MASK)
    if thread_idx() == 0:
        st_release_sys_s32(flag, 1)


@kernel(max_threads=32)
def all_to_all_without_the_last(peers: Peers):
    """The loop over the receivers ends one too early."""
    if thread_idx() == 0:
        for peer in range(peers.num_ranks - 1):
            st_release_sys_s32(buffer_of(peers, peer) + 4 * peers.rank, 1)
        for peer in range(peers.num_ranks):
            wait_for(buffer_of(peers, peers.rank) + 4 * peer, 1)


@kernel(max_threads=32)
def all_to_all_that_skips_itself_once(peers: Peers):
    """The senders leave out their own rank, the receivers do not."""
    if thread_idx() == 0:
        for peer in range(peers.num_ranks):
            if peer != peers.rank:
                st_release_sys_s32(buffer_of(peers, peer) + 4 * peers.rank, 1)
        for peer in range(peers.num_ranks):
            wait_for(buffer_of(peers, peers.rank) + 4 * peer, 1)


@kernel(max_threads=32)
def reduction_tree_with_a_wrong_child(peers: Peers):
    """Each rank waits for its children 2r + 1 and 2r + 2; a parent is (r - 1) // 2, and not r // 2."""
    if thread_idx() == 0:
        for k in range(2):
            if 2 * peers.rank + 1 + k < peers.num_ranks:
                wait_for(buffer_of(peers, peers.rank) + 4 * k, 1)
        if peers.rank > 0:
            st_release_sys_s32(buffer_of(peers, peers.rank // 2) + 4 * ((peers.rank - 1) % 2), 1)


@kernel(max_threads=32)
def reduction_along_a_ring(peers: Peers):
    """Each rank hands on what it has got; nobody begins."""
    if thread_idx() == 0:
        wait_for(buffer_of(peers, peers.rank), 1)
        st_release_sys_s32(buffer_of(peers, (peers.rank + 1) % peers.num_ranks), 1)


@kernel(max_threads=32)
def counter_without_an_atomic(peers: Peers):
    """Each rank adds one, by a load and a store. All have loaded before the first one stores."""
    if thread_idx() == 0:
        count = ld_acquire_sys_s32(buffer_of(peers, 0) + COUNT)
        atom_add_release_sys_s32(buffer_of(peers, 0) + LOOKED, 1)
        wait_for(buffer_of(peers, 0) + LOOKED, peers.num_ranks)
        st_release_sys_s32(buffer_of(peers, 0) + COUNT, count + 1)
        wait_for(buffer_of(peers, 0) + COUNT, peers.num_ranks)


RING = {"tail": TAIL, "head": HEAD}
CELLS = {"arrivals": COUNT, "looked": LOOKED}
SIGNALS = {f"signal of rank {rank}": 4 * rank for rank in range(4)}
SLOTS = {f"slot {rank}": 4 * rank for rank in range(4)}
ENTRIES = [
    hang("flag: a loop without wait_expired", flag_polled_without_wait_expired, (
            "rank 1, kernel `flag_polled_without_wait_expired`, block 0, warp 0, lane 0",
            "polls `nvl_buffer` of rank 1: flag (byte 0), expects 7 and sees 0",
            "Rank 0 runs no kernel: its host has returned"), cells={"flag": 0}),
    hang("flag: raised in the own memory", flag_in_own_memory, (
            "rank 1, kernel `flag_in_own_memory`, block 0, warp 0, lane 0, waits for rank 0",
            "`nvl_buffer` of rank 1: flag (byte 0), expects 1 or more and sees 0",
            "In the memory of rank 0 the same byte was stored by rank 0"), ("circle", "Next to it"), cells={"flag": 0}),
    hang("ring: counts of rows that differ", ring_with_one_more_row, (
            "rank 1, kernel `ring_with_one_more_row`, block 0, warp 0, lane 0, waits for rank 0",
            "polls `nvl_buffer` of rank 1: tail (byte 0), expects 11 or more and sees 10",
            "not weak is by rank 0, kernel `ring_with_one_more_row`, block 0, warp 0, lane 0", "which has ended",
            "Rank 0 runs no kernel: its host has returned"), ("circle",), cells=RING),
    hang("ring: the head is stored one word too far", ring_with_the_heads_next_word, (
            "rank 0, kernel `ring_with_the_heads_next_word`, block 0, warp 0, lane 0, waits for rank 1",
            "polls `nvl_buffer` of rank 0: head (byte 64), expects 1 or more and sees 0",
            "Next to it, `nvl_buffer` of rank 0: head + 4 (byte 68) is 4, stored by rank 1,",
            "They wait in a circle: rank 0 block 0, warp 0, lane 0 -> rank 1 block 0"), cells=RING),
    hang("ring: the head wraps like the slots", ring_with_a_head_that_wraps, (
            "rank 0, kernel `ring_with_a_head_that_wraps`, block 0, warp 0, lane 0, waits for rank 1",
            "polls `nvl_buffer` of rank 0: head (byte 64), expects ",
            "It has gone back from 3 to 0, by a store of rank 1, kernel `ring_with_a_head_that_wraps`, block 0"),
        ("Next to it",), cells=RING),
    hang("barrier: all set it back", barrier_that_all_set_back, (
            "polls `nvl_buffer` of rank 0: arrivals (byte 0), expects 2 or more and sees ", "It has gone back from ",
            " to 0, by rank "), ("atomic",), cells=CELLS),
    hang("barrier: a signal in the other rank's cell", barrier_of_signals, (
            "rank 0, kernel `barrier_of_signals`, block 0, warp 0, lane 1, waits for rank 1",
            "polls `nvl_buffer` of rank 0: signal of rank 1 (byte 4), expects 1 or more and sees 0",
            "rank 1, kernel `barrier_of_signals`, block 0, warp 0, lane 0, waits for rank 0",
            "polls `nvl_buffer` of rank 1: signal of rank 0 (byte 0), expects 1 or more and sees 0",
            ("Next to it, `nvl_buffer` of rank 0: signal of rank 0 (byte 0) is 1, stored by rank",
                "Next to it, `nvl_buffer` of rank 1: signal of rank 1 (byte 4) is 1, stored by rank"),
            "They wait in a circle"), cells=SIGNALS, num_ranks=2),
    hang("barrier: one rank does not come", barrier_at_rank_0, (
            "polls `nvl_buffer` of rank 0: arrivals (byte 0), expects 4 or more and sees 3", "wait in the same way",
            "Rank 2 runs no kernel: its host has returned"), ("circle", "Rank 3 runs"), cells={"arrivals": 0},
        num_ranks=4, absent=(2,)),
    hang("block: two barriers in another order", barriers_in_another_order, (
            "rank 0, kernel `barriers_in_another_order`, block 0, warp 0, waits at barrier 1: 32 of 64 threads have",
            "rank 0, kernel `barriers_in_another_order`, block 0, warp 1, waits at barrier 2: 32 of 64 threads have",
            "They wait in a circle: rank 0 block 0, warp 0 -> rank 0 block 0, warp 1 -> rank 0 block 0, warp 0"),
        num_ranks=1, block=64),
    hang("block: a named barrier for too many threads", team_barrier_for_too_many, (
            "rank 0, kernel `team_barrier_for_too_many`, block 0, warp 0-1, waits at barrier 1: 64 of 96 threads have",
            "for 32 more threads there is nobody left: warp 2-3 so far met at barrier 2 only"), ("missing: warp 3",),
        cells={"flag": 0}, num_ranks=1, block=128),
    hang("block: a warp that returns before the barrier", barrier_that_a_warp_leaves_out,
        ("barrier 0 of rank 0, kernel `barrier_that_a_warp_leaves_out`, block 0 can never fill: it takes 64 threads",),
        num_ranks=1, block=64),
    hang("block: a lane that waits for its own warp", lanes_that_wait_for_their_warp, (
            "rank 0, kernel `lanes_that_wait_for_their_warp`, block 0, warp 0, lane 1,",
            "polls `nvl_buffer` of rank 0: flag (byte 0), expects 1 or more and sees 0"), cells={"flag": 0},
        num_ranks=1),
    hang("all-to-all: the last receiver is left out", all_to_all_without_the_last, (
            "rank 3, kernel `all_to_all_without_the_last`, block 0, warp 0, lane 0, waits for rank 0",
            "polls `nvl_buffer` of rank 3: slot 0 (byte 0), expects 1 or more and sees 0",
            "In the memory of ranks 0-2 the same byte was stored by rank 0", "Ranks 0-2 run no kernel"), ("circle",),
        cells=SLOTS, num_ranks=4),
    hang("all-to-all: nobody sends to itself, but waits for it", all_to_all_that_skips_itself_once,
        ("rank 0, kernel `all_to_all_that_skips_itself_once`, block 0, warp 0, lane 0, waits for rank 0",
            "polls `nvl_buffer` of rank 0: slot 0 (byte 0), expects 1 or more and sees 0",
            "In the memory of ranks 1-3 the same byte was stored by rank 0"), cells=SLOTS, num_ranks=4),
    hang("reduction: along a ring in which nobody begins", reduction_along_a_ring, (
            "rank 0, kernel `reduction_along_a_ring`, block 0, warp 0, lane 0",
            "polls `nvl_buffer` of rank 0: part (byte 0), expects 1 or more and sees 0",
            "So far only weak stores, or none, have written it", "Ranks 1-2 wait in the same way"), cells={"part": 0},
        num_ranks=3),
    hang("reduction: a tree in which a child tells another parent", reduction_tree_with_a_wrong_child,
        ("polls `nvl_buffer` of rank 0: child 1 (byte 4), expects 1 or more and sees 0",
            "rank 0, kernel `reduction_tree_with_a_wrong_child`",
            "In the memory of rank 1 the same byte was stored by rank 2"), ("circle",),
        cells={"child 0": 0, "child 1": 4}, num_ranks=3),
    hang("counter: a load and a store in place of an atomic", counter_without_an_atomic, (
            "polls `nvl_buffer` of rank 0: arrivals (byte 0), expects 2 or more and sees 1",
            "have stored 1 there: to count together takes an atomic"), ("gone back",), cells=CELLS),
]  # fmt: skip
