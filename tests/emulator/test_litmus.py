"""Litmus tests: what the emulator shows is what the axioms of PTX allow, and what `checked` says is a race is one."""

import pytest
from litmus_programs import named, random_program
from parts import both_parts

from nbep.lab.litmus import PROGRAMS, Program, allowed, is_race
from nbep.lab.litmus.runs import run

NEVER_LATE = "a load is never later than its place in the program"
SAYS_ALL = "who acquires a release knows all that anybody could see by then"
# Weak outcomes that PTX allows and that no seed shows, by shape and place, and by what is in their threads.
NOT_SHOWN = [
    ("LB", "", "relaxed", NEVER_LATE),
    ("MP, load first", "", "wait.relaxed", NEVER_LATE),
    ("ISA2", "", "wait.relaxed y 1", SAYS_ALL),
    ("IRIW", "", "st.release", SAYS_ALL),
    ("IRIW", "a block", "relaxed", "what a thread has read, its block does not miss"),
    ("2+2W", "", "st.release", "a store that releases comes before all that its thread cannot see"),
    ("CoRR", "", "ld.weak", "nobody sees a cell go back in time"),
    ("add", "", "add.relaxed.cta", "atomics are performed one after the other, whatever their scope"),
]


def is_not_shown(program: Program) -> bool:
    return any(
        program.shape == shape and where in program.where and steps in " ".join(program.threads)
        for shape, where, steps, _ in NOT_SHOWN
    )


@pytest.mark.parametrize("seeds", both_parts([range(40)], thorough=[], long=[range(40, 150)]))
@pytest.mark.parametrize("program", named(PROGRAMS))
def test_delayed_shows_only_what_ptx_allows_and_the_weak_outcome_where_it_can(program, seeds):
    verdict = allowed(program)
    is_shown = False
    for seed in seeds if verdict.allows(program) or seeds[0] else seeds[:20]:
        outcome = run(program, "delayed", seed)
        assert outcome in verdict.outcomes, f"seed {seed}: {dict(outcome)}"
        is_shown |= program.is_weak(outcome)
        if is_shown and not seeds[0]:
            break
    assert is_shown == (verdict.allows(program) and not is_not_shown(program))


@pytest.mark.parametrize("program", named(PROGRAMS))
def test_checked_finds_the_races_of_ptx_but_for_relaxed_heads(program):
    """A load is over before its thread stores: see docs/memory_orders.md. PTX itself does not promise that."""
    is_head = program.shape == "MP, load first" and "wait.relaxed" in program.threads[-1]
    assert is_race(program, range(8)) == (allowed(program).has_race and not is_head)


def verdict_on(weak: str, *threads: str, where="ranks") -> bool:
    outcome = {name: int(value) for name, value in (part.split("=") for part in weak.split())}
    program = Program("", threads, where, outcome)
    return allowed(program).allows(program)


def test_the_axioms_agree_with_the_litmus_tests_of_the_ptx_isa():
    """Source: PTX ISA 8.5, Memory Consistency Model, 8.10 Axioms"""
    fence = "fence.acq_rel"
    assert not verdict_on("x=1", "add.relaxed r0 x 1", "add.relaxed r1 x 1")
    assert verdict_on("x=1", "add.relaxed.cta r0 x 1", "add.relaxed.gpu r1 x 1", where="a GPU")
    assert verdict_on("r0=1 r1=1", "ld.weak r0 x; st.weak y 1", "ld.weak r1 y; st.weak x 1")
    assert not verdict_on("r0=1 r1=0", "st.relaxed x 1", "ld.relaxed r0 x; ld.relaxed r1 x")
    assert not verdict_on(
        "r0=1 r1=0", f"st.weak x 1; {fence}; st.relaxed y 1", f"ld.relaxed r0 y; {fence}; ld.weak r1 x"
    )
    assert verdict_on("r0=0 r1=0", f"st.weak x 1; {fence}; ld.weak r0 y", f"st.weak y 1; {fence}; ld.weak r1 x")


def test_writes_that_race_have_no_order():
    """Who comes behind both may read one and then the other; a write that is morally strong to both orders them.

    Source: PTX ISA 8.5, 8.9.6 Coherence Order
    """
    behind_both = "wait.acquire y 1; wait.acquire z 1; ld.weak r0 x; ld.weak r1 x"
    writers = "st.{0} x 1; st.release y 1", "st.{0} x 2; st.release z 1"
    for order, may_change in (("weak", True), ("relaxed", False)):
        threads = *(writer.format(order) for writer in writers), behind_both
        assert verdict_on("r0=1 r1=2", *threads) == verdict_on("r0=2 r1=1", *threads) == may_change
        assert verdict_on("r0=2 r1=2", *threads)


def test_each_barrier_meets_the_one_of_the_same_number():
    """Source: PTX ISA 8.5, 8.9.4 Memory Synchronization: "executed on the same barrier" """
    threads = "st.weak x 1; bar; bar; st.weak x 2", "bar; ld.weak r0 x; bar; bar"
    assert allowed(Program("", (threads[0] + "; bar", threads[1]), "a block", {})).outcomes == {
        frozenset({("r0", 1), ("x", 2)})
    }
    late = Program("", ("bar; st.weak x 1; bar", "ld.weak r0 x; bar; bar"), "a block", {})
    assert allowed(late) == (frozenset({frozenset({("r0", 0), ("x", 1)})}), False)
    early = Program("", ("bar; st.weak x 1; bar", "bar; ld.weak r0 x; bar"), "a block", {})
    assert allowed(early).has_race


def test_an_atomic_may_read_any_write_that_its_own_has_no_order_with():
    """Also one that is still there at the end: neither of two that race comes first.

    Source: PTX ISA 8.5, 8.10.3 Atomicity
    """
    for write in ("st.weak x 5", "st.relaxed.cta x 5"):
        for end in (5, 6):
            assert verdict_on(f"r0=5 x={end}", "add.relaxed r0 x 1", write)
    assert not verdict_on("r0=5 x=5", "add.relaxed r0 x 1", "st.relaxed x 5")


def test_the_axioms_want_scopes_that_reach_at_both_ends():
    """Source: PTX ISA 8.5, 8.7 Morally strong operations"""
    for release, acquire in (("release.gpu", "acquire"), ("release", "acquire.gpu")):
        threads = f"st.weak x 1; st.{release} y 1", f"wait.{acquire} y 1; ld.weak r0 x"
        assert verdict_on("r0=0", *threads)
        assert not verdict_on("r0=0", *threads, where="a GPU")


def test_a_compare_and_swap_that_fails_publishes_nothing_under_seeds():
    for compare, fails in ((5, True), (0, False)):
        first = f"st.relaxed x 2; cas.acq_rel r0 z 1 {compare}; st.relaxed y 1"
        program = Program("", (first, "wait.relaxed y 1; st.relaxed x 1"), "a GPU", {"x": 2})
        is_shown = any(program.is_weak(run(program, "delayed", seed)) for seed in range(30))
        assert allowed(program).allows(program)  # the other thread acquires nothing
        assert is_shown == fails  # a store that is released has arrived


@pytest.mark.parametrize("numbers", both_parts([range(20)], thorough=[range(20, 80)], long=[range(80, 160)]))
def test_random_programs_show_only_what_ptx_allows_and_are_alarms_only_if_they_have_races(numbers):
    outcomes = races = 0
    for number in numbers:
        program = random_program(number)
        verdict = allowed(program)
        for seed in range(8):
            outcome = run(program, "delayed", seed)
            assert outcome in verdict.outcomes, f"{program.name}, seed {seed}: {dict(outcome)}"
        alarm = is_race(program, range(3))
        assert verdict.has_race or not alarm, program.name
        outcomes += len(verdict.outcomes) > 1
        races += alarm
    assert min(outcomes, races) > len(numbers) // 4, "programs that say little"
