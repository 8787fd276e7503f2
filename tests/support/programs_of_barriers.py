"""Random programs of warps that meet at named barriers, where more may come than are counted.

`draw` makes one, `interleavings` goes through all orders, in which a warp arrives as one, `run` runs it once.
"""

import random

from nbep.emulator import DeadlockError, Divergence, World, current_thread

WARP = 32
FAILS = ("fails",)  # somebody waits for ever, or arrives where it may not


def run_block(num_warps, warp, strategy, seed=0):
    """warp(t, the address of a cell) by the threads of one block. Returns what is in the cell; None if it fails."""
    model = getattr(strategy, "memory_model", "checked")
    world = World(1, seed, memory_model=model, strategy=strategy)
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
    answers = [[] for _ in warps]

    def warp(t, cell):
        for name, barrier, count in warps[t.warp]:
            if name == "sync":
                met = t.meet(barrier, WARP * count, True)
                if t.lane == 0:
                    answers[t.warp].append(frozenset(one // WARP for one in met.arrived))
            elif name == "arrive":
                t.barrier_arrive(barrier, WARP * count)
            elif t.lane == 0 and name == "load":
                answers[t.warp].append(int(t.load(cell, "s32", "relaxed", "gpu")))
            elif t.lane == 0:
                answers[t.warp].append(int(t.atomic("add", cell, "s32", 1, "relaxed", "gpu")))

    cell = run_block(len(warps), warp, strategy, seed)
    return FAILS if cell is None else (cell, *map(tuple, answers))


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
            ends.add((cell, *(answers for _, answers in states)) if is_over else FAILS)
        for after in following:
            if after == FAILS:
                ends.add(FAILS)
            elif after not in seen:
                seen.add(after)
                left.append(after)
    return ends


def step_of(warps, state, number):
    cell, barriers, states = state
    at, answers = states[number]
    if at == len(warps[number]) or at < 0:  # over, or it waits
        return []
    name, barrier, count = warps[number][at]
    if name == "load":
        return [(cell, barriers, replaced(states, number, (at + 1, (*answers, cell))))]
    if name == "add":
        return [(cell + 1, barriers, replaced(states, number, (at + 1, (*answers, cell))))]
    come = barriers[barrier - 1]  # (warp, whether it waits, what it counts)
    if any(other == number or counted != count for other, _, counted in come):
        return [FAILS]
    come = (*come, (number, name == "sync", count))
    states = replaced(states, number, (at + 1, answers) if name == "arrive" else (-at - 1, answers))
    if len(come) == count:
        met = frozenset(other for other, _, _ in come)
        for other, waits, _ in come:
            if waits:
                at, answers = states[other]
                states = replaced(states, other, (-at, (*answers, met)))
        come = ()
    return [(cell, replaced(barriers, barrier - 1, come), states)]


def replaced(values, number, value):
    return (*values[:number], value, *values[number + 1 :])


TWICE = [[("sync", 1, 2)] * 2, [("sync", 1, 2)], [("sync", 1, 2)]]
WITHOUT_EMPTY = [[("arrive", 1, 2)] * 2, [("sync", 1, 2)] * 2]
WITH_EMPTY = [[("arrive", 1, 2), ("sync", 2, 2), ("arrive", 1, 2)], [("sync", 1, 2), ("arrive", 2, 2), ("sync", 1, 2)]]
