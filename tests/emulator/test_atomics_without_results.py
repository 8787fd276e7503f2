"""Two relaxed operations of one thread on different cells: an atomic whose result is not used may come second."""

import pytest

from nbep.device import primitives as ptx
from nbep.emulator import World

NEVER = 1 << 62


def nothing():
    pass


def add(cell):
    """As a kernel's own function would do it, with a result that goes nowhere."""
    return ptx.atom_add_relaxed_gpu_s32(cell, 1)


def found(second, between, seed, used=False):
    """What an atomic finds in x, once it has seen y."""
    world = World(1, seed, memory_model="delayed")
    seen = []

    def tell_and_take(x, y):
        if ptx.block_idx() == 0:
            if used:
                assert add(x) in (0, 1)
            else:
                add(x)
            between()
            second(y, 1)
        else:
            while ptx.ld_relaxed_gpu_s32(y) == 0:
                ptx.wait_expired(NEVER)
            seen.append(ptx.atom_add_relaxed_gpu_s32(x, 1))

    space, stream = world.ranks[0].space, world.ranks[0].create_stream("stream")
    x, y = (space.allocate(4, name, zero=True) for name in "xy")
    stream.launch(tell_and_take, (x.address, y.address), 2, 1)
    stream.synchronize()
    assert x.read(0, "s32") == 2  # no atomic is lost
    return seen[0]


SEEDS = range(40)


@pytest.mark.parametrize("second", [ptx.st_relaxed_gpu_s32, ptx.atom_add_relaxed_gpu_s32])
def test_an_atomic_may_come_after_a_relaxed_one_that_follows_it(second):
    assert {found(second, nothing, seed) for seed in SEEDS} == {0, 1}


@pytest.mark.parametrize(
    ("second", "between"), [(ptx.st_release_gpu_s32, nothing), (ptx.st_relaxed_gpu_s32, ptx.fence_acq_rel_gpu)]
)
def test_a_release_or_a_fence_keeps_an_atomic_in_its_place(second, between):
    assert {found(second, between, seed) for seed in SEEDS} == {1}


def test_an_atomic_whose_result_is_used_is_performed_in_its_place():
    assert {found(ptx.st_relaxed_gpu_s32, nothing, seed, used=True) for seed in SEEDS} == {1}


def test_a_thread_sees_its_own_atomics():
    def count(x, y):
        for i in range(5):
            ptx.atom_add_relaxed_gpu_s32(x, 1)
            assert i % 2 or ptx.ld_relaxed_gpu_s32(x) == i + 1

    for seed in SEEDS[:8]:
        world = World(1, seed, memory_model="delayed")
        x = world.ranks[0].space.allocate(4, "x", zero=True)
        stream = world.ranks[0].create_stream("stream")
        stream.launch(count, (x.address, 0), 1, 1)
        stream.synchronize()
        assert x.read(0, "s32") == 5
