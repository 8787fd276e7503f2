"""The tree of all schedules: its outcomes are those of all interleavings, and it goes through few of them."""

import random

import pytest
from parts import both_parts

from nbep.emulator import DataRace, DeadlockError, World, current_thread
from nbep.emulator.schedule.every import Every, Redundant, Tree
from nbep.emulator.schedule.every_seen import settled
from nbep.emulator.schedule.every_thread import EveryThread

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
# are loaded one after the other. What asks for less than the value: bump, swap: an add or an exchange whose old value
# nobody reads; at_least: until the cell holds the number or more; is_least: whether it does; is_near: that of a sum;
# bit: the lowest bit; late: load this cell and the next one, and ask only then whether the first one held the number or
# more


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
    stored = {"store": number, "add": value + number, "bump": value + number, "swap": number}.get(name, value)
    after = (*cells[:cell], stored, *cells[cell + 1 :])
    if name in ("poll", "at_least"):
        is_there = value == number if name == "poll" else value >= number
        return ((cells, (at + 1, None, (*reads, number))),) if is_there else ()
    if name == "late":
        if half is None:
            return ((cells, (at, value, reads)),)
        return ((cells, (at + 1, None, (*reads, cells[other], half >= number))),)
    if name == "poll_either":
        if half is None:
            return ((cells, (at, value, reads)),)
        if half or cells[other]:
            return ((cells, (at + 1, None, (*reads, half, cells[other]))),)
        return ((cells, (at, None, reads)),) if value else ()
    told = {
        "store": (),
        "bump": (),
        "swap": (),
        "is_least": (value >= number,),
        "is_near": (1 - (value + 1) >= -number,),
        "bit": (value & 1 == 1,),
    }.get(name, (value,))
    return ((after, (at + 1, None, (*reads, *told))),)


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
                elif name == "bump":
                    t.atomic("add", here, "s32", value, "release" if store_order == "release" else "relaxed", "sys")
                elif name == "swap":
                    t.atomic("exch", here, "s32", value, store_order, "sys")
                elif name == "is_near":
                    mine.append(bool(1 - (t.load(here, "s32", load_order, "sys") + 1) >= -value))
                elif name == "at_least":
                    while not t.load(here, "s32", load_order, "sys") >= value:
                        t.spin(NEVER_NS)
                    mine.append(value)
                elif name == "is_least":
                    mine.append(bool(t.load(here, "s32", load_order, "sys") >= value))
                elif name == "bit":
                    mine.append(bool(t.load(here, "s32", load_order, "sys") & 1 == 1))
                elif name == "late":
                    seen = t.load(here, "s32", load_order, "sys")
                    mine.append(int(t.load(other, "s32", load_order, "sys")))
                    mine.append(bool(seen >= value))
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


POLLS = [
    (),
    ("poll",),
    ("poll", "poll_either"),
    ("poll_either",),
    ("bump", "at_least"),
    ("bump", "at_least", "is_least"),
    ("bump", "bump", "is_least", "bit"),
    ("bump", "poll"),
    ("late", "bump"),
    ("bump", "bump", "at_least", "at_least", "is_least", "late", "poll"),
    ("at_least", "poll_either", "bump"),
    ("swap", "bump", "at_least", "is_near"),
    ("swap", "swap", "late", "is_least"),
]


@pytest.mark.parametrize("polls", POLLS, ids=lambda polls: "-".join(polls) or "none")
def test_outcomes_are_those_of_all_interleavings(polls):
    for seed in range(15):
        compare(seed, polls)


@pytest.mark.thorough
@pytest.mark.parametrize("polls", POLLS, ids=lambda polls: "-".join(polls) or "none")
def test_outcomes_of_more_programs(polls):
    for seed in range(15, 100):
        compare(seed, polls)


@pytest.mark.parametrize(
    ("seed", "polls"),
    [(56, POLLS[9]), (74, POLLS[7]), (79, POLLS[5]), (91, POLLS[7]), (112, POLLS[9])],
)
def test_a_poll_that_fails_to_the_end_has_succeeded_in_other_schedules(seed, polls):
    compare(seed, polls)


# --- races of weak accesses ---------------------------------------------------------------------------------------


def draw_with_data(seed):
    """Threads, each a list of (name, flag, number, cell of data, whether it releases or acquires); flags and cells."""
    draws = random.Random(seed)
    num_flags, num_cells = draws.choice((1, 2)), draws.choice((1, 2))
    names = ["store_data", "load_data", "store", "bump", "at_least", "load_if", "store_unless", "ticket"]
    threads = [
        [
            (
                draws.choice(names),
                draws.randrange(num_flags),
                draws.randrange(1, 4),
                draws.randrange(num_cells),
                draws.random() < 0.7,
            )
            for _ in range(draws.randint(2, 4))
        ]
        for _ in range(draws.choice((2, 3, 3)))
    ]
    return threads, num_flags, num_cells


def finds_race(threads, num_flags, num_cells):
    def program(strategy):
        def thread(t, number, cells):
            for name, flag_index, value, cell_index, is_ordered in threads[number]:
                flag, data = cells[flag_index], cells[num_flags + cell_index]
                load_order, store_order = ("acquire", "release") if is_ordered else ("relaxed", "relaxed")
                if name == "store_data":
                    t.store(data, "s32", value, "weak", "sys")
                elif name == "load_data":
                    t.load(data, "s32", "weak", "sys")
                elif name == "store":
                    t.store(flag, "s32", value, store_order, "sys")
                elif name == "bump":
                    t.atomic("add", flag, "s32", 1, store_order, "sys")
                elif name == "ticket":
                    if t.atomic("add", flag, "s32", 1, "acq_rel" if is_ordered else "relaxed", "sys") == value:
                        t.load(data, "s32", "weak", "sys")
                elif name == "at_least":
                    while not t.load(flag, "s32", load_order, "sys") >= value:
                        t.spin(NEVER_NS)
                elif name == "load_if":
                    if t.load(flag, "s32", load_order, "sys") >= value:
                        t.load(data, "s32", "weak", "sys")
                elif not t.load(flag, "s32", load_order, "sys") >= value:
                    t.store(data, "s32", 9, "weak", "sys")

        return run_threads(len(threads), num_flags + num_cells, thread, strategy)

    try:
        run_all(program)
    except DataRace:
        return True
    return False


@pytest.mark.parametrize("seeds", both_parts([range(60)], [range(60, 500)]))
def test_no_race_is_lost_by_what_commutes(seeds, monkeypatch):
    """With each value that is read taken for asked, adds and loads do not commute: there are as many races."""
    seen = EveryThread.seen
    drawn = [draw_with_data(seed) for seed in seeds]
    found = [finds_race(*one) for one in drawn]
    monkeypatch.setattr(EveryThread, "seen", lambda self, value, kind: settled(seen(self, value, kind)))
    assert found == [finds_race(*one) for one in drawn]
    assert 0 < sum(found) < len(seeds)


def test_adds_whose_old_value_nobody_reads_have_one_order():
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


# --- what "all" leaves out: each assumption of docs/every_schedule.md has a program on which it fails ---------------


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
    """No seed finds it: there the load comes behind the store, and has acquired."""

    def program(strategy):
        def thread(t, number, cells):
            data, flag, other = cells
            if number == 0:
                t.store(data, "s32", 42, "weak", "sys")
                t.store(flag, "s32", 1, "release", "sys")
                t.store(other, "s32", 1, "relaxed", "sys")
            else:
                while t.load(other, "s32", "relaxed", "sys") == 0:
                    t.spin(NEVER_NS)
                t.load(flag, "s32", "acquire", "sys")
                t.load(data, "s32", "weak", "sys")

        return run_threads(2, 3, thread, strategy)

    with pytest.raises(DataRace):
        run_all(program)
    program("uniform")
