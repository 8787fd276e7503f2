"""One buffer that serves low-latency calls and calls of the normal mode between nodes in turn."""

import low_latency
import pytest
from calls import SlowRank
from internode import NIC, Options, make_node_case
from intranode import check, combine, dispatch
from low_latency import Trip, make_low_latency_case
from parts import both_parts
from target import TARGET, spawn

import nbep

pytestmark = pytest.mark.long

ROUNDS = 2


@pytest.fixture(params=["all alike", *both_parts([], thorough=["slow combine"])])
def slow(request, monkeypatch):
    """Whether the last rank is slow in the normal mode's combine."""
    if request.param == "slow combine":
        if TARGET != "emulator":
            pytest.skip("on the emulator only: one rank is made slow")
        places = [("nbep.device.kernels.internode.combine", "receive_sums")]
        slow_rank = SlowRank(monkeypatch, places)
        slow_rank.rank, slow_rank.reads = 3, 2000


@pytest.mark.usefixtures("slow")
@pytest.mark.thorough
@pytest.mark.parametrize("transport", ["ibgda", "direct"])
def test_calls_of_both_modes_in_turn_get_the_references_bits(transport):
    """With clean_low_latency_buffer in between, as DeepEP asks for: the modes share the RDMA buffer."""
    options = Options(transport=transport, nic=NIC)
    cases = [make_node_case(seed, num_tokens=(6, 0, 3, 9), num_topk=3) for seed in range(ROUNDS)]
    fast_options = low_latency.Options()
    fast_cases = [
        make_low_latency_case(seed, num_ranks=4, num_tokens=(5, 0, 2, 3), num_topk=3) for seed in range(ROUNDS)
    ]
    sizes = options.buffer_arguments(cases[0])
    num_rdma_bytes = max(sizes["num_rdma_bytes"], *(low_latency.num_rdma_bytes(c, fast_options) for c in fast_cases))

    def main(comm):
        buffer = nbep.Buffer(comm, **{**sizes, "num_rdma_bytes": num_rdma_bytes}, low_latency_mode=True)
        outcomes, fast_outcomes = [], []
        for case, fast_case in zip(cases, fast_cases, strict=True):
            outcomes.append(dispatch(buffer, case, options, comm.rank))
            combine(buffer, case, options, comm.rank, outcomes[-1])
            most = max(fast_case.num_tokens)
            buffer.clean_low_latency_buffer(most, fast_case.hidden, fast_case.num_experts)
            fast_outcomes.append(Trip(buffer, fast_case, fast_options).whole())
        buffer.destroy()
        return outcomes, fast_outcomes

    by_rank = spawn(main, 4)
    for number in range(ROUNDS):
        check(cases[number], options, [outcomes[number] for outcomes, _ in by_rank], 0)
        fast = [fast_outcomes[number] for _, fast_outcomes in by_rank]
        low_latency.check(fast_cases[number], fast_options, fast, f"round {number}")
