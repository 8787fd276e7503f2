"""What a kernel knows of another rank by a kernel before it, as docs/memory_orders.md has it; and constant bytes.

What streams, events and hosts order the oracle asks (test_oracle); test_stream_races what is said of a missing wait.
"""

from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
from every_schedule import run_all
from litmus import put, wait_for

from nbep.emulator import DataRace, NonCoherent, World, current_thread

DATA, FLAG = 0, 64
SEEDS = range(12)


class Host:
    """The host of a rank: what it launches are lists of accesses, one kernel of one thread for each."""

    def __init__(self, world, rank, memory):
        self.world, self.space, self.memory = world, world.ranks[rank].space, memory
        self.base = (memory if rank == 0 else self.space.open(memory.handle)).address
        self.streams = {name: world.ranks[rank].create_stream(name) for name in ("compute", "comm")}

    def launch(self, *accesses, stream="compute"):
        def kernel(base):
            for access in accesses:
                access(base)

        self.streams[stream].launch(kernel, (self.base,), 1, 1)


def run(hosts, strategy="uniform", seed=0):
    """Run host(Host) for each rank, and all that they launch."""
    world = World(len(hosts), seed, memory_model="checked", strategy=strategy)
    memory = world.ranks[0].space.allocate(256, "memory", zero=True)
    world.run([partial(host, Host(world, rank, memory)) for rank, host in enumerate(hosts)])


def write(base):
    put(current_thread(), base + DATA)


def read_constant(base):
    current_thread().load(base + DATA, "s32", "nc", "cta")


def set_flag(base):
    current_thread().store(base + FLAG, "s32", 1, "release", "sys")


def await_flag(base, order="acquire"):
    wait_for(base + FLAG, order)


def poll_relaxed(base):
    await_flag(base, "relaxed")


def fence(base):
    current_thread().fence("acq_rel", "sys")


def read(base):
    current_thread().load(base + DATA, "s32", "weak", "cta")


def nothing(base):
    pass


def kernels(*each):
    """A host that launches kernels on one stream, each a list of accesses."""

    def host(it):
        for accesses in each:
            it.launch(*accesses)

    return host


RELEASED = kernels([write, set_flag])
# Kernel 1 of rank 1, what kernel 2 does, and whether that is a race.
CASES = {
    "acquires the flag": ([await_flag], [read], False),
    "polls it relaxed, then passes a fence": ([poll_relaxed, fence], [read], False),
    "polls it relaxed": ([poll_relaxed], [fence, read], True),
    "does nothing": ([nothing], [read], True),
}


@pytest.mark.parametrize(("first", "second", "is_race"), CASES.values(), ids=CASES)
def test_a_kernel_knows_what_the_one_before_it_has_acquired(first, second, is_race):
    for seed in SEEDS:
        with pytest.raises(DataRace) if is_race else nullcontext():
            run([RELEASED, kernels(first, second)], seed=seed)
    with pytest.raises(DataRace) if is_race else nullcontext():
        run_all(lambda strategy: run([RELEASED, kernels(first, second)], strategy), 20)


@pytest.mark.parametrize(
    "hosts",
    [
        [RELEASED, kernels([await_flag, read_constant])],
        [RELEASED, kernels([nothing], [await_flag, read_constant])],
        [
            lambda it: (
                it.launch(write, set_flag, stream="comm"),
                it.launch(await_flag, read_constant),
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
    hosts = [RELEASED, kernels([await_flag], [read_constant])]
    for seed in SEEDS:
        run(hosts, seed=seed)
    run_all(lambda strategy: run(hosts, strategy), 20)


def test_a_flag_that_a_host_has_polled_may_be_reset_by_a_kernel_that_it_queues_then():
    def reset(it):
        flag = partial(it.space.read, it.memory, np.int32, FLAG, 1, polls=True)
        it.world.host_wait(lambda: flag()[0] == 1, "the flag")
        it.launch(lambda base: put(current_thread(), base + FLAG, 0))

    set_relaxed = kernels([lambda base: current_thread().store(base + FLAG, "s32", 1, "relaxed", "sys")])
    for seed in SEEDS:
        run([set_relaxed, reset], seed=seed)
