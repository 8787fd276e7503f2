"""What shares nothing is explored apart: the schedules of parts add up, and nothing is missed that all of them show."""

import pytest
from every_schedule import run_all, run_threads
from oracle import Op, Oracle, Program
from oracle_programs import lone, smallest, start, words
from oracle_runs import under_all
from part_programs import NUM_BYTES, in_parts
from parts import both_parts

from nbep.emulator.schedule.every import Tree

MOST = 200  # runs of a program; of those that take more nothing is said


def st(cell, value=1, order="relaxed", given=-1):
    return Op("st", order, cell, value, given=given)


def ld(cell, order="relaxed", given=-1, least=None):
    return Op("ld", order, cell, given=given, asks="all" if least is None else "least", other=least or 0)


def exch(cell, value, order="acq_rel", asks="all"):
    return Op("exch", order, cell, value, asks=asks)


def wait(cell, order="acquire", given=-1):
    return Op("wait", order, cell, 1, given=given)


def one_kernel(*threads):
    return Program(((0, tuple(lone(thread) for thread in threads)),), (tuple(start([0])),), NUM_BYTES)


def in_turn(*kernels):
    """Kernels of one rank, each of them threads; of those with "beside" before them in another stream."""
    queued = [Op("launch", cell=int("beside" in kernel), value=number) for number, kernel in enumerate(kernels)]
    blocks = [(0, tuple(lone(thread) for thread in kernel if thread != "beside")) for kernel in kernels]
    return Program(tuple(blocks), (tuple(queued),), NUM_BYTES)


def of_ranks(*hosts):
    """What the hosts do: steps, and kernels as lists of threads."""
    kernels, steps = [], []
    for rank, host in enumerate(hosts):
        steps.append([])
        for one in host:
            if isinstance(one, list):
                steps[-1] += start([len(kernels)])
                kernels.append((rank, tuple(lone(thread) for thread in one)))
            else:
                steps[-1].append(one)
    return Program(tuple(kernels), tuple(map(tuple, steps)), NUM_BYTES)


TELL = (exch(0, 1, "release", "none"),), (exch(8, 1, "release", "none"),)
HEAR = (exch(0, 2, "acquire"),), (exch(8, 2, "acquire"),)
AT_ONCE = (st(48), wait(56, "relaxed")), (st(56), wait(48, "relaxed"))  # the order of steps alone
BOTH = (st(0),), (st(0, 2),), (st(8),), (st(8, 2),)  # two parts, each of which leaves one of two values
SEES_ONE, SEES_OTHER = (lambda *then: (ld(0), *then)), (lambda *then: (ld(8), *then))
SYNC = Op("sync")

# What cuts have missed, and what they might.
WRONG_CUTS = {
    "a look between two kernels of a part": in_turn(
        ((exch(0, 1),), (exch(8, 1),)), ((ld(0),),), ((exch(0, 3),),), ("beside", (exch(0, 2),), (exch(8, 2),))
    ),
    "a store between two kernels of a part": in_turn(
        ((exch(0, 1), st(24)), (exch(8, 1),)),
        ((st(0, 5), ld(16)),),
        ((ld(0), ld(24)),),
        ("beside", (exch(0, 2), st(16)), (exch(8, 2),)),
    ),
    "two chains around a race": of_ranks(
        [[(st(32, 1, "weak"),)], [AT_ONCE[0], *TELL]], [[AT_ONCE[1], *HEAR], [(ld(32, "weak"),)]]
    ),
    "two chains around a race, and nothing else": of_ranks(
        [[(st(32, 1, "weak"),)], [*TELL]], [[*HEAR], [(ld(32, "weak"),)]]
    ),
    "a host that goes on behind two chains": of_ranks(
        [st(32, 1, "release"), [AT_ONCE[0], *TELL]], [[AT_ONCE[1], *HEAR], SYNC, [(ld(32, "weak"),)]]
    ),
    "hosts of which each goes on behind a part": Program(
        (
            (0, (lone((exch(0, 1),)),)),
            (1, (lone((exch(0, 2),)),)),
            (0, (lone((exch(8, 1),)),)),
            (1, (lone((exch(8, 2),)),)),
        ),
        (
            (*start([0]), *start([2], 1), SYNC, st(32, 1, "release")),
            (*start([1]), *start([3], 1), Op("sync", cell=1), ld(32, "weak")),
        ),
        NUM_BYTES,
    ),
    "a host that frees what another part may read": of_ranks(
        [[AT_ONCE[0], *TELL], SYNC, Op("free")], [[AT_ONCE[1], HEAR[0], (*HEAR[1], ld(16, "weak", given=0))]]
    ),
    "parts that leave orders of kernels which exclude each other": of_ranks(
        [[(Op("cas", "relaxed", 0, 1, other=1),)], [(Op("cas", "relaxed", 24, 1, other=1),)]],
        [[(Op("add", "relaxed", 24, 2, asks="least", other=2),)], [(exch(0, 2, "acquire", "none"),)]],
    ),
    "weak accesses of which each is made in some schedules": one_kernel(
        (st(0),), SEES_ONE(st(16, 1, "weak", given=0)), (st(8),), SEES_OTHER(ld(16, "weak", given=0))
    ),
    "the same with strong ones": one_kernel((st(0),), SEES_ONE(st(16, given=0)), (st(8),), SEES_OTHER(ld(16, given=0))),
    "a wait for what is stored in some schedules": one_kernel(
        (st(0),), SEES_ONE(st(16, given=0)), (st(8),), SEES_OTHER(wait(16, given=0))
    ),
    "a later kernel of the one reads what is stored in some schedules": in_turn(
        ((st(0),), SEES_ONE(st(16, 1, "weak", given=0))), ((st(8),), SEES_OTHER(ld(16, "weak", given=0)))
    ),
    "a later kernel that reads what both leave": in_turn(BOTH, ((ld(0, "weak"), ld(8, "weak")),)),
    "blocks of a later kernel that race if both have left 2": in_turn(
        BOTH,
        ((ld(0, "weak", least=2), st(16, 1, "weak", given=0)), (ld(8, "weak", least=2), st(16, 2, "weak", given=0))),
    ),
    "a later kernel that waits if both have left 2": in_turn(
        BOTH, ((ld(0, "weak", least=2), st(16, given=0), ld(8, "weak", least=2), wait(24, given=1)),)
    ),
    "a host that reads what both leave": of_ranks([[*BOTH], SYNC, ld(0, "weak"), ld(8, "weak")]),
}


def of_words(outcomes):
    """What each word may hold, and what each thread may be told."""
    memory = {(at, left[at : at + 4]) for left, _ in outcomes for at in range(0, len(left), 4)}
    return memory | {(number, told) for _, answers in outcomes for number, told in enumerate(answers)}


def missed(program):
    """What its parts do not show of a program, and all its schedules do; "" if nothing. And the tree if it is whole."""
    tree = Tree(finds_races=True, has_parts=True)
    (found, is_over), (whole, are_all) = under_all(program, MOST, tree), under_all(program, MOST)
    if not is_over or not are_all:
        return "", None
    exact = Oracle(program).verdict()
    if found.faults != whole.faults or not found.faults <= exact.faults:
        return f"{found.faults} in parts, {whole.faults} with all schedules, {exact.faults} by the oracle", tree
    if not exact.faults and not (
        found.outcomes <= exact.outcomes and of_words(found.outcomes) == of_words(exact.outcomes)
    ):
        return f"outcomes: {of_words(found.outcomes) ^ of_words(exact.outcomes)}", tree
    return "", tree


@pytest.mark.parametrize("name", WRONG_CUTS)
def test_nothing_is_cut_wrongly(name):
    assert missed(WRONG_CUTS[name])[0] == ""


SEEDS = [range(begin, begin + 200) for begin in range(20, 1220, 200)]


@pytest.mark.parametrize("seeds", both_parts([], thorough=[range(13, 20), SEEDS[0]], long=SEEDS[1:]))
def test_random_parts_show_what_all_schedules_show(seeds):
    are_apart = 0
    for seed in seeds:
        program = in_parts(seed)
        said, tree = missed(program)
        if said:
            least = smallest(program, lambda one, said=said: missed(one)[0][:8] == said[:8])
            pytest.fail(f"{seed}: {missed(least)[0]}\n{words(least)}")
        are_apart += tree is not None and tree.parts is not None and len(tree.parts.several) > 1
    assert are_apart > len(seeds) // 40, are_apart


@pytest.mark.parametrize("num_pairs", [1, 2, 3])
def test_schedules_of_parts_add_up(num_pairs):
    """Pairs of threads of which each has 3 schedules."""

    def program(strategy):
        def thread(t, number, cells):
            mine, other = cells[number], cells[number ^ 1]
            t.store(mine, "s32", 1, "relaxed", "sys")
            int(t.load(other, "s32", "relaxed", "sys"))

        run_threads(2 * num_pairs, 2 * num_pairs, thread, strategy)

    assert run_all(program)[0].schedules == 3**num_pairs
    tree, _ = run_all(program, has_parts=True)
    assert (tree.schedules, len(tree.parts.several)) == (1 + 2 * num_pairs, num_pairs)
