"""Threads that meet, broken: barriers of a block, of a grid and between ranks, reductions, all-to-all."""

from cells import ALL, COUNT, DATA, FLAG, OTHER, OUT, PARTS, cell, linger, together, wait
from entries import Race, maybe

from nbep.device.primitives import (
    atom_add_acq_rel_gpu_s32,
    atom_add_relaxed_gpu_s32,
    atom_add_relaxed_sys_s32,
    atom_add_release_sys_s32,
    bar_arrive,
    bar_sync,
    block_dim,
    block_idx,
    fence_acq_rel_gpu,
    lane_id,
    ld_acquire_gpu_s32,
    ld_acquire_sys_s32,
    ld_relaxed_gpu_s32,
    ld_relaxed_sys_s32,
    ld_shared_s32,
    ld_weak_s32,
    shfl_xor_s32,
    st_release_sys_s32,
    st_shared_s32,
    st_weak_s32,
    syncthreads,
    thread_idx,
)
from nbep.emulator import current_thread


def nothing():
    """No step."""


def start():
    """Leave something in shared memory: words that nobody has written are another error."""
    st_shared_s32(4 * thread_idx(), 0)
    syncthreads()


def exchange(middle=syncthreads, end=syncthreads):
    """Threads pass words through shared memory, twice."""

    def exchange_words(memory):
        other = 4 * (thread_idx() ^ (block_dim() - 1))
        start()
        for turn in range(2):
            st_shared_s32(4 * thread_idx(), turn)
            middle()
            assert ld_shared_s32(other) == turn
            end()

    return exchange_words


def in_one_block(kernel, threads=64):
    return together((0, kernel, 1, threads))


def store_behind_an_arrival(memory):
    if thread_idx() < 32:
        bar_sync(1, 33)
        ld_weak_s32(memory + DATA)
    else:
        bar_arrive(1, 33)
        st_weak_s32(memory + DATA, 1)


def give_back_before_the_load(memory):
    """Warp 0 fills a stage and warp 1 empties it, which says so before it has read its words."""
    for turn in range(4):
        if thread_idx() < 32:
            if turn:
                bar_sync(2, 64)
            st_shared_s32(4 * lane_id(), turn)
            bar_arrive(1, 64)
        else:
            bar_sync(1, 64)
            if turn < 3:
                bar_arrive(2, 64)
            ld_shared_s32(4 * lane_id())


def last_block_sums(count=atom_add_acq_rel_gpu_s32, before=syncthreads, after=syncthreads):
    """Each block leaves a part, and the last to come adds them up."""

    def sum_parts(memory):
        st_weak_s32(memory + PARTS + 4 * (block_idx() * 32 + thread_idx()), 1)
        before()
        if thread_idx() == 0:
            st_shared_s32(0, count(memory + COUNT, 1))
        after()
        if thread_idx() == 0 and ld_shared_s32(0) == 2:
            for i in range(0, 96, 31):
                ld_weak_s32(memory + PARTS + 4 * i)

    return sum_parts


def fence_and_count(address, value):
    """As with __threadfence() before the atomic, and none behind it."""
    fence_acq_rel_gpu()
    return atom_add_relaxed_gpu_s32(address, value)


def grid_barrier(arrive=atom_add_acq_rel_gpu_s32, poll=ld_acquire_gpu_s32, before=syncthreads, after=syncthreads):
    """All blocks come together; then each reads what the next one has stored."""

    def meet(memory):
        st_weak_s32(memory + PARTS + 4 * (block_idx() * 32 + thread_idx()), 1)
        before()
        if thread_idx() == 0:
            arrive(memory + COUNT, 1)
            wait(memory + COUNT, poll, at_least=2)
        after()
        ld_weak_s32(memory + PARTS + 4 * ((1 - block_idx()) * 32 + thread_idx()))

    return meet


def blocks(kernel, grid=2, threads=32):
    return together((0, kernel, grid, threads))


def all_to_all(send=atom_add_release_sys_s32, receive=ld_acquire_sys_s32, num_waited=2, slot=lambda rank: rank):
    """Ranks 0 and 1 each put a word into rank 2's memory, and count it there."""

    def put(memory):
        rank = current_thread().rank
        st_weak_s32(memory + PARTS + 4 * slot(rank), rank)
        send(memory + COUNT + 4 * rank, 1)

    def take(memory):
        for rank in range(num_waited):
            wait(memory + COUNT + 4 * rank, receive)
        for rank in range(2):
            ld_weak_s32(memory + PARTS + 4 * slot(rank))

    return together((0, put, 1, 1), (1, put, 1, 1), (2, take, 1, 1))


def all_count(at_least):
    """Ranks 0 and 1 each put a word into rank 2's memory, and count themselves in the same cell."""

    def put(memory):
        st_weak_s32(memory + PARTS + 4 * current_thread().rank, 1)
        atom_add_release_sys_s32(memory + COUNT, 1)

    def take(memory):
        if thread_idx() == 0:
            wait(memory + COUNT, at_least=at_least)
            for rank in range(2):
                ld_weak_s32(memory + PARTS + 4 * rank)

    return together((0, put, 1, 1), (1, put, 1, 1), (2, take, 1, 32))


def count_together():
    """Two ranks tell each other that they have stored."""

    def meet(memory):
        rank = current_thread().rank
        st_weak_s32(memory + PARTS + 4 * rank, 1)
        atom_add_acq_rel_gpu_s32(memory + COUNT, 1)
        wait(memory + COUNT, ld_acquire_gpu_s32, at_least=2)
        ld_weak_s32(memory + PARTS + 4 * (1 - rank))

    return together((0, meet, 1, 1), (1, meet, 1, 1))


def lanes_sum(meet):
    """A warp adds up through shared memory."""

    def sum_lanes(memory):
        start()
        st_shared_s32(4 * lane_id(), 1)
        meet()
        if lane_id() == 0:
            st_weak_s32(memory + OUT, ld_shared_s32(0) + ld_shared_s32(4 * 31))

    return sum_lanes


def shuffle():
    shfl_xor_s32(ALL, 1, 1)


def read_early(memory):
    """The reset of a counter, while others still add to it."""
    atom_add_relaxed_sys_s32(memory + OTHER, 1)
    if thread_idx() == 0:
        ld_weak_s32(memory + OTHER)


def late_flag(memory):
    st_weak_s32(memory + DATA, 42)
    linger(2000)
    st_release_sys_s32(memory + FLAG, 1)


def one_waits_for_all(memory):
    """Warp 0 waits for the flag, after a look at another cell, as nbep's waits look whether one has timed out."""
    if thread_idx() == 0:
        ld_relaxed_sys_s32(memory + OTHER)
        wait(memory + FLAG)
    elif thread_idx() == block_dim() // 2:
        linger(400)
        ld_weak_s32(memory + DATA)


ENTRIES = [
    Race("block: no barrier behind the thread that waits",
         together((0, late_flag, 1, 1), (1, one_waits_for_all, 1, 64)),
         ("gone on", "heard by another warp", "neither waited"), ((cell("data[0]"), cell("flag")),),
         range(8)),
    Race("block: no barrier before the loads", in_one_block(exchange(middle=nothing)), "no barrier",
         ("`shared memory`",), range(8)),
    Race("warp: no syncwarp before the loads", in_one_block(exchange(middle=nothing), 32), "no syncwarp",
         ("`shared memory`",), range(8)),
    Race("block: a store behind its arrival", in_one_block(store_behind_an_arrival, 33), "no barrier",
         (cell("data[0]", 0),), range(8)),
    Race("block: a stage is given back before it is read", in_one_block(give_back_before_the_load), "no barrier",
         ("`shared memory`",), least=4),
    Race("reduction: lanes, no syncwarp", in_one_block(lanes_sum(nothing), 32), "no syncwarp", ("`shared memory`",),
         range(12)),
    Race("reduction: lanes, a shuffle in place of a syncwarp", in_one_block(lanes_sum(shuffle), 32), "shuffle",
         ("`shared memory`",), range(8)),
    Race("reduction: a total is read while others add", in_one_block(read_early), ("no syncwarp", "warps not met"),
         (cell("other flag", 0),), range(8)),
    Race("last block: counts itself relaxed", blocks(last_block_sums(atom_add_relaxed_gpu_s32), 3), "both too weak",
         (cell("arrivals", 0),), least=4),
    Race("grid barrier: relaxed poll", blocks(grid_barrier(fence_and_count, ld_relaxed_gpu_s32)), "load too weak",
         (cell("arrivals", 0),), range(8)),
    Race("all-to-all: waits for one rank, reads of both", all_to_all(num_waited=1), ("not waited", "neither waited"),
         (cell("parts[1]", 2), cell("arrivals", 2)), range(12)),
    Race("all-to-all: waits until one of two has counted itself", all_count(at_least=1),
         ("neither waited", "not waited"), (": parts[", cell("arrivals", 2)), range(12)),
    Race("barrier between ranks: counts with the GPU's scope", count_together(), "racing store's scope",
         (cell("arrivals"),), range(4)),
    Race("all-to-all: two ranks put into one slot", all_to_all(slot=lambda rank: 0), "two stores, not waited",
         (cell("parts[0]", 2), maybe(cell("arrivals + 1", 2)), maybe(cell("arrivals", 2))), range(8)),
]  # fmt: skip
