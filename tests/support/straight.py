"""Programs whose threads are straight lines, as those of kernels are, and all their interleavings.

A thread that an interpreter runs, as in `every_schedule`, has a loop around its waits: nbep takes their turns for steps
then. Here each thread is a function with a source of its own. Its steps:

    ("st", cell, number), ("add", cell, number), ("ld", cell), ("wait", cell, number)
    ("or", cell, number, cell, number)     until the first cell holds its number, or the second one does: which
    ("and", cell, number, cell, number)    until both do, looked at one after the other
"""

import random
from itertools import product

from every_schedule import run_all, run_threads

CELLS = "xyz"
HANG = "hang"
SOURCES = {
    "st": 't.store({cell}, "s32", {number}, "relaxed", "sys")',
    "add": 'told.append(int(t.atomic("add", {cell}, "s32", {number}, "relaxed", "sys")))',
    "ld": "told.append(int({load}))",
    "wait": "while {load} != {number}:\n  {end_turn}",
    "and": "while not ({load} == {number} and {other} == {last}):\n  {end_turn}",
    "or": """while True:
  if {load} == {number}:
    told.append(1)
    break
  if {other} == {last}:
    told.append(2)
    break
  {end_turn}""",
}


def function_of(steps, end_turn):
    """A thread. end_turn: what each turn of its waits ends with"""
    lines = ["pass"]
    for what, cell, number, other, last in (step + (None,) * (5 - len(step)) for step in steps):
        cells = {one: f"cells[{CELLS.index(one)}]" for one in (cell, other) if one}
        loads = {one: f't.load({place}, "s32", "relaxed", "sys")' for one, place in cells.items()}
        words = {"cell": cells[cell], "load": loads[cell], "other": loads.get(other), "number": number, "last": last}
        lines += SOURCES[what].format(end_turn=end_turn, **words).split("\n")
    space = {}
    source = "\n ".join(["def thread(t, cells, told):", *lines])
    exec(compile(source, f"<{steps}>", "exec"), space)
    return space["thread"]


def explore(threads, end_turn="t.spin(1 << 62)"):
    """The tree of all schedules, and the outcomes: cells at the end and what each thread was told; or that it hangs."""
    functions = [function_of(steps, end_turn) for steps in threads]

    def program(strategy):
        told = [[] for _ in threads]
        cells, is_over = run_threads(
            len(threads), len(CELLS), lambda t, number, cells: functions[number](t, cells, told[number]), strategy
        )
        return (cells, tuple(map(tuple, told))) if is_over else HANG

    return run_all(program, most=3000)


def interleavings(threads):
    """The same outcomes, found by going through all orders."""
    begin = (
        (0,) * len(CELLS),
        ((0, False, ()),) * len(threads),
    )  # the number of the step, whether it has looked once, told
    known, left, outcomes = {begin}, [begin], set()
    while left:
        cells, states = left.pop()
        ends = [at == len(steps) for (at, _, _), steps in zip(states, threads, strict=True)]
        if all(ends):
            outcomes.add((cells, tuple(told for _, _, told in states)))
        elif all(end or waits(steps, cells, state) for end, steps, state in zip(ends, threads, states, strict=True)):
            outcomes.add(HANG)
        for i in range(len(threads)):
            if not ends[i]:
                after, state = step_of(threads[i], cells, states[i])
                new = after, (*states[:i], state, *states[i + 1 :])
                if new not in known:
                    known.add(new)
                    left.append(new)
    return outcomes


def step_of(steps, cells, state):
    at, has_looked, told = state
    what, cell, *more = steps[at]
    value = cells[CELLS.index(cell)]
    if what in ("st", "add"):
        stored = more[0] + (value if what == "add" else 0)
        place = CELLS.index(cell)
        return (*cells[:place], stored, *cells[place + 1 :]), (at + 1, False, told + (value,) * (what == "add"))
    if what == "ld":
        return cells, (at + 1, False, (*told, value))
    if has_looked:
        is_over = cells[CELLS.index(more[1])] == more[2]
        return cells, (at + is_over, False, (*told, 2) if is_over and what == "or" else told)
    if (value == more[0]) != (what == "and"):
        return cells, (at + (what != "and"), False, (*told, 1) if what == "or" else told)
    return cells, (at, what != "wait", told)


def waits(steps, cells, state):
    """Whether a thread would look for ever, as the cells are."""
    at, has_looked, _ = state
    if has_looked or steps[at][0] not in ("wait", "or", "and"):
        return False
    once = step_of(steps, cells, state)[1]
    return (step_of(steps, cells, once)[1] if once[1] else once) == state


# --- programs --------------------------------------------------------------------------------------------------------


def small_ones():
    """All with a thread of three stores, and one that stores once or not at all and waits until a cell of two is 2."""
    stores = [("st", cell, number) for cell in "xy" for number in (1, 2, 3)]
    for first in ((), (("st", "y", 2),), (("st", "x", 2),)):
        for three in product(stores, repeat=3):
            yield [three, (*first, ("or", "x", 2, "y", 2))]


def draw(seed):
    """Two or three threads that store, add, look and wait, for one cell or two."""
    draws = random.Random(f"straight {seed}")

    def step():
        kind = draws.random()
        if kind < 0.45:
            return "st", draws.choice(CELLS), draws.choice((1, 2, 2, 1, 3))
        if kind < 0.65:
            return ("add", draws.choice("xy"), 1) if kind < 0.55 else ("ld", draws.choice(CELLS))
        if kind < 0.75:
            return "wait", draws.choice("xy"), draws.choice((1, 2))
        one, other = draws.sample(CELLS, 2)
        return draws.choice(("or", "and")), one, draws.choice((1, 2)), other, draws.choice((1, 2))

    count = draws.choice((2, 3, 3))
    return [tuple(step() for _ in range(draws.randint(1, 4 if count == 2 else 3))) for _ in range(count)]
