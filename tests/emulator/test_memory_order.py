"""Litmus tests: what the memory model "delayed" lets a reader see, and what it never does."""

import numpy as np
import pytest

from nbep.emulator import NonCoherent, World, current_thread

SEEDS = range(40)


def acquire(t, tail):
    while t.load(tail, "s32", "acquire", "sys") == 0:
        t.spin(10**12)


def pass_message(observe, ranks, seed, model):
    """Rank 0 stores to the payload and releases the tail; the reader, the last rank, calls observe(t, tail)."""
    world = World(ranks, seed, memory_model=model)
    owner = world.ranks[ranks - 1]
    ring = owner.space.allocate(128, "ring", zero=True)
    theirs = ring if ranks == 1 else world.ranks[0].space.open(ring.handle)

    def writer(ring):
        current_thread().store(ring, "s32", 1, "weak", "cta")
        release(current_thread(), ring + 32)

    world.ranks[0].create_stream("write").launch(writer, (theirs.address,), 1, 1)
    stream = owner.create_stream("read")
    stream.launch(lambda ring: observe(current_thread(), ring + 32), (ring.address,), 1, 1)
    stream.synchronize()


def passes_bulk_message(publish, seed, observe=acquire):
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
        observe(t, ring + 32)
        payload = [t.load(ring + 4 * i, "s32", "weak", "cta") for i in range(8)]
        t.store(ring + 64, "s32", min(payload), "weak", "cta")

    world.ranks[0].create_stream("write").launch(writer, (ring.address,), 1, 1, 32)
    stream = world.ranks[0].create_stream("read")
    stream.launch(reader, (ring.address,), 1, 1)
    stream.synchronize()
    return int(ring.array(np.int32, 64, 1)[0])


def relaxed(t, tail):
    t.store(tail, "s32", 1, "relaxed", "sys")


def release(t, tail):
    t.store(tail, "s32", 1, "release", "sys")


def test_bulk_payload_needs_the_release_too():
    assert {passes_bulk_message(release, seed) for seed in SEEDS} == {1}
    assert {passes_bulk_message(relaxed, seed) for seed in SEEDS} == {0, 1}


def poll(order, scope="sys"):
    def observe(t, tail):
        while t.load(tail, "s32", order, scope) == 0:
            t.spin(10**12)

    return observe


def load_row_in_bulk(order):
    """A reader of eight words that the copy engine brings."""

    def observe(t, tail):
        poll(order)(t, tail)
        t.mbarrier_init(32, 1)
        t.fence_proxy_async_global()
        t.bulk_load(0, tail - 32, 32, 32)
        t.mbarrier_arrive_expect_tx(32, 32)
        while not t.mbarrier_try_wait(32, 0):
            pass
        t.store(tail + 64, "s32", t.load_shared(0, "s32", "weak"), "weak", "cta")

    return observe


def test_a_bulk_load_may_be_early_too():
    def found_in_bulk(order, seed):
        world = World(1, seed, memory_model="delayed")
        ring = world.ranks[0].space.allocate(128, "ring", zero=True)

        def writer(ring):
            for i in range(8):
                current_thread().store(ring + 4 * i, "s32", 1, "weak", "cta")
            release(current_thread(), ring + 32)

        world.ranks[0].create_stream("write").launch(writer, (ring.address,), 1, 1)
        stream = world.ranks[0].create_stream("read")
        stream.launch(lambda ring: load_row_in_bulk(order)(current_thread(), ring + 32), (ring.address,), 1, 1, 64)
        stream.synchronize()
        return int(ring.array(np.int32, 96, 1)[0])

    assert {found_in_bulk("acquire", seed) for seed in SEEDS} == {1}
    assert {found_in_bulk("relaxed", seed) for seed in SEEDS} == {0, 1}


@pytest.mark.parametrize("model", ["delayed", "checked"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_bytes_that_came_since_the_kernel_began_may_not_be_read_as_constant(ranks, model):
    """Also if they were acquired. Bytes from before may, and what another kernel of the stream has stored."""

    def read_as_constant(t, tail):
        acquire(t, tail)
        assert t.load(tail + 16, "s32", "nc", "gpu") == 0
        t.load(tail - 32, "s32", "nc", "gpu")

    for seed in range(4):
        with pytest.raises(NonCoherent, match=r"ld.global.nc of `ring` of rank \d: byte 0, .* since this kernel began"):
            pass_message(read_as_constant, ranks, seed, model)


@pytest.mark.parametrize("model", ["delayed", "checked"])
def test_what_an_earlier_kernel_has_stored_may_be_read_as_constant(model):
    world = World(1, 3, memory_model=model)
    memory = world.ranks[0].space.allocate(16, "memory", zero=True)
    stream = world.ranks[0].create_stream("stream")
    seen = []
    stream.launch(lambda at: current_thread().store(at, "s32", 5, "weak", "cta"), (memory.address,), 1, 1)
    stream.launch(lambda at: seen.append(current_thread().load(at, "s32", "nc", "gpu")), (memory.address,), 1, 1)
    stream.synchronize()
    assert seen == [5]
