"""Several nodes with one process per rank: NICs reach other nodes through one-sided calls of MPI."""

from pathlib import Path

import pytest
from parts import both_parts
from processes import run_python

pytestmark = pytest.mark.mpi

PROGRAMS = Path(__file__).parent / "network_programs.py"
LOW_LATENCY = Path(__file__).parent / "low_latency_programs.py"
FOUR_HOSTS = {"MPIR_CVAR_NOLOCAL": "1"}
TWO_HOSTS = {"MPIR_CVAR_NUM_CLIQUES": "2", "MPIR_CVAR_CLIQUES_BY_BLOCK": "1"}


def mpiexec(num_ranks: int, program: str, *numbers: int, **environment: str) -> str:
    """Run a program, or several with commas between. All ranks must come to their end."""
    output = run_python(PROGRAMS, program, *numbers, ranks=num_ranks, NBEP_TARGET="emulator", **environment)
    for rank in range(num_ranks):
        assert f"rank {rank} is done" in output, output
    return output


@pytest.mark.thorough
def test_calls_adds_and_stores_between_processes():
    """A little of each, in processes that start once: what a queue adds is exact, a plain store stays in the node."""
    mpiexec(4, "internode 0 1 1 200000, adds_to_one_cell 8, plain_stores")


@pytest.mark.parametrize(
    ("num_nvl_peers", "use_nvlink", "num_kinds", "seed", "max_delay_ns"),
    both_parts(
        short=[],
        thorough=[(2, 1, 5, 3, 200_000), (4, 0, 3, 5, 0)],
        long=[(1, 1, 2, 1, 200_000), (1, 1, 5, 2, 0), (2, 0, 5, 4, 200_000), (1, 1, 5, 6, 2_000_000)],
    ),
)
def test_ranks_in_nodes_agree_with_the_reference(num_nvl_peers, use_nvlink, num_kinds, seed, max_delay_ns):
    mpiexec(4, "low_latency", num_nvl_peers, use_nvlink, num_kinds, seed, max_delay_ns)


@pytest.mark.parametrize(
    ("is_direct", "num_rounds", "seed", "max_delay_ns"),
    both_parts(short=[], thorough=[(1, 6, 4, 0)], long=[(0, 6, 2, 0), (0, 6, 3, 500_000)]),
)
def test_normal_calls_of_ranks_in_two_nodes_agree_with_the_reference(is_direct, num_rounds, seed, max_delay_ns):
    mpiexec(4, "internode", is_direct, num_rounds, seed, max_delay_ns)


@pytest.mark.thorough
@pytest.mark.parametrize("odd", [0, 3])
def test_a_call_with_a_handle_that_differs_on_one_rank_raises_in_all_processes(odd):
    mpiexec(4, "calls_that_differ", odd, NBEP_TIMEOUT_MS="5000")


@pytest.mark.thorough
@pytest.mark.parametrize(("num_hosts", "num_kinds", "seed"), [(2, 1, 7), (4, 5, 9)])
def test_nodes_may_be_on_several_hosts_but_mapped_ranks_may_not(num_hosts, num_kinds, seed):
    hosts = TWO_HOSTS if num_hosts == 2 else FOUR_HOSTS
    output = mpiexec(4, "pretended_hosts", num_hosts, 4 // num_hosts, 1, num_kinds, seed, 100_000, **hosts)
    if "one host" in output:
        pytest.skip("only MPICH takes one machine for several")


@pytest.mark.thorough
def test_adds_of_all_ranks_to_one_cell_are_exact_and_each_sees_another_old_value():
    mpiexec(4, "adds_to_one_cell", 60)


@pytest.mark.thorough
def test_a_nic_that_stops_ends_the_wait_of_every_rank_and_the_buffer_can_be_destroyed():
    mpiexec(4, "nic_that_stops", NBEP_TIMEOUT_MS="5000")


@pytest.mark.thorough
def test_an_mpi_for_one_thread_is_refused():
    mpiexec(2, "too_few_threads", MPI4PY_RC_THREAD_LEVEL="serialized")


@pytest.mark.thorough
@pytest.mark.parametrize("num_nvl_peers", ["1", "2"])
def test_two_calls_in_flight_agree_with_the_reference(num_nvl_peers):
    output = run_python(LOW_LATENCY, "two_calls_in_flight", ranks=4, NBEP_TARGET="emulator", **over_nics(num_nvl_peers))
    assert output.count("is done") == 4, output


@pytest.mark.thorough
def test_the_others_go_on_when_a_rank_in_another_node_is_killed():
    output = run_python(
        LOW_LATENCY,
        "rank_that_is_killed",
        "plain",
        ranks=4,
        survive=True,
        must_fail=True,
        NBEP_TARGET="emulator",
        NBEP_TIMEOUT_MS="10000",
        **over_nics("1"),
    )
    assert output.count("is done") == 3, output


def over_nics(num_nvl_peers: str) -> dict[str, str]:
    """Variables that have buffers send to other nodes over NICs."""
    nic = "seed=1,max_delay_ns=100000"
    return {"NBEP_TRANSPORT": "ibgda", "NBEP_NUM_NVL_PEERS": num_nvl_peers, "NBEP_NIC": nic}
