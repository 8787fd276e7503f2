"""The tree of all schedules goes through few of them: what commutes, and what a thread has asked for."""

import pytest
from every_schedule import run_all, run_threads

from nbep.device.primitives import s32
from nbep.emulator import DataRace

NEVER_NS = 1 << 62


def test_adds_whose_old_value_is_not_read_have_one_order():
    def program(strategy):
        def thread(t, number, cells):
            for _ in range(3):
                t.atomic("add", cells[0], "s32", 1, "release", "sys")

        return run_threads(3, 1, thread, strategy, num_ranks=3)

    tree, outcomes = run_all(program)
    assert (tree.schedules, tree.redundant, outcomes) == (1, 0, {((9,), True)})


def test_who_waits_for_a_counter_that_grows_does_not_multiply_schedules():
    def program(strategy):
        def thread(t, number, cells):
            if number == 0:
                for i in range(4):
                    t.store(cells[0], "s32", i + 1, "release", "sys")
            else:
                while t.load(cells[0], "s32", "acquire", "sys") < 2:
                    t.spin(NEVER_NS)

        return run_threads(6, 1, thread, strategy)

    tree, _ = run_all(program)
    assert (tree.schedules, tree.redundant) == (1, 0)


def test_who_waits_for_a_counter_that_wraps_does_not_multiply_schedules():
    def program(strategy):
        def thread(t, number, cells):
            if number == 0:
                for value in (0x7FFFFFFE, 0x7FFFFFFF, -0x80000000, -0x7FFFFFFF):
                    t.store(cells[0], "s32", value, "release", "sys")
            else:
                while s32(t.load(cells[0], "s32", "acquire", "sys") - 0x7FFFFFFE) < 1:
                    t.spin(NEVER_NS)

        return run_threads(4, 1, thread, strategy)

    tree, _ = run_all(program)
    assert tree.schedules == 1


def test_loads_of_bytes_without_stores_are_no_choices():
    """Each of six threads looks ten times at its own cell, which no thread writes, and then takes a ticket of two."""

    def program(strategy):
        def thread(t, number, cells):
            for _ in range(10):
                t.load(cells[1 + number], "s32", "relaxed", "sys")
            if number < 2:
                int(t.atomic("add", cells[0], "s32", 1, "relaxed", "sys"))

        return run_threads(6, 7, thread, strategy)

    tree, _ = run_all(program)
    assert (tree.schedules, tree.redundant, len(tree.steps)) == (2, 0, 2)


def test_a_load_counts_as_a_step_once_somebody_stores_there():
    """In the first run no thread does: only who sees the flag stores."""

    def program(strategy):
        seen = {}

        def thread(t, number, cells):
            flag, cell = cells
            if number == 0:
                seen[0] = int(t.load(cell, "s32", "relaxed", "sys"))
                seen[1] = int(t.load(cell, "s32", "relaxed", "sys"))
            elif number == 1:
                if t.load(flag, "s32", "relaxed", "sys") == 1:
                    t.store(cell, "s32", 7, "relaxed", "sys")
            else:
                t.store(flag, "s32", 1, "relaxed", "sys")

        run_threads(3, 2, thread, strategy)
        return seen[0], seen[1]

    assert run_all(program)[1] == {(0, 0), (0, 7), (7, 7)}


def test_a_value_that_a_function_has_left_behind_asks_nothing_more():
    """Who has waited for 1 stands before its next wait: that it may still ask for the first value would cost runs."""

    def program(strategy):
        def wait(t, cell, number):
            while True:
                seen = t.load(cell, "s32", "acquire", "sys")
                if seen >= number:
                    return
                t.spin(NEVER_NS)

        def thread(t, number, cells):
            mine, other = cells[number], cells[1 - number]
            for i in range(6):
                wait(t, other, i - 3)
                t.store(mine, "s32", i + 1, "release", "sys")

        return run_threads(2, 2, thread, strategy)

    assert run_all(program)[0].schedules == 1


def wait_for_two(t, one, two):
    """Look at two cells in turn until one of them is not 0."""
    while True:
        first, second = t.load(one, "s32", "relaxed", "sys") != 0, t.load(two, "s32", "relaxed", "sys") != 0
        if first or second:
            return first, second
        t.spin(NEVER_NS)


def test_a_turn_that_looks_at_two_cells_is_no_step_if_it_fails():
    """Whether it sees both, the first or the second; it may miss the first and see the second, stored later."""

    def program(strategy):
        seen = []

        def thread(t, number, cells):
            if number == 0:
                t.store(cells[2], "s32", 1, "relaxed", "sys")
                t.store(cells[0], "s32", 1, "relaxed", "sys")
                t.store(cells[1], "s32", 1, "relaxed", "sys")
            else:
                seen.append(wait_for_two(t, cells[0], cells[1]))

        run_threads(2, 3, thread, strategy)
        return seen[0]

    tree, outcomes = run_all(program)
    assert outcomes == {(True, True), (True, False), (False, True)}
    assert tree.schedules == 3


def test_a_thread_knows_no_more_than_it_has_asked_for():
    """Who asks for 1 may come before the release of 2, also in the only schedule that is run."""

    def program(strategy):
        def thread(t, number, cells):
            data, flag, other = cells
            if number == 0:
                t.store(flag, "s32", 1, "release", "sys")
                t.store(data, "s32", 42, "weak", "sys")
                t.store(flag, "s32", 2, "release", "sys")
                t.store(other, "s32", 1, "relaxed", "sys")
            else:
                while t.load(other, "s32", "relaxed", "sys") == 0:
                    t.spin(NEVER_NS)
                if t.load(flag, "s32", "acquire", "sys") >= 1:
                    t.load(data, "s32", "weak", "sys")

        return run_threads(2, 3, thread, strategy)

    with pytest.raises(DataRace):
        run_all(program)


def take_tickets(each, bad=None):
    """Two ranks take tickets from one cell. Returns a program that gives the order in which they got them."""

    def program(strategy):
        order = {}

        def thread(t, number, cells):
            for _ in range(each):
                order[int(t.atomic("add", cells[0], "s32", 1, "relaxed", "sys"))] = number

        run_threads(2, 1, thread, strategy, num_ranks=2)
        owners = tuple(order[ticket] for ticket in range(2 * each))
        assert owners != bad
        return owners

    return program


def test_each_order_of_tickets_comes_once():
    tree, orders = run_all(take_tickets(3))
    assert (tree.schedules, tree.redundant, len(orders)) == (20, 0, 20)


@pytest.mark.thorough
def test_all_924_orders_of_six_tickets_each():
    tree, orders = run_all(take_tickets(6))
    assert (tree.schedules, tree.redundant, len(orders)) == (924, 0, 924)


def test_a_wrong_order_of_tickets_is_found():
    with pytest.raises(AssertionError):
        run_all(take_tickets(3, bad=(1, 0, 0, 1, 1, 0)))


def send_message(order):
    def program(strategy):
        def thread(t, number, cells):
            data, flag = cells
            if number == 0:
                t.store(data, "s32", 42, "weak", "sys")
                t.store(flag, "s32", 1, order, "sys")
            else:
                while t.load(flag, "s32", "acquire", "sys") == 0:
                    t.spin(NEVER_NS)
                assert t.load(data, "s32", "weak", "sys") == 42

        return run_threads(2, 2, thread, strategy)

    return program


def test_a_message_needs_one_schedule():
    tree, _ = run_all(send_message("release"))
    assert (tree.schedules, tree.redundant) == (1, 0)


def test_a_relaxed_flag_is_a_race():
    with pytest.raises(DataRace):
        run_all(send_message("relaxed"))


def test_a_poll_that_fails_tells_nothing():
    """Who waits for 2 may miss the release of 1: its look at that is no part of the orders gone through."""

    def program(strategy):
        def thread(t, number, cells):
            data, flag = cells
            if number == 0:
                t.store(data, "s32", 42, "weak", "sys")
                t.store(flag, "s32", 1, "release", "sys")
            elif number == 1:
                while t.load(flag, "s32", "relaxed", "sys") != 1:
                    t.spin(NEVER_NS)
                t.store(flag, "s32", 2, "relaxed", "sys")
            else:
                while t.load(flag, "s32", "acquire", "sys") != 2:
                    t.spin(NEVER_NS)
                t.load(data, "s32", "weak", "sys")

        return run_threads(3, 2, thread, strategy)

    with pytest.raises(DataRace):
        run_all(program)
