"""A seed gives one run on both engines: the same results to the byte, calls, switches and draws."""

from functools import partial

import numpy as np
import pytest
from engine_runs import run
from parts import both_parts

from nbep.device import primitives as ptx
from nbep.emulator.engine.delayed_world import DelayedWorld
from nbep.lab.check.scenario import accepted
from nbep.lang import FULL_MASK, I32, InOut, device_function, kernel
from nbep.specimens.scenarios import SCENARIOS

NEVER = 1 << 62
THREADS, BLOCKS, MBARRIER, COPIED, SMEM = 96, 3, 512, 1024, 2048
FLAG, TICKETS, SUMS, ROWS = 0, 64, 128, 8192


@kernel(max_threads=THREADS)
def meetings(memory: InOut, rounds: I32):
    """Blocks hand a flag on; their threads meet, shuffle, vote and copy in all ways that there are."""
    thread, block = ptx.thread_idx(), ptx.block_idx()
    if thread == 0:
        ptx.mbarrier_init(MBARRIER, 1)
        ptx.fence_mbarrier_init()
    ptx.syncthreads()
    for turn in range(rounds):
        while ptx.ld_acquire_gpu_s32(memory + FLAG) < turn * BLOCKS + block:
            if ptx.wait_expired(NEVER):
                return
        ptx.st_shared_s32(4 * thread, thread * thread + turn)
        ptx.syncthreads()
        value = ptx.ld_shared_s32(4 * ((thread + 7) % THREADS))
        value += ptx.shfl_xor_s32(FULL_MASK, value, 5) - ptx.shfl_down_s32(FULL_MASK, value, 3)
        value += ptx.vote_ballot(FULL_MASK, value % 3 == 0) % 1000 + ptx.match_any_s32(FULL_MASK, value % 4) % 77
        if ptx.vote_any(FULL_MASK, ptx.shfl_idx_f32(FULL_MASK, ptx.f32(thread) * ptx.f32(0.5), turn) > ptx.f32(1.0)):
            value = -value
        ptx.st_weak_s32(memory + SUMS + 4 * (thread + THREADS * block), value)
        ticket = ptx.atom_add_acq_rel_gpu_s32(memory + TICKETS, 1)
        ptx.st_weak_s32(memory + ROWS + 4 * ticket, thread)
        ptx.syncwarp(FULL_MASK)
        ptx.fence_proxy_async_global()
        ptx.syncthreads()
        if thread < 32:
            ptx.bar_arrive(3, 64)
        elif thread < 64:
            ptx.bar_sync(3, 64)
        if thread == 0:
            ptx.fence_proxy_async_global()
            ptx.fence_proxy_async_shared()
            ptx.mbarrier_arrive_expect_tx(MBARRIER, 256)
            ptx.tma_load_1d(COPIED, memory + SUMS + 4 * THREADS * block, 256, MBARRIER)
        while not ptx.mbarrier_try_wait_parity(MBARRIER, turn & 1):
            if ptx.wait_expired(NEVER):
                return
        copied = ptx.ld_shared_s32(COPIED + 4 * (thread % 64))
        ptx.st_weak_s32(
            memory + SUMS + 6144 + 4 * thread, copied + ptx.ld_weak_s32(memory + SUMS + 4 * (thread % 8)) * 0
        )
        ptx.syncthreads()
        if thread == 0:
            ptx.fence_proxy_async_shared()
            ptx.tma_store_1d(memory + SUMS + 4096 + 256 * block, COPIED, 256)
            ptx.tma_store_commit()
            ptx.tma_store_wait_all()
            ptx.st_release_gpu_s32(memory + FLAG, turn * BLOCKS + block + 1)
        ptx.syncthreads()


def own_kernel(comm):
    memory = np.zeros(8192, np.int32)
    stream = comm.runtime.create_stream("own")
    comm.runtime.launch(stream, meetings, BLOCKS, THREADS, SMEM, memory, 4)
    stream.synchronize()
    return memory


@pytest.mark.parametrize("memory_model", both_parts(["sc", "checked"], ["delayed"]))
@pytest.mark.parametrize("seed", both_parts([0, 1], range(2, 6)))
def test_a_kernel_of_the_users(seed, memory_model):
    one, other = (run(own_kernel, 1, engine, seed, memory_model=memory_model) for engine in ("compiled", "python"))
    assert one == other


@pytest.mark.parametrize("memory_model", both_parts(["sc", "checked"], ["delayed"]))
@pytest.mark.parametrize("strategy", ["starved", "late"])
def test_strategies_choose_the_same(strategy, memory_model):
    options = {"strategy": strategy, "memory_model": memory_model}
    for seed in range(3):
        one, other = (run(own_kernel, 1, engine, seed, **options) for engine in ("compiled", "python"))
        assert one == other


@device_function
def count_returned(cell):
    return ptx.atom_add_relaxed_gpu_s32(cell, 1)


@kernel(max_threads=32)
def in_turn(memory: InOut, role: I32):
    """0 stores, and tells 1, which makes that visible to all; 2 starts when the stores of 0 have arrived."""
    own = memory + 256 + 128 * role + 4 * ptx.thread_idx()
    if role == 1:
        while ptx.ld_acquire_gpu_s32(memory) < ptx.block_dim():
            if ptx.wait_expired(NEVER):
                return
        ptx.fence_acq_rel_sys()
    for value in range(4):
        ptx.st_weak_s32(own, value)
    if role == 0:
        ptx.atom_add_release_gpu_s32(memory, 1)
    elif role == 3:
        count_returned(memory + 4)


def two_streams(comm, roles):
    memory = np.zeros(512, np.int32)
    one, two = (comm.runtime.create_stream(name) for name in ("one", "two"))
    for role in roles:
        comm.runtime.launch(two if role == 1 else one, in_turn, 1, 32, 0, memory, role)
    one.synchronize()
    two.synchronize()
    return memory


def test_a_thread_ends_another_kernel_by_its_fence(monkeypatch):
    """Under `delayed`: the last stores of 0 arrive in the middle of 1, and before what 1 stores then 2 is under way."""
    ends: list[int] = []
    handle = DelayedWorld._handle
    monkeypatch.setattr(
        DelayedWorld, "_handle", lambda self, what: ends.append(self.tables.run["resumes"]) or handle(self, what)
    )
    main, options = partial(two_streams, roles=(0, 1, 2)), {"memory_model": "delayed", "strategy": "late"}
    for seed in range(12):
        one, other = (run(main, 1, engine, seed, **options) for engine in ("compiled", "python"))
        assert one == other
    assert sum(ends) >= 6


def test_an_atomic_that_a_function_returns_is_left_to_python():
    """Whether its result is used hangs on who calls the function: so whether it may be late."""
    main = partial(two_streams, roles=(3,))
    one, other = (
        run(main, 1, engine, memory_model="delayed", may_repeat=engine == "compiled")
        for engine in ("compiled", "python")
    )
    assert one == other
    assert run(main, 1, "compiled") == run(main, 1, "python")


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
@pytest.mark.parametrize("memory_model", both_parts(["sc", "checked"], ["delayed"]))
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
