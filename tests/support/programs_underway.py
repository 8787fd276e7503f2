"""Random programs with what is under way: bulk loads, mbarriers, hosts, ends of kernels, kernels that compete for SMs.

`draw` makes one, `outcomes_of` goes through all its interleavings, `explore` runs it under each schedule.
"""

import random

import numpy as np
from every_schedule import run_all

from nbep.emulator import DeadlockError, World, current_thread

NEVER_NS = 1 << 62
COPY = 16  # bytes
STAGE = 64  # the shared byte at which stages begin; mbarriers are before it

# An action of a thread: (name, cell or mbarrier, number).
# load, store, bump, poll: as in `every_schedule`. send: expect a copy, and start it; expect, copy: one of the two;
# arrive: without expecting bytes; look: whether the phase of that parity is over; await: until it is, in a loop that
# spins or, busy, in one that does not
# An action of the host: load, store: a word; wait: until it is the number; wait_all: until no cell is 0, where it looks
# at the next one only if the one before is not; wait_sum: until their sum is the number; ask: whether the kernel has
# ended
ON_MBARRIERS = ("send", "expect", "copy", "arrive", "look", "await", "busy")


def draw(seed, names, host_names):
    """Threads and hosts, each a list of actions; the number of cells, and the count of each mbarrier."""
    draws = random.Random(seed)
    num_threads, num_hosts, num_cells = draws.choice((1, 2, 2)), draws.choice((1, 1, 2)), draws.choice((1, 2))
    counts = [draws.choice((1, 1, 2)) for _ in range(draws.choice((1, 2)))]

    def action(of):
        name = draws.choice(of)
        return name, draws.randrange(len(counts) if name in ON_MBARRIERS else num_cells), draws.randrange(1, 3)

    threads = [
        [action(names) for _ in range(draws.randint(1, 4 if num_threads == 1 else 3))] for _ in range(num_threads)
    ]
    hosts = [[action(host_names) for _ in range(draws.randint(0, 3 - num_hosts))] for _ in range(num_hosts)]
    for host in hosts[1:]:  # only the first one has the kernel's event
        host[:] = [action for action in host if action[0] != "ask"]
    return threads, hosts, num_cells, counts


# --- plain enumeration --------------------------------------------------------------------------------------------


def outcomes_of(threads, hosts, num_cells, counts):
    """The outcomes of all interleavings: cells, what each thread and host has got, whether all came to their end."""
    actors = [*threads, *hosts]
    mbarriers = tuple((count, 0, 0) for count in counts)  # arrivals that are missing, bytes, phases
    begin = ((0,) * num_cells, mbarriers, (0,) * len(counts), False, tuple((0, ()) for _ in actors))
    found = set()
    for cells, _, _, is_done, states in ends_of(begin, lambda state: steps_from(state, threads, actors, counts)):
        is_over = is_done and all(at == len(actor) for actor, (at, _) in zip(actors, states, strict=True))
        found.add((cells, tuple(got for _, got in states), is_over))
    return found


def ends_of(begin, steps):
    """The states, of all that a first one leads to, from which no step leads on."""
    seen, left = {begin}, [begin]
    while left:
        state = left.pop()
        successors = list(steps(state))
        for after in successors:
            if after not in seen:
                seen.add(after)
                left.append(after)
        if not successors:
            yield state


def steps_from(state, threads, actors, counts):
    cells, mbarriers, copies, is_done, states = state
    for m, number in enumerate(copies):
        if number:
            yield cells, updated(mbarriers, m, 0, -COPY, counts), replaced(copies, m, number - 1), is_done, states
    have_left = all(states[i][0] == len(thread) for i, thread in enumerate(threads))
    if have_left and not any(copies) and not is_done:
        yield cells, mbarriers, copies, True, states
    for i, actor in enumerate(actors):
        at, got = states[i]
        if at < len(actor):
            made = act(actor[at], cells, mbarriers, copies, is_done, counts)
            if made is not None:
                *after, answers = made
                yield *after, is_done, replaced(states, i, (at + 1, (*got, *answers)))


def replaced(values, index, value):
    return (*values[:index], value, *values[index + 1 :])


def updated(mbarriers, m, arrivals, num_bytes, counts):
    missing, expected, phases = mbarriers[m]
    missing, expected = missing - arrivals, expected + num_bytes
    if (missing, expected) == (0, 0):
        missing, phases = counts[m], phases + 1
    return replaced(mbarriers, m, (missing, expected, phases))


def act(action, cells, mbarriers, copies, is_done, counts):
    """Cells, mbarriers, copies under way and what the actor gets; None if it has to wait."""
    name, index, number = action
    answers = ()
    if name in ("store", "bump"):
        cells = replaced(cells, index, number if name == "store" else cells[index] + number)
    elif name == "load":
        answers = (cells[index],)
    elif name in ("poll", "wait"):
        if cells[index] != number:
            return None
    elif name == "wait_all":
        if 0 in cells:
            return None
    elif name == "wait_sum":
        if sum(cells) != number:
            return None
    elif name == "ask":
        answers = (is_done,)
    elif name in ("look", "await", "busy"):
        is_over = mbarriers[index][2] & 1 != number & 1
        if name != "look" and not is_over:
            return None
        answers = (is_over,)
    else:
        if name != "copy":
            mbarriers = updated(mbarriers, index, 1, COPY if name in ("send", "expect") else 0, counts)
        if name in ("send", "copy"):
            copies = replaced(copies, index, copies[index] + 1)
    return cells, mbarriers, copies, answers


# --- the same under --all -----------------------------------------------------------------------------------------


def explore(threads, hosts, num_cells, counts, **kind):
    num_threads = len(threads)

    def program(strategy):
        got = [[] for _ in range(num_threads + len(hosts))]
        world = World(len(hosts), 0, memory_model=strategy.memory_model, strategy=strategy)
        cells = world.ranks[0].space.allocate(16 * num_cells, "cells", zero=True)
        source = world.ranks[0].space.allocate(COPY, "source", zero=True)

        def kernel(base, data):
            t = current_thread()
            if t.thread_idx == 0:
                for m, count in enumerate(counts):
                    t.mbarrier_init(8 * m, count)
            t.barrier(0, num_threads)
            go_on(t, base, data, 0)

        def go_on(t, base, data, number):
            """No loop: a look in the next turn of one counts as a poll."""
            if number == len(threads[t.thread_idx]):
                return
            name, index, value = threads[t.thread_idx][number]
            mine = got[t.thread_idx]
            here = base + 16 * index
            if name == "load":
                mine.append(int(t.load(here, "s32", "relaxed", "sys")))
            elif name == "store":
                t.store(here, "s32", value, "relaxed", "sys")
            elif name == "bump":
                t.atomic("add", here, "s32", value, "relaxed", "sys")
            elif name == "poll":
                while t.load(here, "s32", "relaxed", "sys") != value:
                    t.spin(NEVER_NS)
            elif name == "look":
                mine.append(t.mbarrier_try_wait(8 * index, value))
            elif name == "await":
                while not t.mbarrier_try_wait(8 * index, value):
                    t.spin(NEVER_NS)
                mine.append(True)
            elif name == "busy":
                while not t.mbarrier_try_wait(8 * index, value):
                    pass
                mine.append(True)
            elif name == "arrive":
                t.mbarrier_arrive(8 * index)
            if name in ("send", "expect"):
                t.mbarrier_arrive_expect_tx(8 * index, COPY)
            if name in ("send", "copy"):
                t.bulk_load(STAGE + COPY * (4 * t.thread_idx + number), data, COPY, 8 * index)
            go_on(t, base, data, number + 1)

        def host(rank):
            space = world.ranks[0].space

            def word(i):
                return int(space.read(cells, np.int32, 16 * i, 1, polls=True)[0])

            def main():
                if rank == 0:
                    stream = world.ranks[0].create_stream("main")
                    stream.launch(kernel, (cells.address, source.address), 1, num_threads, 256)
                    end = stream.record()
                    ends.append(end)
                mine = got[num_threads + rank]
                for name, index, value in hosts[rank]:
                    if name == "load":
                        mine.append(word(index))
                    elif name == "store":
                        space.write(cells, 16 * index, np.array([value], np.int32))
                    elif name == "wait":
                        world.host_wait(lambda index=index, value=value: word(index) == value, "a cell")
                    elif name == "wait_all":
                        world.host_wait(lambda: all(word(i) for i in range(num_cells)), "all cells")
                    elif name == "wait_sum":
                        world.host_wait(lambda value=value: sum(map(word, range(num_cells))) == value, "a sum")
                    else:
                        mine.append(ends[0].done)
                if rank == 0:
                    world.host_wait(lambda: end.done, "the kernel")

            return main

        ends = []
        is_over = True
        try:
            world.run([host(rank) for rank in range(len(hosts))])
        except DeadlockError:
            is_over = False
        values = tuple(cells.array("i4", writable=False)[::4][:num_cells].tolist())
        return values, tuple(tuple(of_one) for of_one in got), is_over

    return run_all(program, **kind)


COPIES = ("send", "send", "expect", "copy", "arrive", "look", "await", "busy")
MIXED = ("send", "look", "await", "load", "store", "bump", "poll")
KINDS = {
    "copies": (COPIES, ("load",)),
    "copies_and_cells": (MIXED, ("load", "store")),
    "hosts": (("load", "store", "poll"), ("load", "store", "wait", "wait_all", "wait_sum")),
    "hosts_and_adds": (("bump", "bump", "load"), ("load", "store", "wait", "wait_all", "wait_sum")),
    "hosts_that_wait": (("store", "store", "bump"), ("wait_all", "wait_all", "wait_sum", "store")),
    "ends": (("load", "store", "send"), ("ask", "load", "store")),
    "everything": ((*MIXED, "copy", "arrive"), ("load", "store", "wait", "wait_all", "ask")),
}


# --- kernels that compete for SMs -----------------------------------------------------------------------------------


def draw_kernels(seed):
    """Kernels, each with its stream and a list of actions for each block; the number of cells and of SMs."""
    draws = random.Random(seed)
    num_cells = draws.choice((1, 2))

    def block():
        names = ("load", "store", "bump", "poll")
        return tuple(
            (draws.choice(names), draws.randrange(num_cells), draws.randrange(1, 3)) for _ in range(draws.randint(1, 2))
        )

    kernels = [
        (draws.randrange(2), [block() for _ in range(draws.choice((1, 1, 2)))]) for _ in range(draws.choice((2, 2, 3)))
    ]
    return kernels, num_cells, draws.choice((1, 1, 2))


def outcomes_of_kernels(kernels, num_cells, num_sms):
    """The outcomes of all orders in which kernels get SMs and their blocks act."""
    names = [(k, b) for k, (_, blocks) in enumerate(kernels) for b in range(len(blocks))]
    # Cells; which kernels have asked for SMs, and which of them still wait; of each block, how many actions it has
    # made, what it has got, and whether it has an SM (None: not yet).
    begin = (0,) * num_cells, frozenset(), (), tuple((0, (), None) for _ in names)
    found = set()
    for cells, _, _, blocks in ends_of(begin, lambda state: steps_of_kernels(state, kernels, names, num_sms)):
        is_over = all(at == len(kernels[k][1][b]) for (k, b), (at, _, _) in zip(names, blocks, strict=True))
        found.add((cells, tuple(got for _, got, _ in blocks), is_over))
    return found


def steps_of_kernels(state, kernels, names, num_sms):
    cells, asked, waiting, blocks = state
    for k, (stream, _) in enumerate(kernels):
        before = [i for i in range(k) if kernels[i][0] == stream]
        ends = [at == len(kernels[i][1][b]) for (i, b), (at, _, _) in zip(names, blocks, strict=True) if i in before]
        if k not in asked and asked.issuperset(before) and all(ends):
            yield cells, asked | {k}, *filled((*waiting, k), blocks, names, num_sms)
    for i, (k, b) in enumerate(names):
        at, got, has_sm = blocks[i]
        actions = kernels[k][1][b]
        if has_sm and at == len(actions):
            yield cells, asked, *filled(waiting, replaced(blocks, i, (at, got, False)), names, num_sms)
        elif has_sm:
            made = act(actions[at], cells, (), (), False, ())
            if made is not None:
                yield made[0], asked, waiting, replaced(blocks, i, (at + 1, (*got, *made[3]), True))


def filled(waiting, blocks, names, num_sms):
    """Give free SMs to the blocks of the first kernel that waits, then to those of the next one."""
    while waiting and sum(bool(has_sm) for _, _, has_sm in blocks) < num_sms:
        new = [i for i, (k, _) in enumerate(names) if k == waiting[0] and blocks[i][2] is None]
        blocks = replaced(blocks, new[0], (*blocks[new[0]][:2], True))
        waiting = waiting[1:] if len(new) == 1 else waiting
    return waiting, blocks


def explore_kernels(kernels, num_cells, num_sms, **kind):
    def program(strategy):
        got = {(k, b): [] for k, (_, blocks) in enumerate(kernels) for b in range(len(blocks))}
        world = World(1, 0, memory_model=strategy.memory_model, strategy=strategy, num_sms=num_sms)
        context = world.ranks[0]
        cells = context.space.allocate(16 * num_cells, "cells", zero=True)

        def kernel(base, k):
            t = current_thread()
            mine = got[k, t.block_idx]
            for name, index, value in kernels[k][1][t.block_idx]:
                here = base + 16 * index
                if name == "load":
                    mine.append(int(t.load(here, "s32", "relaxed", "sys")))
                elif name == "store":
                    t.store(here, "s32", value, "relaxed", "sys")
                elif name == "bump":
                    t.atomic("add", here, "s32", value, "relaxed", "sys")
                else:
                    while t.load(here, "s32", "relaxed", "sys") != value:
                        t.spin(NEVER_NS)

        def main():
            streams = [context.create_stream(name) for name in ("first", "second")]
            for k, (stream, blocks) in enumerate(kernels):
                streams[stream].launch(kernel, (cells.address, k), len(blocks), 1, name=f"kernel{k}")
            for stream in streams:
                stream.synchronize()

        is_over = True
        try:
            world.run([main])
        except DeadlockError:
            is_over = False
        values = tuple(cells.array("i4", writable=False)[::4][:num_cells].tolist())
        return values, tuple(tuple(of_one) for of_one in got.values()), is_over

    return run_all(program, **kind)
