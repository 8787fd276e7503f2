"""Litmus tests: what the memory model "delayed" lets a reader see, and what it never does."""

import numpy as np
import pytest

from nbep.emulator import World, current_thread

SEEDS = range(40)


def passes_message(publish, *, ranks=1, seed=0, block=1, model="delayed"):
    """Two kernels: the writer stores 1 to the payload and calls publish(t, tail); the reader waits for the tail.

    Returns what the reader found in the payload. The writer is rank 0, the reader the last rank.
    """
    world = World(ranks, seed, memory_model=model)
    owner = world.ranks[ranks - 1]
    ring = owner.space.allocate(128, "ring", zero=True)
    theirs = ring if ranks == 1 else world.ranks[0].space.open(ring.handle)
    found = ring.array(np.int32, 64, 1)

    def writer(ring):
        t = current_thread()
        if t.thread_idx == t.block_dim - 1:
            t.store(ring, "s32", 1, "weak", "cta")
        publish(t, ring + 32)

    def reader(ring):
        t = current_thread()
        while t.load(ring + 32, "s32", "acquire", "sys") == 0:
            t.spin(10**12)
        t.store(ring + 64, "s32", t.load(ring, "s32", "weak", "cta"), "weak", "cta")

    world.ranks[0].create_stream("write").launch(writer, (theirs.address,), 1, block)
    stream = owner.create_stream("read")
    stream.launch(reader, (ring.address,), 1, 1)
    stream.synchronize()
    return int(found[0])


def passes_bulk_message(publish, seed):
    """As passes_message, with a payload that the copy engine writes and the writer has waited for."""
    world = World(1, seed, memory_model="delayed")
    ring = world.ranks[0].space.allocate(128, "ring", zero=True)

    def writer(ring):
        t = current_thread()
        for i in range(8):
            t.store_shared(4 * i, "s32", 1, "weak")
        t.fence_proxy_async()
        t.bulk_store(ring, 0, 32)
        t.bulk_commit_group()
        t.bulk_wait_group(0)
        assert t.load(ring + 28, "s32", "weak", "cta") == 1
        publish(t, ring + 32)

    def reader(ring):
        t = current_thread()
        while t.load(ring + 32, "s32", "acquire", "sys") == 0:
            t.spin(10**12)
        payload = [t.load(ring + 4 * i, "s32", "weak", "cta") for i in range(8)]
        t.store(ring + 64, "s32", min(payload), "weak", "cta")

    world.ranks[0].create_stream("write").launch(writer, (ring.address,), 1, 1, 32)
    stream = world.ranks[0].create_stream("read")
    stream.launch(reader, (ring.address,), 1, 1)
    stream.synchronize()
    return int(ring.array(np.int32, 64, 1)[0])


def found(publish, **options):
    return {passes_message(publish, seed=seed, **options) for seed in SEEDS}


def relaxed(t, tail):
    t.store(tail, "s32", 1, "relaxed", "sys")


def release(t, tail):
    t.store(tail, "s32", 1, "release", "sys")


@pytest.mark.parametrize("ranks", [1, 2])
def test_payload_is_never_stale_behind_a_release(ranks):
    assert found(release, ranks=ranks) == {1}


@pytest.mark.parametrize("ranks", [1, 2])
def test_payload_is_stale_behind_a_relaxed_tail_under_some_seed(ranks):
    assert found(relaxed, ranks=ranks) == {0, 1}


def test_bulk_payload_needs_the_release_too():
    assert {passes_bulk_message(release, seed) for seed in SEEDS} == {1}
    assert {passes_bulk_message(relaxed, seed) for seed in SEEDS} == {0, 1}


def test_sequential_consistency_hides_the_missing_release():
    assert found(relaxed, model="sc") == {1}


def test_fence_orders_the_relaxed_tail_behind_it():
    def fenced(t, tail):
        t.fence("acq_rel", "sys")
        relaxed(t, tail)

    assert found(fenced) == {1}


def test_release_covers_what_the_barrier_made_known():
    """Thread 63 writes, all meet at bar.sync, thread 0 releases: the reader must see what thread 63 wrote."""

    def after_barrier(t, tail):
        t.barrier(1, 64)
        if t.thread_idx == 0:
            release(t, tail)

    def after_syncwarp(t, tail):
        t.syncwarp(0xFFFFFFFF)
        if t.thread_idx == 0:
            release(t, tail)

    assert found(after_barrier, ranks=2, block=64) == {1}
    assert found(after_syncwarp, ranks=2, block=32) == {1}


def test_release_does_not_cover_what_it_cannot_know():
    """Without the barrier, thread 0's release says nothing of thread 63's store."""

    def alone(t, tail):
        if t.thread_idx == 0:
            release(t, tail)

    assert found(alone, ranks=2, block=64) == {0, 1}


def test_scope_gpu_reaches_the_own_rank_and_no_further():
    def release_gpu(t, tail):
        t.store(tail, "s32", 1, "release", "gpu")

    assert found(release_gpu, ranks=1) == {1}
    assert found(release_gpu, ranks=2) == {0, 1}


def test_releasing_atomic_publishes_and_relaxed_atomic_does_not():
    def add(order):
        return lambda t, tail: t.atomic("add", tail, "s32", 1, order, "sys")

    assert found(add("release"), ranks=2) == {1}
    assert found(add("acq_rel"), ranks=2) == {1}
    assert found(add("relaxed"), ranks=2) == {0, 1}


@pytest.mark.parametrize("seed", range(20))
def test_thread_and_block_see_their_own_stores(launch, seed):
    y = np.zeros(64, np.int32)

    def kernel(y):
        t = current_thread()
        mine, other = y + 4 * t.thread_idx, y + 4 * (t.thread_idx ^ 33)
        t.store(mine, "s32", t.thread_idx, "weak", "cta")
        assert t.load(mine, "s32", "weak", "cta") == t.thread_idx
        t.store(mine, "s32", -t.thread_idx, "weak", "cta")
        t.barrier(0, 64)
        assert t.load(other, "s32", "weak", "cta") == -(t.thread_idx ^ 33)
        assert t.load(y + 16 * (t.thread_idx // 4), "v4", "weak", "cta")[t.thread_idx % 4] == -t.thread_idx % 2**32

    launch(kernel, y, block=64, memory_model="delayed", seed=seed)
    np.testing.assert_array_equal(y, -np.arange(64))


@pytest.mark.parametrize("seed", range(10))
def test_atomic_comes_after_the_threads_own_stores_to_the_cell(launch, seed):
    x = np.zeros(4, np.int32)

    def kernel(x):
        t = current_thread()
        t.store(x, "s32", 5, "relaxed", "sys")
        assert t.atomic("add", x, "s32", 1, "relaxed", "sys") == 5
        assert t.load(x, "s32", "relaxed", "sys") == 6

    launch(kernel, x, memory_model="delayed", seed=seed)
    assert x[0] == 6


@pytest.mark.parametrize("seed", range(20))
def test_stores_to_one_cell_arrive_in_order(seed):
    """A reader polling a cell that takes relaxed stores 1, 2, 3, ... never sees it step back."""
    world = World(2, seed, memory_model="delayed")
    cell = world.ranks[1].space.allocate(16, "cell", zero=True)

    def writer(cell):
        for i in range(1, 20):
            current_thread().store(cell, "s32", i, "relaxed", "sys")

    def reader(cell):
        t, last = current_thread(), 0
        while last < 19:
            value = t.load(cell, "s32", "relaxed", "sys")
            assert value >= last
            last = value
            if last < 19:
                t.spin(10**12)

    theirs = world.ranks[0].space.open(cell.handle)
    world.ranks[0].create_stream("write").launch(writer, (theirs.address,), 1, 1)
    stream = world.ranks[1].create_stream("read")
    stream.launch(reader, (cell.address,), 1, 1)
    stream.synchronize()
