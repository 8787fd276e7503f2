"""All outcomes of the litmus tests: with late stores and early loads as choices they are those that PTX allows."""

import random
import re
from pathlib import Path

import pytest
from litmus_programs import named, random_program
from parts import both_parts

from nbep.emulator import DeadlockError, World, current_thread
from nbep.emulator.schedule.every import Every, Redundant, Tree
from nbep.lab.litmus import PROGRAMS, Program, allowed
from nbep.lab.litmus.programs import PLACES
from nbep.lab.litmus.runs import HANG, all_outcomes, run, set_row, summary, words_of

PAGES = Path(__file__).resolve().parents[2]
NEVER_LATE = "A load is never later than its place in the program."
BEFORE_UNSEEN = "A store that releases comes before all stores that its thread cannot see."
ONE_BY_ONE = "Atomics are performed one after the other, whatever their scope."
RACING = (0, 0), (0, 1), (1, 0)  # what two adds of 1 may read; either may be what is left
# What PTX allows and no schedule shows: the whole list, by shape, by what is in the threads, and by place.
NOT_SHOWN = [
    ("LB", "ld.relaxed r0 x", tuple(PLACES), {"r0 = 1, r1 = 1, x = 1, y = 1"}, NEVER_LATE),
    ("MP, load first", "wait.relaxed", tuple(PLACES), {"r0 = 1, x = 1, y = 1"}, NEVER_LATE),
    ("2+2W", "st.release", ("a GPU",), {"x = 1, y = 1"}, BEFORE_UNSEEN),
    ("add", "add.relaxed.cta", ("a GPU",), {f"r0 = {r0}, r1 = {r1}, x = 1" for r0, r1 in RACING}, ONE_BY_ONE),
]


def not_shown(program: Program) -> set[str]:
    return {
        outcome
        for shape, steps, places, outcomes, _ in NOT_SHOWN
        if program.shape == shape and steps in " ".join(program.threads) and program.where in places
        for outcome in outcomes
    }


@pytest.mark.parametrize("program", named(PROGRAMS))
def test_the_set_of_outcomes_is_that_of_ptx_less_what_is_named(program):
    _, found = all_outcomes(program)
    assert {words_of(one) for one in allowed(program).outcomes - found} == not_shown(program)
    assert found <= allowed(program).outcomes


def test_what_is_never_shown_is_named_on_the_page_with_its_reason():
    assert sum(bool(not_shown(program)) for program in PROGRAMS) == sum(len(places) for _, _, places, _, _ in NOT_SHOWN)
    page = (PAGES / "records" / "litmus.md").read_text()
    begin = page.index("## What `delayed` does not show")
    rows = [line for line in page[begin : page.index("\n## ", begin + 1)].splitlines() if line.startswith("| ")]
    never = [line for line in rows if line.endswith("| no |")]
    assert len(never) == len({reason for *_, reason in NOT_SHOWN})
    for shape, _, _, _, reason in NOT_SHOWN:
        assert any(shape.split(",")[0].replace("add", "atomics") in line and reason in line for line in never)


# What none of the shapes asks. Each has all outcomes that PTX allows; some have a wait that may never end.
SMALL = [
    ("a store shown to the GPU in another order", "a GPU", ["st.relaxed x 1; fence.acq_rel", "st.relaxed x 2"], False),
    ("likewise to the block", "a block", ["st.relaxed x 1; fence.acq_rel", "st.relaxed x 2"], False),
    ("a fence whose scope does not reach, and a store that is there", "ranks", [
            "st.relaxed x 1; fence.acq_rel.gpu; st.relaxed y 1", "wait.acquire y 1; wait.relaxed z 1; ld.relaxed r0 x",
            "wait.relaxed x 1; st.release z 1"], False),
    ("a poll that may succeed early, or after it could not", "a GPU",
        ["st.release x 1; st.release x 0; st.release y 1; st.release x 1", "wait.acquire x 1; ld.relaxed r0 y"], False),
    ("a poll that has failed, and might have come before", "a GPU", [
            "st.release x 1; st.release x 0; wait.acquire y 1; st.release x 1", "wait.acquire x 1; ld.relaxed r0 y",
            "st.relaxed y 1"], False),
    ("a poll that only an older value ends", "ranks",
        ["st.relaxed x 1; st.release x 0; st.release y 1", "wait.relaxed y 1; wait.relaxed x 1"], True),
    ("S with a compare-and-swap that fails: it publishes nothing", "a GPU",
        ["st.relaxed x 2; cas.acq_rel r0 z 1 5; st.relaxed y 1", "wait.relaxed y 1; st.relaxed x 1"], False),
    ("MP by one that fails: it acquires, too", "a GPU",
        ["st.relaxed x 1; st.release y 1", "cas.acquire r0 y 1 5; ld.relaxed r1 x"], False),
    ("one that fails by a value that is not the latest", "ranks",
        ["st.relaxed x 1; st.release y 1", "wait.relaxed y 1; st.relaxed z 1",
            "wait.acquire z 1; cas.relaxed r0 x 2 1"], False),
    ("two, of which one succeeds", "a block",
        ["cas.acq_rel r0 x 1 0; ld.relaxed r1 y", "st.release y 1; cas.acq_rel r2 x 2 0"], False),
]  # fmt: skip


@pytest.mark.parametrize(("where", "threads", "may_hang"), [one[1:] for one in SMALL], ids=[one[0] for one in SMALL])
def test_small_programs_have_all_outcomes_that_ptx_allows(where, threads, may_hang):
    program = Program("", tuple(threads), where, {})
    _, found = all_outcomes(program)
    assert found == allowed(program).outcomes | ({HANG} if may_hang else set())


@pytest.mark.thorough
@pytest.mark.parametrize("step", [1])
def test_without_any_reduction_the_outcomes_are_the_same(step):
    for program in PROGRAMS[::step]:
        tree, found = all_outcomes(program)
        plain, every = all_outcomes(program, is_plain=True)
        assert found == every, program.name
        assert plain.is_whole
        assert tree.schedules + tree.redundant <= plain.schedules + plain.redundant


def test_the_page_says_how_many_schedules_there_would_be_without_reduction():
    text = " ".join((PAGES / "docs" / "every_schedule_inside.md").read_text().split())
    said = re.search(r"IRIW with relaxed stores and loads has ([\d,]+) schedules, and ([\d,]+) without", text)
    assert said is not None
    program = next(one for one in PROGRAMS if one.shape == "IRIW" and one.where == "a GPU")
    counts = [all_outcomes(program, is_plain=is_plain)[0].schedules for is_plain in (False, True)]
    assert [int(number.replace(",", "")) for number in said.groups()] == counts


# --- programs drawn at random -------------------------------------------------------------------------------------


@pytest.mark.parametrize("numbers", both_parts([range(8)], thorough=[range(8, 40)], long=[range(40, 120)]))
def test_random_programs_show_what_seeds_show_and_only_what_ptx_allows(numbers):
    whole = 0
    for number in numbers:
        program = random_program(number)
        tree, found = all_outcomes(program, most=1500)
        assert found <= allowed(program).outcomes, program.name
        if tree.is_whole:
            assert {run(program, "delayed", seed) for seed in range(6)} <= found, program.name
            whole += found == allowed(program).outcomes
    assert whole > len(numbers) // 2  # in the others writes race: PTX gives them no order, a run does


@pytest.mark.parametrize("numbers", both_parts([range(3)], thorough=[range(3, 40)], long=[range(40, 120)]))
def test_random_programs_have_the_outcomes_of_a_plain_enumeration(numbers):
    compared = 0
    for number in numbers:
        plain, every = all_outcomes(random_program(number), is_plain=True, most=800)
        if plain.is_whole:
            assert all_outcomes(random_program(number))[1] == every, random_program(number).name
            compared += 1
    assert compared > len(numbers) // 3


def program_that_waits(seed: int) -> Program:
    """Polls of cells that are set and, in some programs, cleared again: a wait may come too late, and never end."""
    choose = random.Random(f"waits {seed}")
    registers = iter(range(20))

    def store(cell: str, value: int) -> str:
        return f"st.{choose.choice(['weak', 'relaxed', 'release'])} {cell} {value}"

    def other() -> str:
        cell = choose.choice("xy")
        ld = f"ld.{choose.choice(['relaxed', 'acquire'])} r{next(registers)} {cell}"
        return choose.choice([ld, store(cell, 0), store(cell, 1), f"add.acq_rel r{next(registers)} {cell} 1"])

    sets = [store("x", 1), choose.choice([store("x", 0), store("y", 1), other()])]
    waits = [f"wait.{choose.choice(['relaxed', 'acquire'])} x 1", other()]
    more = [[f"wait.relaxed {choose.choice('xy')} 1"], [other()], [other(), other()]]
    threads = [sets, waits, *([choose.choice(more)] if choose.random() < 0.6 else [])]
    where = choose.choice(list(PLACES))
    return Program(f"waits {seed}", tuple("; ".join(steps) for steps in threads), where, {})


@pytest.mark.parametrize("numbers", both_parts([], thorough=[range(100)], long=[range(100, 250)]))
def test_polls_that_fail_end_as_in_a_plain_enumeration(numbers):
    some_hang = compared = 0
    for number in numbers:
        program = program_that_waits(number)
        plain, every = all_outcomes(program, is_plain=True, most=300)
        if plain.is_whole:
            _, found = all_outcomes(program)
            assert found == every, program.name
            compared += 1
            some_hang += HANG in found and len(found) > 1
    assert compared > len(numbers) * 2 // 3
    assert some_hang > len(numbers) // 5


# --- what no litmus test has --------------------------------------------------------------------------------------


def outcomes_of(threads, strategies, num_cells=2):
    """What some strategies show of threads of one block, thread(t, cells, registers)."""
    found = set()
    for strategy, end in strategies:
        world = World(1, 0, memory_model="delayed", strategy=strategy)
        cells = world.ranks[0].space.allocate(16 * num_cells, "cells", zero=True)
        registers: dict[str, int] = {}

        def kernel(base, registers=registers):
            t = current_thread()
            threads[t.thread_idx](t, [base + 16 * i for i in range(num_cells)], registers)

        stream = world.ranks[0].create_stream("main")
        stream.launch(kernel, (cells.address,), 1, len(threads), 64)
        try:
            stream.synchronize()
        except Redundant:
            end(True)
            continue
        except DeadlockError:
            registers["hangs"] = 1
        values = cells.array("i4", writable=False)[::4].tolist()
        found.add((tuple(sorted(registers.items())), tuple(values)))
        end()
    return found


def runs_of(tree):
    while tree.begin():
        yield Every(tree), tree.end


def add_late(t, cells, registers):
    t.atomic("add", cells[0], "s32", 1, "relaxed", "sys")
    t.store(cells[1], "s32", 1, "relaxed", "sys")


def add_and_look(t, cells, registers):
    t.atomic("add", cells[0], "s32", 2, "relaxed", "sys")
    registers["own"] = t.load(cells[0], "s32", "relaxed", "sys")


def look_at_both(t, cells, registers):
    registers["flag"] = t.load(cells[1], "s32", "relaxed", "sys")
    registers["sum"] = t.load(cells[0], "s32", "relaxed", "sys")


def tell_in_shared(t, cells, registers):
    t.store(cells[0], "s32", 1, "weak", "sys")
    t.store_shared(0, "s32", 1, "release")


def hear_in_shared(order):
    def hear(t, cells, registers):
        registers["old"] = t.atomic_shared("add", 0, "s32", 0, order)
        registers["data"] = t.load(cells[0], "s32", "weak", "sys")

    return hear


def clear_shared(t, cells, registers):
    """In front: shared memory is not zero."""
    if t.thread_idx == 0:
        t.store_shared(0, "s32", 0, "weak")
    t.barrier(0, t.block_dim)


def behind_clear(thread):
    def both(t, cells, registers):
        clear_shared(t, cells, registers)
        thread(t, cells, registers)

    return both


def meet_between(t, cells, registers):
    if t.lane == 0:
        t.store(cells[0], "s32", 1, "weak", "sys")
    t.syncwarp(0b11)
    if t.lane == 1:
        registers["data"] = t.load(cells[0], "s32", "weak", "sys")


PROGRAMS_OF_A_BLOCK = {
    "late atomics": [add_late, add_and_look, look_at_both],
    "shared memory, acquired": [behind_clear(tell_in_shared), behind_clear(hear_in_shared("acquire"))],
    "shared memory, relaxed": [behind_clear(tell_in_shared), behind_clear(hear_in_shared("relaxed"))],
    "a warp meets": [meet_between, meet_between],
}


@pytest.mark.parametrize("name", PROGRAMS_OF_A_BLOCK)
def test_threads_of_a_block_have_the_outcomes_of_a_plain_enumeration(name):
    threads = PROGRAMS_OF_A_BLOCK[name]
    found = outcomes_of(threads, runs_of(Tree(is_weak=True)))
    assert found == outcomes_of(threads, runs_of(Tree(is_weak=True, is_plain=True)))
    data = {(dict(registers).get("old"), dict(registers).get("data")) for registers, _ in found}
    expected = {
        "late atomics": {(None, None)},
        "shared memory, acquired": {(0, 0), (0, 1), (1, 1)},
        "shared memory, relaxed": {(0, 0), (0, 1), (1, 0), (1, 1)},
        "a warp meets": {(None, 1)},
    }
    assert data == expected[name]
    if name == "late atomics":
        assert {dict(registers)["own"] for registers, _ in found} == {2, 3}
        assert {(dict(one)["flag"], dict(one)["sum"]) for one, _ in found} >= {(1, 0), (1, 1), (1, 2), (1, 3), (0, 0)}
        assert {values for _, values in found} == {(3, 1)}


def test_the_summary_counts_all_programs():
    some = [one for one in PROGRAMS if one.shape in ("SB", "LB")]
    lines = summary(some, list(map(set_row, some)))
    assert [line.split()[:2] for line in lines[1:]] == [["SB", "8"], ["LB", "4"]]
    assert set_row(some[0]).words[-1] == "-"
    assert set_row(some[-2]).words[-1] == "r0 = 1, r1 = 1, x = 1, y = 1"
