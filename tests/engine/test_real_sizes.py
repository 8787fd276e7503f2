"""Compiled calls of the sizes that models have give the reference's bits."""

import intranode
import low_latency
import pytest
from cases import make_case
from low_latency import make_low_latency_case

from nbep.emulator.engine import MODELS

MODES = {"low latency": (low_latency, make_low_latency_case), "inside a node": (intranode, make_case)}


@pytest.mark.thorough
@pytest.mark.parametrize("memory_model", MODELS)
@pytest.mark.parametrize("mode", MODES)
def test_calls_of_real_sizes_are_the_references_bits(mode, memory_model):
    module, make = MODES[mode]
    callers = []

    def trip(comm, *given):
        callers.append(comm.rank)
        return module.round_trip(comm, *given)

    case = make(0, num_ranks=2, num_tokens=128, num_topk=8, experts_per_rank=8, hidden=7168)
    module.run(case, fn=trip, memory_model=memory_model, engine="compiled")
    assert sorted(callers) == [0, 1]  # Python has repeated nothing
