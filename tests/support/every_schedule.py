"""Run a program of a few threads under every schedule."""

import numpy as np

import nbep
from nbep.emulator import DeadlockError, World, current_thread
from nbep.emulator.schedule.every import Every, Redundant, Tree


def run_all(program, most=100_000, **kind):
    """Run program(strategy) under each schedule. Returns the tree, and the set of what it returned.

    kind: of the tree, as is_weak and is_plain
    """
    tree, outcomes = Tree(**kind), set()
    while tree.begin():
        try:
            outcomes.add(program(Every(tree)))
        except Redundant:
            tree.end(is_redundant=True)
        else:
            tree.end()
        assert tree.schedules + tree.redundant <= most
    return tree, outcomes


def all_of(main, num_ranks, *args):
    """The tree of all schedules of a program. Yields the results of each run."""
    tree = Tree()
    while tree.begin():
        try:
            results = nbep.spawn(main, num_ranks, "emulator", args, memory_model="checked", strategy=Every(tree))
        except Redundant:
            tree.end(is_redundant=True)
        else:
            tree.end()
            if tree.schedules:  # else that run was none: it has shown what is a choice
                yield tree, results


def run_threads(num_threads, num_cells, thread, strategy, num_ranks=1, seed=0, memory_model="checked"):
    """thread(t, number, addresses of the cells on rank 0) in blocks of one thread each, spread over the ranks in turn.

    Returns: the final values of the cells, and whether the run ended as it should, without a deadlock
    """
    world = World(num_ranks, seed, memory_model=memory_model, strategy=strategy)
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


def run_host(strategy, main, num_cells=1, num_sms=None, seed=0):
    """Run main(rank's context, cells, world) as the host of the only rank."""
    world = World(1, seed, memory_model="checked", strategy=strategy, num_sms=num_sms)
    context = world.ranks[0]
    cells = context.space.allocate(16 * num_cells, "cells", zero=True)
    return world.run([lambda: main(context, cells, world)])[0]


def numbers_in(space, cells):
    """What the host gets that polls the cells, which lie 16 bytes apart, one after the other."""
    return [int(space.read(cells, np.int32, at, 1, polls=True)[0]) for at in range(0, cells.nbytes, 16)]


# --- programs drawn at random -------------------------------------------------------------------------------------
#
# A thread is a list of accesses: (name, cell, number).
# load, store, add; poll: until the cell holds the number; poll_either: until this cell or the next one is not 0, which
# are loaded one after the other. What asks for less than the value: bump, swap: an add or an exchange whose old value
# nobody reads; at_least: until the cell holds the number or more; is_least: whether it does; is_near: that of a sum;
# bit: the lowest bit; late: load this cell and the next one, and ask only then whether the first one held the number or
# more


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
    answers = {
        "store": (),
        "bump": (),
        "swap": (),
        "is_least": (value >= number,),
        "is_near": (1 - (value + 1) >= -number,),
        "bit": (value & 1 == 1,),
    }.get(name, (value,))
    return ((after, (at + 1, None, (*reads, *answers))),)
