"""The order in which warps arrive at named barriers is a choice under `--all`, if more may come than are counted.

Random programs have the outcomes of a plain enumeration of all orders, in which a warp arrives as one.
"""

import random

import pytest
from every_schedule import run_all
from parts import both_parts

from nbep.emulator import DeadlockError, Divergence, World, current_thread

WARP = 32
FAILS = ("fails",)  # somebody waits for ever, or arrives where it may not


def run_block(num_warps, warp, strategy, seed=0):
    """warp(t, the address of a cell) by the threads of one block. Returns what is in the cell; None if it fails."""
    world = World(1, seed, memory_model="checked", strategy=strategy)
    cell = world.ranks[0].space.allocate(16, "cell", zero=True)

    def host():
        stream = world.ranks[0].create_stream("main")
        stream.launch(lambda address: warp(current_thread(), address), (cell.address,), 1, WARP * num_warps)
        stream.synchronize()

    try:
        world.run([host])
    except (DeadlockError, Divergence):
        return None
    return cell.read(0, "s32")


def draw(seed):
    """Warps, each a list of (sync or arrive, barrier, warps that it counts) and of accesses to one cell.

    In some order all come to their end: each phase is drawn with those who make it. Other orders may fail.
    """
    draws = random.Random(seed)
    num_warps = draws.choice((2, 3, 3, 4))
    counts = [min(draws.choice((1, 2, 2, 3)), num_warps) for _ in range(2)]
    warps = [[] for _ in range(num_warps)]
    for _ in range(draws.randint(1, 4)):
        barrier = draws.randrange(2)
        count = min(counts[barrier] + (draws.random() < 0.05), num_warps)  # now and then another one
        members = draws.sample(range(num_warps), count)
        for member in members:
            name = "arrive" if draws.random() < 0.2 and member != members[0] else "sync"
            warps[member].append((name, barrier + 1, count))
            if draws.random() < 0.2:
                warps[member].append((draws.choice(("load", "add")), 0, 0))
    return warps


def run(warps, strategy, seed=0):
    """What is in the cell at the end, what each warp has read, and with whom it has met; or `FAILS`."""
    told = [[] for _ in warps]

    def warp(t, cell):
        for name, barrier, count in warps[t.warp]:
            if name == "sync":
                met = t.meet(barrier, WARP * count, True)
                if t.lane == 0:
                    told[t.warp].append(frozenset(one // WARP for one in met.arrived))
            elif name == "arrive":
                t.barrier_arrive(barrier, WARP * count)
            elif t.lane == 0 and name == "load":
                told[t.warp].append(int(t.load(cell, "s32", "relaxed", "gpu")))
            elif t.lane == 0:
                told[t.warp].append(int(t.atomic("add", cell, "s32", 1, "relaxed", "gpu")))

    cell = run_block(len(warps), warp, strategy, seed)
    return FAILS if cell is None else (cell, *map(tuple, told))


def interleavings(warps):
    """The same of all orders of steps of warps."""
    begin = (0, ((), ()), tuple((0, ()) for _ in warps))  # the cell; who has come to each barrier; how far each warp is
    seen, left, ends = {begin}, [begin], set()
    while left:
        state = left.pop()
        following = [after for number in range(len(warps)) for after in step_of(warps, state, number)]
        if not following:
            cell, barriers, states = state
            is_over = barriers == ((), ()) and all(at == len(warps[i]) for i, (at, _) in enumerate(states))
            ends.add((cell, *(told for _, told in states)) if is_over else FAILS)
        for after in following:
            if after == FAILS:
                ends.add(FAILS)
            elif after not in seen:
                seen.add(after)
                left.append(after)
    return ends


def step_of(warps, state, number):
    cell, barriers, states = state
    at, told = states[number]
    if at == len(warps[number]) or at < 0:  # over, or it waits
        return []
    name, barrier, count = warps[number][at]
    if name == "load":
        return [(cell, barriers, replaced(states, number, (at + 1, (*told, cell))))]
    if name == "add":
        return [(cell + 1, barriers, replaced(states, number, (at + 1, (*told, cell))))]
    come = barriers[barrier - 1]  # (warp, whether it waits, what it counts)
    if any(other == number or counted != count for other, _, counted in come):
        return [FAILS]
    come = (*come, (number, name == "sync", count))
    states = replaced(states, number, (at + 1, told) if name == "arrive" else (-at - 1, told))
    if len(come) == count:
        met = frozenset(other for other, _, _ in come)
        for other, waits, _ in come:
            if waits:
                at, told = states[other]
                states = replaced(states, other, (-at, (*told, met)))
        come = ()
    return [(cell, replaced(barriers, barrier - 1, come), states)]


def replaced(values, number, value):
    return (*values[:number], value, *values[number + 1 :])


@pytest.mark.parametrize("seeds", both_parts([range(40)], [range(40, 150)], long=[range(150, 1000)]))
def test_outcomes_are_those_of_all_orders_of_warps(seeds):
    for seed in seeds:
        warps = draw(seed)
        _, ends = run_all(lambda strategy, warps=warps: run(warps, strategy))
        expected = interleavings(warps)
        # A run that fails is not run to its end, so it does not show which other orders there are.
        assert ends <= expected if FAILS in ends & expected else ends == expected, (seed, warps)


# --- the same by hand ------------------------------------------------------------------------------------------------

TWICE = [[("sync", 1, 2)] * 2, [("sync", 1, 2)], [("sync", 1, 2)]]
WITHOUT_EMPTY = [[("arrive", 1, 2)] * 2, [("sync", 1, 2)] * 2]
WITH_EMPTY = [
    [("arrive", 1, 2), ("sync", 2, 2), ("arrive", 1, 2)],
    [("sync", 1, 2), ("arrive", 2, 2), ("sync", 1, 2)],
]


def test_a_warp_that_comes_twice_may_meet_itself_in_no_other():
    _, ends = run_all(lambda strategy: run(TWICE, strategy))
    assert FAILS in ends
    assert len(ends) > 1


def test_a_barrier_that_lets_a_slot_be_used_again_must_not_be_left_out():
    assert FAILS in run_all(lambda strategy: run(WITHOUT_EMPTY, strategy))[1]
    tree, ends = run_all(lambda strategy: run(WITH_EMPTY, strategy))
    assert FAILS not in ends
    assert (tree.schedules, tree.redundant) == (1, 0)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_who_are_as_many_as_a_barrier_counts_have_one_schedule(count):
    """Teams of warps, each with a barrier of its own, and all of them with one, again and again."""

    def warp(t, cell):
        for _ in range(3):
            t.barrier(1 + t.warp // count, WARP * count)
            t.barrier(0, WARP * 4)

    tree, ends = run_all(lambda strategy: run_block(4, warp, strategy))
    assert (tree.schedules, tree.redundant, ends) == (1, 0, {0})
    assert tree.steps == []  # no arrival is a step


def test_lanes_that_come_without_the_rest_of_their_warp_arrive_when_nobody_else_can_go_on():
    """A GPU promises nothing of them; the emulator counts them."""

    def warp(t, cell):
        if t.lane < 16:
            t.barrier_arrive(1, 32)
            t.barrier(2, 32)

    assert run_all(lambda strategy: run_block(2, warp, strategy))[1] == {0}
