"""Parts of a program that do not meet are tried one after the other: their schedules add, and do not multiply."""

from unittest import mock

import pytest
from every_schedule import run_all
from oracle import Op, Oracle, Program
from oracle_runs import difference, run, under_all

from nbep.emulator import World, current_thread
from nbep.emulator.schedule.every_parts import Parts

A, B = 0, 16  # cells of the two parts
ONES = (Op("st", "relaxed", A, 1), Op("st", "relaxed", A, 1))
OTHERS = tuple(op._replace(cell=B) for op in ONES)


def blocks_of(*threads):
    return tuple(((thread,),) for thread in threads)


def program_of(*kernels, num_seen=32):
    """Kernels of one rank, in one stream, each of blocks of one thread."""
    launches = tuple(Op("launch", value=k) for k in range(len(kernels)))
    return Program(tuple((0, blocks_of(*threads)) for threads in kernels), (launches,), 32, num_seen)


def counts(program, parts_after=1):
    tree, outcomes = run_all(lambda strategy: run(program, strategy), parts_after=parts_after)
    assert outcomes == Oracle(program).verdict().outcomes
    return tree.schedules, tree.parts is not None


SIX_EACH = program_of((ONES, ONES, OTHERS, OTHERS))  # two threads store twice to one cell, and two to another one


def test_schedules_of_parts_add():
    assert counts(SIX_EACH, parts_after=None) == (36, False)
    assert counts(SIX_EACH) == (11, True)
    assert counts(SIX_EACH, parts_after=30) == (11, True)


def test_parts_of_kernels_that_come_one_after_the_other_add_too():
    assert counts(program_of((ONES, ONES), (OTHERS, OTHERS))) == (11, True)


def test_kernels_that_store_to_one_cell_are_two_parts_if_one_comes_behind_the_other():
    assert counts(program_of((ONES, ONES), (ONES, ONES))) == (11, True)


def test_one_access_makes_two_parts_one():
    first = (*OTHERS, Op("add", "relaxed", A, 0, asks="none"))
    program = program_of((ONES, ONES, first, OTHERS))
    assert counts(program)[0] == counts(program, parts_after=None)[0]


TWO = (Op("st", "relaxed", A, 2),)


@pytest.mark.parametrize("num_seen", [32, 0])
def test_what_differs_behind_a_part_and_is_looked_at_makes_all_run_together(num_seen):
    """The first kernel leaves 1 or 2, and the next one reads it and tells it."""
    reads = (Op("ld", "relaxed", A), Op("st", "relaxed", B, 1))
    program = program_of((ONES[:1], TWO), (reads, OTHERS), num_seen=num_seen)
    assert counts(program) == counts(program, parts_after=None)


def test_what_differs_behind_a_part_and_nobody_reads_is_left_out():
    program = program_of((ONES[:1], TWO, OTHERS, OTHERS), num_seen=0)
    assert counts(program, parts_after=None) == (12, False)
    assert counts(program) == (7, True)
    assert counts(program._replace(num_seen=32)) == (12, False)


def test_after_parts_that_will_not_do_it_goes_on_where_it_was():
    program = program_of((ONES[:1], TWO, OTHERS, OTHERS))
    runs = []
    tree, _ = run_all(lambda strategy: runs.append(run(program, strategy)), parts_after=6)
    assert (tree.schedules, tree.redundant, tree.parts) == (12, 0, None)
    assert len(runs) == 14  # two in which the parts have been tried


# A part that does something only in another order than the first one: it stores to what the others read.
HIDDEN = program_of(
    (
        (Op("exch", "relaxed", A, 1, asks="none"),),
        (Op("exch", "relaxed", A, 1, asks="least", other=1), Op("st", "weak", B + 8, 1, given=0)),
        OTHERS,
        (*OTHERS, Op("ld", "weak", B + 8, asks="none")),
    ),
    num_seen=0,
)


@pytest.mark.parametrize("first", [0, 1])
def test_a_race_between_parts_that_one_of_them_shows_in_few_orders_is_found(first):
    kernels = HIDDEN.kernels
    blocks = kernels[0][1]
    program = HIDDEN._replace(kernels=((0, (blocks[first], blocks[1 - first], *blocks[2:])),))
    assert under_all(program)[0].faults == {"race"}


def test_hosts_that_ask_run_all_together():
    """What a host has been told is in its program, where nobody sees it."""

    def program(strategy):
        world = World(1, 0, memory_model="checked", strategy=strategy)
        context = world.ranks[0]
        cells = context.space.allocate(64, "cells", zero=True)
        told = []

        def kernel(base):
            t = current_thread()
            for _ in range(2):
                t.store(base + 16 * (t.block_idx // 2), "s32", 1, "relaxed", "sys")

        def main():
            stream = context.create_stream("main")
            stream.launch(kernel, (cells.address,), 4, 1)
            told.append(int(context.space.read(cells, "i4", 0, 1, polls=True)[0]))
            stream.synchronize()

        world.run([main])
        return tuple(told)

    together, outcomes = run_all(program)
    tree, found = run_all(program, parts_after=1)
    assert (found, tree.schedules) == (outcomes, together.schedules)
    assert outcomes == {(0,), (1,)}


def test_a_cut_that_does_not_look_at_what_parts_leave_is_found():
    """Two kernels, of which the second one tells what the first one has left: four outcomes."""
    reads = (Op("ld", "relaxed", A), Op("exch", "relaxed", B, 1))
    program = program_of((ONES[:1], TWO), (reads, OTHERS[:1]), num_seen=0)
    exact = Oracle(program).verdict().outcomes
    assert under_all(program)[0].outcomes == exact
    with mock.patch.object(Parts, "leave_same", lambda self: not self.results.append({})):
        assert under_all(program)[0].outcomes < exact


# --- between the launches of a part ---------------------------------------------------------------------------------


def store(cell, value, **more):
    return Op("st", "relaxed", cell, value, **more)


def in_two_streams(first, between, last, is_read=False):
    """Of each pair: a kernel beside, which has a counter in common with two others; something comes between these two.

    first, between, last: of the cell, the threads of those kernels. is_read: whether the host reads the cell there
    """
    kernels, host = [], []
    for pair, (cell, counter) in enumerate(((A, A + 8), (B, B + 8))):
        add = Op("add", "relaxed", counter, 1, asks="none")
        threads = [[(add,)], *(of(cell) for of in (first, between, last))]
        threads[1][0], threads[3][0] = (*threads[1][0], add), (*threads[3][0], add)
        at, streams = len(kernels), (2 * pair, 2 * pair + 1)
        kernels += [(0, blocks_of(*of)) for of in threads if of]
        order = list(range(at, len(kernels)))
        launches = [Op("launch", cell=streams[k > at], value=k) for k in order]
        if is_read:
            wait = [Op("sync", cell=stream) for stream in streams]
            launches = [*launches[:2], *wait[1:], Op("ld", "weak", cell), *launches[2:], *wait]
        host += launches
    return Program(tuple(kernels), (tuple(host),), 32)


def one_or_two(cell):
    return [(store(cell, 1),), (store(cell, 2),)]


def seven(cell):
    return [(store(cell, 7),)]


BETWEEN = {
    "a kernel reads and tells": in_two_streams(one_or_two, lambda cell: [(Op("ld", "relaxed", cell),)], seven),
    "a kernel stores over": in_two_streams(
        lambda cell: [(store(cell, 1),)],
        lambda cell: [(store(cell, 9),)],
        lambda cell: [(store(cell, 7),), (store(cell, 8),)],
    ),
    "the host reads": in_two_streams(one_or_two, lambda cell: [], seven, is_read=True),
    "what a kernel reads says where it stores": in_two_streams(
        one_or_two,
        lambda cell: [(Op("ld", "relaxed", cell, asks="bit"), Op("st", "weak", 12, cell, given=0))],
        seven,
    ),
}


@pytest.mark.parametrize("name", BETWEEN)
def test_what_comes_between_two_launches_of_a_part_is_of_it(name):
    """In the end a cell holds the same in all runs of its part, but not when others look at it."""
    assert difference(BETWEEN[name]) == ""
    with mock.patch.object(Parts, "join_those_between", return_value=False):
        assert "missed" in difference(BETWEEN[name])


def heard_by_two_ways(exchanges):
    """A kernel stores. The last one stores there, too, and has heard of that if one of two exchanges came in time."""
    tells = tuple(Op("exch", "release", cell, 1, asks="none") for cell in exchanges)
    hears = tuple(Op("exch", "acquire", cell, 1, asks="least") for cell in exchanges)  # which tells the same always
    kernels = [blocks_of(*((op,) for op in tells)), blocks_of((Op("st", "weak", 8, 1),))]
    kernels += [blocks_of(*((op,) for op in hears)), blocks_of((Op("st", "weak", 8, 2),))]
    host = tuple(Op("launch", cell=stream, value=k) for k, stream in ((2, 0), (1, 1), (0, 1), (3, 0)))
    return Program(tuple((0, blocks) for blocks in kernels), (host,), 32)


def test_a_race_that_two_parts_hide_from_each_other_is_found():
    """Each exchange is a part, and the race shows only where both come too late."""
    program = heard_by_two_ways((A, B))
    assert Oracle(program).verdict().faults == under_all(program)[0].faults == {"race"}
    with mock.patch.object(Parts, "know_same", return_value=True):
        assert under_all(program)[0].faults == set()
