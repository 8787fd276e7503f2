"""The seed decides who runs when, and nothing else does."""

import numpy as np
import pytest

from nbep.emulator import EmulatorError, Trap, World, current_thread


def test_threads_of_all_blocks_and_ranks_interleave_at_every_primitive():
    """Some seed runs another thread between any two primitive calls of a thread."""
    order = []

    def kernel():
        t = current_thread()
        for i in range(3):
            t.fence("acq_rel", "cta")
            order.append((t.rank, t.block_idx, i))

    interrupted = set()
    for seed in range(60):
        order.clear()
        world = World(2, seed)
        for rank in range(2):
            world.ranks[rank].create_stream("main").launch(kernel, (), 2, 1)
        world.host_wait(lambda: len(order) == 12, "all steps")
        for me in {entry[:2] for entry in order}:
            mine = [at for at, entry in enumerate(order) if entry[:2] == me]
            interrupted |= {(me, i) for i in range(2) if mine[i + 1] > mine[i] + 1}
    assert len(interrupted) == 8


@pytest.mark.parametrize("seed", range(3))
def test_parked_threads_cost_nothing(seed):
    """A thousand threads wait while one counts: the number of switches does not depend on how long it counts."""

    def switches(count):
        world = World(1, seed)
        flag = world.ranks[0].space.allocate(16, "flag", zero=True)

        def kernel(flag):
            t = current_thread()
            if t.thread_idx:
                while t.load(flag, "s32", "acquire", "gpu") == 0:
                    t.spin(10**12)
            else:
                for i in range(count):
                    t.store(flag + 8, "s32", i, "relaxed", "gpu")
                t.store(flag, "s32", 1, "release", "gpu")

        stream = world.ranks[0].create_stream("main")
        stream.launch(kernel, (flag.address,), 1, 1000)
        stream.synchronize()
        assert world.counters["parks"] <= 999
        return world.counters["primitive_calls"]

    assert switches(3000) <= switches(30) + 2970 + 3 * 999


def test_kernel_that_waits_without_polling_is_an_error(launch):
    def kernel(flag):
        t = current_thread()
        while t.load(flag, "s32", "weak", "gpu") == 0:
            t.spin(10**12)

    with pytest.raises(EmulatorError, match="waits without polling: only volatile, relaxed and acquire loads count"):
        launch(kernel, np.zeros(1, np.int32))


def test_virtual_clock_counts_calls(launch):
    def kernel():
        t = current_thread()
        start = t.globaltimer()
        for _ in range(10):
            t.fence("acq_rel", "cta")
        assert t.globaltimer() - start == 11

    launch(kernel)


def test_deadline_in_the_past_ends_a_wait_at_once(launch):
    def kernel(flag):
        t = current_thread()
        t.load(flag, "s32", "acquire", "gpu")
        assert t.spin(t.globaltimer() - 1)

    launch(kernel, np.zeros(1, np.int32))


def test_a_failed_world_is_spent():
    world = World(1)
    stream = world.ranks[0].create_stream("main")
    stream.launch(lambda: current_thread().trap("first"), (), 1, 1)
    with pytest.raises(Trap):
        stream.synchronize()
    with pytest.raises(EmulatorError, match="has ended with an error"):
        stream.synchronize()


def test_bad_arguments_are_refused():
    for options in [{"num_ranks": 0}, {"num_ranks": 1, "memory_model": "tso"}, {"num_ranks": 1, "on_deadlock": "wait"}]:
        with pytest.raises(ValueError, match="allowed"):
            World(**options)
    stream = World(1).ranks[0].create_stream("main")
    for grid, block in [(0, 1), (1, 0), (1, 1025)]:
        with pytest.raises(ValueError, match=r"allowed: grid >= 1, block 1 \.\. 1024"):
            stream.launch(print, (), grid, block)
