"""Low-latency calls with one process per rank, also when one of them is killed."""

from pathlib import Path

import pytest
from parts import both_parts
from processes import run_python

pytestmark = pytest.mark.mpi

PROGRAMS = Path(__file__).parent / "low_latency_programs.py"


def mpiexec(num_ranks: int, *arguments: str, without: int | None = None, **options) -> None:
    """Run programs. All ranks but `without` must come to their end."""
    output = run_python(PROGRAMS, *arguments, ranks=num_ranks, NBEP_TARGET="emulator", **options)
    for rank in range(num_ranks):
        assert (f"rank {rank} is done" in output) == (rank != without), output


@pytest.mark.parametrize("num_ranks", both_parts([2], thorough=[4]))
def test_ranks_in_processes_agree_with_the_reference(num_ranks):
    mpiexec(num_ranks, "round_trips,two_calls_in_flight,two_threads_in_another_order")


@pytest.mark.thorough  # without processes: tests/low_latency/test_last_call.py
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_who_waits_in_vain_in_the_last_call_raises(num_ranks):
    programs = "last_combine_that_a_rank_comes_late_to,event_that_nobody_waits_for"
    mpiexec(num_ranks, programs, NBEP_TIMEOUT_MS="1500")


@pytest.mark.thorough
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_in_processes_whose_calls_differ_report_what_both_have_passed(num_ranks):
    mpiexec(num_ranks, "calls_that_differ")


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["plain", "deduplicate"])
def test_the_others_go_on_when_a_rank_is_killed_and_end_without_it(kind):
    mpiexec(4, "rank_that_is_killed", kind, without=1, survive=True, must_fail=True, NBEP_TIMEOUT_MS="10000")
