"""Streams run in order, events order them among each other, and hosts wait without stopping the world."""

import numpy as np
import pytest

from nbep.emulator import World, current_thread

SEEDS = range(6)


@pytest.mark.parametrize("seed", SEEDS)
def test_launches_of_a_stream_run_one_after_another(seed):
    world = World(1, seed)
    stream = world.ranks[0].create_stream("main")
    order = []

    def kernel(name):
        order.append(name)
        current_thread().barrier(0, 32)
        order.append(name)

    launches = [stream.launch(kernel, (name,), 2, 32, name=name) for name in "abc"]
    assert not any(launch.done for launch in launches)
    stream.synchronize()
    assert order == ["a"] * 128 + ["b"] * 128 + ["c"] * 128
    assert all(launch.done for launch in launches)


def test_streams_overlap_unless_an_event_orders_them():
    def order_of(seed, ordered):
        world = World(2, seed)
        first, second = world.ranks[0].create_stream("first"), world.ranks[1].create_stream("second")
        order = []

        def kernel(name):
            order.append(name)
            current_thread().fence("acq_rel", "gpu")
            order.append(name)

        first.launch(kernel, ("a",), 1, 1)
        event = first.record()
        if ordered:
            second.wait(event)
        launch = second.launch(kernel, ("b",), 1, 1)
        second.synchronize()
        assert launch.done
        assert event.done or not ordered
        first.synchronize()
        assert event.done
        return "".join(order)

    assert {order_of(seed, True) for seed in range(30)} == {"aabb"}
    orders = {order_of(seed, False) for seed in range(60)}
    assert {"aabb", "bbaa"} < orders


def test_callbacks_run_when_the_launch_is_done():
    world = World(1)
    stream = world.ranks[0].create_stream("main")
    order = []
    launch = stream.launch(lambda: order.append("kernel"), (), 1, 1)
    launch.callbacks.append(lambda: order.append("first"))
    launch.callbacks.append(lambda: order.append("second"))
    stream.synchronize()
    launch.callbacks.append(lambda: order.append("late"))
    assert order == ["kernel", "first", "second", "late"]


def test_arguments_are_let_go_after_the_launch():
    world = World(1)
    stream = world.ranks[0].create_stream("main")
    launch = stream.launch(lambda x: None, (np.zeros(4),), 1, 1)
    assert len(launch.args) == 1
    stream.synchronize()
    assert launch.args == ()


@pytest.mark.parametrize("seed", SEEDS)
def test_host_reads_memory_while_a_kernel_runs(seed):
    world = World(1, seed)
    counter = world.ranks[0].space.allocate(16, "counter", zero=True)

    def kernel(counter):
        t = current_thread()
        t.store(counter, "s32", 7, "relaxed", "sys")
        while t.load(counter + 4, "s32", "acquire", "sys") == 0:
            t.spin(10**12)

    def other(counter):
        current_thread().store(counter + 4, "s32", 1, "release", "sys")

    def host():
        stream, answer = world.ranks[0].create_stream("main"), world.ranks[0].create_stream("answer")
        launch = stream.launch(kernel, (counter.address,), 1, 1)
        view = counter.array(np.int32)
        world.host_wait(lambda: view[0] == 7, "the counter")
        assert not launch.done
        answer.launch(other, (counter.address,), 1, 1)
        stream.synchronize()
        return int(view[0])

    assert world.run([host]) == [7]


def test_results_come_back_by_rank():
    world = World(3)
    assert world.run([lambda rank=rank: rank * rank for rank in range(3)]) == [0, 1, 4]
    assert world.run([lambda: None] * 3) == [None] * 3
    with pytest.raises(ValueError, match="2 for 3 ranks"):
        world.run([lambda: None] * 2)


def test_run_waits_for_kernels_that_no_host_waits_for():
    world = World(1)
    done = []
    world.run([lambda: world.ranks[0].create_stream("main").launch(lambda: done.append(1), (), 2, 3)])
    assert len(done) == 6


def test_a_hosts_exception_ends_all_ranks_and_keeps_its_traceback():
    world = World(3, seed=8)
    waiting, cleaned = [], []

    def broken_host():
        world.host_wait(lambda: waiting, "rank 0 to wait")
        raise LookupError("rank 1 has no table")

    def patient_host():
        waiting.append(1)
        try:
            world.host_wait(lambda: False, "what never comes")
        finally:
            cleaned.append(1)

    def spinning_host():
        flag = world.ranks[2].space.allocate(4, "flag", zero=True)

        def kernel(flag):
            t = current_thread()
            while t.load(flag, "s32", "acquire", "gpu") == 0:
                t.spin(10**12)

        world.ranks[2].create_stream("main").launch(kernel, (flag.address,), 1, 32)

    with pytest.raises(LookupError, match="rank 1 has no table") as caught:
        world.run([patient_host, broken_host, spinning_host])
    assert caught.traceback[-1].name == "broken_host"
    assert "rank 1" in caught.value.__notes__[0]
    assert "seed 8" in caught.value.__notes__[0]
    assert cleaned == [1]
    assert not world.launches


def test_a_predicates_exception_is_its_hosts():
    world = World(2)

    def host():
        world.host_wait(lambda: 1 // 0, "nonsense")

    with pytest.raises(ZeroDivisionError) as caught:
        world.run([lambda: None, host])
    assert "rank 1" in caught.value.__notes__[0]
