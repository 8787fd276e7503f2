"""Kernels without rings, broken on purpose, are caught: both ends of each pair, in the run named in records/faults.md.

Their other steps are broken by tests/check/test_table.py.
"""

from dataclasses import replace

import pytest
from table import FOUND, PAIRS, is_found, runs_of
from target import MEMORY_MODELS

from nbep.lab.check import perform
from nbep.lab.check.catalogue import own_faults

pytestmark = pytest.mark.emulator_only("the kernels are broken in Python")

RUNS = [run for run in runs_of("intranode") if run.scenario == "intranode.direct"]
ENDS = [
    name
    for name, line in FOUND.items()
    if line.base is not None and line.base.scenario == "intranode.direct" and own_faults()[name].kind in PAIRS
]


@pytest.mark.thorough
@pytest.mark.parametrize("memory_model", MEMORY_MODELS)
@pytest.mark.parametrize("base", RUNS, ids=str)
def test_unbroken_kernels_are_not_caught(base, memory_model):
    assert perform(replace(base, seed=1, memory_model=memory_model)) is None


@pytest.mark.parametrize("fault", ENDS)
def test_either_end_of_a_pair_that_is_broken_is_caught(fault):
    assert is_found(fault)


@pytest.mark.thorough
def test_rows_that_are_announced_while_their_copies_are_under_way_are_caught():
    """The stage has been read, which is enough for the next load only."""
    assert is_found("intranode.direct_dispatch.send_tokens: tma_store_wait_all until read")
