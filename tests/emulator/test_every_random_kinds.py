"""As `test_every_random_program`, for numbers that wrap, and for cells that some take for signed and others do not."""

import operator
import random

import pytest
from every_schedule import run_all, run_threads
from parts import both_parts

from nbep.emulator.machine.kinds import wrap

NEVER_NS = 1 << 62
KINDS = ("s32", "u32")
NUMBERS = (0, 1, 2, 3, -1, -2, (1 << 31) - 1, -(1 << 31), (1 << 30) + 1)
ASKS = ("lt", "ge", "eq", "ne")


def draw(seed):
    """Threads, each a list of accesses: what, kind, number, how the value is asked, and for what. All of one cell."""
    draws = random.Random(f"kinds {seed}")
    whats = draws.choice((("ask", "store", "add", "bump"), ("add", "add", "ask"), ("bump", "bump", "ask", "wait")))
    kinds = draws.choice((KINDS, KINDS[:1], KINDS[1:]))

    def access():
        kind = draws.choice(kinds)
        number, other = (wrap(draws.choice(NUMBERS), kind) for _ in range(2))
        return draws.choice(whats), kind, number, draws.choice(ASKS), other

    return [[access() for _ in range(draws.choice((1, 1, 2)))] for _ in range(draws.choice((2, 3, 3, 4)))]


def ask(value, how, other):
    return bool(getattr(operator, how)(value, other))


def interleavings(threads):
    """The outcomes of all orders: the answers of each thread, what the cell holds, whether all come to an end."""
    begin = 0, tuple((0, ()) for _ in threads)
    left, seen, outcomes = [begin], {begin}, set()
    while left:
        cell, states = left.pop()
        is_stuck = True
        for i, (at, told) in enumerate(states):
            if at == len(threads[i]):
                continue
            what, kind, number, how, other = threads[i][at]
            answer = ask(wrap(cell, kind), how, other)
            if what == "wait" and not answer:
                continue
            is_stuck = False
            after = {"store": number, "add": cell + number, "bump": cell + number}.get(what, cell)
            state = at + 1, (*told, answer) if what in ("ask", "add") else told
            new = wrap(after, "s32"), (*states[:i], state, *states[i + 1 :])
            if new not in seen:
                seen.add(new)
                left.append(new)
        if is_stuck:
            is_over = all(at == len(thread) for (at, _), thread in zip(states, threads, strict=True))
            outcomes.add((cell, tuple(told for _, told in states), is_over))
    return outcomes


def explore(threads):
    def program(strategy):
        told = [[] for _ in threads]

        def thread(t, number, cells):
            cell = cells[0]
            for what, kind, value, how, other in threads[number]:
                if what == "store":
                    t.store(cell, kind, value, "relaxed", "sys")
                elif what == "bump":
                    t.atomic("add", cell, kind, value, "relaxed", "sys")
                elif what == "add":
                    told[number].append(ask(t.atomic("add", cell, kind, value, "relaxed", "sys"), how, other))
                elif what == "ask":
                    told[number].append(ask(t.load(cell, kind, "relaxed", "sys"), how, other))
                else:
                    while not ask(t.load(cell, kind, "relaxed", "sys"), how, other):
                        t.spin(NEVER_NS)

        cells, is_over = run_threads(len(threads), 1, thread, strategy)
        return cells[0], tuple(map(tuple, told)), is_over

    return run_all(program)[1]


@pytest.mark.parametrize("seeds", both_parts([range(40)], [range(40, 1000)], long=[range(1000, 5000)]))
def test_outcomes_are_those_of_all_interleavings_where_numbers_wrap(seeds):
    for seed in seeds:
        threads = draw(seed)
        assert explore(threads) == interleavings(threads), (seed, threads)


def test_a_signed_load_of_what_is_stored_unsigned_asks_for_the_signed_number():
    threads = [[("ask", "s32", 0, "lt", 0)], [("store", "u32", 0xFFFFFFFF, "eq", 0)]]
    assert explore(threads) == {(-1, ((False,), ()), True), (-1, ((True,), ()), True)}
