"""The outcomes of random programs under `--all` are those of a plain enumeration of all interleavings."""

import random

import pytest
from every_schedule import interleavings, run_all, run_threads
from parts import both_parts

NEVER_NS = 1 << 62


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


def wait_for_either(t, here, other, order, end_turn):
    while True:
        one = int(t.load(here, "s32", order, "sys"))
        two = int(t.load(other, "s32", order, "sys"))
        if one or two:
            return one, two
        end_turn(t)


def explore(threads, num_cells, num_ranks, orders, end_turn):
    """end_turn: what a loop that polls calls at the end of each turn"""
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
                        end_turn(t)
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
                        end_turn(t)
                    mine.append(value)
                else:
                    mine += wait_for_either(t, here, other, load_order, end_turn)

        cells, is_over = run_threads(len(threads), num_cells, thread, strategy, num_ranks)
        return cells, tuple(tuple(of_thread) for of_thread in reads), is_over

    return run_all(program)


def spin(t):
    t.spin(NEVER_NS)


def do_nothing(t):
    """A loop without a way out."""


def compare(seed, polls, end_turn=spin):
    threads, num_cells = draw(seed, polls)
    draws = random.Random(-seed)
    orders = draws.choice((("relaxed", "relaxed"), ("acquire", "release")))
    tree, outcomes = explore(threads, num_cells, draws.choice((1, 2)), orders, end_turn)
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


DEAR = (6, 10)  # three threads with many accesses: these two take three quarters of the time of the first 15


@pytest.mark.parametrize("seeds", both_parts([range(4)], [(DEAR,), range(4, 40)], long=[range(40, 100)]))
@pytest.mark.parametrize("polls", POLLS, ids=lambda polls: "-".join(polls) or "none")
def test_outcomes_are_those_of_all_interleavings(polls, seeds):
    for seed in seeds:
        if seeds is DEAR or seed not in DEAR:
            compare(seed, polls)


@pytest.mark.parametrize("seeds", both_parts([range(2)], [range(2, 25)], long=[range(25, 100)]))
@pytest.mark.parametrize(
    "polls",
    [polls for polls in POLLS if {"poll", "poll_either", "at_least"} & {*polls}],
    ids=lambda polls: "-".join(polls),
)
def test_loops_without_a_way_out_have_the_same_outcomes(polls, seeds):
    for seed in seeds:
        compare(seed, polls, do_nothing)


@pytest.mark.parametrize(
    ("seed", "polls"),
    [(56, POLLS[9]), (74, POLLS[7]), (79, POLLS[5]), (91, POLLS[7]), (112, POLLS[9])],
)
def test_a_poll_that_fails_to_the_end_has_succeeded_in_other_schedules(seed, polls):
    compare(seed, polls)


@pytest.mark.parametrize("last", ["store", "swap"])
def test_a_poll_may_come_before_adds_that_a_store_has_overwritten(last):
    threads = [[("bump", 0, 1)], [("bump", 0, 2), (last, 0, 2)], [("bump", 0, 1), ("poll", 0, 1)]]
    _, outcomes = explore(threads, 1, 1, ("relaxed", "relaxed"), spin)
    assert outcomes == interleavings(threads, 1)
