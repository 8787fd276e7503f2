"""The tree of all schedules: its outcomes are those of all interleavings, and it goes through few of them."""

import random

import pytest

from nbep.emulator import DataRace, DeadlockError, World, current_thread
from nbep.emulator.schedule.every import Every, Redundant, Tree

NEVER_NS = 1 << 62


def run_all(program, most=100_000):
    """Run program(strategy) under each schedule. Returns the tree, and the set of what it returned."""
    tree, outcomes = Tree(), set()
    while tree.begin():
        try:
            outcomes.add(program(Every(tree)))
        except Redundant:
            tree.end(is_redundant=True)
        else:
            tree.end()
        assert tree.schedules + tree.redundant <= most
    return tree, outcomes


def run_threads(num_threads, num_cells, thread, strategy, num_ranks=1):
    """thread(t, number, addresses of the cells on rank 0) in blocks of one thread each, spread over the ranks in turn.

    Returns: the final values of the cells, and whether the run ended as it should, without a deadlock
    """
    world = World(num_ranks, 0, memory_model="checked", strategy=strategy)
    cells = world.ranks[0].space.allocate(16 * num_cells, "cells", zero=True)

    def kernel(base, rank):
        t = current_thread()
        thread(t, t.block_idx * num_ranks + rank, [base + 16 * i for i in range(num_cells)])

    def host(rank):
        def main():
            context = world.ranks[rank]
            base = cells.address if rank == 0 else context.space.open(cells).address
            stream = context.create_stream("main")
            stream.launch(kernel, (base, rank), len(range(rank, num_threads, num_ranks)), 1)
            stream.synchronize()

        return main

    is_over = True
    try:
        world.run([host(rank) for rank in range(num_ranks)])
    except DeadlockError:
        is_over = False
    return tuple(cells.array("i4", writable=False)[::4][:num_cells].tolist()), is_over


# --- programs drawn at random -------------------------------------------------------------------------------------
#
# A thread is a list of accesses: (name, cell, number).
# load, store, add; poll: until the cell holds the number; poll_either: until this cell or the next one is not 0, which
# are loaded one after the other


def draw(seed, polls):
    """Threads, each a list of accesses, and the number of cells."""
    draws = random.Random(seed)
    num_threads, num_cells = draws.choice((2, 2, 3)), draws.choice((1, 2, 2))
    names = ["load", "store", "add", *polls]
    most = 4 if num_threads == 2 else 3
    lengths = [draws.randint(2, most) for _ in range(num_threads)]
    threads = [
        [(draws.choice(names), draws.randrange(num_cells), draws.randrange(1, 3)) for _ in range(length)]
        for length in lengths
    ]
    return threads, num_cells


def interleavings(threads, num_cells):
    """The outcomes of all interleavings: cells, what each thread has read, whether all came to their end."""
    begin = ((0,) * num_cells, tuple((0, None, ()) for _ in threads))  # number of the access, half of it, reads
    seen, left, outcomes = {begin}, [begin], set()
    while left:
        cells, states = left.pop()
        is_stuck = True
        for i in range(len(threads)):
            for after in step_of(threads[i], cells, states[i]):
                new_cells, state = after
                new = (new_cells, (*states[:i], state, *states[i + 1 :]))
                is_stuck = False
                if new not in seen:
                    seen.add(new)
                    left.append(new)
        if is_stuck:
            is_over = all(states[i][0] == len(threads[i]) for i in range(len(threads)))
            outcomes.add((cells, tuple(reads for _, _, reads in states), is_over))
    return outcomes


def step_of(thread, cells, state):
    """The step of a thread, if it can make one that changes something: ((cells, state),) or ()"""
    at, half, reads = state
    if at == len(thread):
        return ()
    name, cell, number = thread[at]
    value, other = cells[cell], (cell + 1) % len(cells)
    stored = {"store": number, "add": value + number}.get(name, value)
    after = (*cells[:cell], stored, *cells[cell + 1 :])
    if name == "poll":
        return ((cells, (at + 1, None, (*reads, number))),) if value == number else ()
    if name == "poll_either":
        if half is None:
            return ((cells, (at, value, reads)),)
        if half or cells[other]:
            return ((cells, (at + 1, None, (*reads, half, cells[other]))),)
        return ((cells, (at, None, reads)),) if value else ()
    return ((after, (at + 1, None, reads if name == "store" else (*reads, value))),)


def explore(threads, num_cells, num_ranks, orders):
    load_order, store_order = orders

    def program(strategy):
        reads = [[] for _ in threads]

        def thread(t, number, cells):
            mine = reads[number]
            for name, cell, value in threads[number]:
                here, other = cells[cell], cells[(cell + 1) % num_cells]
                if name == "load":
                    mine.append(int(t.load(here, "s32", load_order, "sys")))
                elif name == "store":
                    t.store(here, "s32", value, store_order, "sys")
                elif name == "add":
                    mine.append(int(t.atomic("add", here, "s32", value, "relaxed", "sys")))
                elif name == "poll":
                    while t.load(here, "s32", load_order, "sys") != value:
                        t.spin(NEVER_NS)
                    mine.append(value)
                else:
                    while True:
                        one = int(t.load(here, "s32", load_order, "sys"))
                        two = int(t.load(other, "s32", load_order, "sys"))
                        if one or two:
                            break
                        t.spin(NEVER_NS)
                    mine += [one, two]

        cells, is_over = run_threads(len(threads), num_cells, thread, strategy, num_ranks)
        return cells, tuple(tuple(of_thread) for of_thread in reads), is_over

    return run_all(program)


def compare(seed, polls):
    threads, num_cells = draw(seed, polls)
    draws = random.Random(-seed)
    orders = draws.choice((("relaxed", "relaxed"), ("acquire", "release")))
    tree, outcomes = explore(threads, num_cells, draws.choice((1, 2)), orders)
    assert outcomes == interleavings(threads, num_cells), threads
    return tree


POLLS = [(), ("poll",), ("poll", "poll_either"), ("poll_either",)]


@pytest.mark.parametrize("polls", POLLS, ids=lambda polls: "-".join(polls) or "none")
def test_outcomes_are_those_of_all_interleavings(polls):
    for seed in range(15):
        compare(seed, polls)


@pytest.mark.thorough
@pytest.mark.parametrize("polls", POLLS, ids=lambda polls: "-".join(polls) or "none")
def test_outcomes_of_more_programs(polls):
    for seed in range(15, 100):
        compare(seed, polls)


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
