"""One rank per process: peers write the same bytes behind the emulator's back.

Two worlds with a kernel thread each stand for two processes; they share only the bytes, as two processes do.
"""

import mmap
import multiprocessing
import os
import signal
import sys
from multiprocessing.shared_memory import SharedMemory

import numpy as np
import pytest
from shared_counter import add_many

from nbep.emulator import EmulatorError, OutOfBounds, current_thread, process_lock
from nbep.emulator.process import ProcessWorld
from nbep.emulator.process_lock import LONGEST_STEP_NS, ProcessLock, RunningClock, lock_bytes

SECOND = 10**9


@pytest.fixture
def two_worlds():
    worlds = [ProcessWorld(2, seed, local_rank=seed) for seed in range(2)]
    yield worlds
    for world in worlds:
        world.close()


def adopt_both(worlds, nbytes=64):
    """Both ranks' segments as each world sees them: [world][rank] -> allocation."""
    memories = [bytearray(nbytes) for _ in worlds]
    return [
        [world.ranks[me].space.adopt(memoryview(memories[rank]), f"window {rank}") for rank in range(2)]
        for me, world in enumerate(worlds)
    ]


def make_lock(memory, rank=0, timeout_ns=SECOND // 20):
    return ProcessLock(memory, rank, timeout_ns, lambda holder: TimeoutError(f"held by {holder}"))


def test_local_rank_is_the_only_rank(two_worlds):
    assert [list(world.ranks) for world in two_worlds] == [[0], [1]]
    with pytest.raises(EmulatorError, match="one rank in this process"):
        two_worlds[0].run([lambda: None, lambda: None])


def test_kernels_shake_hands_across_worlds_while_both_hosts_wait(two_worlds):
    windows = adopt_both(two_worlds)

    def handshake(rank, mine, theirs):
        t = current_thread()
        deadline = t.globaltimer() + 60 * SECOND
        for i in range(1, 30):
            if rank == 0:
                t.store(theirs, "s32", i, "release", "sys")
            while t.load(mine, "s32", "acquire", "sys") < i:
                assert not t.spin(deadline)
            if rank == 1:
                t.store(theirs, "s32", i, "release", "sys")

    streams = [world.ranks[rank].create_stream("main") for rank, world in enumerate(two_worlds)]
    for rank, stream in enumerate(streams):
        stream.launch(handshake, (rank, windows[rank][rank].address, windows[rank][1 - rank].address), 1, 1)
    for stream in streams:
        stream.synchronize()
    assert [windows[0][rank].array(np.int32)[0] for rank in range(2)] == [29, 29]


def test_wait_for_a_silent_peer_ends_at_its_deadline(two_worlds):
    windows = adopt_both(two_worlds)
    late = np.zeros(1, np.int32)
    world = two_worlds[0]

    def kernel(cell, late):
        t = current_thread()
        start = t.globaltimer()
        while t.load(cell, "s32", "acquire", "sys") == 0:
            if t.spin(start + SECOND // 20):
                t.store(late, "s32", t.globaltimer() - start > SECOND // 20, "weak", "gpu")
                return

    stream = world.ranks[0].create_stream("main")
    mapping = world.ranks[0].space.map_array(late, "late", True)
    stream.launch(kernel, (windows[0][0].address, mapping.address), 1, 1)
    stream.synchronize()
    assert late[0] == 1


def test_kernel_error_reaches_the_host_that_waits(two_worlds):
    windows = adopt_both(two_worlds)
    stream = two_worlds[1].ranks[1].create_stream("main")
    stream.launch(lambda a: current_thread().load(a + 64, "s32", "weak", "gpu"), (windows[1][1].address,), 1, 1)
    with pytest.raises(OutOfBounds, match="`window 1` of rank 1: byte 64"):
        two_worlds[1].host_wait(lambda: False, "nothing")
    with pytest.raises(OutOfBounds):
        stream.launch(print, (), 1, 1)


def test_callbacks_and_events_reach_the_host(two_worlds):
    world, done = two_worlds[0], []
    stream = world.ranks[0].create_stream("main")
    for i in range(20):
        stream.launch(lambda: None, (), 1, 1).callbacks.append(lambda i=i: done.append(i))
    event = stream.record()
    world.host_wait(lambda: event.done, "the event")
    assert sorted(done) == list(range(20))


def test_a_host_waits_no_longer_than_it_says(two_worlds):
    assert not two_worlds[0].host_wait(lambda: False, "nothing", 1)
    assert two_worlds[0].host_wait(lambda: True, "anything", 1)


def test_atomics_of_two_processes_lose_nothing():
    memory = SharedMemory(create=True, size=256)
    try:
        make_lock(memory.buf[64:256]).create()
        context = multiprocessing.get_context("spawn")
        workers = [context.Process(target=add_many, args=(memory.name, rank, 2000)) for rank in range(2)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert [worker.exitcode for worker in workers] == [0, 0]
        assert int.from_bytes(memory.buf[:8], "little") == 2 * 4 * 2000
    finally:
        memory.close()
        memory.unlink()


@pytest.mark.skipif(sys.platform != "linux", reason="robust mutexes are Linux's")
def test_a_lock_names_a_holder_that_is_stopped_and_is_free_when_it_is_killed():
    memory = memoryview(mmap.mmap(-1, lock_bytes(2)))
    make_lock(memory).create()
    child = os.fork()
    if child == 0:
        make_lock(memory, rank=1).acquire()
        os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(1)
    try:
        os.waitpid(child, os.WUNTRACED)
        lock = make_lock(memory)
        with pytest.raises(TimeoutError, match="held by 1"):
            lock.acquire()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    for _ in range(2):
        lock.acquire()
        assert lock.holder() == 0
        lock.release()


def test_a_clock_skips_the_time_in_which_its_process_stood_still(monkeypatch):
    times = iter([0, 10, 10 + 100 * SECOND, 20 + 100 * SECOND])
    monkeypatch.setattr(process_lock.time, "monotonic_ns", lambda: next(times))
    running = RunningClock()
    assert [running.now() for _ in range(3)] == [10, 10 + LONGEST_STEP_NS, 20 + LONGEST_STEP_NS]


def test_checked_takes_all_ranks_in_one_process():
    with pytest.raises(ValueError, match="other processes"):
        ProcessWorld(2, memory_model="checked", local_rank=0)
