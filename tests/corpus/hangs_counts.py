"""Kernels of two ranks that hang because a cell goes back, or loses a count; and what the report must say.

The patterns: ring, barrier, counter. See hangs_users.
"""

from hangs_users import HEAD, RING, TAIL, hang, wait_for

from nbep.device.jit import kernel
from nbep.device.primitives import atom_add_release_sys_s32, ld_acquire_sys_s32, st_release_sys_s32, thread_idx
from nbep.device.protocols.peers import Peers, buffer_of

COUNT, LOOKED = 0, 64


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
def barrier_that_all_set_back(peers: Peers):
    """Each rank empties the cell for the next time, when another one may have come there again."""
    if thread_idx() == 0:
        for _ in range(6):
            atom_add_release_sys_s32(buffer_of(peers, 0) + COUNT, 1)
            wait_for(buffer_of(peers, 0) + COUNT, peers.num_ranks)
            st_release_sys_s32(buffer_of(peers, 0) + COUNT, 0)


@kernel(max_threads=32)
def counter_without_an_atomic(peers: Peers):
    """Each rank adds one, by a load and a store. All have loaded before the first one stores."""
    if thread_idx() == 0:
        count = ld_acquire_sys_s32(buffer_of(peers, 0) + COUNT)
        atom_add_release_sys_s32(buffer_of(peers, 0) + LOOKED, 1)
        wait_for(buffer_of(peers, 0) + LOOKED, peers.num_ranks)
        st_release_sys_s32(buffer_of(peers, 0) + COUNT, count + 1)
        wait_for(buffer_of(peers, 0) + COUNT, peers.num_ranks)


CELLS = {"arrivals": COUNT, "looked": LOOKED}
ENTRIES = [
    hang("ring: the head wraps like the slots", ring_with_a_head_that_wraps, (
            "rank 0, kernel `ring_with_a_head_that_wraps`, block 0, warp 0, lane 0, waits for rank 1",
            "polls `nvl_buffer` of rank 0: head (byte 64), expects ",
            "It has gone back from 3 to 0, by a store of rank 1, kernel `ring_with_a_head_that_wraps`, block 0"),
        ("Next to it",), cells=RING),
    hang("barrier: all set it back", barrier_that_all_set_back, (
            "polls `nvl_buffer` of rank 0: arrivals (byte 0), expects 2 or more and sees ", "It has gone back from ",
            " to 0, by rank "), ("atomic",), cells=CELLS),
    hang("counter: a load and a store in place of an atomic", counter_without_an_atomic, (
            "polls `nvl_buffer` of rank 0: arrivals (byte 0), expects 2 or more and sees 1",
            "have stored 1 there: to count together takes an atomic"), ("gone back",), cells=CELLS),
]  # fmt: skip
