"""A seed gives one run on both engines: the same results to the byte, calls, switches and draws."""

from functools import partial

import numpy as np
import pytest
from engine_runs import run
from parts import both_parts

from nbep.emulator.engine import MODELS
from nbep.lab.check.scenario import accepted
from nbep.lang import (
    FULL_MASK,
    I32,
    InOut,
    atom_add_acq_rel_gpu_s32,
    bar_arrive,
    bar_sync,
    block_idx,
    f32,
    fence_mbarrier_init,
    fence_proxy_async_global,
    fence_proxy_async_shared,
    kernel,
    ld_acquire_gpu_s32,
    ld_shared_s32,
    ld_weak_s32,
    match_any_s32,
    mbarrier_arrive_expect_tx,
    mbarrier_init,
    mbarrier_try_wait_parity,
    shfl_down_s32,
    shfl_idx_f32,
    shfl_xor_s32,
    st_release_gpu_s32,
    st_shared_s32,
    st_weak_s32,
    syncthreads,
    syncwarp,
    thread_idx,
    tma_load_1d,
    tma_store_1d,
    tma_store_commit,
    tma_store_wait_all,
    vote_any,
    vote_ballot,
    wait_expired,
)
from nbep.specimens.scenarios import SCENARIOS

NEVER = 1 << 62
THREADS, BLOCKS, MBARRIER, COPIED, SMEM = 96, 3, 512, 1024, 2048
FLAG, TICKETS, SUMS, ROWS = 0, 64, 128, 8192


@kernel(max_threads=THREADS)
def meetings(memory: InOut, rounds: I32):
    """Blocks hand a flag on; their threads meet, shuffle, vote and copy in all ways that there are."""
    thread, block = thread_idx(), block_idx()
    if thread == 0:
        mbarrier_init(MBARRIER, 1)
        fence_mbarrier_init()
    syncthreads()
    for turn in range(rounds):
        while ld_acquire_gpu_s32(memory + FLAG) < turn * BLOCKS + block:
            if wait_expired(NEVER):
                return
        st_shared_s32(4 * thread, thread * thread + turn)
        syncthreads()
        value = ld_shared_s32(4 * ((thread + 7) % THREADS))
        value += shfl_xor_s32(FULL_MASK, value, 5) - shfl_down_s32(FULL_MASK, value, 3)
        value += vote_ballot(FULL_MASK, value % 3 == 0) % 1000 + match_any_s32(FULL_MASK, value % 4) % 77
        if vote_any(FULL_MASK, shfl_idx_f32(FULL_MASK, f32(thread) * f32(0.5), turn) > f32(1.0)):
            value = -value
        st_weak_s32(memory + SUMS + 4 * (thread + THREADS * block), value)
        ticket = atom_add_acq_rel_gpu_s32(memory + TICKETS, 1)
        st_weak_s32(memory + ROWS + 4 * ticket, thread)
        syncwarp(FULL_MASK)
        fence_proxy_async_global()
        syncthreads()
        if thread < 32:
            bar_arrive(3, 64)
        elif thread < 64:
            bar_sync(3, 64)
        if thread == 0:
            fence_proxy_async_global()
            fence_proxy_async_shared()
            mbarrier_arrive_expect_tx(MBARRIER, 256)
            tma_load_1d(COPIED, memory + SUMS + 4 * THREADS * block, 256, MBARRIER)
        while not mbarrier_try_wait_parity(MBARRIER, turn & 1):
            if wait_expired(NEVER):
                return
        copied = ld_shared_s32(COPIED + 4 * (thread % 64))
        st_weak_s32(memory + SUMS + 6144 + 4 * thread, copied + ld_weak_s32(memory + SUMS + 4 * (thread % 8)) * 0)
        syncthreads()
        if thread == 0:
            fence_proxy_async_shared()
            tma_store_1d(memory + SUMS + 4096 + 256 * block, COPIED, 256)
            tma_store_commit()
            tma_store_wait_all()
            st_release_gpu_s32(memory + FLAG, turn * BLOCKS + block + 1)
        syncthreads()


def own_kernel(comm):
    memory = np.zeros(8192, np.int32)
    stream = comm.runtime.create_stream("own")
    comm.runtime.launch(stream, meetings, BLOCKS, THREADS, SMEM, memory, 4)
    stream.synchronize()
    return memory


@pytest.mark.parametrize("memory_model", MODELS)
@pytest.mark.parametrize("seed", range(6))
def test_a_kernel_of_the_users(seed, memory_model):
    one, other = (run(own_kernel, 1, engine, seed, memory_model=memory_model) for engine in ("compiled", "python"))
    assert one == other


@pytest.mark.parametrize("memory_model", MODELS)
@pytest.mark.parametrize("strategy", ["starved", "late"])
def test_strategies_choose_the_same(strategy, memory_model):
    options = {"strategy": strategy, "memory_model": memory_model}
    for seed in range(8 if memory_model == "sc" else 4):
        one, other = (run(own_kernel, 1, engine, seed, **options) for engine in ("compiled", "python"))
        assert one == other


# Each variant once, of those that have a copy engine: cards without one are interpreted.
VARIANTS = [
    (name, {**scenario.parameters, **variant})
    for name, scenario in SCENARIOS.items()
    for variant in scenario.variants
    if {**scenario.parameters, **variant}.get("tma", 1)
]
WITH_FAULTS = {name for name in SCENARIOS if name.endswith((".differ", ".alone", ".masked"))}
SHORT = [one for one in VARIANTS if one[0] == "intranode.layout"][:1]
THOROUGH = [one for one in VARIANTS if one[0].startswith("network")]


@pytest.mark.parametrize(
    ("name", "parameters"),
    both_parts(SHORT, THOROUGH, [one for one in VARIANTS if one not in SHORT + THOROUGH]),
)
@pytest.mark.parametrize("memory_model", MODELS)
def test_all_modes(name, parameters, memory_model):
    """With an empty cache it compiles each kernel; later runs take them from there."""
    scenario = SCENARIOS[name]
    main = partial(scenario.main, **accepted(scenario.main, parameters))
    options = {"on_deadlock": "expire" if scenario.lets_time_pass else "raise", "may_repeat": name in WITH_FAULTS}
    options["memory_model"] = memory_model
    for seed in range(3 if memory_model == "sc" else 1):
        compiled, interpreted = (
            run(main, parameters["ranks"], engine, seed, **options) for engine in ("compiled", "python")
        )
        assert compiled == interpreted
