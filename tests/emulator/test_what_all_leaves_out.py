"""Programs on which assumptions of docs/every_schedule.md fail: `--all` shows less than may happen.

`test_every_schedule.py` has those of the other assumptions.
"""

from itertools import count

import numpy as np
from every_schedule import run_all, run_threads

from nbep.emulator import DataRace, World, current_thread

SEEDS = range(40)


def read_too_early(strategy, seed=0):
    """A host that does not wait for its kernel, and looks at an array of NumPy's: nothing checks what NumPy does."""
    world = World(1, seed, memory_model="checked", strategy=strategy)
    out, context = np.zeros(1, np.int32), world.ranks[0]
    cell = context.space.allocate(64, "cell", zero=True)
    seen = []

    def kernel(address):
        current_thread().store(address, "s32", 1, "weak", "sys")

    def other(address):
        current_thread().store(address, "s32", 1, "relaxed", "sys")

    def host():
        mapping = context.space.map_array(out, "out", True)
        context.create_stream("main").launch(kernel, (mapping.address,), 1, 1)
        stream = context.create_stream("other")
        stream.launch(other, (cell.address,), 1, 1)
        stream.synchronize()
        seen.append(int(out[0]))

    world.run([host])
    return seen[0]


def test_a_weak_access_that_checked_does_not_see_is_no_choice():
    assert len(run_all(read_too_early)[1]) == 1
    assert {read_too_early("uniform", seed) for seed in SEEDS} == {0, 1}


def waits_for_a_while(strategy, seed=0):
    """A wait that ends by the clock, while another thread takes its time."""
    timed_out = []

    def thread(t, number, cells):
        if number == 0:
            for _ in range(100):
                t.store(cells[1], "s32", 1, "weak", "sys")
            t.store(cells[0], "s32", 1, "release", "sys")
        else:
            while t.load(cells[0], "s32", "acquire", "sys") == 0:
                if t.spin(60):
                    timed_out.append(True)
                    return
            timed_out.append(False)

    run_threads(2, 2, thread, strategy, seed=seed)
    return timed_out[0]


def test_no_wait_times_out():
    assert run_all(waits_for_a_while)[1] == {False}
    assert {waits_for_a_while("uniform", seed) for seed in SEEDS} == {False, True}


def test_what_else_varies_and_changes_no_access_is_not_noticed():
    """A program that is wrong at every second start has one schedule, which is right."""
    starts = count()

    def program(strategy):
        def thread(t, number, cells):
            t.store(cells[number], "s32", 1, "release", "sys")

        run_threads(2, 2, thread, strategy)
        return next(starts) % 2

    assert run_all(program)[1] == {0}
    assert run_all(program)[1] == {1}


def stores_without_telling(strategy, seed=0):
    """A host stores a word while another one runs a kernel that reads it. Whether that is a race."""
    world = World(2, seed, memory_model="checked", strategy=strategy)
    space = world.ranks[0].space
    cell = space.allocate(64, "cell", zero=True)

    def kernel(address):
        current_thread().load(address, "s32", "weak", "sys")

    def store():
        space.write(cell, 0, np.ones(1, np.int32))

    def start():
        stream = world.ranks[1].create_stream("main")
        stream.launch(kernel, (world.ranks[1].space.open(cell).address,), 1, 1)
        stream.synchronize()

    try:
        world.run([store, start])
    except DataRace:
        return True
    return False


def test_of_hosts_that_do_not_talk_one_order_is_run():
    assert run_all(stores_without_telling)[1] == {False}
    assert {stores_without_telling("uniform", seed) for seed in SEEDS} == {False, True}
