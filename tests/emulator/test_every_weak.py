"""Late stores and early loads are choices beside copies, hosts, barriers and SMs: one tree has all of them.

Random programs have the outcomes of a plain enumeration, and at least those of all interleavings of their steps.
"""

import numpy as np
import programs_of_barriers as barriers
import programs_underway as underway
import pytest
from every_schedule import run_all
from parts import both_parts

from nbep.emulator import World, current_thread

NEVER_NS = 1 << 62
COPY = 16  # bytes


def outcomes(program, **kind):
    return run_all(program, is_weak=True, **kind)[1]


def noted_by(main, num_cells=2, num_ranks=1):
    """What main(world, cells of rank 0, noted) notes of each run: hosts, and what they launch."""

    def program(strategy):
        world = World(num_ranks, 0, memory_model="delayed", strategy=strategy)
        cells = world.ranks[0].space.allocate(16 * num_cells, "cells", zero=True)
        noted = {}
        world.run([lambda rank=rank: main(world, cells, noted, rank) for rank in range(num_ranks)])
        return tuple(noted[name] for name in sorted(noted))

    return program


def launch(world, kernel, *args, rank=0, num_threads=1):
    """A kernel in a stream of its own, which has 256 bytes of shared memory; kernel(thread, *args)."""
    stream = world.ranks[rank].create_stream("main")
    stream.launch(lambda *values: kernel(current_thread(), *values), args, 1, num_threads, 256)
    return stream


def wait_for(t, cell, order):
    while t.load(cell, "s32", order, "sys") != 1:
        t.spin(NEVER_NS)


def word(space, cells, index):
    return int(space.read(cells, np.int32, 16 * index, 1, polls=True)[0])


def store(space, cells, index, number):
    space.write(cells, 16 * index, np.array([number], np.int32))


# --- copies -----------------------------------------------------------------------------------------------------------


def fetch(t, begin):
    t.mbarrier_init(0, 1)
    t.mbarrier_arrive_expect_tx(0, COPY)
    t.bulk_load(COPY, begin, COPY, 0)


def wait_for_copy(t):
    while not t.mbarrier_try_wait(0, 0):
        t.spin(NEVER_NS)


@pytest.mark.parametrize(("order", "seen"), [("relaxed", {(0,), (1,)}), ("acquire", {(1,)})])
def test_a_copy_may_bring_what_was_there_before_a_flag_that_was_not_acquired(order, seen):
    def send(t, base):
        t.store(base, "s32", 1, "weak", "cta")
        t.store(base + 16, "s32", 1, "release", "sys")

    def main(world, cells, noted, _):
        def receive(t, base):
            wait_for(t, base + 16, order)
            t.fence_proxy_async_global()
            fetch(t, base)
            wait_for_copy(t)
            noted["data"] = int(t.load_shared(COPY, "s32", "weak"))

        for stream in [launch(world, send, cells.address), launch(world, receive, cells.address)]:
            stream.synchronize()

    assert outcomes(noted_by(main)) == seen


def test_when_a_copy_reads_its_source_is_a_choice():
    def main(world, cells, noted, _):
        def receive(t, base):
            fetch(t, base)
            wait_for_copy(t)
            noted["data"] = int(t.load_shared(COPY, "s32", "weak"))

        def send(t, base):
            t.store(base, "s32", 1, "relaxed", "sys")
            t.store(base, "s32", 2, "relaxed", "sys")

        for stream in [launch(world, receive, cells.address), launch(world, send, cells.address)]:
            stream.synchronize()

    assert outcomes(noted_by(main)) == {(0,), (1,), (2,)}


def test_when_a_copy_is_there_is_a_choice():
    def main(world, cells, noted, _):
        def ask(t, base):
            fetch(t, base)
            noted["is there"] = t.mbarrier_try_wait(0, 0)

        launch(world, ask, cells.address).synchronize()

    assert outcomes(noted_by(main)) == {(False,), (True,)}


@pytest.mark.parametrize(("waits", "seen"), [(False, {(1,), (2,)}), (True, {(1,)})])
def test_a_bulk_store_may_read_its_stage_late(waits, seen):
    def main(world, cells, noted, _):
        def send(t, base):
            for i in range(4):
                t.store_shared(4 * i, "s32", 1, "weak")
            t.fence_proxy_async()
            t.bulk_store(base, 0, COPY)
            t.bulk_commit_group()
            if waits:
                t.bulk_wait_group_read(0)
            t.store_shared(0, "s32", 2, "weak")
            t.bulk_wait_group_read(0)

        launch(world, send, cells.address).synchronize()
        noted["data"] = int(cells.read(0, "s32"))

    assert outcomes(noted_by(main)) == seen


@pytest.mark.parametrize(("order", "seen"), [("relaxed", {(0,), (1,)}), ("release", {(1,)})])
def test_what_a_bulk_store_writes_is_late_like_a_store(order, seen):
    def main(world, cells, noted, _):
        def send(t, base):
            for i in range(4):
                t.store_shared(4 * i, "s32", 1, "weak")
            t.fence_proxy_async()
            t.bulk_store(base, 0, COPY)
            t.bulk_commit_group()
            t.bulk_wait_group(0)
            t.store(base + 16, "s32", 1, order, "sys")

        def receive(t, base):
            wait_for(t, base + 16, "acquire")
            noted["data"] = int(t.load(base, "s32", "weak", "cta"))

        for stream in [launch(world, send, cells.address), launch(world, receive, cells.address)]:
            stream.synchronize()

    assert outcomes(noted_by(main)) == seen


# --- hosts and streams ------------------------------------------------------------------------------------------------


IN_ORDER = {(0, 0), (0, 1), (1, 1)}


@pytest.mark.parametrize(("order", "seen"), [("relaxed", {*IN_ORDER, (1, 0)}), ("release", IN_ORDER)])
def test_a_host_may_see_a_flag_before_the_data_if_it_does_not_release(order, seen):
    def send(t, base):
        t.store(base, "s32", 1, "relaxed", "sys")
        t.store(base + 16, "s32", 1, order, "sys")

    def main(world, cells, noted, _):
        stream = launch(world, send, cells.address)
        noted[0], noted[1] = (word(world.ranks[0].space, cells, index) for index in (1, 0))
        stream.synchronize()

    assert outcomes(noted_by(main)) == seen


@pytest.mark.parametrize(("order", "seen"), [("relaxed", {(0,), (1,)}), ("acquire", {(1,)})])
def test_a_kernel_may_miss_what_a_host_has_stored_before_a_flag(order, seen):
    def main(world, cells, noted, _):
        def receive(t, base):
            wait_for(t, base + 16, order)
            noted["data"] = int(t.load(base, "s32", "relaxed", "sys"))

        stream = launch(world, receive, cells.address)
        for index in (0, 1):
            store(world.ranks[0].space, cells, index, 1)
        stream.synchronize()

    assert outcomes(noted_by(main)) == seen


@pytest.mark.parametrize(("waits", "seen"), [(True, {(1,)}), (False, {(0,), (1,)})])
def test_a_kernel_knows_what_its_host_has_waited_for(waits, seen):
    """Two streams: the second kernel is queued when the first one is over, or at once."""

    def send(t, base):
        t.store(base, "s32", 1, "weak", "cta")

    def main(world, cells, noted, _):
        def receive(t, base):
            noted["data"] = int(t.load(base, "s32", "weak", "cta"))

        stream = launch(world, send, cells.address)
        if waits:
            stream.synchronize()
        other = launch(world, receive, cells.address)
        stream.synchronize()
        other.synchronize()

    assert outcomes(noted_by(main)) == seen


def test_a_kernel_knows_what_its_host_has_acquired_from_another_one():
    """Rank 0's host waits for its kernel and stores a word; rank 1's host waits for that, and starts a kernel."""

    def send(t, base):
        t.store(base, "s32", 1, "weak", "cta")

    def main(world, cells, noted, rank):
        space = world.ranks[0].space
        if rank == 0:
            launch(world, send, cells.address).synchronize()
            store(space, cells, 1, 1)
            return

        def receive(t, base):
            noted["data"] = int(t.load(base, "s32", "weak", "cta"))

        world.host_wait(lambda: word(space, cells, 1) == 1, "the word")
        launch(world, receive, world.ranks[1].space.open(cells).address, rank=1).synchronize()

    assert outcomes(noted_by(main, num_ranks=2)) == {(1,)}


def test_hosts_that_start_kernels_do_so_in_each_order():
    """Each rank's host looks whether the other one's kernel has stored, and then starts its own."""

    def send(t, base, rank):
        t.store(base + 16 * rank, "s32", 1, "relaxed", "sys")

    def main(world, cells, noted, rank):
        noted[rank] = word(world.ranks[0].space, cells, 1 - rank)
        address = world.ranks[rank].space.open(cells).address if rank else cells.address
        launch(world, send, address, rank, rank=rank).synchronize()

    assert outcomes(noted_by(main, num_ranks=2)) == {(0, 0), (0, 1), (1, 0)}


# --- barriers, SMs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("warps", [barriers.TWICE, barriers.WITHOUT_EMPTY])
def test_who_meets_at_a_barrier_is_a_choice(warps):
    ends = outcomes(lambda strategy: barriers.run(warps, strategy))
    assert barriers.FAILS in ends
    assert len(ends) > 1 or warps is barriers.WITHOUT_EMPTY


@pytest.mark.parametrize("seeds", both_parts([range(12)], [range(12, 60)], long=[range(60, 300)]))
def test_outcomes_of_barriers_are_those_of_all_orders_of_warps(seeds):
    for seed in seeds:
        warps = barriers.draw(seed)
        ends = outcomes(lambda strategy, warps=warps: barriers.run(warps, strategy))
        expected = barriers.interleavings(warps)
        assert ends <= expected if barriers.FAILS in ends & expected else ends == expected, (seed, warps)


def without_reduction(explore, program):
    """The outcomes of a plain enumeration; None if it has too many runs."""
    try:
        return explore(*program, is_weak=True, is_plain=True, most=300)[1]
    except AssertionError:
        return None


@pytest.mark.parametrize("kind", underway.KINDS)
@pytest.mark.parametrize("seeds", both_parts([range(4)], [range(4, 40)], long=[range(40, 150)]))
def test_random_programs_have_the_outcomes_of_a_plain_enumeration(kind, seeds):
    for seed in seeds:
        program = underway.draw(seed, *underway.KINDS[kind])
        found = underway.explore(*program, is_weak=True)[1]
        expected = underway.outcomes_of(*program)
        assert found == expected if program[2] == 1 else found >= expected, (seed, program)  # one cell is coherent
        assert without_reduction(underway.explore, program) in (None, found), (seed, program)


def test_who_looks_once_more_before_a_deadlock_need_not_stand_there_in_the_next_run():
    """The first thread may take an older value where both look in vain; the other one is asleep then."""
    threads = [[("poll", 0, 2), ("poll", 0, 2), ("store", 0, 2)], [("store", 0, 1), ("poll", 0, 2)]]
    program = threads, [[("wait_sum", 0, 1)]], 1, [1, 2]
    found = underway.explore(*program, is_weak=True)[1]
    assert found == underway.outcomes_of(*program) == without_reduction(underway.explore, program)


@pytest.mark.parametrize("seeds", both_parts([range(4)], [range(4, 60)], long=[range(60, 200)]))
def test_kernels_that_compete_for_sms_have_the_outcomes_of_a_plain_enumeration(seeds):
    for seed in seeds:
        program = underway.draw_kernels(seed)
        found = underway.explore_kernels(*program, is_weak=True)[1]
        assert found >= underway.outcomes_of_kernels(*program), (seed, program)
        assert without_reduction(underway.explore_kernels, program) in (None, found), (seed, program)


# --- waits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spins", [True, False])
@pytest.mark.parametrize("memory_model", ["checked", "delayed"])
def test_a_cell_may_change_between_the_two_looks_of_a_wait(memory_model, spins):
    def look(t, cell):
        return t.load(cell, "s32", "relaxed", "sys")

    def program(strategy):
        world = World(1, 0, memory_model=memory_model, strategy=strategy)
        cell = world.ranks[0].space.allocate(16, "cell", zero=True).address
        seen = []

        def wait(t):
            while True:
                first, second = look(t, cell), look(t, cell)
                if first + second != 0:
                    break
                if spins:
                    t.spin(NEVER_NS)
            seen.append((first, second))

        def main():
            streams = [
                launch(world, wait),
                launch(world, lambda t: t.store(cell, "s32", 1, "relaxed", "sys")),
            ]
            for stream in streams:
                stream.synchronize()

        world.run([main])
        return tuple(seen)

    assert run_all(program, is_weak=memory_model == "delayed")[1] == {((0, 1),), ((1, 1),)}
