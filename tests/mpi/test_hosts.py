"""What ranks say of their hosts, on one host."""

import pytest
from processes import run_python

from nbep.host.ranks.hosts import difference
from nbep.info_hosts import nodes_of

pytestmark = pytest.mark.mpi


def test_the_first_difference_is_named_with_all_values_ranks_and_hosts():
    facts = [{"nbep": "1", "Python": "3.11"}, {"nbep": "1", "Python": "3.12"}, {"nbep": "1", "Python": "3.12"}]
    text = "Python: got 3.11 on rank 0 (a), 3.12 on ranks 1, 2 (a, b); must be the same on all ranks"
    assert difference(["a", "a", "b"], facts) == text
    assert difference(["a", "a", "b"], [facts[0]] * 3) is None


@pytest.mark.parametrize(
    ("names", "nodes"),
    [("aaaa", ("direct", 4)), ("aabb", ("ibgda", 2)), ("aaab", ("ibgda", 1)), ("a" * 16, ("ibgda", 8))],
)
def test_nodes_are_as_large_as_the_hosts_allow(names, nodes):
    assert nodes_of(names) == nodes


@pytest.mark.thorough
def test_info_runs_an_exchange_on_one_host():
    output = run_python("-m", "nbep", "info", "--hosts", ranks=2, NBEP_TARGET="emulator")
    assert "2 ranks, target emulator, transport direct" in output
    assert "each rank has received a token from each: right" in output


def test_a_launcher_of_another_mpi_is_named():
    program = "from mpi4py import MPI; import nbep; nbep.Buffer(MPI.COMM_WORLD, 256)"
    output = run_python("-c", program, must_fail=True, OMPI_COMM_WORLD_SIZE="4", NBEP_TARGET="emulator")
    assert "group: got 1 rank, though the launcher has started 4 (OMPI_COMM_WORLD_SIZE)" in output
