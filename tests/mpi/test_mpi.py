"""The same calls with one process per rank: mpiexec starts them, peers' memory lies in MPI shared windows."""

import sys
from pathlib import Path

import pytest
from parts import both_parts
from processes import run_python

pytestmark = pytest.mark.mpi

PROGRAMS = Path(__file__).parent / "programs.py"


def mpiexec(num_ranks: int, *programs: str, **environment: str | None) -> str:
    """What some programs print on num_ranks processes of this interpreter. All of them must come to their end."""
    environment = {"NBEP_TARGET": "emulator"} | environment
    output = run_python("-m", "mpi4py", PROGRAMS, *programs, ranks=num_ranks, **environment)
    for rank in range(num_ranks):
        assert f"rank {rank} is done\n" in output
    return output


# Most of what these tests cost is the start of processes: programs that leave the group as they found it share one.
REFUSED = ("bad_targets", "bad_arguments", "one_rank_has_no_memory", "windows_without_room")
CALLS = ("round_trips", "one_buffer_many_calls", "the_calls_of_the_readme", "asynchronous", "calls_that_differ")
MEMORY = ("arrays_that_outlive_their_buffer", "memory_is_given_back")  # the last one ends the ranks' world


@pytest.fixture(scope="module", params=both_parts([2], thorough=[4]))
def all_are_done(request):
    """Whether all ranks have come to the end of some of these programs."""
    num_ranks = request.param
    output = mpiexec(num_ranks, *REFUSED, *CALLS, *MEMORY)
    return lambda *names: all(f"rank {r} is done with {name}\n" in output for r in range(num_ranks) for name in names)


def test_ranks_in_processes_agree_with_the_reference(all_are_done):
    """The host waits in MPI while kernels run, too. Calls that differ raise; a destroyed buffer is out of reach."""
    assert all_are_done(*CALLS, *MEMORY)


def test_what_one_rank_gets_wrong_is_refused_on_every_rank(all_are_done):
    assert all_are_done(*REFUSED)


@pytest.mark.thorough
def test_a_part_of_the_ranks_can_come_before_all():
    mpiexec(4, "part_of_the_ranks_first")


@pytest.mark.thorough
def test_two_groups_of_ranks_work_at_the_same_time():
    mpiexec(4, "part_of_the_ranks")


@pytest.mark.skipif(sys.platform != "linux", reason="CUDA's bindings and abstract sockets are for Linux")
@pytest.mark.thorough
@pytest.mark.parametrize(
    "program", ["part_of_the_gpus_first", "two_groups_on_one_host", "part_of_the_ranks_without_gpus"]
)
def test_ranks_that_have_a_gpu_come_together_with_others_and_pass_file_descriptors(program):
    mpiexec(4, program, "file_descriptors", NBEP_TARGET=None)


@pytest.mark.parametrize("num_ranks", both_parts([2], thorough=[4]))
def test_the_reports_of_all_ranks_reach_rank_0_in_one_table(num_ranks):
    mpiexec(num_ranks, "rank_that_leaves_a_call_out", NBEP_TIMEOUT_MS="1000")


@pytest.mark.thorough
def test_a_peer_that_does_not_come_or_does_not_destroy_is_named():
    mpiexec(4, "peer_that_does_not_come", "peer_that_does_not_destroy", NBEP_TIMEOUT_MS="1000")


@pytest.mark.thorough
def test_a_job_ends_when_one_rank_raises_and_another_destroys():
    output = run_python(
        PROGRAMS,
        "rank_that_ends_while_another_destroys",
        ranks=2,
        must_fail=True,
        NBEP_TARGET="emulator",
        NBEP_TIMEOUT_MS="200",
    )
    assert "RuntimeError: rank 0 has a bug" in output
    assert "PeerTimeout: rank 1: rank 0 did not come to destroy in 400 ms" in output
    assert "is done" not in output


def test_a_script_without_mpiexec_says_how_to_start():
    assert "rank 0 is done" in run_python(PROGRAMS, "one_rank", NBEP_TARGET="emulator")


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="abstract sockets are Linux's")
def test_file_descriptors_go_from_every_process_to_every_other():
    mpiexec(8, "file_descriptors")


@pytest.mark.thorough
def test_a_communicator_that_mpi_never_gets_done_is_not_waited_for_longer_than_that():
    output = run_python("-m", "mpi4py", PROGRAMS, "communicator_that_is_never_done", ranks=2, must_fail=True)
    for rank in range(2):
        assert f"rank {rank} has waited in time" in output
