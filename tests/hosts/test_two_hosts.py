"""Ranks on two hosts: calls are right, and a rank or a host that is gone is named in time."""

import re
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
from kills import PROGRAM as KILLED
from kills import last_words

pytestmark = [pytest.mark.mpi, pytest.mark.hosts, pytest.mark.thorough]

MPI = Path(__file__).parents[1] / "mpi"
EXAMPLE = Path(__file__).parents[2] / "examples" / "train_moe"
WITH_TORCH = pytest.mark.skipif(find_spec("torch") is None, reason="no torch here")
LAUNCHERS = pytest.mark.parametrize(
    "torchrun", [False, pytest.param(True, marks=WITH_TORCH)], ids=["mpiexec", "torchrun"]
)
NUM_RANKS = 4
ON_THIS_HOST, ON_THE_OTHER = (0, 1), (2, 3)
ENDED_BY_MPICH = "on node {rank} (rank"  # "Abort(...) on node 1 (rank 0 in comm 16): Fatal error in ..."


@LAUNCHERS
def test_calls_between_two_hosts_agree_with_the_reference(on_two_hosts, torchrun):
    """The normal mode; low latency with hooks; calls that differ, which all ranks report; adds of several NICs."""
    programs = "internode 0 1 1 200000, low_latency 2 0 2 1 0, calls_that_differ 3, adds_to_one_cell 3"
    output = on_two_hosts(MPI / "network_programs.py", programs, torchrun=torchrun, NBEP_TIMEOUT_MS="20000")
    for rank in range(NUM_RANKS):
        assert f"rank {rank} is done" in output, output


def test_memory_is_not_mapped_from_host_to_host(on_two_hosts):
    output = on_two_hosts(MPI / "network_programs.py", "pretended_hosts 2 2 1 1 7 100000", NBEP_TIMEOUT_MS="20000")
    assert output.count("is done") == NUM_RANKS, output


@pytest.mark.parametrize(("kind", "step"), [("nodes", 2), ("internode", 1)])
def test_ranks_of_the_other_host_name_a_rank_that_is_killed_and_its_host(on_two_hosts, kind, step):
    """A survivor names whom it misses first: that may be a rank of its own host, which has missed the killed one.

    MPICH may end a rank itself when its connection to the killed one is reset: then that rank says nothing.
    """
    until = [(f"ends: rank {rank}", ENDED_BY_MPICH.format(rank=rank)) for rank in (0, 1, 2)]
    output = on_two_hosts(KILLED, 3, "KILL", kind, "step", step, until=until, NBEP_TIMEOUT_MS="3000")
    words = last_words(output)
    ended_by_mpich = {rank for rank in (0, 1, 2) if ENDED_BY_MPICH.format(rank=rank) in output}
    assert not ended_by_mpich or "OFI poll failed" in output, output
    assert {0, 1, 2} == words.keys() | ended_by_mpich, output
    assert words, output
    if not ended_by_mpich & set(ON_THIS_HOST):
        assert any("rank 3 is on hostb, this rank on hosta" in words[rank] for rank in ON_THIS_HOST), output
    if 2 not in ended_by_mpich:
        assert "rank 3 has ended" in words[2], output


@WITH_TORCH
@pytest.mark.parametrize(("victim", "name", "kind", "step"), [(3, "KILL", "nodes", 2), (2, "LINK", "internode", 1)])
def test_ranks_under_torchrun_name_whom_they_miss_on_the_other_host(on_two_hosts, victim, name, kind, step):
    """torchrun ends the other ranks of a host when one of it has failed: the first to fail says why."""
    until = [tuple(f"ends: rank {rank}" for rank in ON_THIS_HOST)]
    output = on_two_hosts(KILLED, victim, name, kind, "step", step, torchrun=True, until=until, NBEP_TIMEOUT_MS="3000")
    words = last_words(output)
    missed = "waited more than 3000 ms for rank [23]: .*; rank [23] is on hostb, this rank on hosta"
    assert any(re.search(missed, words.get(rank, "")) for rank in ON_THIS_HOST), output


@WITH_TORCH
def test_the_example_trains_and_decodes_on_two_hosts(on_two_hosts, tmp_path):
    file = tmp_path / "model.pt"
    output = on_two_hosts(EXAMPLE / "train.py", "--steps", 1, "--save", file, torchrun=True, NBEP_TRANSPORT="ibgda")
    difference = re.search(r"1 steps on 4 ranks: largest difference of the losses (\S+)", output)
    assert difference is not None, output
    assert float(difference[1]) < 1e-3, output
    output = on_two_hosts(EXAMPLE / "decode.py", file, torchrun=True, NBEP_TRANSPORT="ibgda")
    assert output.count("the same tokens as without expert parallelism") == NUM_RANKS, output


@pytest.mark.parametrize(("kind", "step"), [("nodes", 2), ("internode", 1)])
def test_a_host_that_vanishes_is_missed_by_the_others_in_time(on_two_hosts, kind, step):
    until = [(f"ends: rank {rank}",) for rank in ON_THIS_HOST]
    output = on_two_hosts(KILLED, 2, "LINK", kind, "step", step, until=until, NBEP_TIMEOUT_MS="3000")
    words = last_words(output)
    for rank in ON_THIS_HOST:
        assert "waited more than 3000 ms for rank" in words[rank], output
    assert any("is on hostb, this rank on hosta" in words[rank] for rank in ON_THIS_HOST), output


@LAUNCHERS
def test_hosts_that_differ_are_refused_by_name_and_so_is_allow_mnnvl(on_two_hosts, torchrun):
    output = on_two_hosts(Path(__file__).with_name("differ_main.py"), torchrun=torchrun)
    assert output.count("is done") == NUM_RANKS, output


@LAUNCHERS
def test_nbep_info_says_which_rank_is_where_and_what_reaches_what(on_two_hosts, torchrun):
    output = on_two_hosts("-m", "nbep", "info", "--hosts", torchrun=torchrun)
    assert "4 ranks, target emulator, transport ibgda" in output, output
    assert "rank 1 on hosta reaches 0 over memory; 2, 3 over ibgda" in output, output
    assert "rank 2 on hostb reaches 0, 1 over ibgda; 3 over memory" in output, output
    assert "each rank has received a token from each: right" in output, output


def test_two_hosts_leave_nothing_behind(on_two_hosts):
    on_two_hosts("-c", "pass")
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert "nbep-" not in listed
