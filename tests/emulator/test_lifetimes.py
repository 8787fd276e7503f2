"""What a run leaves behind: nothing of a finished kernel stays, and nothing of a failed run."""

import gc
import threading
import weakref

import numpy as np
import pytest

from nbep.emulator import DeadlockError, World, current_thread
from nbep.emulator.machine import carrier, memory
from nbep.emulator.run import MEMORY_MODELS
from nbep.emulator.schedule.every import Tree
from nbep.lab.check.every import next_run


@pytest.fixture
def without_collector():
    """Counts of references alone free objects, unless a test collects."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("memory_model", MEMORY_MODELS)
def test_finished_launches_and_their_threads_are_freed_at_once(memory_model, without_collector):
    world = World(1, seed=1, memory_model=memory_model)
    threads, launches = weakref.WeakSet(), weakref.WeakSet()

    def kernel(buffer):
        t = current_thread()
        threads.add(t)
        t.store_shared(4 * t.thread_idx, "s32", 1, "weak")
        t.store(buffer + 512 + 4 * t.thread_idx, "s32", 1, "weak", "gpu")
        if t.thread_idx == 0:
            t.mbarrier_init(1024, 1)
        t.fence_proxy_async()
        t.fence("acq_rel", "gpu")
        t.barrier(0, t.block_dim)
        if t.thread_idx == 1:
            gc.collect()  # meets what holds threads that are under way
            t.bulk_store(buffer + 256, 0, 128)
            t.bulk_commit_group()
            t.bulk_wait_group(0)
            t.store(buffer, "s32", 1, "release", "gpu")
        while t.load(buffer, "s32", "acquire", "gpu") == 0:
            t.spin(10**12)

    def host():
        stream = world.ranks[0].create_stream("main")
        for _ in range(3):
            buffer = world.ranks[0].space.allocate(1024, "buffer", zero=True)
            launches.add(stream.launch(kernel, (buffer.address,), 1, 64, smem_bytes=2048))
            stream.synchronize()

    world.run([host])
    assert len(threads) == 0
    assert len(launches) == 0


@pytest.mark.parametrize("memory_model", MEMORY_MODELS)
def test_a_failed_run_is_freed(memory_model):
    def fail():
        world = World(1, memory_model=memory_model)
        flag = world.ranks[0].space.allocate(4, "flag", zero=True)

        def kernel(flag):
            t = current_thread()
            t.store_shared(16 * t.thread_idx, "s32", 1, "weak")
            while t.load(flag, "s32", "acquire", "gpu") == 0:
                t.spin(10**12)

        stream = world.ranks[0].create_stream("main")
        stream.launch(kernel, (flag.address,), 2, 32, smem_bytes=1024)
        with pytest.raises(DeadlockError):
            stream.synchronize()
        return weakref.ref(world)

    world = fail()
    gc.collect()
    assert world() is None


def test_a_run_that_a_hosts_wait_ends_is_freed():
    def fail():
        world = World(2)
        arrived = []

        def host(rank):
            def main():
                world.ranks[rank].create_stream("main").launch(lambda: arrived.append(rank), (), 1, 1)
                world.host_wait(lambda: 1 // (2 - len(arrived)) > 1, "a division by zero")

            return main

        with pytest.raises(ZeroDivisionError):
            world.run([host(0), host(1)])
        return weakref.ref(world)

    world = fail()
    gc.collect()
    assert world() is None


def run_once(kernel=lambda: None):
    world = World(1)

    def host():
        stream = world.ranks[0].create_stream("main")
        stream.launch(kernel, (), 2, 32)
        stream.synchronize()

    world.run([host])


def test_threads_run_on_the_carriers_of_those_that_have_left():
    run_once()
    carriers = set(carrier._idle.carriers)
    assert len(carriers) >= 64
    met = set()
    run_once(lambda: met.add(current_thread().carrier))
    assert len(met) == 64
    assert met <= carriers == set(carrier._idle.carriers)


def test_what_a_failed_run_leaves_is_not_used():
    def fail():
        t = current_thread()
        if t.thread_idx == 3:
            raise ValueError("as planned")
        t.syncwarp()

    with pytest.raises(ValueError, match="as planned"):
        run_once(fail)
    assert all(carrier._idle.carriers)  # a greenlet that is dead is false
    run_once()


def test_a_thread_of_pythons_has_carriers_of_its_own():
    run_once()
    others = set(carrier._idle.carriers)
    met = []
    thread = threading.Thread(target=run_once, args=(lambda: met.append(current_thread().carrier),))
    thread.start()
    thread.join()
    assert len(met) == 64
    assert others.isdisjoint(met)


def test_names_of_arrays_that_launches_have_mapped_take_little_memory(monkeypatch):
    """A rank that makes calls for hours maps millions of them; what it keeps of each is for reports of late uses."""
    monkeypatch.setattr(memory, "MOST_RETIRED", 100)
    space, array = memory.AddressSpace(0), np.zeros(4, np.int32)
    numbers = []
    for _ in range(250):
        mapping = space.map_array(array, "x", writable=True)
        numbers.append(mapping.number)
        space.unmap(mapping)
    assert list(space.retired) == numbers[-100:]
    assert len({id(what) for what in space.retired.values()}) == 1


def run_under(strategy, kernel):
    world = World(1, memory_model=strategy.memory_model, strategy=strategy)

    def host():
        stream = world.ranks[0].create_stream("main")
        buffer = world.ranks[0].space.allocate(1024, "buffer", zero=True)
        stream.launch(kernel, (buffer.address,), 2, 32)
        stream.synchronize()

    world.run([host])


def test_threads_of_every_schedule_are_freed_at_once(without_collector):
    """A search makes thousands of runs: to look for them as garbage took a sixth of its time."""
    threads, tree = weakref.WeakSet(), Tree()

    def kernel(buffer):
        t = current_thread()
        threads.add(t)
        if t.lane == 0:
            old = t.atomic("add", buffer, "s32", 1, "acq_rel", "gpu")
            t.store(buffer + 4, "s32", old, "relaxed", "gpu")
        t.syncwarp()
        while t.load(buffer, "s32", "acquire", "gpu") < 2:
            t.spin(10**12)

    while tree.begin():
        assert len(threads) == 0
        next_run(tree, lambda strategy: run_under(strategy, kernel))
    assert tree.schedules > 1


def test_threads_of_a_schedule_that_is_given_up_are_freed_while_they_are_young(without_collector):
    """The carriers that other runs have made are old, and refer to its threads no more."""
    threads, tree = weakref.WeakSet(), Tree()

    def kernel(buffer):
        t = current_thread()
        threads.add(t)
        mine, other = buffer + 4 * t.block_idx, buffer + 4 - 4 * t.block_idx
        for number in (1, 2):  # a barrier of both blocks, twice
            if t.lane == 0:
                t.store(mine, "s32", number, "release", "gpu")
                while t.load(other, "s32", "acquire", "gpu") < number:
                    t.spin(10**12)
            t.syncwarp()

    while tree.begin() and tree.redundant == 0:
        gc.collect()
        next_run(tree, lambda strategy: run_under(strategy, kernel))
    assert tree.redundant == 1
    gc.collect(0)
    assert len(threads) == 0
