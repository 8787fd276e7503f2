"""Launches of one rank on two streams are ordered by events and by the host; else what they share is a race."""

import numpy as np
import pytest

from nbep.emulator import DataRace, DeadlockError, World, current_thread

SEEDS = range(8)


class Machine:
    """A rank with two streams and an array."""

    def __init__(self, seed, strategy="uniform"):
        self.world = World(1, seed, memory_model="checked", strategy=strategy)
        self.space = self.world.ranks[0].space
        self.compute, self.comm = (self.world.ranks[0].create_stream(name) for name in ("compute", "comm"))
        self.x = np.zeros(64, np.int32)

    def launch(self, stream, kernel, writable, *args, **options):
        """Map the array for a launch, and no longer: the runtime does so, too."""
        mapping = self.space.map_array(self.x, "x", writable)
        launch = stream.launch(kernel, (mapping.address, *args), 1, 32, **options)
        launch.callbacks.append(lambda: self.space.unmap(mapping))
        return launch

    def run(self, host):
        self.world.run([lambda: host(self)])


def fill(x):
    t = current_thread()
    t.store(x + 4 * t.lane, "s32", t.lane, "weak", "gpu")


def use(x):
    t = current_thread()
    t.load(x + 4 * t.lane, "s32", "weak", "gpu")


def without_wait(m):
    m.launch(m.compute, fill, True)
    m.launch(m.comm, use, False)


def with_early_event(m):
    event = m.compute.record()
    m.launch(m.compute, fill, True)
    m.comm.wait(event)
    m.launch(m.comm, use, False)


def with_event_of_an_earlier_record(m):
    m.launch(m.compute, fill, True)
    event = m.compute.record()
    m.comm.wait(event)  # for the first record
    m.launch(m.compute, fill, True)
    m.compute.record(event)
    m.launch(m.comm, use, False)


def overwritten_while_read(m):
    m.launch(m.compute, fill, True)
    m.comm.wait(m.compute.record())
    m.launch(m.comm, use, False)
    m.launch(m.compute, fill, True)


def told_by_another_stream_only(m):
    m.launch(m.compute, fill, True)
    m.comm.synchronize()
    m.launch(m.comm, use, False)


UNORDERED = {
    without_wait: ("on stream `comm` loads it", "stream `comm` must wait", "it has waited for no event"),
    with_early_event: ("`fill` on stream", "stream `comm` must wait", "an event, recorded before kernel `fill`"),
    with_event_of_an_earlier_record: (
        "`fill`, launch 2",
        "`comm` must wait",
        "recorded before kernel `fill`, launch 2",
    ),
    overwritten_while_read: ("`use` on stream `comm` loads", "stream `compute` must wait", "no event of stream `comm`"),
    told_by_another_stream_only: ("`fill` on stream", "stream `comm` must wait", "it has waited for no event"),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("host", UNORDERED, ids=lambda host: host.__name__)
def test_a_missing_wait_is_named_with_both_launches(host, seed):
    with pytest.raises(DataRace) as caught:
        Machine(seed).run(host)
    first = str(caught.value).splitlines()[0]
    assert first.startswith("on rank 0, kernel `")
    for words in UNORDERED[host]:
        assert words in first


def test_what_is_over_is_known_in_the_next_run():
    machine = Machine(0)
    machine.run(lambda m: m.launch(m.compute, fill, True))
    machine.run(lambda m: m.launch(m.comm, use, False))


def test_an_array_at_the_place_of_a_dropped_one_has_no_history():
    def host(m):
        m.launch(m.compute, fill, True)
        m.world.host_wait(lambda: not m.compute.is_busy, "compute")
        m.x = np.zeros(64, np.int32)  # most often where the old one was
        m.launch(m.comm, use, False)

    Machine(0).run(host)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_cpu_may_not_write_what_a_queued_kernel_reads(seed):
    def host(m):
        staging = m.space.allocate(128, "staging", zero=True)
        m.space.write(staging, 0, np.zeros(32, np.int32))
        m.comm.launch(use, (staging.address,), 1, 32)
        m.launch(m.compute, fill, True)
        m.compute.synchronize()  # which says nothing of the other stream
        m.space.write(staging, 0, np.ones(32, np.int32))

    with pytest.raises(DataRace) as caught:
        Machine(seed).run(host)
    first = str(caught.value).splitlines()[0]
    queued = "after it has queued kernel `use` on stream `comm`, which loads it"
    assert queued in first or first.startswith("the CPU writes 128 bytes that a thread has loaded")


@pytest.mark.parametrize("seed", SEEDS)
def test_the_cpu_may_write_before_a_launch_and_after_its_end(seed):
    def host(m):
        staging = m.space.allocate(128, "staging", zero=True)
        for step in range(3):
            m.space.write(staging, 0, np.full(32, step, np.int32))
            m.comm.launch(use, (staging.address,), 1, 32)
            m.comm.synchronize()

    Machine(seed).run(host)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_wait_for_an_event_recorded_again_is_named_in_a_deadlock(seed):
    world = World(1, seed)
    ready = world.ranks[0].space.allocate(16, "ready", zero=True).address
    forward, copies = (world.ranks[0].create_stream(name) for name in ("forward", "copies"))

    def replay(ready, wanted):
        t = current_thread()
        while t.load(ready, "s32", "acquire", "gpu") < wanted:
            t.spin(10**12)

    def copy(ready):
        current_thread().store(ready, "s32", 1, "release", "gpu")

    def host():
        forward.launch(replay, (ready, 0), 1, 1)
        event = forward.record()
        forward.launch(replay, (ready, 1), 1, 1)
        forward.record(event)
        copies.wait(event)
        copies.launch(copy, (ready,), 1, 1)
        copies.synchronize()

    with pytest.raises(DeadlockError) as caught:
        world.run([host])
    assert str(caught.value).splitlines()[0] == (
        "kernel `copy` of rank 0 cannot start: its stream `copies` waits for record 2 of an event of stream `forward`, "
        "behind kernel `replay`, launch 2, which waits for it; record 1 is done"
    )
