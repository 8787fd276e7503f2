"""`--all` and `--all --weak` beside all execution graphs of random programs: outcomes, hangs and races."""

import pytest
from execution_graphs import Graphs
from oracle import ATOMIC, TURNS, Op, Oracle, Program
from oracle_programs import SHAPES, smallest, words
from oracle_runs import under_all
from parts import both_parts

from nbep.emulator.schedule.every import Tree

SAYS = {*ATOMIC, *TURNS, "ld", "st", "fence", "launch"}  # what the graphs know
OF_ORACLE = ["flags", "observed", "scopes", "counters", "tickets"]
MOST = 400  # runs of a program; of one that has more, what is missed does not count


def apart(program: Program) -> Program:
    """With each cell in 16 bytes of its own: stores to the same ones arrive in order."""

    def of_thread(thread):
        return tuple(op if op.what == "launch" else op._replace(cell=2 * op.cell) for op in thread)

    kernels = tuple(
        (rank, tuple(tuple(tuple(map(of_thread, warp)) for warp in block) for block in blocks))
        for rank, blocks in program.kernels
    )
    return program._replace(kernels=kernels, num_bytes=2 * program.num_bytes)


def difference(program: Program) -> str:
    """What nbep says and no graph has, or what it misses; "" if nothing."""
    ptx = Graphs(program, "ptx").verdict()
    for name, model in (("--all", "sc"), ("--all --weak", "at once")):
        least = Graphs(program, model).verdict()
        most = ptx if name == "--all --weak" else least
        found, is_whole = under_all(program, MOST, Tree(is_weak=name == "--all --weak", finds_races=True))
        if "race" in found.faults:
            if "race" not in ptx.faults:
                return f"{name}: a race is false"
        elif is_whole and "race" in least.faults:
            return f"{name}: a race is missed"
        elif "race" not in most.faults:  # what comes behind a race may be anything
            said, has_to, may = (one.outcomes | {(fault,) for fault in one.faults} for one in (found, least, most))
            if said - may:
                return f"{name}: cannot be: {said - may}"
            if is_whole and has_to - said:
                return f"{name}: missed: {has_to - said}"
    return ""


def check(shape: str, seeds: range) -> int:
    """Returns how many of the programs the graphs know."""
    count = 0
    for seed in seeds:
        program = apart(SHAPES[shape](seed))
        if all(op.what in SAYS for thread in Oracle(program).threads for op in thread):
            count += 1
            if said := difference(program):
                least = smallest(program, lambda one, said=said: difference(one)[:14] == said[:14])
                pytest.fail(f"{shape} {seed}: {difference(least)}\n{words(least)}")
    return count


def chunks(begin: int, end: int) -> list[range]:
    return [range(at, min(at + 500, end)) for at in range(begin, end, 500)]


@pytest.mark.parametrize("seeds", both_parts([range(3)], thorough=[range(3, 8)], long=chunks(8, 10000)))
def test_waits_and_locks_have_the_outcomes_and_races_of_all_graphs(seeds):
    assert check("turns", seeds) == len(seeds)


@pytest.mark.parametrize("seeds", both_parts([range(2)], thorough=[range(2, 6)], long=chunks(6, 2000)))
@pytest.mark.parametrize("shape", OF_ORACLE)
def test_programs_of_the_oracle_have_the_outcomes_and_races_of_all_graphs(shape, seeds):
    assert check(shape, seeds) > len(seeds) // 3


# What the graphs have found in nbep, as small as it gets, and has been mended since.
FOUND = {
    "a wait for one cell of two, in vain, behind a rest": (
        (),
        (Op("st", "release", 8, 3), Op("either", "relaxed", 16, 2), Op("again", "relaxed", 8, 2)),
        (Op("st", "release", 16, 3), Op("wait", "acquire", 0, 2)),
    ),
    "a failing compare-and-swap that publishes": (
        (Op("st", "relaxed", 0, 1), Op("cas", "acq_rel", 16, 1, other=5), Op("st", "relaxed", 32, 1)),
        (Op("wait", "relaxed", 32, 1), Op("st", "relaxed", 0, 2)),
    ),
    "a failing compare-and-swap that has read what is not the latest": (
        (Op("st", "relaxed", 0, 1), Op("st", "release", 16, 1)),
        (Op("wait", "relaxed", 16, 1), Op("st", "relaxed", 32, 1)),
        (Op("wait", "acquire", 32, 1), Op("cas", "acq_rel", 0, 2, other=1)),
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_was_wrong_once_is_right(name):
    program = Program(((0, ((FOUND[name],),)),), ((Op("launch"),),), 64)  # lanes of a warp
    assert not difference(program)
