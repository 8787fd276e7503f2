"""nbep beside an oracle that shares nothing with it: random programs have the outcomes and the races that it says."""

import re
from pathlib import Path

import pytest
from litmus_programs import in_oracle, random_program
from oracle import Op, Oracle, Program
from oracle_faults import FAULTS, programs_until_found
from oracle_programs import SHAPES, smallest, words
from oracle_runs import difference
from oracle_table import row
from parts import both_parts

from nbep.lab.litmus import PROGRAMS, allowed

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "records" / "every_schedule.md"


def of_one_kernel(*threads) -> Program:
    """Blocks of a thread each."""
    blocks = tuple((((thread,) if isinstance(thread, Op) else thread,),) for thread in threads)
    return Program(((0, blocks),), ((Op("launch"),),), 32)


CHUNKS = [range(begin, begin + 245) for begin in range(20, 1000, 245)]


@pytest.mark.parametrize("seeds", both_parts([range(8)], thorough=[range(8, 20)], long=CHUNKS))
@pytest.mark.parametrize("shape", SHAPES)
def test_outcomes_and_races_are_those_of_the_oracle(shape, seeds):
    for seed in seeds:
        program = SHAPES[shape](seed)
        if said := difference(program):
            least = smallest(program, lambda one: difference(one)[:12] == said[:12])
            pytest.fail(f"{shape} {seed}: {difference(least)}\n{words(least)}")


FEW = ["observed"]


@pytest.mark.parametrize("shape", both_parts(FEW, thorough=[], long=[one for one in SHAPES if one not in FEW]))
def test_the_page_says_what_the_programs_are(shape):
    """`python tests/support/oracle_table.py` writes the table."""
    assert row(shape) in PAGE.read_text()


# What the oracle has found in nbep, as small as it gets, and has been mended since.
FOUND = {
    "a load that may come late, beside a compare and an add that asks": of_one_kernel(
        Op("ld", "acquire", 0, asks="least", other=2),
        (Op("exch", "acq_rel", 8, 1, asks="least"), Op("add", "release", 0, 1, asks="least", other=1)),
        Op("cas", "acq_rel", 0, 1),
    ),
    "the same beside adds of several threads": of_one_kernel(
        Op("add", "relaxed", 0, 1, asks="none"),
        (Op("add", "relaxed", 0, 1, asks="late", other=1), Op("exch", "acquire", 0, 2, asks="late", other=2)),
        Op("ld", "relaxed", 0, asks="late", other=3),
    ),
    "a kernel that stores what a host has read before": Program(
        ((0, ((((Op("cas", "relaxed", 8, 1), Op("st", "weak", 16, 1)),),),)),),
        ((Op("launch"), Op("ld", "acquire", 16)),),
        32,
    ),
    "an atomic that reads the bytes of one of another size": of_one_kernel(
        Op("add", "acq_rel", 0, 2, size=8, asks="least"), Op("cas", "relaxed", 0, 2, other=1)
    ),
    "an add that makes the cell less, and asks only later": of_one_kernel(
        (Op("add", "release", 0, 1, "gpu", asks="none"), Op("st", "relaxed", 16, 1, "gpu")),
        (
            Op("add", "relaxed", 0, -1, "gpu", other=2, asks="late"),
            Op("add", "relaxed", 0, 1, "gpu", asks="none"),
            Op("ld", "weak", 16, given=0),
        ),
        Op("add", "release", 0, 1, other=2, asks="late"),
    ),
    "a value that is asked for behind a later read of its cell and a fence": of_one_kernel(
        (Op("st", "weak", 16, 1), Op("add", "release", 0, 1, asks="none")),
        (
            Op("add", "relaxed", 0, 1, other=1, asks="late"),
            Op("add", "relaxed", 0, 4, asks="none"),
            Op("fence", "acq_rel"),
            Op("ld", "weak", 16, given=0),
        ),
    ),
    "an add whose old value is asked for only behind a later release": Program(
        (
            (0, ((((Op("exch", "release", 8, 1), Op("st", "relaxed", 0, 1)),),),)),
            (
                1,
                (
                    (
                        (
                            (
                                Op("wait", "relaxed", 0, 1),
                                Op("add", "relaxed", 8, 1, other=1, asks="late"),
                                Op("st", "release", 16, 1),
                            ),
                        ),
                    ),
                ),
            ),
            (0, ((((Op("wait", "acquire", 16, 1), Op("st", "weak", 8, 1)),),),)),
        ),
        ((Op("launch"), Op("launch", cell=2, value=2)), (Op("launch", cell=1, value=1),)),
        32,
    ),
    "a compare-and-swap that fails, and releases nothing": of_one_kernel(
        (Op("st", "weak", 16, 42), Op("cas", "acq_rel", 0, 6, other=5), Op("st", "relaxed", 8, 1)),
        (Op("wait", "relaxed", 8, 1), Op("ld", "acquire", 0), Op("ld", "weak", 16)),
    ),
    "a compare-and-swap that fails beside a weak load": of_one_kernel(
        Op("ld", "weak", 0), Op("cas", "relaxed", 0, 6, other=5)
    ),
    "an atomic that acquires, and another size": of_one_kernel(
        Op("add", "acq_rel", 0, 1, asks="none"), Op("cas", "acquire", 0, 1, size=8)
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_the_oracle_has_found_is_mended(name):
    assert difference(FOUND[name]) == ""


# --- faults put back ------------------------------------------------------------------------------------------------


def table_of_faults() -> dict[str, tuple[str, int]]:
    """Of the page: shape and number of programs, by fault."""
    text = PAGE.read_text()
    rows = re.findall(r"^\| (.+) \| `(\w+)` \| (\d+) \|$", text[text.index("## Faults put back") :], re.MULTILINE)
    return {words: (shape, int(number)) for words, shape, number in rows}


def test_the_page_has_all_faults():
    assert {words: shape for words, (shape, _) in table_of_faults().items()} == {one.words: one.shape for one in FAULTS}
    assert f"{len(FAULTS)} faults were put back" in PAGE.read_text()


@pytest.mark.thorough
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.words)
def test_the_oracle_finds_a_fault_that_is_put_back(fault):
    """After as many programs as the page says: `python tests/support/oracle_faults.py` writes it."""
    assert programs_until_found(fault) == table_of_faults()[fault.words][1]


# --- the oracle itself ----------------------------------------------------------------------------------------------


def outcomes_of(program, verdict) -> set:
    """The same as those of `axioms`: registers, and cells at the end."""
    found = set()
    for memory, answers in verdict.outcomes:
        values = {cell: memory[8 * i] for i, cell in enumerate(program.cells)}
        for steps, values_read in zip(program.steps, answers, strict=False):
            values.update(zip((step.register for step in steps if step.register), values_read, strict=True))
        found.add(frozenset(values.items()))
    return found


@pytest.mark.parametrize("numbers", both_parts([range(60)], thorough=[range(60, 300)]))
def test_the_oracle_sees_no_more_than_the_axioms_allow(numbers):
    """Without late stores and early loads; and it finds a race wherever there is one without those."""
    alike = 0
    programs = [*(PROGRAMS if 0 in numbers else ()), *map(random_program, numbers)]
    for program in programs:
        verdict, by_axioms = Oracle(in_oracle(program)).verdict(), allowed(program)
        assert outcomes_of(program, verdict) <= by_axioms.outcomes, program.name
        assert by_axioms.has_race or "race" not in verdict.faults, program.name
        alike += by_axioms.has_race == ("race" in verdict.faults)
    assert alike > 0.9 * len(programs)
