"""Programs for both engines: one kernel interprets the steps of each of its threads, so nothing is compiled anew.

An access has its order and its scope in its step: it calls the machine, as primitives do of which each has one of both.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from oracle import Op, Program
from oracle_runs import KINDS, WARP, num_threads, run_hosts

from nbep.device import primitives as ptx
from nbep.device.compilers import cpu
from nbep.device.compilers.cpu import how
from nbep.emulator import current_thread
from nbep.emulator.engine import access
from nbep.emulator.engine.signals import ACQUIRE, RELEASE, UNUSED
from nbep.emulator.engine.words import get_s32, get_s64
from nbep.lang import I32, In, InOut, device_function, kernel

NEVER = 1 << 62
MOST_THREADS = 128
SMEM, MBARRIERS, NUM_BYTES = 384, 256, 528
(
    NOTHING, ST_V4, LD_V4, ST_U8, LD_U8, LD_NC, ST_VOL, LD_VOL,
    LOAD, STORE, ADD, EXCHANGE, COMPARE, AWAIT, LOCK, EITHER, BOTH,
    FENCE_CTA, FENCE_GPU, FENCE_SYS, BAR, LANES, MEET, ARRIVE, SHFL, VOTE,
    S_ST, S_LD, S_ST_V4, S_LD_V4, S_RLX, S_ACQ, S_ADD, S_EXCH,
    FENCE_SHARED, FENCE_GLOBAL, M_INIT, M_EXPECT, M_WAIT, B_LOAD, B_STORE, COMMIT, WAIT_READ, WAIT_ALL,
) = range(44)  # fmt: skip


# --- accesses ----------------------------------------------------------------------------------------------------
MODIFYING = "add", "exch", "cas"  # as `access` numbers them
# how: what the machine is told of order and scope. Numba compiles the second function of each pair for the first.

WAYS = {
    how(order, scope, loads): (order, scope)
    for order in ("weak", "relaxed", "acquire", "release", "acq_rel")
    for scope in ("cta", "gpu", "sys")
    for loads in (False, True)
}


def load(address, size, how):
    return current_thread().load(address, KINDS[size], *WAYS[how])


def _load(address, size, how):
    place = access.load(address, size, how)
    return get_s32(place) if size == 4 else get_s64(place)


def store(address, size, value, how):
    current_thread().store(address, KINDS[size], value, *WAYS[how])


def _store(address, size, value, how):
    access.store(address, size, value, 0, how)


def modify(op, address, size, value, compare, how):
    return current_thread().atomic(MODIFYING[op], address, KINDS[size], value, *WAYS[how], compare)


def _modify(op, address, size, value, compare, how):
    return access.atomic(op, address, size, value, compare, how)


def change(op, address, size, value, compare, how):
    """The same where nobody uses what was there."""
    return current_thread().atomic(MODIFYING[op], address, KINDS[size], value, *WAYS[how], compare)


def _change(op, address, size, value, compare, how):
    return access.atomic(op, address, size, value, compare, how if how & (ACQUIRE | RELEASE) else how | UNUSED)


for one, other in (load, _load), (store, _store), (modify, _modify), (change, _change):
    one.__wrapped__ = other  # so it is what the cache knows it by
cpu._overload(load, lambda address, size, how: _load)
cpu._overload(store, lambda address, size, value, how: _store)
cpu._overload(modify, lambda op, address, size, value, compare, how: _modify)
cpu._overload(change, lambda op, address, size, value, compare, how: _change)


@device_function
def reach(what, there, value, size, how, compare, is_used):
    """An access whose order is in its step; what it has read, or 0."""
    old = 0
    if what == STORE:
        store(there, size, value, how)
    elif what == LOAD:
        old = load(there, size, how)
    elif what == AWAIT:
        while load(there, size, how) < value:
            ptx.wait_expired(NEVER)
    elif what == LOCK:
        while modify(2, there, size, value, compare, how) != compare:
            ptx.wait_expired(NEVER)
    elif is_used:
        old = modify(what - ADD, there, size, value, compare, how)
    else:
        change(what - ADD, there, size, value, compare, how)
    return old


@device_function
def wait_for_two(what, there, value, size, how, there_2, value_2, how_2):
    if what == EITHER:
        while load(there, size, how) != value:
            if load(there_2, size, how_2) == value_2:
                break
            ptx.wait_expired(NEVER)
    else:
        while not (load(there, size, how) == value and load(there_2, size, how_2) == value_2):
            ptx.wait_expired(NEVER)


@device_function
def access_plainly(what, there, value):
    if what == ST_V4:
        ptx.st_na_v4(there, (1, 2, 3, 4))
    elif what == LD_V4:
        ptx.ld_na_v4(there)
    elif what == ST_U8:
        ptx.st_weak_u8(there, value)
    elif what == LD_U8:
        ptx.ld_weak_u8(there)
    elif what == LD_NC:
        ptx.ld_nc_s32(there)
    elif what == ST_VOL:
        ptx.st_volatile_s32(there, value)
    elif what == LD_VOL:
        ptx.ld_volatile_s32(there)


@device_function
def order(what, at, value, more):
    if what == FENCE_CTA:
        ptx.fence_acq_rel_cta()
    elif what == FENCE_GPU:
        ptx.fence_acq_rel_gpu()
    elif what == FENCE_SYS:
        ptx.fence_acq_rel_sys()
    elif what == BAR:
        ptx.syncthreads()
    elif what == LANES:
        ptx.syncwarp(value & 0xFFFFFFFF)
    elif what == MEET:
        ptx.bar_sync(at, more)
    elif what == ARRIVE:
        ptx.bar_arrive(at, more)


@device_function
def access_shared(what, at, value):
    if what == S_ST:
        ptx.st_shared_s32(at, value)
    elif what == S_LD:
        ptx.ld_shared_s32(at)
    elif what == S_ST_V4:
        ptx.st_shared_v4(at, (1, 2, 3, 4))
    elif what == S_LD_V4:
        ptx.ld_shared_v4(at)
    elif what == S_RLX:
        ptx.ld_relaxed_cta_shared_s32(at)
    elif what == S_ACQ:
        ptx.ld_acquire_cta_shared_s32(at)
    elif what == S_ADD:
        ptx.atom_add_relaxed_cta_shared_s32(at, value)
    elif what == S_EXCH:
        ptx.atom_exch_release_cta_shared_s32(at, value)


@device_function
def copy(what, there, value, more):
    if what == FENCE_SHARED:
        ptx.fence_proxy_async_shared()
    elif what == FENCE_GLOBAL:
        ptx.fence_proxy_async_global()
    elif what == M_INIT:
        ptx.mbarrier_init(MBARRIERS + 8 * more, 1)
    elif what == M_EXPECT:
        ptx.mbarrier_arrive_expect_tx(MBARRIERS + 8 * more, 32)
    elif what == M_WAIT:
        while not ptx.mbarrier_try_wait_parity(MBARRIERS + 8 * more, 0):
            ptx.wait_expired(NEVER)
    elif what == B_LOAD:
        ptx.tma_load_1d(value, there, 32, MBARRIERS + 8 * more)
    elif what == B_STORE:
        ptx.tma_store_1d(there, value, 32)
    elif what == COMMIT:
        ptx.tma_store_commit()
    elif what == WAIT_READ:
        ptx.tma_store_wait_read_all()
    elif what == WAIT_ALL:
        ptx.tma_store_wait_all()


@kernel(max_threads=MOST_THREADS)
def interpret(memory: InOut, told: InOut, program: In, num_steps: I32):
    """program: for each thread its steps, as `encoded` says; told: for each what it has been told, as one number"""
    thread = ptx.thread_idx()
    for i in range(0, SMEM, 4 * ptx.block_dim()):
        if i + 4 * thread < SMEM:
            ptx.st_shared_s32(i + 4 * thread, 0)
    ptx.syncthreads()
    number = thread + ptx.block_dim() * ptx.block_idx()
    rows = program + 32 * num_steps * number
    answers, last, is_true, were_true, count = 0, 0, False, 0, 0
    for step in range(num_steps):
        row = rows + 32 * step
        what, at, value, more = ptx.ld_nc_v4(row)
        at, value, more = ptx.s32(at), ptx.s32(value), ptx.s32(more)
        size, how, asks, given = ptx.ld_nc_v4(row + 16)
        there = memory + at
        if given > 0 and were_true >> (given - 1) & 1 == 0:
            continue
        is_told = asks != NONE
        if what == NOTHING:
            continue
        if what < LOAD:
            access_plainly(what, there, value)
            is_told = False
        elif what < EITHER:
            last = reach(what, there, value, size, how, more, is_told)
        elif what <= BOTH:
            _, at_2, value_2, _ = ptx.ld_nc_v4(row + 32)
            _, how_2, _, _ = ptx.ld_nc_v4(row + 48)
            wait_for_two(what, there, value, size, how, memory + at_2, value_2, how_2)
        elif what == VOTE:
            last = ptx.vote_any(more & 0xFFFFFFFF, is_true) * 1
        elif what == SHFL:
            last = (ptx.shfl_idx_s32(more & 0xFFFFFFFF, ptx.s32(last), at) >= value) * 1
        elif what < S_ST:
            order(what, at, value, more)
        elif what < FENCE_SHARED:
            access_shared(what, at, value)
        else:
            copy(what, there, value, more)
        if is_told:
            answer = last
            if asks == BIT:
                answer = last & 1
            elif asks == LEAST:
                answer = (last >= more) * 1
            is_true = answer != 0
            were_true |= (is_true * 1) << count
            answers = ptx.s32(31 * answers + answer + 1)
            count += 1
    ptx.st_weak_s32(told + 4 * number, answers)


class Steps(NamedTuple):
    """A program. kernels: (rank, blocks, threads of each, steps); hosts: by rank; num_bytes: of the memory"""

    kernels: list[tuple[int, int, int, np.ndarray]]
    hosts: list[list[Op]]
    num_bytes: int = NUM_BYTES


NONE, ALL, BIT, LEAST = range(4)  # what a thread asks of a value
ASKED = {"none": NONE, "all": ALL, "bit": BIT, "least": LEAST, "late": LEAST}
NUMBERS = {
    "ld": LOAD, "st": STORE, "add": ADD, "exch": EXCHANGE, "cas": COMPARE, "wait": AWAIT, "lock": LOCK,
    "either": EITHER, "both": BOTH, "again": NOTHING, "vote": VOTE, "shfl": SHFL,
}  # fmt: skip


def encoded(op: Op, count: int = 0) -> tuple[int, ...]:
    """A step as the kernel reads it. count: of the threads that a barrier is for"""
    if op.what == "fence":
        return {"cta": FENCE_CTA, "gpu": FENCE_GPU, "sys": FENCE_SYS}[op.scope], 0, 0, 0, 0, 0, NONE, op.given + 1
    if op.what in ("bar", "arrive"):
        return MEET if op.what == "bar" else ARRIVE, op.cell, 0, count, 0, 0, NONE, op.given + 1
    if op.what == "syncwarp":
        return LANES, 0, op.other, 0, 0, 0, NONE, op.given + 1
    is_answer = op.what in ("ld", *MODIFYING, "vote", "shfl")
    way = how(op.order, op.scope, op.what not in ("st", "lock", *MODIFYING)) if op.order else 0
    at = (op.other & -op.other).bit_length() - 1 if op.what == "shfl" else op.cell  # the first lane
    asks = ASKED[op.asks] if is_answer else NONE
    return NUMBERS[op.what], at, op.value, op.other, op.size, way, asks, op.given + 1


def of_oracle(program: Program) -> Steps:
    """A program of the oracle for both engines. Threads that a warp has besides come to its barriers."""
    kernels = []
    for rank, blocks in program.kernels:
        threads = num_threads(blocks[0])
        steps: dict[tuple[int, int], list[tuple[int, ...]]] = {}
        for b, block in enumerate(blocks):
            for w, lanes in enumerate(block):
                for lane in range(min(WARP, threads - WARP * w)):
                    ops = lanes[lane] if lane < len(lanes) else [op for op in lanes[0] if op.what in ("bar", "arrive")]
                    steps[b, WARP * w + lane] = [
                        encoded(op, WARP * op.value if len(block) > 1 else threads) for op in ops
                    ]
        kernels.append((rank, len(blocks), threads, table_of(steps, len(blocks), threads)))
    return Steps(kernels, [list(host) for host in program.hosts], program.num_bytes)


def table_of(steps: dict[tuple[int, int], list[tuple[int, ...]]], blocks: int, threads: int) -> np.ndarray:
    """Steps of threads by block and number, all as many."""
    rows = np.zeros((blocks, threads, max(map(len, steps.values())) + 1, 8), np.int64)
    for who, mine in steps.items():
        for i, step in enumerate(mine):
            rows[*who, i, : len(step)] = step
    return rows.astype(np.int32)


# --- running -----------------------------------------------------------------------------------------------------


def run(world, program: Steps) -> tuple:
    """Run a program in a world: the bytes at its end, and what hosts and threads have been told."""
    told = []

    def launch(stream, number: int, base: int) -> None:
        rank, blocks, threads, rows = program.kernels[number]
        space = world.ranks[rank].space
        told.append(np.zeros(blocks * threads, np.int32))
        answers = space.map_array(told[-1], "told", True)
        steps = space.map_array(rows.reshape(-1), "program", False)
        args = base, answers.address, steps.address, rows.shape[2]
        stream.launch(interpret, args, blocks, threads, SMEM, "interpret")

    return *run_hosts(world, program.hosts, program.num_bytes, launch), told
