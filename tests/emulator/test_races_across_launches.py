"""What a kernel knows of other ranks and streams when it starts: what its host and its stream say, and nothing else.

Each program is run under seeds and under every schedule. Source: PTX ISA, Memory Consistency Model, "API
synchronization"
"""

from functools import partial

import numpy as np
import pytest
from every_schedule import run_all
from litmus import put, take, wait_for

from nbep.emulator import DataRace, NonCoherent, World, current_thread

DATA, FLAG, FLAG_2 = 0, 64, 128
SEEDS = range(12)


class Host:
    """The host of a rank: what it launches are lists of accesses, one kernel of one thread for each."""

    def __init__(self, world, rank, memory):
        self.world = world
        self.space = world.ranks[rank].space
        self.memory = memory
        self.base = (memory if rank == 0 else self.space.open(memory.handle)).address
        self.streams = {name: world.ranks[rank].create_stream(name) for name in ("compute", "comm")}

    def launch(self, *accesses, stream="compute"):
        def kernel(base):
            for access in accesses:
                access(base)

        self.streams[stream].launch(kernel, (self.base,), 1, 1)

    def wait_for(self, condition):
        self.world.host_wait(condition, "the other host")

    def poll(self, flag):
        self.wait_for(lambda: self.space.read(self.memory, np.int32, flag, 1, polls=True)[0] == 1)


def run(hosts, strategy="uniform", seed=0):
    """Run host(Host, marks) for each rank, and all that they launch; hosts share the set of marks."""
    world = World(len(hosts), seed, memory_model="checked", strategy=strategy)
    memory = world.ranks[0].space.allocate(256, "memory", zero=True)
    marks = set()
    world.run([partial(host, Host(world, rank, memory), marks) for rank, host in enumerate(hosts)])


# --- accesses of a kernel ---------------------------------------------------------------------------------------------


def write(base):
    put(current_thread(), base + DATA)


def read(base):
    current_thread().load(base + DATA, "s32", "weak", "cta")


def read_as_written(base):
    take(current_thread(), base + DATA)


def read_constant(base):
    current_thread().load(base + DATA, "s32", "nc", "cta")


def fence(base):
    current_thread().fence("acq_rel", "sys")


def set_flag(order, flag=FLAG, scope="sys"):
    return lambda base: current_thread().store(base + flag, "s32", 1, order, scope)


def await_flag(order, flag=FLAG):
    return lambda base: wait_for(base + flag, order)


def add_to_flag(order, flag=FLAG):
    return lambda base: current_thread().atomic("add", base + flag, "s32", 1, order, "sys")


def read_flag(base):
    take(current_thread(), base + FLAG)


def reset_flag(base):
    put(current_thread(), base + FLAG, 0)


def nothing(base):
    pass


def kernels(*each):
    """A host that launches kernels on one stream, each a list of accesses."""

    def host(it, marks):
        for accesses in each:
            it.launch(*accesses)

    return host


# --- programs with a race -------------------------------------------------------------------------------------------


RELEASED = kernels([write, set_flag("release")])

RACES = {
    "both store": [kernels([write]), kernels([write])],
    "store, load": [kernels([write]), kernels([read])],
    "load, store": [kernels([read]), kernels([write])],
    "store and fence, load": [kernels([write, fence]), kernels([read])],
    "store and fence, store": [kernels([write, fence]), kernels([write])],
    "load and fence, store": [kernels([read, fence]), kernels([write])],
    "release, load without an acquire": [RELEASED, kernels([read])],
    "release, later kernel that loads": [RELEASED, kernels([nothing], [read])],
    "release, later kernel that stores": [RELEASED, kernels([nothing], [write])],
    "load, later kernel that stores": [kernels([read]), kernels([nothing], [write])],
    "load and release, later kernel that stores": [kernels([read, set_flag("release")]), kernels([nothing], [write])],
    "relaxed poll, load": [RELEASED, kernels([await_flag("relaxed"), read])],
    "relaxed poll, later kernel that loads": [RELEASED, kernels([await_flag("relaxed")], [read_as_written])],
    "relaxed poll, later kernel with a fence": [RELEASED, kernels([await_flag("relaxed")], [fence, read_as_written])],
    "relaxed store, acquire, later kernel that loads": [
        kernels([write, set_flag("relaxed")]),
        kernels([await_flag("acquire")], [read_as_written]),
    ],
    "store in a kernel after the one that releases": [
        kernels([set_flag("release")], [write]),
        kernels([await_flag("acquire")], [read]),
    ],
    "store in a kernel before a relaxed one": [
        kernels([write], [set_flag("relaxed")]),
        kernels([await_flag("acquire"), read_as_written]),
    ],
    "acquired by another stream": [
        RELEASED,
        lambda it, marks: (it.launch(await_flag("acquire"), stream="comm"), it.launch(read)),
    ],
    "acquired by another rank": [RELEASED, kernels([await_flag("acquire")]), kernels([read])],
    "passed on by a relaxed store": [
        RELEASED,
        kernels([await_flag("acquire")], [set_flag("relaxed", FLAG_2)]),
        kernels([await_flag("acquire", FLAG_2)], [read_as_written]),
    ],
    "flag that nobody reads, reset": [kernels([set_flag("relaxed")]), kernels([nothing], [reset_flag])],
    "flag that another rank has read, reset": [
        kernels([set_flag("relaxed")]),
        kernels([await_flag("relaxed")]),
        kernels([nothing], [reset_flag]),
    ],
}


def host_that_waits_after_the_other_has_queued(it, marks):
    it.launch(write)
    it.wait_for(lambda: "queued" in marks)
    it.streams["compute"].synchronize()
    marks.add("waited")


def host_that_queues_first(it, marks):
    it.launch(await_flag("relaxed", FLAG_2))
    it.launch(read)
    marks.add("queued")
    it.wait_for(lambda: "waited" in marks)
    it.launch(set_flag("relaxed", FLAG_2), stream="comm")


def host_that_polls_relaxed(it, marks):
    it.poll(FLAG)
    it.launch(read)


def host_that_waits_for_one_of_two_launches(wait_for_stream):
    def host(it, marks):
        it.launch(write, stream="comm")
        it.launch(read, stream="compute")
        it.streams[wait_for_stream].synchronize()

    return host


def host_that_waits_for_the_launch_before(it, marks):
    """The wait comes after the second launch was queued: that knows nothing of it."""
    it.launch(nothing, stream="comm")
    it.launch(write, stream="comm")
    it.launch(await_flag("relaxed"), stream="compute")
    it.launch(read, stream="compute")
    it.streams["comm"].synchronize()
    it.launch(set_flag("relaxed"), stream="comm")


def host_with_an_event_before_the_store(it, marks):
    it.launch(nothing, stream="comm")
    event = it.streams["comm"].record()
    it.launch(write, stream="comm")
    it.streams["compute"].wait(event)
    it.launch(read)


def host_with_two_streams(*of_comm):
    def host(it, marks):
        for accesses in of_comm:
            it.launch(*accesses, stream="comm")
        it.launch(read)

    return host


RACES |= {
    "host that waits too late for the other": [host_that_waits_after_the_other_has_queued, host_that_queues_first],
    "host that polls a relaxed flag": [kernels([write, set_flag("relaxed")]), host_that_polls_relaxed],
    "two streams": [host_with_two_streams([write])],
    "two streams, release": [host_with_two_streams([write, set_flag("release")])],
    "host that has waited for the one that stores": [host_that_waits_for_one_of_two_launches("comm")],
    "host that has waited for the one that loads": [host_that_waits_for_one_of_two_launches("compute")],
    "host that waits after both were queued": [host_that_waits_for_the_launch_before],
    "event before the store": [host_with_an_event_before_the_store],
}


@pytest.mark.parametrize("name", RACES)
def test_a_race_is_found_under_every_seed_and_among_all_schedules(name):
    for seed in SEEDS:
        with pytest.raises(DataRace):
            run(RACES[name], seed=seed)
    with pytest.raises(DataRace):
        run_all(lambda strategy: run(RACES[name], strategy), 20)


@pytest.mark.parametrize(
    "hosts",
    [
        [RELEASED, kernels([await_flag("acquire"), read_constant])],
        [RELEASED, kernels([nothing], [await_flag("acquire"), read_constant])],
        [
            lambda it, marks: (
                it.launch(write, set_flag("release"), stream="comm"),
                it.launch(await_flag("acquire"), read_constant),
            )
        ],
    ],
)
def test_bytes_are_not_constant_that_nothing_orders_before_the_kernel(hosts):
    for seed in SEEDS:
        with pytest.raises(NonCoherent):
            run(hosts, seed=seed)
    with pytest.raises(NonCoherent):
        run_all(lambda strategy: run(hosts, strategy), 20)


def test_bytes_are_constant_that_an_earlier_kernel_has_acquired():
    hosts = [RELEASED, kernels([await_flag("acquire")], [read_constant])]
    for seed in SEEDS:
        run(hosts, seed=seed)
    run_all(lambda strategy: run(hosts, strategy), 20)


# --- programs without one -------------------------------------------------------------------------------------------


def host_that_waits(it, marks):
    it.launch(write)
    it.streams["compute"].synchronize()
    marks.add("waited")


def host_that_waits_for_the_other(it, marks):
    it.wait_for(lambda: "waited" in marks)
    it.launch(read_as_written)


def host_that_polls(it, marks):
    it.poll(FLAG)
    it.launch(read_as_written)
    it.launch(read_flag, stream="comm")


def host_that_polls_and_resets(it, marks):
    it.poll(FLAG)
    it.launch(reset_flag)


def host_with_an_event(it, marks):
    it.launch(write, stream="comm")
    it.streams["compute"].wait(it.streams["comm"].record())
    it.launch(read_as_written)
    it.launch(nothing)
    it.launch(read_as_written)


def host_that_waits_between(it, marks):
    it.launch(write, stream="comm")
    it.streams["comm"].synchronize()
    it.launch(read_as_written)


ORDERED = {
    "acquire": [RELEASED, kernels([await_flag("acquire"), read_as_written])],
    "acquire, later kernel": [RELEASED, kernels([await_flag("acquire")], [nothing], [read_as_written])],
    "relaxed poll and fence, later kernel": [RELEASED, kernels([await_flag("relaxed"), fence], [read_as_written])],
    "stored in an earlier kernel than released": [
        kernels([write], [nothing], [set_flag("release")]),
        kernels([await_flag("acquire")], [read_as_written]),
    ],
    "chain of two kernels on each of three ranks": [
        kernels([write], [set_flag("release")]),
        kernels([await_flag("acquire")], [set_flag("release", FLAG_2)]),
        kernels([await_flag("acquire", FLAG_2)], [write]),
    ],
    "flag that a relaxed poll has seen, later kernel": [
        kernels([set_flag("relaxed")]),
        kernels([await_flag("relaxed")], [read_flag], [reset_flag]),
    ],
    "flag that another rank has seen and released": [
        kernels([set_flag("relaxed")]),
        kernels([await_flag("relaxed")], [set_flag("release", FLAG_2)]),
        kernels([await_flag("acquire", FLAG_2)], [reset_flag]),
    ],
    "count of relaxed adds, later kernel": [
        kernels([add_to_flag("relaxed")]),
        kernels([add_to_flag("relaxed")]),
        kernels([lambda base: wait_for(base + FLAG, "relaxed", at_least=2)], [reset_flag]),
    ],
    "loaded before a relaxed flag": [kernels([read], [set_flag("relaxed")]), kernels([await_flag("relaxed")], [write])],
    "event of a stream that has acquired": [
        RELEASED,
        lambda it, marks: (
            it.launch(await_flag("acquire"), stream="comm"),
            it.streams["compute"].wait(it.streams["comm"].record()),
            it.launch(read_as_written),
        ),
    ],
    "host that waits for a stream that has acquired": [
        RELEASED,
        lambda it, marks: (
            it.launch(await_flag("acquire"), stream="comm"),
            it.streams["comm"].synchronize(),
            it.launch(read_as_written),
        ),
    ],
    "host that another one has waited for": [host_that_waits, host_that_waits_for_the_other],
    "host that polls a flag": [RELEASED, host_that_polls],
    "host that polls a relaxed flag, and resets it": [kernels([set_flag("relaxed")]), host_that_polls_and_resets],
    "event": [host_with_an_event],
    "host that waits between two streams": [host_that_waits_between],
}


@pytest.mark.parametrize("name", ORDERED)
def test_nothing_is_found_where_kernels_are_ordered(name):
    for seed in SEEDS:
        run(ORDERED[name], seed=seed)
    run_all(lambda strategy: run(ORDERED[name], strategy), 20)
