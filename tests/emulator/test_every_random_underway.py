"""As `test_every_random_program`, with what is under way: bulk loads, mbarriers, hosts, ends and starts of kernels."""

import pytest
from parts import both_parts
from programs_underway import KINDS, draw, draw_kernels, explore, explore_kernels, outcomes_of, outcomes_of_kernels


def compare(seed, names, host_names):
    program = draw(seed, names, host_names)
    tree, outcomes = explore(*program)
    assert outcomes == outcomes_of(*program), program
    return tree


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seeds", both_parts([range(12)], [range(12, 150)]))
def test_outcomes_are_those_of_all_interleavings(kind, seeds):
    for seed in seeds:
        compare(seed, *KINDS[kind])


@pytest.mark.parametrize("parities", [(2, 2), (2, 1, 1), (2, 2, 1)])
def test_two_looks_at_one_phase_from_one_place_are_no_loop(parities):
    """A thread that looks again where it has looked before, with no loop around it, does not wait."""
    looks = [("look", 0, parity) for parity in parities]
    program = [[("arrive", 0, 1)], looks], [[]], 1, [1]
    assert explore(*program)[1] == outcomes_of(*program)


@pytest.mark.parametrize("first", [0, 1])
def test_a_host_may_go_on_before_what_undoes_its_wait(first):
    """Each thread sets its cell and clears it again; the host waits until both are set, looking at one by one."""
    threads = [[("store", cell, 1), ("store", cell, 0)] for cell in (first, 1 - first)]
    program = threads, [[("wait_all", 0, 0)]], 2, [1]
    outcomes = explore(*program)[1]
    assert outcomes == outcomes_of(*program)
    assert len(outcomes) == 2


@pytest.mark.parametrize("seeds", both_parts([range(25)], [range(25, 300)]))
def test_outcomes_of_kernels_that_compete_are_those_of_all_orders(seeds):
    for seed in seeds:
        program = draw_kernels(seed)
        assert explore_kernels(*program)[1] == outcomes_of_kernels(*program), program
