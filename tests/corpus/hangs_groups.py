"""Kernels of many threads, blocks and ranks, broken so that they hang; what the first paragraph of the report must say.

The patterns: barrier between ranks, barrier in a block, all-to-all, reduction. See hangs_users.
"""

from hangs_users import NEVER, hang, wait_for

from nbep.device.jit import kernel
from nbep.device.primitives import (
    FULL_MASK,
    atom_add_acq_rel_gpu_s32,
    atom_add_release_sys_s32,
    bar_sync,
    block_idx,
    grid_dim,
    ld_acquire_gpu_s32,
    st_release_sys_s32,
    syncwarp,
    thread_idx,
    wait_expired,
)
from nbep.device.protocols.peers import Peers, buffer_of

# --- barrier between ranks ------------------------------------------------------------------------------------------


@kernel(max_threads=32)
def barrier_at_rank_0(peers: Peers):
    """All ranks count themselves in at rank 0."""
    if thread_idx() == 0:
        arrivals = buffer_of(peers, 0)
        atom_add_release_sys_s32(arrivals, 1)
        wait_for(arrivals, peers.num_ranks)


@kernel(max_threads=32)
def barrier_for_one_rank_more(peers: Peers):
    if thread_idx() == 0:
        arrivals = buffer_of(peers, 0)
        atom_add_release_sys_s32(arrivals, 1)
        wait_for(arrivals, peers.num_ranks + 1)


@kernel(max_threads=32)
def barrier_that_one_rank_reaches_late(peers: Peers):
    """Rank 2 waits for a flag before it comes; who raises it comes first."""
    if thread_idx() == 0:
        arrivals, flag = buffer_of(peers, 0), buffer_of(peers, 2) + 64
        if peers.rank == 2:
            wait_for(flag, 1)
        atom_add_release_sys_s32(arrivals, 1)
        wait_for(arrivals, peers.num_ranks)
        if peers.rank == 1:
            st_release_sys_s32(flag, 1)


@kernel(max_threads=32)
def barrier_of_signals(peers: Peers):
    """Each rank tells each other one, in the cell of its own rank; this one tells in the cell of the other's."""
    peer = thread_idx()
    if peer < peers.num_ranks:
        st_release_sys_s32(buffer_of(peers, peer) + 4 * peer, 1)
        wait_for(buffer_of(peers, peers.rank) + 4 * peer, 1)


SIGNALS = {f"signal of rank {rank}": 4 * rank for rank in range(4)}
BARRIERS = [
    hang("barrier: one rank does not come", barrier_at_rank_0, (
            "polls `nvl_buffer` of rank 0: arrivals (byte 0), expects 4 or more and sees 3", "wait in the same way",
            "Rank 2 runs no kernel: its host has returned"), ("circle", "Rank 3 runs"), cells={"arrivals": 0},
        num_ranks=4, absent=(2,)),
    hang("barrier: one rank too many is counted on", barrier_for_one_rank_more, (
            "rank 0, kernel `barrier_for_one_rank_more`, block 0, warp 0, lane 0",
            "polls `nvl_buffer` of rank 0: arrivals (byte 0), expects 5 or more and sees 4",
            "Ranks 1-3 wait in the same way"), ("circle", "runs no kernel"), cells={"arrivals": 0}, num_ranks=4),
    hang("barrier: one rank waits before it for who is in it", barrier_that_one_rank_reaches_late,
        ("polls `nvl_buffer` of rank 2: flag (byte 64), expects 1 or more and sees 0",
            "rank 2, kernel `barrier_that_one_rank_reaches_late`"), cells={"arrivals": 0, "flag": 64}, num_ranks=3),
    hang("barrier: a signal in the other rank's cell", barrier_of_signals, (
            "rank 0, kernel `barrier_of_signals`, block 0, warp 0, lane 1, waits for rank 1",
            "polls `nvl_buffer` of rank 0: signal of rank 1 (byte 4), expects 1 or more and sees 0",
            "rank 1, kernel `barrier_of_signals`, block 0, warp 0, lane 0, waits for rank 0",
            "polls `nvl_buffer` of rank 1: signal of rank 0 (byte 0), expects 1 or more and sees 0",
            ("Next to it, `nvl_buffer` of rank 0: signal of rank 0 (byte 0) is 1, stored by rank",
                "Next to it, `nvl_buffer` of rank 1: signal of rank 1 (byte 4) is 1, stored by rank"),
            "They wait in a circle"), cells=SIGNALS, num_ranks=2),
]  # fmt: skip


# --- barriers in a block --------------------------------------------------------------------------------------------


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
def barrier_behind_a_wait_for_the_block(peers: Peers):
    """Warp 1 waits for a flag that warp 0 raises behind the barrier."""
    flag = buffer_of(peers, peers.rank)
    if thread_idx() == 32:
        wait_for(flag, 1)
    bar_sync(0, 64)
    if thread_idx() == 0:
        st_release_sys_s32(flag, 1)


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
def grid_barrier_for_too_many(peers: Peers):
    """A barrier of all blocks that is for one block more."""
    arrivals = buffer_of(peers, peers.rank)
    if thread_idx() == 0:
        atom_add_acq_rel_gpu_s32(arrivals, 1)
        while ld_acquire_gpu_s32(arrivals) != grid_dim() + 1:
            wait_expired(NEVER)


BLOCKS = [
    hang("block: a named barrier for too many threads", team_barrier_for_too_many, (
            "rank 0, kernel `team_barrier_for_too_many`, block 0, warp 0-1, waits at barrier 1: 64 of 96 threads have",
            "for 32 more threads there is nobody left: warp 2-3 so far met at barrier 2 only"), ("missing: warp 3",),
        cells={"flag": 0}, num_ranks=1, block=128),
    hang("block: two barriers in another order", barriers_in_another_order, (
            "rank 0, kernel `barriers_in_another_order`, block 0, warp 0, waits at barrier 1: 32 of 64 threads have",
            "rank 0, kernel `barriers_in_another_order`, block 0, warp 1, waits at barrier 2: 32 of 64 threads have",
            "They wait in a circle: rank 0 block 0, warp 0 -> rank 0 block 0, warp 1 -> rank 0 block 0, warp 0"),
        num_ranks=1, block=64),
    hang("block: a wait for who is at the barrier", barrier_behind_a_wait_for_the_block, (
            "rank 0, kernel `barrier_behind_a_wait_for_the_block`, block 0, warp 1, lane 0,",
            "polls `nvl_buffer` of rank 0: flag (byte 0), expects 1 or more and sees 0"), cells={"flag": 0},
        num_ranks=1, block=64),
    hang("block: a warp that returns before the barrier", barrier_that_a_warp_leaves_out,
        ("barrier 0 of rank 0, kernel `barrier_that_a_warp_leaves_out`, block 0 can never fill: it takes 64 threads",),
        num_ranks=1, block=64),
    hang("block: a lane that waits for its own warp", lanes_that_wait_for_their_warp, (
            "rank 0, kernel `lanes_that_wait_for_their_warp`, block 0, warp 0, lane 1,",
            "polls `nvl_buffer` of rank 0: flag (byte 0), expects 1 or more and sees 0"), cells={"flag": 0},
        num_ranks=1),
    hang("block: a grid barrier for too many blocks", grid_barrier_for_too_many, (
            "rank 0, kernel `grid_barrier_for_too_many`, block 0-3, warp 0, lane 0",
            "polls `nvl_buffer` of rank 0: arrivals (byte 0), expects 5 and sees 4"), ("circle",),
        cells={"arrivals": 0}, num_ranks=1, grid=4),
]  # fmt: skip


# --- all-to-all -----------------------------------------------------------------------------------------------------


@kernel(max_threads=32)
def all_to_all_at_the_receivers_slot(peers: Peers):
    """Rank r's message to d stands at slot r of d; this kernel puts it at slot d, the receiver's own."""
    peer = thread_idx()
    if peer < peers.num_ranks and peer != peers.rank:
        st_release_sys_s32(buffer_of(peers, peer) + 4 * peer, 1)
        wait_for(buffer_of(peers, peers.rank) + 4 * peer, 1)


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


SLOTS = {f"slot {rank}": 4 * rank for rank in range(4)}
ALL_TO_ALLS = [
    hang("all-to-all: the receiver's slot in place of the sender's", all_to_all_at_the_receivers_slot,
        ("rank 0, kernel `all_to_all_at_the_receivers_slot`, block 0, warp 0, lane 1",
            "polls `nvl_buffer` of rank 0: slot 1 (byte 4), expects 1 or more and sees 0",
            "Next to it, `nvl_buffer` of rank 0: slot 0 (byte 0) is 1, stored by rank"), cells=SLOTS, num_ranks=4),
    hang("all-to-all: the last receiver is left out", all_to_all_without_the_last, (
            "rank 3, kernel `all_to_all_without_the_last`, block 0, warp 0, lane 0, waits for rank 0",
            "polls `nvl_buffer` of rank 3: slot 0 (byte 0), expects 1 or more and sees 0",
            "In the memory of ranks 0-2 the same byte was stored by rank 0", "Ranks 0-2 run no kernel"), ("circle",),
        cells=SLOTS, num_ranks=4),
    hang("all-to-all: nobody sends to itself, but waits for it", all_to_all_that_skips_itself_once,
        ("rank 0, kernel `all_to_all_that_skips_itself_once`, block 0, warp 0, lane 0, waits for rank 0",
            "polls `nvl_buffer` of rank 0: slot 0 (byte 0), expects 1 or more and sees 0",
            "In the memory of ranks 1-3 the same byte was stored by rank 0"), cells=SLOTS, num_ranks=4),
]  # fmt: skip


# --- reduction ------------------------------------------------------------------------------------------------------


@kernel(max_threads=32)
def reduction_that_counts_the_root(peers: Peers):
    """Rank 0 waits for as many parts as there are ranks, but adds none itself."""
    if thread_idx() == 0:
        if peers.rank == 0:
            wait_for(buffer_of(peers, 0), peers.num_ranks)
        else:
            atom_add_release_sys_s32(buffer_of(peers, 0), 1)


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
def reduction_of_blocks(peers: Peers):
    """Block 0 waits for all blocks; block 3 has an early way out."""
    arrivals = buffer_of(peers, peers.rank)
    if thread_idx() == 0 and block_idx() != 3:
        if block_idx() > 0:
            atom_add_acq_rel_gpu_s32(arrivals, 1)
        else:
            while ld_acquire_gpu_s32(arrivals) != grid_dim() - 1:
                wait_expired(NEVER)


REDUCTIONS = [
    hang("reduction: the root counts itself", reduction_that_counts_the_root, (
            "rank 0, kernel `reduction_that_counts_the_root`, block 0, warp 0, lane 0",
            "polls `nvl_buffer` of rank 0: parts (byte 0), expects 4 or more and sees 3", "Ranks 1-3 run no kernel"),
        ("circle",), cells={"parts": 0}, num_ranks=4),
    hang("reduction: a tree in which a child tells another parent", reduction_tree_with_a_wrong_child,
        ("polls `nvl_buffer` of rank 0: child 1 (byte 4), expects 1 or more and sees 0",
            "rank 0, kernel `reduction_tree_with_a_wrong_child`",
            "In the memory of rank 1 the same byte was stored by rank 2"), ("circle",),
        cells={"child 0": 0, "child 1": 4}, num_ranks=3),
    hang("reduction: along a ring in which nobody begins", reduction_along_a_ring, (
            "rank 0, kernel `reduction_along_a_ring`, block 0, warp 0, lane 0",
            "polls `nvl_buffer` of rank 0: part (byte 0), expects 1 or more and sees 0",
            "So far only weak stores, or none, have written it", "Ranks 1-2 wait in the same way"), cells={"part": 0},
        num_ranks=3),
    hang("reduction: a block that returns early", reduction_of_blocks, (
            "rank 0, kernel `reduction_of_blocks`, block 0, warp 0, lane 0",
            "polls `nvl_buffer` of rank 0: parts (byte 0), expects 3 and sees 2",
            "The last store to it that is not weak is by rank 0, kernel `reduction_of_blocks`, block",
            "kernel `reduction_of_blocks` of rank 0: block 0, warp 0, lane 1-31; block 1-3, warp 0"), ("circle",),
        cells={"parts": 0}, num_ranks=1, grid=4),
]  # fmt: skip

ENTRIES = [*BARRIERS, *BLOCKS, *ALL_TO_ALLS, *REDUCTIONS]
