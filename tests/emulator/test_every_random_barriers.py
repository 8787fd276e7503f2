"""The order in which warps arrive at named barriers is a choice under `--all`, if more may come than are counted.

Random programs have the outcomes of a plain enumeration of all orders, in which a warp arrives as one.
"""

import pytest
from every_schedule import run_all
from parts import both_parts
from programs_of_barriers import FAILS, TWICE, WARP, WITH_EMPTY, WITHOUT_EMPTY, draw, interleavings, run, run_block


@pytest.mark.parametrize("seeds", both_parts([range(40)], [range(40, 150)], long=[range(150, 1000)]))
def test_outcomes_are_those_of_all_orders_of_warps(seeds):
    for seed in seeds:
        warps = draw(seed)
        _, ends = run_all(lambda strategy, warps=warps: run(warps, strategy))
        expected = interleavings(warps)
        # A run that fails is not run to its end, so it does not show which other orders there are.
        assert ends <= expected if FAILS in ends & expected else ends == expected, (seed, warps)


# --- the same by hand ------------------------------------------------------------------------------------------------


def test_a_warp_that_comes_twice_may_meet_itself_in_no_other():
    _, ends = run_all(lambda strategy: run(TWICE, strategy))
    assert FAILS in ends
    assert len(ends) > 1


def test_a_barrier_that_lets_a_slot_be_used_again_must_not_be_left_out():
    assert FAILS in run_all(lambda strategy: run(WITHOUT_EMPTY, strategy))[1]
    tree, ends = run_all(lambda strategy: run(WITH_EMPTY, strategy))
    assert FAILS not in ends
    assert (tree.schedules, tree.redundant) == (1, 0)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_who_are_as_many_as_a_barrier_counts_have_one_schedule(count):
    """Teams of warps, each with a barrier of its own, and all of them with one, again and again."""

    def warp(t, cell):
        for _ in range(3):
            t.barrier(1 + t.warp // count, WARP * count)
            t.barrier(0, WARP * 4)

    tree, ends = run_all(lambda strategy: run_block(4, warp, strategy))
    assert (tree.schedules, tree.redundant, ends) == (1, 0, {0})
    assert tree.steps == []  # no arrival is a step


def test_lanes_that_come_without_the_rest_of_their_warp_arrive_when_no_other_thread_can_go_on():
    """A GPU promises nothing of them; the emulator counts them."""

    def warp(t, cell):
        if t.lane < 16:
            t.barrier_arrive(1, 32)
            t.barrier(2, 32)

    assert run_all(lambda strategy: run_block(2, warp, strategy))[1] == {0}
