"""Waits for one cell of two, whose values come and go: `--all` has the outcomes and hangs of all interleavings."""

import pytest
from parts import both_parts
from straight import HANG, draw, explore, interleavings, small_ones

END_TURNS = ["t.spin(1 << 62)", "pass"]


@pytest.mark.thorough
@pytest.mark.parametrize("end_turn", END_TURNS)
def test_small_programs_that_may_hang_and_may_end_do_both(end_turn):
    count = 0
    for threads in small_ones():
        outcomes = interleavings(threads)
        if HANG in outcomes and len(outcomes) > 1:
            count += 1
            assert explore(threads, end_turn)[1] == outcomes, threads
    assert count == 224


@pytest.mark.parametrize(
    "seeds", both_parts([range(200)], thorough=[range(200, 4000)], long=[range(at, at + 16000) for at in (4000, 20000)])
)
@pytest.mark.parametrize("end_turn", END_TURNS)
def test_random_programs_have_the_outcomes_of_all_interleavings(end_turn, seeds):
    """Those that have several."""
    for seed in seeds:
        threads = draw(seed)
        if any(step[0] in ("or", "and") for steps in threads for step in steps):
            outcomes = interleavings(threads)
            assert len(outcomes) == 1 or explore(threads, end_turn)[1] == outcomes, (seed, threads)


# What was missed once, and why.
FOUND = {
    "a value that ends the wait, and is there only for a while": [
        [("st", "y", 2), ("st", "y", 3), ("st", "x", 1)],
        [("or", "x", 2, "y", 2)],
    ],
    "a hang that another thread's store makes, behind the first look of a turn": [
        [("st", "y", 1), ("st", "x", 1)],
        [("st", "y", 2), ("or", "x", 2, "y", 2)],
    ],
    "a look that comes too early, and another one that ends the wait": [
        [("st", "y", 2), ("st", "x", 2)],
        [("st", "x", 3), ("or", "y", 2, "x", 2), ("st", "z", 1)],
    ],
    "a second look that has failed, in a turn before the one that ends with its first": [
        [("st", "x", 2), ("st", "x", 1), ("st", "x", 2)],
        [("st", "x", 2), ("st", "y", 2)],
        [("st", "y", 3), ("or", "y", 2, "x", 1), ("st", "z", 1)],
    ],
    "somebody who sleeps, and whom only the first look of a turn that fails wakes": [
        [("st", "y", 2), ("st", "x", 2), ("st", "z", 1)],
        [("or", "z", 1, "x", 2), ("or", "y", 2, "z", 1)],
        [("st", "x", 2), ("st", "z", 2)],
    ],
    "a second look of a turn that has failed, whose first one comes behind a store": [
        [("st", "y", 2), ("or", "y", 2, "z", 1), ("st", "x", 2)],
        [("st", "y", 1), ("st", "z", 2), ("or", "z", 2, "y", 1)],
        [("st", "z", 1)],
    ],
    "a thread that a cell wakes at which it has looked before its wait": [
        [("ld", "z"), ("and", "y", 1, "x", 2)],
        [("st", "y", 2), ("st", "y", 1), ("st", "z", 3)],
        [("st", "x", 2), ("st", "x", 1), ("or", "y", 1, "z", 1)],
    ],
}


@pytest.mark.parametrize("name", FOUND)
def test_what_was_missed_once_is_found(name):
    assert explore(FOUND[name])[1] == interleavings(FOUND[name])
