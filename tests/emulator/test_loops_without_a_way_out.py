"""A `while` that does nothing but look at cells is a wait under every schedule, also without `wait_expired`.

`test_every_random_program.py` compares the outcomes of random programs with such loops.
"""

import pytest
from every_schedule import run_all, run_threads

from nbep.emulator import DataRace, World, current_thread
from nbep.emulator.schedule.every import Every, OutOfTime, Redundant, Tree
from nbep.emulator.schedule.every_loops import MANY_LOOKS, MANY_WEAK_LOOKS, Endless


def look(t, cell):
    return t.load(cell, "s32", "acquire", "sys")


def are_both_there(t, flag, other):
    return look(t, flag) == 1 and look(t, other) == 1


def plainly(t, flag, other):
    while look(t, flag) != 1:
        pass


def for_ever(t, flag, other):
    while True:
        seen = look(t, flag)
        if seen == 1:
            break


def behind_a_fence(t, flag, other):
    while t.load(flag, "s32", "relaxed", "sys") != 1:
        pass
    t.fence("acq_rel", "sys")


def for_a_sum(t, flag, other):
    while look(t, flag) + look(t, other) != 2:
        pass


def for_both(t, flag, other):
    while not are_both_there(t, flag, other):
        pass


def one_after_the_other(t, flag, other):
    for cell in (flag, other):
        while look(t, cell) != 1:
            pass


def loop_in_a_loop(t, flag, other):
    done = 0
    while done < 2:
        seen = look(t, (flag, other)[done])
        while seen != 1:
            seen = look(t, (flag, other)[done])
        done += 1


def until_it_is_swapped(t, flag, other):
    while int(t.atomic("cas", flag, "s32", 5, "acquire", "sys", 1)) != 1:
        pass


WAITS = [
    plainly, for_ever, behind_a_fence, for_a_sum, for_both, one_after_the_other, loop_in_a_loop, until_it_is_swapped
]  # fmt: skip
each_wait = pytest.mark.parametrize("wait", WAITS, ids=lambda wait: wait.__name__)


def message(wait, order="release", model="checked", is_sent=True):
    """One thread stores data and raises two flags; the other one waits, and reads the data."""

    def program(strategy):
        def thread(t, number, cells):
            flag, other, data = cells
            if number == 0:
                wait(t, flag, other)
                t.load(data, "s32", "weak", "sys")
            elif is_sent:
                t.store(data, "s32", 7, "weak", "sys")
                t.store(flag, "s32", 1, order, "sys")
                t.store(other, "s32", 1, order, "sys")

        return run_threads(2, 3, thread, strategy, memory_model=model)

    return program


def run_all_weak(program):
    tree, outcomes = Tree(is_weak=True), set()
    while tree.begin():
        try:
            outcomes.add(program(Every(tree)))
        except Redundant:
            tree.end(is_redundant=True)
        else:
            tree.end()
    return tree, outcomes


EXPLORERS = [pytest.param(run_all, "checked", id="all"), pytest.param(run_all_weak, "delayed", id="weak")]
each_explorer = pytest.mark.parametrize(("explore", "model"), EXPLORERS)


@each_explorer
@each_wait
def test_a_loop_that_looks_is_a_wait(wait, explore, model):
    flag = 5 if wait is until_it_is_swapped else 1
    assert explore(message(wait, model=model))[1] == {((flag, 1, 7), True)}


@each_explorer
@each_wait
def test_a_loop_that_looks_in_vain_is_a_deadlock(wait, explore, model):
    assert explore(message(wait, model=model, is_sent=False))[1] == {((0, 0, 0), False)}


@each_wait
def test_a_race_behind_such_a_loop_is_found(wait):
    with pytest.raises(DataRace):
        run_all(message(wait, "relaxed"))


def test_a_loop_that_looks_weakly_races_with_the_store_that_ends_it():
    def weakly(t, flag, other):
        while t.load(flag, "s32", "weak", "sys") != 1:
            pass

    with pytest.raises(DataRace, match="too weak: it has weak order, but another thread stores to it"):
        run_all(message(weakly))
    assert run_all(message(weakly, is_sent=False))[1] == {((0, 0, 0), False)}


def test_looks_that_fail_tell_nothing():
    """A thread that waits for 2 may miss the release of 1: its looks at that are no part of the orders gone through."""

    def program(strategy):
        def thread(t, number, cells):
            data, flag = cells
            if number == 0:
                t.store(data, "s32", 42, "weak", "sys")
                t.store(flag, "s32", 1, "release", "sys")
            elif number == 1:
                while t.load(flag, "s32", "relaxed", "sys") != 1:
                    pass
                t.store(flag, "s32", 2, "relaxed", "sys")
            else:
                while look(t, flag) != 2:
                    pass
                t.load(data, "s32", "weak", "sys")

        return run_threads(3, 2, thread, strategy)

    with pytest.raises(DataRace):
        run_all(program)


# --- loops that end by themselves, or that others must end -----------------------------------------------------------


def a_few_turns(t, flag, other):
    turns = 0
    while turns < 5:
        look(t, flag)
        turns += 1


def as_many_as_there_are(t, flag, other):
    for _ in (None,) * 5:
        look(t, flag)


def until_a_list_is_empty(t, flag, other):
    left = [0, 0, 0, 0]
    while left:
        look(t, flag)
        left.pop()


def until_it_has_counted(t, flag, other):
    while int(t.atomic("add", other, "s32", 1, "relaxed", "sys")) < 4:
        look(t, flag)


def until_it_has_stored(t, flag, other):
    while look(t, other) < 4:
        t.store(other, "s32", int(look(t, other)) + 1, "relaxed", "sys")


def for_a_sum_of_two_looks(t, flag, other):
    while look(t, flag) + look(t, flag) != 2:
        pass


@each_explorer
@pytest.mark.parametrize(
    "loop",
    [
        a_few_turns,
        as_many_as_there_are,
        until_a_list_is_empty,
        until_it_has_counted,
        until_it_has_stored,
        for_a_sum_of_two_looks,
    ],
    ids=lambda loop: loop.__name__,
)
def test_a_loop_that_ends_is_not_taken_for_a_wait_for_what_does_not_come(loop, explore, model):
    def program(strategy):
        def thread(t, number, cells):
            if number == 1:
                t.store(cells[0], "s32", 1, "relaxed", "sys")
            else:
                loop(t, *cells)

        return run_threads(2, 2, thread, strategy, memory_model=model)

    assert {is_over for _, is_over in explore(program)[1]} == {True}


# --- what is said of a loop that is not known to wait ----------------------------------------------------------------


def count_turns(t, cell):
    turns = 0
    while look(t, cell) != 1:
        turns += 1


def meet_in_each_turn(t, cell):
    while not t.vote("all", 3, look(t, cell) == 1):
        pass


@each_explorer
@pytest.mark.parametrize("loop", [count_turns, meet_in_each_turn])
def test_a_loop_that_does_more_than_look_is_named_and_what_to_write(loop, explore, model):
    def program(strategy):
        world = World(1, 0, memory_model=model, strategy=strategy)
        cell = world.ranks[0].space.allocate(16, "cell", zero=True).address

        def kernel(cell):
            t = current_thread()
            if t.block_idx == 0:
                loop(t, cell)
            elif t.thread_idx == 0:
                t.store(cell, "s32", 1, "release", "sys")

        def host():
            stream = world.ranks[0].create_stream("main")
            stream.launch(kernel, (cell,), 2, 2)
            stream.synchronize()

        world.run([host])

    with pytest.raises(Endless) as found:
        explore(program)
    words = str(found.value)
    most = MANY_LOOKS if explore is run_all else MANY_WEAK_LOOKS
    assert f"has looked {most:,} times at one cell while no thread has stored, at " in words
    assert "test_loops_without_a_way_out.py" in words
    assert "`give_up(bounds, deadline)`" in words


@pytest.mark.parametrize("tree", [Tree(), Tree(is_weak=True)], ids=["all", "weak"])
def test_the_time_for_all_runs_ends_inside_a_run(tree):
    """A thread that stores and stores, and never comes to its end."""

    def store(t, number, cells):
        count = 0
        while True:
            if count == 20:
                tree.end_time = 0.0
            t.store(cells[0], "s32", count, "weak", "sys")
            count += 1

    assert tree.begin()
    with pytest.raises(OutOfTime):
        run_threads(1, 1, store, Every(tree), memory_model=Every(tree).memory_model)
    assert not tree.begin()
