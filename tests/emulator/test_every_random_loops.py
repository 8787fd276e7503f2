"""As `test_every_random_program`, with source text of its own for each thread: loops in loops, functions, and waits as
they may be written. What `--all` takes for a wait depends on these alone.
"""

import random
from unittest import mock

import pytest
from every_schedule import interleavings, run_all, run_threads
from parts import both_parts

from nbep.emulator.schedule import every_loops, every_thread

NEVER_NS = 1 << 62
NAMES = ("load", "load", "is_least", "is_least", "store", "bump", "bump", "poll", "at_least")
MOST_OF_ALL, MOST = 12, 6  # accesses in a row of all threads, and of one
WAITS = {
    "spins": "while {test}:\n    t.spin(NEVER_NS)",
    "passes": "while {test}:\n    pass",
    "breaks": "while True:\n    if not {test}:\n        break\n    t.spin(NEVER_NS)",
    "looks first": "if {test}:\n    while {test}:\n        t.spin(NEVER_NS)",
    "calls": "def wait(t, cells):\n    while {test}:\n        t.spin(NEVER_NS)\nwait(t, cells)",
}
BLOCKS = {
    "for": "for i{depth} in range({times}):",
    "counts": "n{depth} = 0\nwhile n{depth} < {times}:\n    n{depth} += 1",
    "once": "while True:",
    "calls": "def part{depth}(t, cells, note):",
}
ENDS = {"once": "    break\n", "calls": "part{depth}(t, cells, note)\n"}
LOAD = "t.load(cells[{cell}], 's32', load_order, 'sys')"
LINES = {
    "load": f"note(int({LOAD}))",
    "is_least": f"note(bool({LOAD} >= {{value}}))",
    "store": "t.store(cells[{cell}], 's32', {value}, store_order, 'sys')",
    "bump": "t.atomic('add', cells[{cell}], 's32', {value}, 'relaxed', 'sys')",
}


def draw(seed):
    """Threads, each a list of accesses and blocks (how, how often, what is in it); the number of cells."""
    draws = random.Random(f"loops {seed}")
    num_cells = draws.choice((1, 1, 2))

    def block(depth, most):
        return [part(depth) for _ in range(draws.randint(1, most))]

    def part(depth):
        if depth < 2 and draws.random() < 0.4:
            how = draws.choice(("for", "counts", "counts", "once", "calls"))
            times = draws.choice((2, 3, 4)) if how in ("for", "counts") else 1
            return how, times, block(depth + 1, draws.choice((1, 1, 2)))
        return draws.choice(NAMES), draws.randrange(num_cells), draws.randrange(1, 3), draws.choice(tuple(WAITS))

    return [block(0, draws.choice((1, 2, 3))) for _ in range(draws.choice((2, 2, 3)))], num_cells


def in_a_row(parts):
    for part in parts:
        if len(part) == 3:
            for _ in range(part[1]):
                yield from in_a_row(part[2])
        else:
            yield part[:3]


def text_of(parts, depth=0):
    text = ""
    for part in parts:
        if len(part) == 3:
            how, times, inner = part
            names = {"depth": depth, "times": times}
            text += BLOCKS[how].format(**names) + "\n" + indented(text_of(inner, depth + 1))
            text += ENDS.get(how, "").format(**names)
        elif part[0] in LINES:
            text += LINES[part[0]].format(cell=part[1], value=part[2]) + "\n"
        else:
            test = LOAD.format(cell=part[1]) + {"poll": " != ", "at_least": " < "}[part[0]] + str(part[2])
            text += WAITS[part[3]].format(test=test) + f"\nnote({part[2]})\n"
    return text


def indented(text):
    return "".join(f"    {line}\n" for line in text.splitlines())


def body_of(parts, orders):
    text = "def body(t, cells, note):\n" + indented(text_of(parts))
    names = {"load_order": orders[0], "store_order": orders[1], "NEVER_NS": NEVER_NS}
    exec(compile(text, "<a thread>", "exec"), names)
    return names["body"]


def explore(threads, num_cells, num_ranks, orders):
    bodies = [body_of(parts, orders) for parts in threads]

    def program(strategy):
        note = [[] for _ in threads]
        thread = lambda t, number, cells: bodies[number](t, cells, note[number].append)  # noqa: E731
        cells, is_over = run_threads(len(threads), num_cells, thread, strategy, num_ranks)
        return cells, tuple(map(tuple, note)), is_over

    return run_all(program)[1]


def differs(seed):
    """Whether a program has other outcomes than its interleavings; None if that is too large."""
    threads, num_cells = draw(seed)
    rows = [list(in_a_row(parts)) for parts in threads]
    if sum(map(len, rows)) > MOST_OF_ALL or max(map(len, rows)) > MOST:
        return None
    orders = random.Random(-seed).choice((("relaxed", "relaxed"), ("acquire", "release")))
    return explore(threads, num_cells, 1 + seed % 2, orders) != interleavings(rows, num_cells)


@pytest.mark.parametrize("seeds", both_parts([range(60)], [range(60, 1000)], long=[range(1000, 5000)]))
def test_outcomes_do_not_depend_on_how_loops_are_written(seeds):
    for seed in seeds:
        assert not differs(seed), (seed, *map(text_of, draw(seed)[0]))


FAULTS = {
    "a loop that counts comes back to where it was": (every_loops, "held_in"),
    "each look is one of the loop that polls": (every_thread, "is_in_loop"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("fault", FAULTS)
def test_these_programs_find_a_wait_that_is_none(fault):
    with mock.patch.object(*FAULTS[fault], return_value=True):
        assert any(differs(seed) for seed in range(400))
