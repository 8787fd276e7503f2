"""Random programs for two engines: one kernel interprets the steps of each of its threads, so nothing is compiled anew.

Threads and hosts hand data on, in ways that are right; then some steps are changed, dropped or added.
"""

from __future__ import annotations

import random
from typing import NamedTuple

import numpy as np

from nbep.device import primitives as ptx
from nbep.lang import I32, In, InOut, device_function, kernel

NEVER = 1 << 62
MOST_THREADS = 64
SMEM, MBARRIERS, NUM_BYTES = 384, 256, 528
(
    NOTHING,
    ST, LD, ST_V4, LD_V4, ST_U8, LD_U8, ST_S64, LD_S64, LD_NC,
    ST_REL, ST_RLX, ST_REL_GPU, ST_RLX_GPU, ST_VOL, ST_REL_S64,
    LD_ACQ, LD_RLX, LD_ACQ_GPU, LD_RLX_GPU, LD_VOL, LD_ACQ_S64,
    ADD_RLX, ADD_REL, ADD_ACQ_REL, ADD_RLX_GPU, ADD_REL_GPU, ADD_ACQ_REL_GPU, EXCH, CAS,
    FENCE_CTA, FENCE_GPU, FENCE_SYS,
    WAIT_ACQ, WAIT_RLX, WAIT_ACQ_GPU,
    BAR, WARP, SYNC_1, ARRIVE_1, SHFL,
    S_ST, S_LD, S_ST_V4, S_LD_V4, S_RLX, S_ACQ, S_ADD, S_EXCH,
    FENCE_SHARED, FENCE_GLOBAL, M_INIT, M_EXPECT, M_WAIT, B_LOAD, B_STORE, COMMIT, WAIT_READ, WAIT_ALL,
) = range(59)  # fmt: skip


@device_function
def access_weakly(what, there, value):
    if what == ST:
        ptx.st_weak_s32(there, value)
    elif what == LD:
        ptx.ld_weak_s32(there)
    elif what == ST_V4:
        ptx.st_na_v4(there, (1, 2, 3, 4))
    elif what == LD_V4:
        ptx.ld_na_v4(there)
    elif what == ST_U8:
        ptx.st_weak_u8(there, value)
    elif what == LD_U8:
        ptx.ld_weak_u8(there)
    elif what == ST_S64:
        ptx.st_weak_s64(there, value)
    elif what == LD_S64:
        ptx.ld_weak_s64(there)
    elif what == LD_NC:
        ptx.ld_nc_s32(there)


@device_function
def access_strongly(what, there, value):
    if what == ST_REL:
        ptx.st_release_sys_s32(there, value)
    elif what == ST_RLX:
        ptx.st_relaxed_sys_s32(there, value)
    elif what == ST_REL_GPU:
        ptx.st_release_gpu_s32(there, value)
    elif what == ST_RLX_GPU:
        ptx.st_relaxed_gpu_s32(there, value)
    elif what == ST_VOL:
        ptx.st_volatile_s32(there, value)
    elif what == ST_REL_S64:
        ptx.st_release_sys_s64(there, value)
    elif what == LD_ACQ:
        ptx.ld_acquire_sys_s32(there)
    elif what == LD_RLX:
        ptx.ld_relaxed_sys_s32(there)
    elif what == LD_ACQ_GPU:
        ptx.ld_acquire_gpu_s32(there)
    elif what == LD_RLX_GPU:
        ptx.ld_relaxed_gpu_s32(there)
    elif what == LD_VOL:
        ptx.ld_volatile_s32(there)
    elif what == LD_ACQ_S64:
        ptx.ld_acquire_sys_s64(there)


@device_function
def modify(what, there, value):
    if what == ADD_RLX:
        ptx.atom_add_relaxed_sys_s32(there, value)
    elif what == ADD_REL:
        ptx.atom_add_release_sys_s32(there, value)
    elif what == ADD_ACQ_REL:
        ptx.atom_add_acq_rel_sys_s32(there, value)
    elif what == ADD_RLX_GPU:
        _ = ptx.atom_add_relaxed_gpu_s32(there, value)  # whose result is used: see `models.pending.is_unused`
    elif what == ADD_REL_GPU:
        ptx.atom_add_release_gpu_s32(there, value)
    elif what == ADD_ACQ_REL_GPU:
        ptx.atom_add_acq_rel_gpu_s32(there, value)
    elif what == EXCH:
        ptx.atom_exch_acq_rel_sys_s32(there, value)
    elif what == CAS:
        ptx.atom_cas_acq_rel_sys_s32(there, value - 1, value)


@device_function
def order(what, there, value):
    if what == FENCE_CTA:
        ptx.fence_acq_rel_cta()
    elif what == FENCE_GPU:
        ptx.fence_acq_rel_gpu()
    elif what == FENCE_SYS:
        ptx.fence_acq_rel_sys()
    elif what == WAIT_ACQ:
        while ptx.ld_acquire_sys_s32(there) < value:
            ptx.wait_expired(NEVER)
    elif what == WAIT_RLX:
        while ptx.ld_relaxed_sys_s32(there) < value:
            ptx.wait_expired(NEVER)
    elif what == WAIT_ACQ_GPU:
        while ptx.ld_acquire_gpu_s32(there) < value:
            ptx.wait_expired(NEVER)
    elif what == BAR:
        ptx.syncthreads()
    elif what == WARP:
        ptx.syncwarp(value & 0xFFFFFFFF)
    elif what == SYNC_1:
        ptx.bar_sync(1, 64)
    elif what == ARRIVE_1:
        ptx.bar_arrive(1, 64)
    elif what == SHFL:
        ptx.shfl_idx_s32(value & 0xFFFFFFFF, 1, 0)


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
def interpret(memory: InOut, program: In, num_steps: I32):
    """program: for each thread its steps, each (what, where, value, besides)"""
    thread = ptx.thread_idx()
    for i in range(0, SMEM, 4 * ptx.block_dim()):
        if i + 4 * thread < SMEM:
            ptx.st_shared_s32(i + 4 * thread, 0)
    ptx.syncthreads()
    rows = program + 16 * num_steps * (thread + ptx.block_dim() * ptx.block_idx())
    for step in range(num_steps):
        what, at = ptx.ld_nc_s32(rows + 16 * step), ptx.ld_nc_s32(rows + 16 * step + 4)
        value, more = ptx.ld_nc_s32(rows + 16 * step + 8), ptx.ld_nc_s32(rows + 16 * step + 12)
        there = memory + at
        if what < ST_REL:
            access_weakly(what, there, value)
        elif what < ADD_RLX:
            access_strongly(what, there, value)
        elif what < FENCE_CTA:
            modify(what, there, value)
        elif what < S_ST:
            order(what, there, value)
        elif what < FENCE_SHARED:
            access_shared(what, at, value)
        else:
            copy(what, there, value, more)


# --- drawing -----------------------------------------------------------------------------------------------------

Step = tuple[int, int, int, int]
DATA, FLAGS = (0, 32, 64, 96), tuple(range(128, 512, 8))
LIKE = [  # what a change may make of a step
    (ST, LD, ST_V4, LD_V4, ST_U8, LD_U8, ST_S64, LD_S64, LD_NC, LD_RLX, ST_RLX, ADD_RLX),
    (ST_REL, ST_RLX, ST_REL_GPU, ST_RLX_GPU, ST_VOL, ST, ADD_REL, ADD_RLX, ADD_RLX_GPU, ADD_REL_GPU, EXCH, CAS),
    (WAIT_ACQ, WAIT_RLX, WAIT_ACQ_GPU),
    (FENCE_CTA, FENCE_GPU, FENCE_SYS, NOTHING),
    (S_ST, S_LD, S_ST_V4, S_LD_V4, S_RLX, S_ACQ, S_ADD, S_EXCH),
    (FENCE_SHARED, FENCE_GLOBAL, NOTHING),
    (WAIT_READ, WAIT_ALL, NOTHING),
]
WHOLE = (ST_V4, LD_V4)


class Drawn(NamedTuple):
    """kernels: (rank, blocks, threads of each, steps); hosts: by rank (what, value) in turn"""

    kernels: list[tuple[int, int, int, np.ndarray]]
    hosts: list[list[tuple[str, int, int]]]


class Draw:
    def __init__(self, seed: object, changed: float):
        self.random = random.Random(f"drawn {seed}")
        self.changed = changed
        self.steps: dict[tuple[int, int, int], list[Step]] = {}  # by kernel, block and thread
        self.flags = list(FLAGS)
        self.random.shuffle(self.flags)
        self.holders: dict[int, tuple[int, int, int]] = {}  # who has accessed a cell last
        self.values = dict.fromkeys(FLAGS, 0)

    def data(self, cell: int) -> Step:
        what = self.random.choice((ST, LD, ST_V4, LD_V4, ST_U8, LD_U8, ST_S64, LD_S64, ST, LD))
        at = cell if what in WHOLE else cell + self.random.choice((0, 0, 8))
        return what, at, self.random.randrange(1, 9), 0

    def publish(self, flag: int) -> list[Step]:
        self.values[flag] += 1
        value = self.values[flag]
        return self.random.choice((
            [(ST_REL, flag, value, 0)], [(ST_REL, flag, value, 0)],
            [(ADD_REL, flag, 1, 0)], [(ADD_ACQ_REL, flag, 1, 0)],
            [(FENCE_SYS, 0, 0, 0), (ST_RLX, flag, value, 0)], [(FENCE_SYS, 0, 0, 0), (ADD_RLX, flag, 1, 0)],
            [(FENCE_SYS, 0, 0, 0), (ST_VOL, flag, value, 0)], [(EXCH, flag, value, 0)], [(CAS, flag, value, 0)],
        ))  # fmt: skip

    def wait(self, flag: int) -> list[Step]:
        value = self.values[flag]
        return self.random.choice((
            [(WAIT_ACQ, flag, value, 0)], [(WAIT_ACQ, flag, value, 0)],
            [(WAIT_RLX, flag, value, 0), (FENCE_SYS, 0, 0, 0)], [(WAIT_RLX, flag, value, 0), (LD_ACQ, flag, 0, 0)],
        ))  # fmt: skip

    def message(self) -> None:
        """One thread accesses data and tells another one, which accesses it, too."""
        a, b = self.random.sample(list(self.steps), 2)
        cell = self.random.choice(DATA)
        a = self.holders.get(cell, a)
        if a == b:
            return
        self.holders[cell] = b
        flag = self.random.choice(self.flags[:3]) if self.random.random() < 0.1 else self.flags.pop()
        sends, waits = self.steps[a], self.steps[b]
        if self.random.random() < 0.3:
            stage = self.random.choice((0, 32, 64))
            sends += [(S_ST_V4, stage, 0, 0), (S_ST_V4, stage + 16, 0, 0), (FENCE_SHARED, 0, 0, 0)]
            sends += [(B_STORE, cell & ~31, stage, 0), (COMMIT, 0, 0, 0), (WAIT_ALL, 0, 0, 0)]
        else:
            sends += [self.data(cell) for _ in range(self.random.choice((1, 1, 2)))]
        sends += self.publish(flag)
        waits += self.wait(flag)
        number = sum(step[0] == M_INIT for step in waits)
        if self.random.random() < 0.3 and number < 4:
            mbarrier = 4 * (b[2] % 3) + number
            waits += [(M_INIT, 0, 0, mbarrier), (FENCE_GLOBAL, 0, 0, 0), (FENCE_SHARED, 0, 0, 0)]
            waits += [(M_EXPECT, 0, 0, mbarrier), (B_LOAD, cell & ~31, 128 + 32 * (b[2] % 3), mbarrier)]
            waits += [(M_WAIT, 0, 0, mbarrier), (S_LD, 128 + 32 * (b[2] % 3), 0, 0)]
        waits.append(self.data(cell))

    def change(self, steps: list[Step]) -> None:
        for n in reversed(range(len(steps))):
            what, at, value, more = steps[n]
            like = next((those for those in LIKE if what in those), None)
            if like is None or self.random.random() >= self.changed:
                continue
            if self.random.random() < 0.3:
                steps.insert(n, self.data(self.random.choice(DATA)))
            else:
                new = self.random.choice(like)
                steps[n] = new, at & ~15 if new in WHOLE or new in (S_ST_V4, S_LD_V4) else at, value, more


def draw(seed: object, changed: float = 0.06) -> Drawn:
    """A program of one or two ranks, with one to three kernels in all, by which a host may be met."""
    made = Draw(seed, changed)
    choose = made.random
    num_ranks = choose.choice((1, 2))
    shapes = [
        (choose.randrange(num_ranks), choose.choice((1, 1, 2)), choose.choice((2, 32, 40, 64)))
        for _ in range(choose.choice((1, 2, 2, 3)))
    ]
    if sum(blocks for _, blocks, _ in shapes) == 1 and choose.random() < 0.5:
        shapes[0] = (shapes[0][0], 2, shapes[0][2])
    meets = choose.choice((BAR, BAR, WARP, SYNC_1, NOTHING))
    for k, (_, blocks, threads) in enumerate(shapes):
        for b in range(blocks):
            for thread in choose.sample(range(min(threads, 36)), min(threads, choose.choice((2, 2, 3)))):
                made.steps[k, b, thread] = []
    for _ in range(choose.choice((1, 2))):
        for _ in range(choose.choice((1, 2, 3, 4))):
            made.message()
        meet(made, shapes, meets)
    for _ in range(choose.choice((0, 1, 2))):
        made.message()
    for steps in made.steps.values():
        made.change(steps)
    kernels = []
    for k, (rank, blocks, threads) in enumerate(shapes):
        longest = max(len(steps) for who, steps in made.steps.items() if who[0] == k)
        rows = np.zeros((blocks, threads, longest, 4), np.int32)
        for (_, b, thread), steps in ((who, steps) for who, steps in made.steps.items() if who[0] == k):
            rows[b, thread, : len(steps)] = np.array(steps, np.int64).reshape(-1, 4).astype(np.int32)
        kernels.append((rank, blocks, threads, rows))
    return Drawn(kernels, [of_host(made, rank, kernels) for rank in range(num_ranks)])


def meet(made: Draw, shapes: list[tuple[int, int, int]], how: int) -> None:
    """Let all threads of blocks meet, or lanes of a warp, some of which may have no other steps."""
    if how == NOTHING:
        return
    choose = made.random
    for k, (_, blocks, threads) in enumerate(shapes):
        if how == SYNC_1 and threads != 64:
            how = BAR
        for b in range(blocks):
            lanes = min(threads, 32)
            mask = choose.choice(((1 << lanes) - 1, 3, sum(1 << i for i in range(0, lanes, 2))))
            for thread in range(threads):
                steps = made.steps.get((k, b, thread))
                if how == WARP and (thread >= 32 or not mask >> thread & 1):
                    continue
                if steps is None:
                    steps = made.steps[k, b, thread] = []
                elif how == WARP and choose.random() < 0.3:
                    steps.append((SHFL, 0, 1 << thread, 0))
                steps.append((ARRIVE_1 if how == SYNC_1 and thread < 32 else how, 0, mask, 0))


def of_host(made: Draw, rank: int, kernels: list) -> list[tuple[str, int, int]]:
    choose = made.random
    steps: list[tuple[str, int, int]] = []
    for k, (its_rank, *_) in enumerate(kernels):
        if its_rank == rank:
            if choose.random() < 0.3:
                steps.append((choose.choice(("write", "block", "poll", "read")), choose.choice(DATA + FLAGS[-1:]), 0))
            steps.append(("launch", k, choose.choice((0, 0, 1))))
            steps += choose.choice(([], [], [("sync", 0, choose.choice((0, 1)))], [("event", 0, 0)]))
    for _ in range(choose.choice((0, 0, 1, 2))):
        steps.append((choose.choice(("read", "poll", "write", "sync", "block", "meet")), choose.choice(DATA), 0))
    if choose.random() < 0.5:
        steps += [("sync", 0, 0), ("sync", 0, 1)]
        steps.append((choose.choice(("read", "poll", "write")), choose.choice(DATA), 0))
    if choose.random() < 0.15 and rank == 0:
        steps.append(("free", 0, 0))
    return steps


# --- running -----------------------------------------------------------------------------------------------------


def run(world, program: Drawn):
    """Run a program in a world: the bytes at its end."""
    num_ranks = len(program.hosts)
    memory = world.ranks[0].space.allocate(NUM_BYTES, "memory", zero=True)
    bases = [memory.address, *(world.ranks[rank].space.open(memory).address for rank in range(1, num_ranks))]
    come: list[int] = []

    def host_of(rank: int):
        context = world.ranks[rank]
        space = world.ranks[0].space

        def host() -> None:
            streams = [context.create_stream("one"), context.create_stream("other")]
            for what, value, which in program.hosts[rank]:
                if memory.freed:
                    return
                if what == "launch":
                    _, blocks, threads, rows = program.kernels[value]
                    steps = context.space.map_array(rows.reshape(-1), "program", False)
                    args = bases[rank], steps.address, rows.shape[2]
                    streams[which].launch(interpret, args, blocks, threads, SMEM, "interpret")
                elif what == "sync":
                    streams[which].synchronize()
                elif what == "event":
                    streams[1].wait(streams[0].record())
                elif what == "meet":
                    come.append(rank)
                    if num_ranks == 2 and all(any(w == "meet" for w, *_ in host) for host in program.hosts):
                        world.host_wait(lambda: len(set(come)) == 2, "the other host")
                elif what in ("read", "poll"):
                    space.read(memory, np.int32, value, 1 if what == "poll" else 4, polls=what == "poll")
                elif what == "free":
                    space.free(memory)
                else:
                    space.write(memory, value, np.ones(1 if what == "write" else 4, np.int32))

        return host

    world.run([host_of(rank) for rank in range(num_ranks)])
    return b"" if memory.freed else bytes(memory.memory)
