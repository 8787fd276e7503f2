"""Calls of all shapes follow each other on one buffer of several nodes.

A ring lies elsewhere in each call, and peers may still be in the call before: what a late store, a late message, a late
poll or a missing barrier would do shows here.
"""

import pytest
from calls import check_calls, check_steps, make_calls, make_steps
from internode import NIC
from parts import both_parts
from target import MEMORY_MODELS

IBGDA = {"transport": "ibgda", "nic": NIC}


@pytest.mark.parametrize("memory_model", MEMORY_MODELS)
@pytest.mark.parametrize(
    ("num_nodes", "num_nvl_peers", "seeds"),
    both_parts([(2, 2, range(1))], thorough=[(2, 2, range(1, 8)), (3, 2, range(2)), (2, 3, range(2, 4))]),
)
def test_every_call_gets_the_references_bits(num_nodes, num_nvl_peers, seeds, memory_model):
    for seed in seeds:
        calls = make_calls(seed, num_nodes * num_nvl_peers, num_nodes)
        check_calls(seed, calls, memory_model=memory_model)


@pytest.mark.emulator_only("a seed gives a schedule")
@pytest.mark.parametrize("memory_model", ["sc", "delayed", "checked"])
@pytest.mark.parametrize("seeds", both_parts([], thorough=[range(10, 14)]))
def test_every_call_over_nics_gets_the_references_bits(seeds, memory_model):
    for seed in seeds:
        check_calls(seed, make_calls(seed, 4, 2, **IBGDA), memory_model=memory_model)


@pytest.mark.emulator_only("the host is faster than every kernel")
@pytest.mark.parametrize("memory_model", both_parts(["checked"], thorough=["sc", "delayed"]))
@pytest.mark.parametrize("options", [{}, IBGDA], ids=["direct", "ibgda"])
@pytest.mark.parametrize("seeds", both_parts([range(1)], thorough=[range(1, 5)]))
def test_hosts_that_run_ahead_get_the_references_bits(seeds, options, memory_model):
    for seed in seeds:
        check_steps(seed, *make_steps(seed, make_calls(seed, 4, 2, **options)), memory_model=memory_model)
