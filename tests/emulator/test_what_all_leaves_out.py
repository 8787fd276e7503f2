"""Programs on which assumptions of docs/every_schedule_inside.md fail: `--all` shows less than may happen."""

import re
import subprocess
import sys
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from every_schedule import numbers_in, run_all, run_host, run_threads

from nbep.emulator import DataRace, DeadlockError, World, current_thread
from nbep.lab.litmus import PROGRAMS, allowed

SEEDS = range(40)
NEVER_NS = 1 << 62
PAGE = Path(__file__).resolve().parents[2] / "docs" / "every_schedule_inside.md"


def test_the_page_names_each_of_these_tests():
    tests = {
        name for name in globals() if name.startswith("test_") and name != "test_the_page_names_each_of_these_tests"
    }
    assert set(re.findall(r"`(test_\w+)`", PAGE.read_text())) == tests
    assert len(tests) == 13
    assert "thirteen assumptions" in PAGE.read_text()


def ring_without_head(rows):
    """A ring of two slots whose sender does not wait until a slot is free."""

    def program(strategy):
        def thread(t, number, cells):
            tail, *slots = cells
            for row in range(rows):
                if number == 0:
                    t.store(slots[row % 2], "s32", row, "weak", "sys")
                    t.store(tail, "s32", row + 1, "release", "sys")
                else:
                    while t.load(tail, "s32", "acquire", "sys") <= row:
                        t.spin(NEVER_NS)
                    t.load(slots[row % 2], "s32", "weak", "sys")

        return run_threads(2, 3, thread, strategy)

    return program


def test_larger_numbers_are_another_program():
    assert run_all(ring_without_head(2))[0].is_whole
    with pytest.raises(DataRace):
        run_all(ring_without_head(3))


def test_a_load_is_over_before_its_thread_stores():
    """PTX sees a race, for nothing orders the load before the other thread's store; `checked` and `--all` see none."""
    program = next(
        one for one in PROGRAMS if one.threads == ("ld.weak r0 x; st.relaxed y 1", "wait.relaxed y 1; st.weak x 1")
    )
    seen = []

    def run(strategy):
        def thread(t, number, cells):
            data, flag = cells
            if number == 0:
                seen.append(int(t.load(data, "s32", "weak", "sys")))
                t.store(flag, "s32", 1, "relaxed", "sys")
            else:
                while t.load(flag, "s32", "relaxed", "sys") == 0:
                    t.spin(NEVER_NS)
                t.store(data, "s32", 1, "weak", "sys")

        return run_threads(2, 2, thread, strategy)

    assert run_all(run)[0].is_whole
    assert set(seen) == {0}
    assert allowed(program).has_race


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


def test_a_host_that_waits_for_another_counts_as_one_that_waits_for_all():
    """Host 2 waits for host 1 in a Python variable; its kernel overwrites what host 0 has read. No seed finds that."""
    told = []

    def program(strategy):
        told.clear()
        world = World(3, 0, memory_model="checked", strategy=strategy)
        space = world.ranks[0].space
        cell = space.allocate(64, "cell", zero=True)

        def kernel(address):
            current_thread().store(address, "s32", 1, "weak", "sys")

        def start():
            world.host_wait(lambda: bool(told), "host 1")
            stream = world.ranks[2].create_stream("main")
            stream.launch(kernel, (world.ranks[2].space.open(cell).address,), 1, 1)
            stream.synchronize()

        world.run([lambda: space.read(cell, np.int32, 0, 1), lambda: told.append(1), start])

    assert run_all(program)[0].is_whole


def test_stores_that_come_late_are_not_explored():
    """PTX allows that each of two threads misses the other's store; no interleaving does."""

    def program(strategy):
        seen = {}

        def thread(t, number, cells):
            t.store(cells[number], "s32", 1, "relaxed", "sys")
            seen[number] = int(t.load(cells[1 - number], "s32", "relaxed", "sys"))

        run_threads(2, 2, thread, strategy)
        return seen[0], seen[1]

    assert run_all(program)[1] == {(0, 1), (1, 0), (1, 1)}


def test_turns_of_a_poll_are_not_counted():
    """A real thread may look any number of times before the store comes."""

    def program(strategy):
        turns = [0]

        def thread(t, number, cells):
            if number == 0:
                t.store(cells[0], "s32", 1, "release", "sys")
            else:
                while t.load(cells[0], "s32", "acquire", "sys") == 0:
                    turns[0] += 1
                    t.spin(NEVER_NS)

        run_threads(2, 1, thread, strategy)
        return turns[0]

    assert run_all(program)[1] == {1}


def test_who_acquires_and_does_not_look_knows_nothing():
    """No seed finds it: there the load comes behind the store, and has acquired. An atomic has, too, with `--all`."""

    def program(strategy, acquire=lambda t, flag: t.load(flag, "s32", "acquire", "sys")):
        def thread(t, number, cells):
            data, flag, other = cells
            if number == 0:
                t.store(data, "s32", 42, "weak", "sys")
                t.store(flag, "s32", 1, "release", "sys")
                t.store(other, "s32", 1, "relaxed", "sys")
            else:
                while t.load(other, "s32", "relaxed", "sys") == 0:
                    t.spin(NEVER_NS)
                acquire(t, flag)
                t.load(data, "s32", "weak", "sys")

        return run_threads(2, 3, thread, strategy)

    with pytest.raises(DataRace):
        run_all(program)
    program("uniform")
    for operation in ("add", "exch"):
        run_all(
            lambda strategy, op=operation: program(strategy, lambda t, f: t.atomic(op, f, "s32", 1, "acquire", "sys"))
        )


def test_hosts_share_python_variables_in_one_order_alone():
    """The other order of the two ranks' hosts is never run: nothing that is recorded tells them apart."""

    def program(strategy):
        order = []
        world = World(2, 0, memory_model="checked", strategy=strategy)
        world.run([lambda rank=rank: order.append(rank) for rank in range(2)])
        return tuple(order)

    tree, orders = run_all(program)
    assert (tree.schedules, len(orders)) == (1, 1)


def test_a_wait_of_a_host_looks_at_all_its_cells_at_once():
    """A real host may read the first cell before the kernel has stored to it, and the second one later."""

    def program(strategy):
        def kernel(base):
            t = current_thread()
            for cell in range(2):
                t.store(base + 16 * cell, "s32", 1, "release", "sys")

        def main(context, cells, world):
            stream = context.create_stream("main")
            stream.launch(kernel, (cells.address,), 1, 1)
            world.host_wait(lambda: numbers_in(context.space, cells) == [0, 1], "the second cell alone")

        try:
            run_host(strategy, main, num_cells=2)
        except DeadlockError:
            return "hangs"
        return "ends"

    assert run_all(program)[1] == {"hangs"}


def test_threads_tell_python_lists_nothing_of_two_parts_at_once():
    def program(strategy):
        told = [None] * 4

        def thread(t, number, cells):
            t.store(cells[number], "s32", 1, "relaxed", "sys")
            told[number] = int(t.load(cells[number ^ 1], "s32", "relaxed", "sys"))

        run_threads(4, 4, thread, strategy)
        return tuple(told)

    pairs = {(0, 1), (1, 0), (1, 1)}
    told = run_all(program, has_parts=True)[1]
    assert run_all(program)[1] == {one + other for one in pairs for other in pairs}
    assert {both[:2] for both in told} == {both[2:] for both in told} == pairs
    assert len(told) == 5


NUMBA = """
import numpy as np
from numba import cuda

@cuda.jit
def add_one(a):
    a[0] += 1

there, pinned = cuda.to_device(np.zeros(4, np.int32)), cuda.pinned_array(4, np.int32)
pinned[:] = 3
copies, kernels = cuda.stream(), cuda.stream()
there.copy_to_device(pinned, stream=copies)
add_one[1, 1, kernels](there)
copies.synchronize()
kernels.synchronize()
"""


def test_copies_of_numba_to_the_device_are_no_choice(tmp_path):
    (tmp_path / "program.py").write_text(NUMBA)
    command = [sys.executable, "-m", "nbep", "check", "program.py", "--all"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.startswith("The only schedule: nothing found"), done.stdout + done.stderr
