"""Kernels of two ranks that users write, broken so that they hang, and what the first paragraph of the report must say.

The patterns: flag, ring, double buffer. Each kernel is written out with what is wrong in it, as it is met in the wild.
"""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

from entries import Broken

import nbep
from nbep.device.jit import device_function, kernel
from nbep.device.primitives import (
    atom_cas_acq_rel_sys_s32,
    ld_acquire_sys_s32,
    st_release_sys_s32,
    thread_idx,
    wait_expired,
)
from nbep.device.protocols.peers import Peers, buffer_of
from nbep.emulator import DeadlockError, World

NEVER = 1 << 62
NUM_BYTES = 1024
TAIL, HEAD = 0, 64


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


# --- flag -----------------------------------------------------------------------------------------------------------


@kernel(max_threads=32)
def flag_index_off_by_one(peers: Peers):
    """Rank 0 raises flag 1 of rank 1, which waits for its flag 0."""
    if thread_idx() == 0:
        if peers.rank == 0:
            st_release_sys_s32(buffer_of(peers, 1) + 4 * (peers.rank + 1), 1)
        else:
            wait_for(buffer_of(peers, 1) + 4 * 0, 1)


@kernel(max_threads=32)
def flag_in_own_memory(peers: Peers):
    """Rank 0 raises the flag in its own memory instead of its neighbour's."""
    if thread_idx() == 0:
        if peers.rank == 0:
            st_release_sys_s32(buffer_of(peers, peers.rank), 1)
        else:
            wait_for(buffer_of(peers, peers.rank), 1)


@kernel(max_threads=32)
def flag_of_the_next_round(peers: Peers):
    """Rank 0 stores the number of the round, counted from 0; rank 1 counts from 1."""
    if thread_idx() == 0:
        for i in range(3):
            if peers.rank == 0:
                st_release_sys_s32(buffer_of(peers, 1), i)
            else:
                wait_for(buffer_of(peers, 1), i + 1)


@kernel(max_threads=32)
def flags_that_both_wait_for_first(peers: Peers):
    """Both ranks wait for the other one's flag before they raise theirs."""
    if thread_idx() == 0:
        wait_for(buffer_of(peers, peers.rank), 1)
        st_release_sys_s32(buffer_of(peers, 1 - peers.rank), 1)


@kernel(max_threads=32)
def flag_polled_without_wait_expired(peers: Peers):
    """The loop does not tell the emulator that it waits."""
    if thread_idx() == 0 and peers.rank == 1:
        while ld_acquire_sys_s32(buffer_of(peers, 1)) != 7:
            pass


@kernel(max_threads=32)
def lock_that_is_not_given_back(peers: Peers):
    """Each rank takes the lock in rank 0's memory; nobody gives it back."""
    if thread_idx() == 0:
        while atom_cas_acq_rel_sys_s32(buffer_of(peers, 0), 0, peers.rank + 1) != 0:
            wait_expired(NEVER)


FLAGS = [
    hang("flag: index off by one", flag_index_off_by_one, (
            "rank 1, kernel `flag_index_off_by_one`, block 0, warp 0, lane 0, waits for rank 0",
            "polls `nvl_buffer` of rank 1: flag 0 (byte 0), expects 1 or more and sees 0",
            "Next to it, `nvl_buffer` of rank 1: flag 1 (byte 4) is 1, stored by rank 0,"), ("circle",),
        cells={"flag 0": 0, "flag 1": 4}),
    hang("flag: raised in the own memory", flag_in_own_memory, (
            "rank 1, kernel `flag_in_own_memory`, block 0, warp 0, lane 0, waits for rank 0",
            "`nvl_buffer` of rank 1: flag (byte 0), expects 1 or more and sees 0",
            "In the memory of rank 0 the same byte was stored by rank 0"), ("circle", "Next to it"), cells={"flag": 0}),
    hang("flag: rounds counted from 0 and from 1", flag_of_the_next_round, ("rank 1, kernel `flag_of_the_next_round`",
            "flag (byte 0), expects 3 or more and sees 2",
            "not weak is by rank 0, kernel `flag_of_the_next_round`, block 0, warp 0, lane 0", "which has ended"),
        ("circle",), cells={"flag": 0}),
    hang("flag: both wait first", flags_that_both_wait_for_first, (
            "rank 0, kernel `flags_that_both_wait_for_first`, block 0, warp 0, lane 0, waits for rank 1",
            "polls `nvl_buffer` of rank 0: flag (byte 0), expects 1 or more and sees 0",
            "polls `nvl_buffer` of rank 1: flag (byte 0), expects 1 or more and sees 0",
            "They wait in a circle: rank 0 block 0, warp 0, lane 0 -> rank 1 block 0, warp 0, lane 0 -> rank 0"),
        cells={"flag": 0}),
    hang("flag: a loop without wait_expired", flag_polled_without_wait_expired, (
            "rank 1, kernel `flag_polled_without_wait_expired`, block 0, warp 0, lane 0",
            "polls `nvl_buffer` of rank 1: flag (byte 0), expects 7 and sees 0",
            "Rank 0 runs no kernel: its host has returned"), cells={"flag": 0}),
    hang("flag: a lock that is not given back", lock_that_is_not_given_back, (
            "polls `nvl_buffer` of rank 0: lock (byte 0), expects 0 and sees",
            "The last store to it that is not weak is by rank"), cells={"lock": 0}),
]  # fmt: skip

# --- ring -----------------------------------------------------------------------------------------------------------


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
def ring_without_head(peers: Peers):
    """The receiver never says what it has read."""
    if thread_idx() == 0:
        if peers.rank == 0:
            send_rows(peers, 10, 4, TAIL)
        else:
            for i in range(10):
                wait_for(buffer_of(peers, 1) + TAIL, i + 1)


@kernel(max_threads=32)
def ring_with_the_heads_next_word(peers: Peers):
    """The receiver stores its head one word too far."""
    if thread_idx() == 0:
        if peers.rank == 0:
            send_rows(peers, 10, 4, TAIL)
        else:
            receive_rows(peers, 10, HEAD + 4)


@kernel(max_threads=32)
def ring_with_the_tails_next_word(peers: Peers):
    """The sender stores its tail one word too far."""
    if thread_idx() == 0:
        if peers.rank == 0:
            send_rows(peers, 10, 4, TAIL + 4)
        else:
            receive_rows(peers, 10, HEAD)


@kernel(max_threads=32)
def ring_with_too_few_slots(peers: Peers):
    """The receiver takes out four rows at a time, the ring has three slots."""
    if thread_idx() == 0:
        if peers.rank == 0:
            send_rows(peers, 8, 3, TAIL)
        else:
            for i in range(2):
                wait_for(buffer_of(peers, 1) + TAIL, 4 * (i + 1))
                st_release_sys_s32(buffer_of(peers, 0) + HEAD, 4 * (i + 1))


@kernel(max_threads=32)
def ring_with_one_more_row(peers: Peers):
    """The receiver counts on one row more than the sender sends."""
    if thread_idx() == 0:
        if peers.rank == 0:
            send_rows(peers, 10, 4, TAIL)
        else:
            receive_rows(peers, 11, HEAD)


RING = {"tail": TAIL, "head": HEAD}
RINGS = [
    hang("ring: the head is not published", ring_without_head, (
            "rank 0, kernel `ring_without_head`, block 0, warp 0, lane 0, waits for rank 1",
            "polls `nvl_buffer` of rank 0: head (byte 64), expects 1 or more and sees 0",
            "So far only weak stores, or none, have written it",
            "polls `nvl_buffer` of rank 1: tail (byte 0), expects 5 or more and sees 4",
            "They wait in a circle: rank 0 block 0, warp 0, lane 0 -> rank 1 block 0"), ("Next to it",), cells=RING),
    hang("ring: the head is stored one word too far", ring_with_the_heads_next_word, (
            "rank 0, kernel `ring_with_the_heads_next_word`, block 0, warp 0, lane 0, waits for rank 1",
            "polls `nvl_buffer` of rank 0: head (byte 64), expects 1 or more and sees 0",
            "Next to it, `nvl_buffer` of rank 0: head + 4 (byte 68) is 4, stored by rank 1,",
            "They wait in a circle: rank 0 block 0, warp 0, lane 0 -> rank 1 block 0"), cells=RING),
    hang("ring: the tail is stored one word too far", ring_with_the_tails_next_word, (
            "polls `nvl_buffer` of rank 1: tail (byte 0), expects 1 or more and sees 0",
            "Next to it, `nvl_buffer` of rank 1: tail + 4 (byte 4) is 4, stored by rank 0,",
            "polls `nvl_buffer` of rank 0: head (byte 64), expects 1 or more and sees 0", "They wait in a circle"),
        cells=RING),
    hang("ring: fewer slots than the receiver takes at once", ring_with_too_few_slots, (
            "polls `nvl_buffer` of rank 0: head (byte 64), expects 1 or more and sees 0",
            "polls `nvl_buffer` of rank 1: tail (byte 0), expects 4 or more and sees 3", "They wait in a circle"),
        cells=RING),
    hang("ring: counts of rows that differ", ring_with_one_more_row, (
            "rank 1, kernel `ring_with_one_more_row`, block 0, warp 0, lane 0, waits for rank 0",
            "polls `nvl_buffer` of rank 1: tail (byte 0), expects 11 or more and sees 10",
            "not weak is by rank 0, kernel `ring_with_one_more_row`, block 0, warp 0, lane 0", "which has ended",
            "Rank 0 runs no kernel: its host has returned"), ("circle",), cells=RING),
]  # fmt: skip


# --- double buffer --------------------------------------------------------------------------------------------------

FULL, FREE = 0, 64  # words of two halves each


@device_function
def fill_halves(peers, num_rounds):
    """Rank 0: fill the halves of rank 1 in turn; a half is filled again when it has been freed."""
    for i in range(num_rounds):
        wait_for(buffer_of(peers, 0) + FREE + 4 * (i % 2), i // 2)
        st_release_sys_s32(buffer_of(peers, 1) + FULL + 4 * (i % 2), i // 2 + 1)


@kernel(max_threads=32)
def double_buffer_without_credit(peers: Peers):
    """Rank 1 gives back half 0 only."""
    if thread_idx() == 0:
        if peers.rank == 0:
            fill_halves(peers, 6)
        else:
            for i in range(6):
                wait_for(buffer_of(peers, 1) + FULL + 4 * (i % 2), i // 2 + 1)
                if i % 2 == 0:
                    st_release_sys_s32(buffer_of(peers, 0) + FREE, i // 2 + 1)


@kernel(max_threads=32)
def double_buffer_with_the_other_half(peers: Peers):
    """Rank 1 begins with half 1."""
    if thread_idx() == 0:
        if peers.rank == 0:
            fill_halves(peers, 6)
        else:
            for i in range(6):
                half = (i + 1) % 2
                wait_for(buffer_of(peers, 1) + FULL + 4 * half, i // 2 + 1)
                st_release_sys_s32(buffer_of(peers, 0) + FREE + 4 * (i % 2), i // 2 + 1)
                if i == 0:
                    wait_for(buffer_of(peers, 1) + FULL + 4 * half, 2)


HALVES = {"full[half 0]": FULL, "full[half 1]": FULL + 4, "free[half 0]": FREE, "free[half 1]": FREE + 4}
DOUBLE_BUFFERS = [
    hang("double buffer: one half is not given back", double_buffer_without_credit, (
            "rank 0, kernel `double_buffer_without_credit`, block 0, warp 0, lane 0, waits for rank 1",
            "polls `nvl_buffer` of rank 0: free[half 1] (byte 68), expects 1 or more and sees 0",
            "Next to it, `nvl_buffer` of rank 0: free[half 0] (byte 64) is 2, stored by rank 1",
            "polls `nvl_buffer` of rank 1: full[half 1] (byte 4), expects 2 or more and sees 1",
            "They wait in a circle"), cells=HALVES),
    hang("double buffer: the halves in another order", double_buffer_with_the_other_half,
        ("polls `nvl_buffer` of rank 0: free[half 1] (byte 68), expects 1 or more and sees 0",
            "polls `nvl_buffer` of rank 1: full[half 1] (byte 4), expects 2 or more and sees 1",
            "They wait in a circle"), cells=HALVES),
]  # fmt: skip


ENTRIES = [*FLAGS, *RINGS, *DOUBLE_BUFFERS]
