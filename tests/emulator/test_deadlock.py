"""When nothing can run, the run stops at once and says who waits for which cell."""

import inspect
from typing import ClassVar

import numpy as np
import pytest

from nbep.emulator import DeadlockError, World, current_thread

TIMEOUT = 10_000


def wait_tail(tail, wanted):
    """A protocol function, as kernels have them."""
    t = current_thread()
    deadline = t.globaltimer() + TIMEOUT
    while t.load(tail, "s32", "acquire", "sys") < wanted:
        if t.spin(deadline):
            return False
    return True


def sender(tail):
    current_thread().store(tail + 8, "s32", 3, "release", "sys")  # publishes 3


def receiver(tail, late):
    t = current_thread()
    if t.warp == 0:
        if not wait_tail(tail + 8, 5):
            t.store(late + 4 * t.lane, "s32", 1, "weak", "gpu")
    t.barrier(0, t.block_dim)


def starved_ring(on_deadlock="raise", seed=6):
    """Rank 0 publishes tail 3, rank 1 waits for 5."""
    world = World(2, seed, on_deadlock=on_deadlock)
    late = np.zeros(32, np.int32)
    buffers = {}

    def host(rank):
        context = world.ranks[rank]
        stream = context.create_stream("comm")
        if rank == 1:
            buffers[1] = context.space.allocate(64, "ring", zero=True, describe=lambda o: f"tail[channel {o // 4}]")
            late_address = context.space.map_array(late, "late", True).address
            stream.launch(receiver, (buffers[1].address, late_address), 1, 64)
        else:
            world.host_wait(lambda: 1 in buffers, "rank 1's buffer")
            stream.launch(sender, (context.space.open(buffers[1].handle).address,), 1, 1)
        stream.synchronize()
        if rank == 0:
            world.host_wait(lambda: late.any(), lambda: "late to be set")

    world.run([lambda: host(0), lambda: host(1)])
    return late


def test_deadlock_report_tells_the_whole_story():
    with pytest.raises(DeadlockError) as caught:
        starved_ring()
    text = str(caught.value)
    assert "nothing can run any more: 64 threads in 2 groups and 2 hosts wait (seed 6)" in text
    # the waiting group, its place and how it came there
    assert "rank 1, kernel `receiver`, block 0, warp 0\n" in text
    load_line = inspect.getsourcelines(wait_tail)[1] + 5
    assert f"test_deadlock.py:{load_line} (wait_tail), called from " in text
    assert "(receiver)" in text
    # the cell, its value, its last writer
    assert "polls `ring` of rank 1: tail[channel 2] (byte 8)" in text
    assert "sees 3 (s32)" in text
    writer_line = inspect.getsourcelines(sender)[1] + 1
    assert "last written by rank 0, kernel `sender`, block 0, warp 0, lane 0, at " in text
    assert f"test_deadlock.py:{writer_line} (sender)" in text
    # the group at the barrier, who is missing there, and the hosts
    assert "waits at barrier 0: 32 of 64 threads have arrived" in text
    assert "missing: warp 0, which are at" in text
    assert "the host of rank 0 waits for late to be set" in text
    assert "the host of rank 1 waits for stream `comm`: kernel `receiver` runs" in text


@pytest.mark.parametrize("seed", range(4))
def test_expire_runs_the_kernels_own_time_outs(seed):
    np.testing.assert_array_equal(starved_ring("expire", seed), np.ones(32))


def test_expire_raises_when_no_thread_spins(launch):
    with pytest.raises(DeadlockError, match="barrier 1: 32 of 64"):
        launch(lambda: current_thread().barrier(1 + current_thread().warp, 64), block=64, on_deadlock="expire")


def test_expire_ends_the_earliest_wait_first():
    """The second wait ends well because the first, which is due earlier, has given up and signalled it."""
    world = World(1, on_deadlock="expire")
    cells = world.ranks[0].space.allocate(16, "cells", zero=True)
    outcome = {}

    def kernel(cells):
        t = current_thread()
        deadline = t.globaltimer() + 1000 * (1 + t.thread_idx)
        outcome[t.thread_idx] = "seen"
        while t.load(cells + 4 * t.thread_idx, "s32", "acquire", "gpu") == 0:
            if t.spin(deadline):
                outcome[t.thread_idx] = "late"
                assert t.globaltimer() > deadline
                t.store(cells + 4, "s32", 1, "release", "gpu")
                return

    stream = world.ranks[0].create_stream("main")
    stream.launch(kernel, (cells.address,), 1, 2)
    stream.synchronize()
    assert outcome == {0: "late", 1: "seen"}


@pytest.mark.parametrize("timeout", [TIMEOUT // 2, 2 * TIMEOUT])
def test_expire_ends_the_earliest_wait_first_whether_a_hosts_or_a_threads(timeout):
    """Rank 0 waits on the host for what rank 1's kernel does when its own wait times out."""
    world = World(2, on_deadlock="expire")
    tail = world.ranks[1].space.allocate(4, "tail", zero=True)
    late = []

    def kernel():
        late.append(not wait_tail(tail.address, 1))

    def wait_late():
        in_time = world.host_wait(lambda: bool(late), "the kernel to be late", timeout)
        assert world.host_wait(lambda: bool(late), "the same", 10 * TIMEOUT)
        return in_time

    stream = world.ranks[1].create_stream("main")
    stream.launch(kernel, (), 1, 1)
    assert world.run([wait_late, stream.synchronize]) == [timeout > TIMEOUT, None]
    assert late == [True]


def test_a_caller_without_a_run_waits_no_longer_than_it_says():
    world = World(1, on_deadlock="expire")
    assert not world.host_wait(lambda: False, "nothing", TIMEOUT)
    with pytest.raises(DeadlockError, match="the host waits for nothing"):
        world.host_wait(lambda: False, "nothing")


def test_a_hosts_time_out_does_not_hide_a_deadlock():
    world = World(1)
    with pytest.raises(DeadlockError, match="the host of rank 0 waits for nothing"):
        world.run([lambda: world.host_wait(lambda: False, "nothing", TIMEOUT)])


def test_host_that_waits_for_another_is_in_the_report():
    world = World(2)
    with pytest.raises(DeadlockError, match=r"1 host wait(.|\n)*the host of rank 1 waits for rank 0's answer"):
        world.run([lambda: None, lambda: world.host_wait(lambda: False, "rank 0's answer")])


def poll_each_in_its_way(cells):
    """Thread 0 parks, after a look at another cell; thread 1 polls and polls."""
    t = current_thread()
    if t.thread_idx == 0:
        t.load(cells + 8, "s32", "acquire", "sys")
    while t.load(cells + 4 * t.thread_idx, "s32", "acquire", "sys") == 0:
        if t.thread_idx == 0:
            t.spin(10**12)


def test_who_is_parked_beside_an_endless_loop_waits_for_what_its_loop_polls(launch, monkeypatch):
    monkeypatch.setattr(World, "max_idle_calls", 2000)
    with pytest.raises(DeadlockError, match="nothing changes any more") as caught:
        launch(poll_each_in_its_way, np.zeros(4, np.int32), block=2)
    assert "byte 0" in str(caught.value)
    assert "byte 4" in str(caught.value)
    assert "byte 8" not in str(caught.value)


def load_for_long(cells):
    t = current_thread()
    t.load(cells, "s32", "relaxed", "sys")  # one poll, long ago
    for _ in range(9000):
        t.load(cells + 4, "s32", "weak", "gpu")


def wait_for_a_time(cells):
    t = current_thread()
    start = t.globaltimer()
    while t.globaltimer() < start + 20_000:
        t.load(cells, "s32", "relaxed", "sys")


@pytest.mark.parametrize("kernel", [load_for_long, wait_for_a_time])
def test_long_work_without_a_store_is_no_endless_loop(launch, monkeypatch, kernel):
    monkeypatch.setattr(World, "max_idle_calls", 2000)
    launch(kernel, np.zeros(4, np.int32), block=2)


def test_only_what_a_loop_polls_is_in_the_report(launch):
    def poll_two(cells):
        current_thread().load(cells, "s32", "acquire", "sys")
        wait_tail(cells + 8, 1)

    with pytest.raises(DeadlockError) as caught:
        launch(poll_two, np.zeros(4, np.int32))
    assert "byte 8" in str(caught.value)
    assert "byte 0" not in str(caught.value)


@pytest.mark.parametrize("memory_model", ["sc", "delayed"])
def test_ordinary_store_to_a_polled_cell_is_its_last_writer(launch, memory_model):
    def kernel(cell):
        t = current_thread()
        if t.thread_idx:
            wait_tail(cell, 2)
        else:
            for _ in range(20):
                t.fence("acq_rel", "gpu")
            t.store(cell, "s32", 1, "weak", "gpu")

    with pytest.raises(
        DeadlockError, match=r"sees 1 \(s32\)\n.*last written by rank 0, kernel `kernel`, block 0, warp 0, lane 0"
    ):
        launch(kernel, np.zeros(4, np.int32), block=2, memory_model=memory_model, seed=4)


def test_same_waits_of_many_blocks_are_one_group(launch):
    with pytest.raises(DeadlockError, match=r"512 threads in 1 group(.|\n)*block 0-3, warp 0-3\n"):
        launch(wait_tail, np.zeros(4, np.int32), 1, grid=4, block=128)


# --- the first paragraph ----------------------------------------------------------------------------------------------


def first_paragraph(error):
    return str(error).partition("\n\n")[0]


CONDITIONS = {
    "5": lambda value: value == 5,
    "anything but 0": lambda value: value != 0,
    "5 or more": lambda value: value > 4,
    "4 or less": lambda value: 7 - value >= 3,
    "-2 or less": lambda value: value + 1 < 0,
    "its value & 4 == 4": lambda value: value & 4 == 4,
    "its value // 2 == 3": lambda value: value // 2 == 3,
    "10 or more or -10 or less": lambda value: value >= 10 or value <= -10,
}


@pytest.mark.parametrize("expected", CONDITIONS)
@pytest.mark.parametrize("memory_model", ["sc", "delayed", "checked"])
def test_what_a_cell_must_hold_is_found_from_the_comparison(launch, expected, memory_model):
    condition = CONDITIONS[expected]
    start = 6 if expected.startswith("4 or less") else 0

    def kernel(cell):
        t = current_thread()
        while not condition(t.load(cell, "s32", "acquire", "sys")):
            t.spin(10**12)

    with pytest.raises(DeadlockError) as caught:
        launch(kernel, np.full(4, start, np.int32), memory_model=memory_model)
    assert f"byte 0, expects {expected} and sees {start}, at " in first_paragraph(caught.value)


def test_asking_what_is_expected_changes_no_memory(launch):
    """Behind the wait there is a store, and before it; the thread that is asked goes on to neither."""
    cells = np.zeros(4, np.int32)

    def kernel(cells):
        t = current_thread()
        deadline = t.globaltimer() + 100
        while t.load(cells, "s32", "acquire", "sys") < 3:
            if t.spin(deadline):
                t.store(cells + 4, "s32", 1, "release", "sys")
                return
        t.store(cells + 8, "s32", 1, "release", "sys")

    with pytest.raises(DeadlockError, match="expects 3 or more and sees 0"):
        launch(kernel, cells)
    assert not cells.any()


def test_a_tracer_does_not_see_what_the_report_asks():
    """Asked for its report, the thread comes to the end of its kernel; the trace ends with its wait."""

    class Tracer:
        calls: ClassVar[list] = []

        def on_park(self, thread, cells):
            self.calls.append("park")

        def on_wake(self, thread):
            self.calls.append("wake")

        def on_exit(self, thread):
            self.calls.append("exit")

        def on_launch(self, launch):
            launch.callbacks.append(lambda: self.calls.append("end"))

    world = World(1, tracer=Tracer())
    world.read_report = lambda thread, frame: None
    cell = world.ranks[0].space.allocate(4, "cell", zero=True)
    stream = world.ranks[0].create_stream("main")
    stream.launch(wait_tail, (cell.address, 1), 1, 1)
    with pytest.raises(DeadlockError, match="expects 1 or more and sees 0"):
        stream.synchronize()
    assert Tracer.calls == ["park", "wake", "park"]  # it looked again by itself, before the run was over


def test_what_loops_compare_on_the_way_is_not_what_they_wait_for(launch):
    """Only comparisons of the polled value count, and the emulator's own are none."""

    def kernel(cells):
        t = current_thread()
        rounds = 0
        while t.load(cells, "s32", "acquire", "sys") != 9:
            rounds += 1
            if rounds == 1000:
                return
            t.store(cells + 8, "s32", 1, "relaxed", "gpu")
            t.spin(10**12)

    with pytest.raises(DeadlockError, match="byte 0, expects 9 and sees 1, at"):
        launch(kernel, np.ones(4, np.int32), block=2)


def test_a_wait_in_a_vote_is_found_though_lanes_meet_in_every_turn(launch):
    def kernel(cells):
        t = current_thread()
        while not t.vote("any", 0xFFFFFFFF, t.lane < 2 and t.load(cells + 4 * t.lane, "s32", "acquire", "sys") == 7):
            t.spin(10**12)

    with pytest.raises(DeadlockError, match="byte 0, expects 7 and sees 0, at"):
        launch(kernel, np.zeros(4, np.int32), block=32)


def two_teams(flag):
    """Warps 0 and 1 meet at barrier 1, warps 2 and 3 at barrier 2; in the second round warp 1 waits for a flag."""
    t = current_thread()
    for i in range(2):
        if i == 1 and t.thread_idx == 32:
            wait_tail(flag, 1)
        t.barrier(1 + t.warp // 2, 64)
    t.barrier(0, 128)


def test_a_warp_with_a_barrier_of_its_own_is_not_missing_at_anothers(launch):
    with pytest.raises(DeadlockError) as caught:
        launch(two_teams, np.zeros(1, np.int32), block=128)
    at_1, at_0 = (
        text.split("\n  rank")[0] for text in str(caught.value).partition("\n\n")[2].split("waits at barrier ")[1:]
    )
    if at_1.startswith("0"):
        at_1, at_0 = at_0, at_1
    assert at_1.startswith("1: 63 of 64 threads have arrived\n    missing: warp 1, lane 0, which are at ")
    assert at_1.count("missing") == 1
    # The last barrier is for all.
    assert at_0.startswith("0: 64 of 128 threads have arrived\n")
    assert "missing: warp 0; warp 1, lane 1-31, which are at" in at_0


def test_threads_that_have_left_are_not_missing(launch):
    def kernel(flag):
        t = current_thread()
        if t.warp == 3:
            return
        if t.warp == 2:
            wait_tail(flag, 1)
        t.barrier(1, 96)

    with pytest.raises(DeadlockError) as caught:
        launch(kernel, np.zeros(1, np.int32), block=128)
    assert "missing: warp 2, which are at" in str(caught.value)
    assert "have left the kernel" not in str(caught.value)
    assert "Threads that have left kernel `kernel` of rank 0: block 0, warp 3" in first_paragraph(caught.value)


def many_places(cells):
    """Each thread waits at a place of its own: the depth of its recursion."""

    def wait(depth):
        if depth == 0:
            wait_tail(cells + 4 * current_thread().thread_idx, 1)
        else:
            wait(depth - 1)

    wait(min(3, current_thread().thread_idx))


def hang_of_eight():
    world = World(8)

    def host(rank):
        context = world.ranks[rank]
        stream = context.create_stream("main")
        stream.launch(many_places, (context.space.allocate(256, "cells", zero=True).address,), 1, 64)
        stream.synchronize()

    with pytest.raises(DeadlockError) as caught:
        world.run([lambda rank=rank: host(rank) for rank in range(8)])
    return caught.value


@pytest.mark.thorough
def test_a_hang_of_eight_ranks_fits_in_40_lines_and_the_rest_is_there_on_request(monkeypatch):
    error = hang_of_eight()
    lines = str(error).splitlines()
    assert len(lines) <= 40
    assert lines[-1].endswith("all of it: error.full, or NBEP_REPORT=full")
    assert "  ranks 0-7, kernel `many_places`, block 0, warp 0, lane 0" in lines
    assert "    ... and 7 groups more like it" in lines
    full = error.full.splitlines()
    assert len(full) > 8 * 64
    assert full[: len(first_paragraph(error).splitlines())] == first_paragraph(error).splitlines()
    assert sum("polls `cells` of rank 5: byte 252 " in line for line in full) == 1
    monkeypatch.setenv("NBEP_REPORT", "full")
    assert str(hang_of_eight()) == error.full


def test_a_short_report_is_whole():
    with pytest.raises(DeadlockError) as caught:
        starved_ring()
    assert caught.value.full == str(caught.value)
