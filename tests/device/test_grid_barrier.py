"""All blocks of a launch meet at `barrier_grid`: on the emulator under many schedules, and as code for a GPU."""

import sys
from contextlib import nullcontext

import numpy as np
import pytest
from primitives_of import replace_primitives
from processes import run_python

from nbep.device import primitives as p
from nbep.device.primitives import s32
from nbep.device.protocols.grid_barrier import TOP, barrier_grid, num_arrived, wait_arrivals
from nbep.device.protocols.peers import Bounds
from nbep.emulator import DataRace, DeadlockError, World

NUM_BLOCKS, NUM_THREADS, NUM_PHASES = 3, 64, 4
COMPILE = """
from nbep.device.compile import compile_kernel
from nbep.device.jit import kernel
from nbep.device.protocols.grid_barrier import barrier_grid
from nbep.device.protocols.peers import Bounds
from nbep.device.types import Sym

@kernel()
def meet(arrivals: Sym, bounds: Bounds):
    barrier_grid(arrivals, bounds)

compiled = compile_kernel(meet, (9, 0))
assert "atom.release.gpu.global.add.s32" in compiled.ptx
assert "ld.acquire.gpu.global.s32" in compiled.ptx
assert (compiled.report.spill_stores, compiled.report.stack_frame) == (0, 0)
"""


def phases(cells, faults, arrivals, bounds, num_absent):
    """Every block writes the phase, meets the others, and counts how many of them it finds in another phase."""
    if p.block_idx() < p.grid_dim() - num_absent:
        for phase in range(1, NUM_PHASES + 1):
            if p.thread_idx() == NUM_THREADS - 1:  # not the thread that speaks for the block
                p.st_weak_s32(cells + 4 * p.block_idx(), phase)
            barrier_grid(arrivals, bounds)
            if p.thread_idx() < p.grid_dim() and p.ld_weak_s32(cells + 4 * p.thread_idx()) != phase:
                p.atom_add_relaxed_gpu_s32(faults, 1)
            barrier_grid(arrivals, bounds)


def run(seed: int, memory_model: str = "sc", num_absent: int = 0, start: int = 0) -> int:
    """How often a block found another one in the wrong phase. start: what the barrier's cell holds before."""
    world = World(1, seed, memory_model=memory_model)
    found = []

    def host() -> None:
        space = world.ranks[0].space
        memory = space.allocate(256, "cells", zero=True)
        stream = world.ranks[0].create_stream("main")
        bounds = Bounds(10**9, memory.address + 128, memory.address + 192)
        cells, faults, arrivals = memory.address, memory.address + 64, memory.address + 68
        memory.array(np.int32, 68, 1)[0] = start
        stream.launch(phases, (cells, faults, arrivals, bounds, num_absent), NUM_BLOCKS, NUM_THREADS)
        stream.synchronize()
        found.append(int(memory.array(np.int32, 64, 1)[0]))

        assert num_absent or int(memory.array(np.int32, 68, 1)[0]) in (0, -TOP)

    world.run([host])
    return found[0]


@pytest.mark.parametrize("memory_model", ["sc", "delayed", "checked"])
def test_blocks_never_leave_before_all_have_arrived(memory_model):
    assert [run(seed, memory_model) for seed in range(8)] == [0] * 8


@pytest.mark.parametrize("start", [0, -TOP])
def test_whatever_barriers_came_before_the_next_one_holds(start):
    assert [run(seed, "checked", start=start) for seed in range(4)] == [0] * 4


@pytest.mark.parametrize("num_blocks", [1, 2, 7, 132])
def test_a_block_that_is_missing_is_counted_whoever_it_is(num_blocks):
    of_first = TOP - (num_blocks - 1)
    for others in range(num_blocks):
        assert num_arrived(s32(others), num_blocks) == num_arrived(s32(others + TOP), num_blocks) == others
        if others < num_blocks - 1:
            with_first = s32(of_first + others)
            assert num_arrived(with_first, num_blocks) == num_arrived(s32(with_first + TOP), num_blocks) == others + 1


def test_without_it_blocks_find_each_other_in_other_phases(monkeypatch):
    monkeypatch.setitem(globals(), "barrier_grid", lambda arrivals, bounds: nullcontext())
    assert any(run(seed) for seed in range(8))


@pytest.mark.parametrize(
    ("function", "ordered", "relaxed"),
    [
        (barrier_grid, "atom_add_release_gpu_s32", p.atom_add_relaxed_gpu_s32),
        (wait_arrivals, "ld_acquire_gpu_s32", p.ld_relaxed_gpu_s32),
    ],
)
def test_either_end_that_is_relaxed_is_a_data_race(function, ordered, relaxed, monkeypatch):
    replace_primitives(monkeypatch, sys.modules[function.__module__], **{ordered: relaxed})
    with pytest.raises(DataRace, match="weak load of 4 bytes that another thread has stored"):
        run(0, "checked")


def test_a_block_that_does_not_come_is_reported():
    with pytest.raises(DeadlockError, match="wait_arrivals"):
        run(0, num_absent=1)


@pytest.mark.thorough
def test_compiles_without_spills_to_the_orders_of_its_ledger():
    run_python("-c", COMPILE)
